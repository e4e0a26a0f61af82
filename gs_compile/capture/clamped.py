"""clamped: parameters that a forward clamps in place, as Gemma 3n's does.

A unit may not change a parameter. But clamping within the bounds changes nothing, so a check of the bounds replaces it.
"""

from __future__ import annotations

from collections.abc import Container

import torch
from torch import fx

from gs_compile.capture.floats import made
from gs_compile.capture.graph import origin
from gs_compile.capture.in_place import mutated
from gs_compile.capture.operations import operation

_WORDS = "it clamps a parameter in place, and this one is beyond the bounds: clamp it between steps"
_VALUES = ("_get_data_attr", "detach", "alias")  # as which `.data` and the like are traced


def check_clamps(module: fx.GraphModule, parameters: Container[fx.Node]) -> None:
    """Replace each operation that clamps one of these placeholders in place by a check."""
    for node in list(module.graph.nodes):
        changed = mutated(node) if operation(node) in ("clamp", "clip") else []
        if changed and _source(changed[0]) in parameters:
            clamped = made(node, torch.clamp, changed[0], *node.args[1:], **node.kwargs)
            is_within = made(node, torch.all, made(node, torch.eq, clamped, changed[0]))
            with module.graph.inserting_before(node):
                check = module.graph.call_function(torch._assert_async, (is_within, _WORDS))
            check.meta = origin(node)
            node.replace_all_uses_with(changed[0])
            module.graph.erase_node(node)


def _source(value: fx.Node) -> fx.Node:
    while operation(value) in _VALUES:
        value = value.all_input_nodes[0]
    return value
