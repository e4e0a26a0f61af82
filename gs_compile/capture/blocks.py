"""blocks: which repeated block of the model a node belongs to."""

from __future__ import annotations

import re

from torch import fx

Block = tuple[str, int]  # the stack's path, "model.layers", and the number in it


def block_of(node: fx.Node) -> Block | None:
    """The first numbered module around `node`: ("transformer.h", 3) for a node in transformer.h.3.attn."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return None
    path = str(list(stack.values())[-1][0])
    match = re.match(r"^(?:L\['\w+'\]\.?)?(.*?)\.?(?:\['(\d+)'\]|\b(\d+)\b)(?:[.\[]|$)", path)
    if match is None:
        return None
    return match.group(1).rstrip("."), int(match.group(2) or match.group(3))
