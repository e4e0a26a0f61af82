"""listed: samples that a call passes as a list of tensors, which cannot be cut into micro-batches."""

from __future__ import annotations

import re

import torch
from torch import fx

from gs_compile.capture.graph import Captured, hint

_LISTED = re.compile(r"(.+)\[\d+\]")


def listed_samples(captured: Captured) -> tuple[str, int]:
    """The list whose tensors the model joins along dimension 0, and their number; 0: the samples are not in a list.

    They are not if another input has the batch, such as labels: a list may also hold parts of one sample. Nor are they
    if all of its tensors have the batch's rows, as several views of each sample.
    """
    lists = {entry.name: _list_of(entry.path) for entry in captured.inputs if entry.role in ("batch", "constant")}
    batches = {lists[name] for name in captured.names("batch")}
    path = batches.pop() if len(batches) == 1 else ""
    if captured.batch_symbols and path not in (lists[name] for name in captured.names("constant")):
        return "", 0
    read: dict[fx.Node, frozenset[str]] = {}  # which tensors of the list an operation has read
    joined = 0
    for node in captured.module.graph.nodes if path else ():
        own = {node.name} if lists.get(node.name) == path else set()
        read[node] = frozenset(own.union(*(read[each] for each in node.all_input_nodes)))
        for operands in (each for each in node.args if isinstance(each, list | tuple)):
            parts = [read[each] for each in operands if isinstance(each, fx.Node)]
            is_apart = all(len(part) == 1 for part in parts) and len(frozenset().union(*parts)) == len(parts)
            if len(parts) > 1 and is_apart and _num_rows(node) == len(parts):
                joined = max(joined, len(parts))
    return path, joined


def _list_of(path: str) -> str:
    found = _LISTED.fullmatch(path)
    return found[1] if found else ""


def _num_rows(node: fx.Node) -> int:
    example = node.meta.get("example_value")
    return hint(example.shape[0]) if isinstance(example, torch.Tensor) and example.dim() else 0
