"""sample_layout: how samples are laid out along the dimension of a value that grows with the batch.

    tokens of each sample    0 0 0 1 1 1    runs of 3: all entries of a sample, then all of the next
    samples of each token    0 1 0 1 0 1    runs of 1: an entry of each sample, three times
    both, joined             0 0 1 1 0 1    runs of 2, then of 1

Reshaping, cutting, repeating and joining change the layout. An elementwise operation on two values with different
layouts would pair different samples with each other.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterable
from itertools import accumulate, chain
from math import gcd, prod
from typing import Any, NamedTuple

import torch
from torch import fx

from gs_compile.capture.graph import TensorSpec
from gs_compile.capture.internals import tree_leaves
from gs_compile.capture.operations import (
    JOINING,
    PICKING,
    REGROUPING,
    WRITING,
    argument,
    has_samples,
    maker_of,
    operation,
    tensor_spec,
)

PAIRING = "pairs the samples of the batch with each other"
PART = "takes a part of the samples"
REGROUPED = "takes rows of several samples for one (transpose, or permute, before it)"
OTHERS = "picks other samples by the numbers of rows, which every micro-batch counts from 0"
# With one tensor, these keep numbers in their order, or give those of rows of each sample.
IN_ORDER = frozenset(
    "view reshape flatten squeeze unsqueeze expand contiguous clone detach to type int long float double getitem "
    "repeat tile repeat_interleave add mul floordiv".split()
)
COMPUTED = {"add": operator.add, "mul": operator.mul, "floordiv": operator.floordiv}  # among them
INDEXING = frozenset("getitem setitem index_put".split())
CUTTING = frozenset("split chunk tensor_split split_with_sizes hsplit vsplit dsplit".split())
REPEATING = frozenset("repeat tile".split())
APART = (
    WRITING | PICKING | frozenset("getitem setitem embedding to".split())
)  # these index rows of one tensor by another
_WHOLE = (slice(None), slice(None, None, 1), slice(0, None), slice(0, None, 1))


class SampleLayout(NamedTuple):
    """runs: the number of consecutive entries of a sample, for each pass over all samples; None: not known.
    why: the reason for which the operation mixes samples; empty: it does not.
    """

    runs: tuple[int, ...] | None = None
    why: str = ""


class _Along(NamedTuple):
    """The dimension of a value that grows with the batch, its entries for each sample, and its runs."""

    dim: int
    number: int
    runs: tuple[int, ...] | None

    def ends(self, num_samples: int) -> set[int]:
        """The places at which a pass over all samples ends."""
        return {end * num_samples for end in accumulate(self.runs or (self.number,), initial=0)}


def sample_layout(node: fx.Node, num_samples: int) -> SampleLayout:
    """The layout of a value; those of its operands are known (``meta["runs"]``)."""
    maker = maker_of(node)
    name, own = operation(maker), _along(node, num_samples)
    read = [each for each in maker.all_input_nodes if has_samples(each)]
    places = [found for each in read if (found := _along(each, num_samples)) is not None]
    source = places[0] if read and len(places) == len(read) else None
    if why := _why_rows_are_others(node, name, num_samples):
        return SampleLayout(None, why)
    if name == "setitem" and (target := _along(node.args[0], num_samples)) is not None:
        return SampleLayout(None, _cut(node, target, index_along(node, target.dim), num_samples).why)
    if name in CUTTING and maker is node and source is not None:
        return SampleLayout(None, PART if _is_split(node, source, num_samples) else "")
    alone = SampleLayout((1,) if own is not None and own.number == 1 else None)
    if source is None or maker.meta.get("bodies"):
        return alone
    is_joined = name in JOINING and own is not None and own.number != source.number
    if not (name in APART or name.endswith("_as") or is_joined) and _differ(places):
        return SampleLayout(None, PAIRING)
    if own is None:
        return alone
    if name == "getitem" or (name == "narrow" and own.number != source.number):
        cut = _cut(node, source, index_along(node, source.dim), num_samples)
        return alone if cut == SampleLayout() else cut
    if name in CUTTING and own.number != source.number:
        return SampleLayout(_of_part(node, source, num_samples))
    if name in REGROUPING and read[0].meta["spec"].numel == node.meta["spec"].numel:
        return _regrouped(node.meta["spec"], own, read[0].meta["spec"], source)
    if name == "repeat_interleave" and source.runs is not None:
        is_flat = len(node.meta["spec"].shape) != len(read[0].meta["spec"].shape)
        return alone if is_flat else SampleLayout(tuple(run * own.number // source.number for run in source.runs))
    if name in ("as_strided", "as_strided_copy"):
        return _restrided(node, own, read[0].meta["spec"], source)
    if name in PICKING and name not in WRITING:
        return alone
    if is_joined:
        return SampleLayout(_joined(node, own))
    if name in REPEATING and source.runs is not None:
        return SampleLayout(source.runs * (own.number // source.number))
    runs = {each.runs for each in places[: 1 if name in WRITING else None] if each.number == own.number} - {None}
    return SampleLayout(runs.pop()) if len(runs) == 1 else alone


def _joined(node: fx.Node, own: _Along) -> tuple[int, ...] | None:
    """The runs of the concatenation of values."""
    given = [each.meta.get("runs") for each in tree_leaves((node.args, node.kwargs)) if isinstance(each, fx.Node)]
    runs = tuple(chain.from_iterable(filter(None, given)))
    return runs if sum(runs) == own.number else None


def _along(node: Any, num_samples: int) -> _Along | None:
    """None unless exactly one dimension grows, in proportion to the batch."""
    spec = tensor_spec(node)
    if spec is None or len(spec.batch_dims) != 1 or not spec.is_sized or not spec.numel:
        return None
    (dim,) = spec.batch_dims
    number, rest = divmod(spec.shape[dim], num_samples)
    return None if rest else _Along(dim, number, node.meta.get("runs"))


def _regrouped(after: TensorSpec, own: _Along, before: TensorSpec, source: _Along) -> SampleLayout:
    """The layout of a reshaped tensor: in memory, a run covers the later dimensions of each of its entries."""
    if source.runs is None:  # a dimension may consist of several, before or after the samples
        ahead = prod(before.shape[: source.dim]), prod(after.shape[: own.dim])
        common = gcd(*ahead)
        is_split = source.number % (ahead[1] // common) or own.number % (ahead[0] // common)
        return SampleLayout((1,) if own.number == 1 else None, REGROUPED if is_split else "")
    behind, within = prod(before.shape[source.dim + 1 :]), prod(after.shape[own.dim + 1 :])
    runs = tuple(run * behind // within for run in (source.runs[:1] if len({*source.runs}) == 1 else source.runs))
    if any(run * behind % within for run in source.runs) or own.number % sum(runs):
        return SampleLayout(None, REGROUPED)
    return SampleLayout(runs * (own.number // sum(runs)))


def _restrided(node: fx.Node, own: _Along, before: TensorSpec, source: _Along) -> SampleLayout:
    """The layout of a tensor that is read by strides: each entry of the growing dimension must begin where it did, and
    what is read of it must end before the next begins.
    """
    after: TensorSpec = node.meta["spec"]
    offset = argument(node, 3, "storage_offset", 0)
    others = [
        (size, step) for dim, (size, step) in enumerate(zip(after.shape, after.stride, strict=True)) if dim != own.dim
    ]
    reach, step = (offset or 0) + sum((size - 1) * step for size, step in others), before.stride[source.dim]
    is_apart = own.number == source.number and after.stride[own.dim] == step > reach
    return SampleLayout(source.runs, "" if is_apart else "reads the memory of several samples as one")


def _differ(places: Iterable[_Along]) -> bool:
    """Whether values with equally many entries for each sample have different runs."""
    runs = defaultdict[int, set[tuple[int, ...] | None]](set)
    for each in places:
        runs[each.number].add(each.runs)
    return any(len(each - {None}) > 1 for each in runs.values())


# Parts ----------------------------------------------------------------------------------------------------------------


def _is_split(node: fx.Node, source: _Along, num_samples: int) -> bool:
    """Whether a tensor is cut along the growing dimension at a place where no pass over all samples ends."""
    sizes = [spec.shape[source.dim] for spec in node.meta["spec"] if isinstance(spec, TensorSpec)]
    if source.runs is None or {*sizes} == {source.number * num_samples}:
        return False
    return not source.ends(num_samples).issuperset(accumulate(sizes))


def _why_rows_are_others(node: fx.Node, name: str, num_samples: int) -> str:
    """Why an index selects other rows in a micro-batch than in the batch; empty: it does not."""
    if _is_part_of_chosen(node, name):
        return PART
    return OTHERS if _picks_others(node, num_samples) else ""


def _is_part_of_chosen(node: fx.Node, name: str) -> bool:
    """Whether a slice selects among rows of which values decide how many there are, such as the tokens of an expert."""
    target = tensor_spec(node.args[0]) if name in ("getitem", "narrow", "setitem") else None
    dims = range(len(target.shape)) if target is not None and not target.is_sized else ()
    cut = (index_along(node, dim) for dim in dims if target is not None and target.shape[dim] < 0)
    return any(isinstance(each, slice) and each not in _WHOLE for each in cut)


def _cut(node: fx.Node, source: _Along, part: Any, num_samples: int) -> SampleLayout:
    """The layout of what an index selects along the growing dimension: whole runs of all samples, or a part of each."""
    if isinstance(part, (int, list)):
        return SampleLayout(None, PART)
    if not isinstance(part, slice):
        return SampleLayout()
    size, of_batch = source.number * num_samples, node.meta["batch_numbers"]
    ends = [each for each in (part.start, part.stop) if each is not None and each not in (0, size) and abs(each) < size]
    step = part.step or 1
    if source.runs is None or (not ends and step == 1):
        return SampleLayout(source.runs)
    if step > 1:
        is_part = any(run % step for run in source.runs) or part.stop in ends
        return SampleLayout(None, PART) if is_part else SampleLayout(tuple(run // step for run in source.runs))
    if not all(of_batch.get(each) and each % size in source.ends(num_samples) for each in ends):
        return SampleLayout(None, PART)
    start, stop, _ = part.indices(size)
    return SampleLayout(_between(source, num_samples, start, stop))


def _of_part(item: fx.Node, source: _Along, num_samples: int) -> tuple[int, ...] | None:
    """The runs of one of the parts that a tensor is cut into."""
    place: Any = item.args[1]
    sizes = [each.shape[source.dim] for each in maker_of(item).meta["spec"][: place + 1]]
    return _between(source, num_samples, sum(sizes[:-1]), sum(sizes))


def _between(source: _Along, num_samples: int, start: int, stop: int) -> tuple[int, ...] | None:
    """The runs of a part that begins and ends where passes over all samples end."""
    ends = accumulate(source.runs or ())
    found = tuple(run for run, end in zip(source.runs or (), ends, strict=True) if start < end * num_samples <= stop)
    return found or None


def _picks_others(node: fx.Node, num_samples: int) -> bool:
    """Whether an index computed from row numbers, such as ``arange(n) // 2``, selects rows of other samples."""
    target = _along(node.args[0], num_samples) if operation(node) in INDEXING else None
    index = index_along(node, target.dim) if target is not None else None
    if target is None or not isinstance(index, fx.Node) or target.runs not in (None, (target.number,)):
        return False
    *steps, source = in_order(index)
    computed, rows = [each for each in reversed(steps) if operation(each) in COMPUTED], _along(source, num_samples)
    given: Any = [*source.args, *(other for each in computed for other in each.args if not isinstance(other, fx.Node))]
    is_known = all(isinstance(each, int) for each in given) and not any(each.kwargs for each in computed)
    is_of_batch = any(each.meta["batch_numbers"] for each in computed)
    if operation(source) != "arange" or not source.args or rows is None or not is_known or is_of_batch:
        return False
    start, step = start_and_step(source)

    def sample(row: int) -> int:
        """The sample of the row that is selected for `row`."""
        number: Any = start + row * step
        for each in computed:
            number = COMPUTED[operation(each)](*(number if isinstance(arg, fx.Node) else arg for arg in each.args))
        return int(number // target.number)

    return any(sample(row) != row // rows.number for row in range(2 * rows.number + 1))


def in_order(node: fx.Node) -> list[fx.Node]:
    """A node, and the chain of its sources through operations of `IN_ORDER`."""
    found = [node]
    while len(found[-1].all_input_nodes) == 1 and operation(found[-1]) in IN_ORDER:
        if operation(found[-1]) == "floordiv" and not isinstance(found[-1].args[0], fx.Node):
            break
        found += found[-1].all_input_nodes
    return found


def start_and_step(numbers: fx.Node) -> tuple[Any, Any]:
    """The start and the step of an arange."""
    given = numbers.args if len(numbers.args) > 1 else (0, *numbers.args)
    return given[0], (*given[2:], 1)[0]


def index_along(node: fx.Node, dim: int) -> Any:
    """The index that an operation applies to a dimension of its first input."""
    target: Any = node.args[0]
    index: Any = node.args[1]
    if operation(node) == "narrow":
        start = argument(node, 2, "start")
        return slice(start, start + argument(node, 3, "length"))
    parts: Any = tuple(index) if isinstance(index, tuple) or operation(node) == "index_put" else (index,)
    at_end = len(target.meta["spec"].shape) - 1 - dim
    ahead = parts.index(...) if ... in parts else len(parts)
    for given, at in ((parts[:ahead], dim), (parts[:ahead:-1], at_end)):
        left = at
        for part in given:
            left -= _width(part)
            if left < 0:
                return part
    return slice(None)


def _width(part: Any) -> int:
    """The number of dimensions that an entry of an index covers."""
    if part is None or isinstance(part, bool):
        return 0
    spec = tensor_spec(part)
    return len(spec.shape) if spec is not None and spec.dtype is torch.bool else 1
