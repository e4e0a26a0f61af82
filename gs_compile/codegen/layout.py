"""layout: the span of each parameter in its unit's flat buffer, and how a capture reads its parameters from there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any

import torch

from gs_compile.capture.graph import Captured, TensorSpec
from gs_compile.capture.internals import without_overrides
from gs_compile.capture.split import Split
from gs_compile.errors import CaptureError, OptimizerError
from gs_compile.options import Frozen, Options
from gs_compile.placement.shards import Owned, owned, pieces, sharded
from gs_compile.placement.workload import Products, UnitSize
from gs_compile.program.ir import TIED, Unit
from gs_compile.runtime.coordinators import Bindings
from gs_compile.runtime.formats import Types
from gs_compile.runtime.muon import STATES, Matrices
from gs_compile.runtime.spans import Binding, Slice, encoded_slice
from gs_compile.runtime.updates import Run


@dataclass(frozen=True)
class ParameterLayout:
    """The parameters of each unit: trained ones first, by param group and width, then frozen ones, each at a multiple
    of QUANTUM. If most are matrices that are orthogonalized, every element has one moment; a parameter that needs two
    takes twice the elements, and the second half holds only second moments.

    A parameter that several units read belongs to unit "t". If ranks share the units, spans are places in the buffer of
    all ranks together; runs and sizes are this rank's.
    """

    spans: Mapping[int, Slice]  # by input index
    runs: Mapping[Unit, Sequence[Run]]  # the trained elements, cut where their settings differ
    sizes: tuple[UnitSize, ...]
    types: Mapping[Unit, Types]


def lay_out(
    split: Split,
    captured: Captured,
    types_by: Callable[[torch.dtype], Types],
    groups: Mapping[int, tuple[int, int, bool]] | None = None,
    *,
    share: tuple[int, int],
    codecs: Mapping[int, str],
    matrices: Mapping[int, Matrices] | None,
) -> ParameterLayout:
    """The layout of a captured model.

    types_by: the types of parameters of a dtype.
    groups: of each trained parameter, by input index, the param group, the number of optimizer steps before its first,
        and whether it is idle (`Run`); None: these are equal for all.
    share: this rank, and the number of ranks that share each unit.
    codecs: of frozen parameters, by input index.
    matrices: those that are orthogonalized, by input index; None: the optimizer never does.

    Raises `CaptureError` for a unit whose dtypes cannot be in one buffer.
    """
    specs, owners = _owned(split, captured)
    rank, world = share
    spans, runs = dict[int, Slice](), dict[Unit, list[Run]]()
    types, sizes = dict[Unit, Types](), list[UnitSize]()

    def order(index: int) -> tuple[bool, tuple[int, int, bool], int, int]:
        is_trained = specs[index].requires_grad
        group = groups[index] if is_trained and groups is not None else (0, 0, False)
        width = 0 if index in codecs else types[owners[index]].width(specs[index].dtype)
        return not is_trained, group, width * is_trained, index * group[-1]  # an idle parameter has its own run

    for unit in dict.fromkeys(owners.values()):
        found = [index for index, owner in owners.items() if owner == unit]
        plain = [specs[index] for index in found if index not in codecs]
        types[unit] = types_by(_dtype(unit, plain or [specs[index] for index in found]))
        if _has_one_moment({index: specs[index] for index in found}, matrices or {}, alone=world == 1):
            types[unit] = types[unit].with_one_moment()
        members = {index: specs[index] for index in sorted(found, key=order)}
        placed = _placed(unit, members, types[unit], codecs, matrices)
        sizes.append(sharded(_size(unit, members, placed, types[unit], matrices or {}), world))
        cuts = pieces(sizes[-1].num_trained, sizes[-1].numel)
        mine, runs[unit], stop = partial(owned, cuts, rank, world), [], 0
        for (is_frozen, group, width, _), same in groupby(members, key=order):
            stop = world * sizes[-1].num_trained if is_frozen else stop
            for index in (indices := list(same)):
                spans[index] = replace(placed[index], offset=stop)
                stop += spans[index].padded
            if not is_frozen:
                first = Run(spans[indices[0]].offset, stop, *group, width > 1)
                runs[unit] += _runs(first, {index: spans[index] for index in indices}, matrices, mine)
    return ParameterLayout(spans, runs, tuple(sizes), types)


def _owned(split: Split, captured: Captured) -> tuple[dict[int, TensorSpec], dict[int, Unit]]:
    """All parameters, by input index, and the unit that each belongs to."""
    specs, owners = dict[int, TensorSpec](), dict[int, Unit]()
    for graph in split.units:
        for index, spec in graph.parameters(captured).items():
            specs[index], owners[index] = spec, TIED if index in owners else graph.unit
    return specs, owners


def _runs(
    alike: Run,
    spans: Mapping[int, Slice],
    matrices: Mapping[int, Matrices] | None,
    mine: Callable[[int, int], Iterator[Owned]],
) -> Iterator[Run]:
    """This rank's part of parameters with equal settings. With an optimizer that orthogonalizes, each parameter has
    its own runs, and a matrix is whole.
    """
    if matrices is None:
        for each in mine(alike.start, alike.stop):
            yield alike._replace(start=each.local, stop=each.local + each.numel)
        return
    for index, span in spans.items():
        start, stop = span.offset, span.offset + span.padded
        if index in matrices:
            yield alike._replace(start=start, stop=stop, matrices=matrices[index])
        for each in mine(start, stop) if index not in matrices else ():
            yield alike._replace(start=each.local, stop=each.local + each.numel, second=span.second)


def _dtype(unit: Unit, members: Sequence[TensorSpec]) -> torch.dtype:
    """The dtype of a unit's elements: its narrowest floating dtype; of several equally narrow ones, a trained one.

    A trained parameter must have this dtype, or float32 if this has 16 bits; a frozen one any dtype whose width is a
    multiple.
    """
    dtypes, trained = {spec.dtype for spec in members}, {spec.dtype for spec in members if spec.requires_grad}
    if complex_ones := sorted(str(dtype) for dtype in trained if dtype.is_complex):
        raise CaptureError(
            f"unit {unit} has trained parameters of {', '.join(complex_ones)}, but updates only work on real numbers: "
            "make the parameter of the real and imaginary parts, nn.Parameter(torch.view_as_real(value)), and use "
            "torch.view_as_complex of it in forward"
        )
    floating = [dtype for dtype in dtypes if dtype.is_floating_point] or dtypes
    narrowest = min(floating, key=lambda dtype: (dtype.itemsize, dtype not in trained, str(dtype)))
    wide = {torch.float32} if narrowest.itemsize == 2 else set()
    if any(dtype.itemsize < narrowest.itemsize for dtype in dtypes) or not trained <= {narrowest} | wide:
        raise CaptureError(
            f"unit {unit} has parameters of {', '.join(sorted(map(str, dtypes)))}, which do not go together: trained "
            "ones may have one dtype, or one dtype of 16 bits and float32, and frozen ones must not be narrower. "
            "Convert the model, or these parameters, with .to(dtype); one that is quantized comes from "
            "gs_compile.from_pretrained, which takes its quantization_config"
        )
    return narrowest


def encoded(split: Split, captured: Captured, frozen: Frozen | None, skip: Sequence[str] = ()) -> dict[int, str]:
    """The codec, by input index, of each parameter that the option `frozen` encodes: a layer's frozen matrices, or
    stacks of matrices of one shape, as of experts; not those of modules to skip.
    """
    if frozen is None:
        return {}
    codecs: dict[int, str] = {}
    num_readers = Counter(index for graph in split.units for index in graph.parameters(captured))
    for graph in split.units:
        for index, spec in graph.parameters(captured).items() if isinstance(graph.unit, int) else ():
            is_meant = may_be_encoded(captured.inputs[index].path, spec, skip)
            if is_meant and not spec.requires_grad and num_readers[index] == 1:
                codecs[index] = frozen
    return codecs


def of_layers(split: Split, captured: Captured) -> Mapping[int, TensorSpec]:
    """The parameters that only layers read, by input index. Muon's matrices are among them."""
    found = {unit.unit: unit.parameters(captured) for unit in split.units}
    others = {index for unit, specs in found.items() if not isinstance(unit, int) for index in specs}
    return {i: spec for unit in found for i, spec in found[unit].items() if i not in others}


