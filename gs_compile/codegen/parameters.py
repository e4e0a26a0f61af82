"""The parameters of a captured model: the unit of each, the dtype it is kept in, and what it takes on the tiers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from gs_compile.capture.graph import Captured, TensorSpec, UnitGraph
from gs_compile.errors import CaptureError
from gs_compile.options import Options
from gs_compile.placement.placement import QUANTUM
from gs_compile.placement.workload import UnitSize
from gs_compile.program.ir import TIED, Unit


def owners_of(units: Sequence[UnitGraph], captured: Captured) -> dict[int, Unit]:
    """The unit of each parameter, by input index: "t" for those that several units read."""
    owners: dict[int, Unit] = {}
    for graph in units:
        for source in graph.sources:
            if source.kind == "input" and captured.inputs[source.index].role == "parameter":
                known = owners.setdefault(source.index, graph.unit)
                if known != graph.unit:
                    owners[source.index] = TIED
    return owners


def kept_dtype(parameter: torch.Tensor, options: Options) -> torch.dtype:
    """The dtype in which a parameter is computed with, and kept beside its master."""
    narrow = options.precision == "bf16" and parameter.dtype.is_floating_point
    return torch.bfloat16 if narrow else parameter.dtype


def size_of(unit: Unit, dtype: torch.dtype, numels: Iterable[tuple[int, bool]], num_components: int) -> UnitSize:
    """The size of a unit, given the elements of each of its parameters and whether it is trained.

    num_components: of the optimizer's state, besides a master.
    """
    wide = torch.promote_types(dtype, torch.float32)
    sizes: dict[bool, list[int]] = {True: [], False: []}
    for numel, is_trained in numels:
        sizes[is_trained].append(padded(numel))
    state_nbytes = wide.itemsize * (num_components + (dtype != wide))
    trained, frozen = map(tuple, sizes.values())
    return UnitSize(unit, trained, frozen, dtype.itemsize, wide.itemsize, state_nbytes, dtype != wide)


def sizes_of(units: Sequence[UnitGraph], owners: Mapping[int, Unit], num_components: int) -> tuple[UnitSize, ...]:
    """The size of each unit, read off the capture; `owners`: the unit of each parameter, by input index.

    Raises `CaptureError` for a unit with parameters of several dtypes.
    """
    specs: dict[int, TensorSpec] = {}
    for graph in units:
        specs |= {s.index: spec for s, spec in zip(graph.sources, graph.specs, strict=True) if s.kind == "input"}
    sizes = []
    for unit in dict.fromkeys(owners.values()):
        found = [specs[index] for index, owner in owners.items() if owner == unit]
        dtypes = {spec.dtype for spec in found}
        if len(dtypes) > 1:
            raise CaptureError(mixed_dtypes(unit, dtypes))
        sizes.append(size_of(unit, dtypes.pop(), ((s.numel, s.requires_grad) for s in found), num_components))
    return tuple(sizes)


def mixed_dtypes(unit: Unit, dtypes: Iterable[torch.dtype]) -> str:
    """The words for a unit with parameters of several dtypes."""
    return (
        f"unit {unit} has parameters of {', '.join(sorted(map(str, dtypes)))}; greedysnake keeps a unit in one "
        "flat buffer of one dtype: convert the model with .to(dtype)"
    )


def padded(numel: int) -> int:
    """The elements that a parameter takes in its unit's flat buffer."""
    return -(-numel // QUANTUM) * QUANTUM
