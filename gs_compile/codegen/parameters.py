"""The parameters of a captured model: the unit of each, the dtype it is kept in, and what it takes on the tiers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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


def sizes_of(units: Sequence[UnitGraph], owners: Mapping[int, Unit], num_components: int) -> tuple[UnitSize, ...]:
    """The size of each unit, read off the capture; its tensors are in the order of `owners`.

    owners: the unit of each parameter, by input index; num_components: of the optimizer's state besides a master.
    Raises `CaptureError` for a unit with parameters of several dtypes.
    """
    specs: dict[int, TensorSpec] = {}
    for graph in units:
        specs |= {s.index: spec for s, spec in zip(graph.sources, graph.specs, strict=True) if s.kind == "input"}
    sizes = []
    for unit in dict.fromkeys(owners.values()):
        members = [specs[index] for index, owner in owners.items() if owner == unit]
        dtypes = {spec.dtype for spec in members}
        if len(dtypes) > 1:
            raise CaptureError(
                f"unit {unit} has parameters of {', '.join(sorted(map(str, dtypes)))}; greedysnake keeps a unit in one "
                "flat buffer of one dtype: convert the model with .to(dtype)"
            )
        trained, frozen = (
            tuple(padded(spec.numel) for spec in members if spec.requires_grad == wanted) for wanted in (True, False)
        )
        (dtype,) = dtypes
        wide = torch.promote_types(dtype, torch.float32)
        state_itemsize = wide.itemsize * (num_components + (dtype != wide))
        sizes.append(
            UnitSize(unit, trained, frozen, dtype.itemsize, wide.itemsize, state_itemsize, has_master=dtype != wide)
        )
    return tuple(sizes)


def padded(numel: int) -> int:
    """The elements that a parameter takes in its unit's flat buffer."""
    return -(-numel // QUANTUM) * QUANTUM