def may_be_encoded(path: str, spec: TensorSpec | torch.Tensor, skip: Sequence[str]) -> bool:
    """Whether a layer's parameter is a matrix or a stack of them, outside modules to skip. A stack of biases is not."""
    is_matrix = len(spec.shape) in (2, 3) and spec.dtype.is_floating_point and spec.dtype.itemsize > 1
    return is_matrix and set(skip).isdisjoint(path.split(".")) and not path.endswith("bias")


def _span(unit: Unit, spec: TensorSpec, types: Types, codec: str) -> Slice:
    """The span of a parameter, as if it came first in its unit."""
    if codec:
        return encoded_slice(unit, 0, spec.shape, spec.dtype, codec, types.parameter.itemsize)
    if spec.dtype == types.parameter:
        return Slice(unit, 0, spec.shape)
    return Slice(unit, 0, spec.shape, spec.dtype, types.width(spec.dtype))


def _has_one_moment(members: Mapping[int, TensorSpec], matrices: Mapping[int, Matrices], *, alone: bool) -> bool:
    """Whether most of a unit's trained elements need one moment, not two; with several ranks, whether all do."""
    trained = {index: spec.numel for index, spec in members.items() if spec.requires_grad}
    one = sum(trained[index] for index in trained.keys() & matrices.keys())
    return 2 * one > sum(trained.values()) if alone else 0 < one == sum(trained.values())


def _placed(
    unit: Unit,
    members: Mapping[int, TensorSpec],
    types: Types,
    codecs: Mapping[int, str],
    matrices: Mapping[int, Matrices] | None,
) -> dict[int, Slice]:
    """The span of each parameter of a unit, as if it came first there; with its kind of state if there are matrices."""
    has_one_moment = matrices is not None and len(types.state) - types.has_master == 1

    def placed(index: int, spec: TensorSpec) -> Slice:
        found = _span(unit, spec, types, codecs.get(index, ""))
        if matrices is not None and index in matrices:
            return replace(found, components=STATES)
        return replace(found, second=found.padded) if has_one_moment and spec.requires_grad else found

    return {index: placed(index, spec) for index, spec in members.items()}


def _size(
    unit: Unit,
    members: Mapping[int, TensorSpec],
    placed: Mapping[int, Slice],
    types: Types,
    matrices: Mapping[int, Matrices],
) -> UnitSize:
    trained, frozen = (
        tuple(placed[index].padded for index, spec in members.items() if spec.requires_grad == wanted)
        for wanted in (True, False)
    )
    decoded = sum(members[index].numel * members[index].dtype.itemsize for index in members if placed[index].codec)
    sizes, follows = (types.parameter.itemsize, types.wide.itemsize), types.has_master and not types.is_pair
    size = UnitSize(unit, trained, frozen, *sizes, types.state_itemsize, follows, types.conversion_nbytes)
    own = {index: matrices[index] for index in members if index in matrices}
    products = None
    if own:
        device_nbytes = max(each.scratch_nbytes for each in own.values())
        host_nbytes = 2 * max(placed[index].padded for index in own) * types.wide.itemsize
        products = Products(sum(each.flops for each in own.values()), device_nbytes, host_nbytes)
    return replace(size, decoded_nbytes=decoded, products=products)


def kept_dtype(parameter: torch.Tensor, options: Options) -> torch.dtype:
    """The dtype of the copy of a parameter that is computed with and stored beside its master."""
    narrow = options.precision == "bf16" and parameter.dtype.is_floating_point
    return torch.bfloat16 if narrow else parameter.dtype


# Reading --------------------------------------------------------------------------------------------------------------


def tied_units(split: Split, spans: Mapping[int, Slice]) -> Set[Unit]:
    """The units that read parameters of unit "t"."""
    tied = {index for index, span in spans.items() if span.unit == TIED}
    return {graph.unit for graph in split.units if not tied.isdisjoint(graph.arguments)}


def bind(split: Split, args: Sequence[Any], spans: Mapping[int, Slice], units: Sequence[Unit]) -> Bindings:
    """How one capture reads its inputs: parameters of `units` from the tiers, buffers and constants as they are.

    spans: of the arguments that are parameters, by input index. Raises `OptimizerError` for a parameter that is not on
    the tiers, or is in another unit there.
    """
    parameters: dict[Unit, dict[int, Binding]] = {unit: {} for unit in units}
    others: dict[Unit, dict[int, torch.Tensor]] = {graph.unit: {} for graph in split.units}
    for graph in split.units:
        for index in graph.arguments:
            arg, span = args[index], spans.get(index)
            if not isinstance(arg, torch.nn.Parameter):
                others[graph.unit][index] = arg
            elif span is None or span.unit not in (graph.unit, TIED):
                there = "" if span is None else f" (it did in unit {span.unit}: weights are tied before it)"
                raise OptimizerError(
                    f"this call reads a parameter of shape {tuple(arg.shape)} in unit {graph.unit} that the first call "
                    f"did not{there}: call the model the same way in every step, with the same hooks. To train others "
                    "from now on, as another adapter, save the model and begin a run with a model of its own"
                )
            else:
                with without_overrides():
                    parameters[span.unit][index] = Binding(index, span, arg.requires_grad)
    return Bindings({unit: list(found.values()) for unit, found in parameters.items()}, others)
