"""handlers: what each verb does with each kind of values: one table of (verb, kind) for a step on the tiers.

The executor asks for the content of a result when it issues an operation (`allocate`), and has the operation carried
out on its lane, later (`run`). A new kind of values is a row of this table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from gs_compile.placement.placement import Placement
from gs_compile.program.ir import Op, Unit, Value
from gs_compile.runtime import coordinators
from gs_compile.runtime.coordinators import Binding
from gs_compile.runtime.tiers import Tiers
from gs_compile.runtime.values import flat_of

Memory = torch.Tensor | None


@dataclass(frozen=True)
class Bindings:
    """How one capture of the model reads its inputs: the parameters of each unit, and what is no parameter."""

    parameters: Mapping[Unit, Sequence[Binding]]
    others: Mapping[Unit, Mapping[int, torch.Tensor]]

    def of(self, value: Value) -> Sequence[Binding]:
        """The parameters of a value's unit."""
        assert value.unit is not None
        return self.parameters[value.unit]


class Handler(NamedTuple):
    """How one verb treats values of one kind.

    allocate: the content of a result, given the value, the content it is made of, and the bytes planned for it in host
        memory, if any; they may not be filled yet
    run: what the operation's lane does, given the operation and the contents it reads and those it defines or changes
    """

    allocate: Callable[[Value, Any, Memory], Any] | None = None
    run: Callable[..., None] | None = None


def handlers(tiers: Tiers, placement: Placement, units: Any, bindings: Bindings) -> Mapping[tuple[str, str], Handler]:
    """The table of one step; the kind of a shadow copy is that of what it is a copy of."""
    parameters, optimizer, activations = tiers.parameters, tiers.optimizer, tiers.activations

    def gather(value: Value, staged: Any, memory: Memory) -> Any:
        others = bindings.others.get(value.unit or 0, {})
        return {**others, **parameters.gather(value, staged, memory, bindings.of(value))}

    def move(op: Op, reads: Sequence[Any], targets: Sequence[Any]) -> None:
        if op.lane in ("ssd_read", "ssd_write"):
            coordinators.transfer(reads, targets)
        elif op.results and op.results[0].piece is not None:
            parameters.send_piece(op, reads, targets[0], placement.num_pieces)
        elif op.reads[0].kind == "dw" and op.results[0].part:
            optimizer.split(op, reads[0], targets)
        else:
            for source, target in zip(reads, targets, strict=True):
                tiers.setting.device.copy(flat_of(target), flat_of(source))

    def zeros(value: Value, _: Any, memory: Memory) -> Any:
        if value.kind == "dw" and value.unit in placement.by_unit:
            return optimizer.zeros(value, memory, bindings.of(value))
        return units.zeros(value)

    moved: dict[str, Callable[[Value, Any, Memory], Any]] = {
        "x": activations.allocate,
        "dx": activations.allocate,
        "w": parameters.allocate,
        "s": lambda value, _, memory: tiers.setting.part(value, memory),
        "dw": lambda value, source, memory: optimizer.allocate_gradient(value, source, memory, bindings.of(value)),
    }
    return {
        **{(verb, kind): Handler(moved[kind], move) for kind in moved for verb in ("prefetch", "offload")},
        **{("update", kind): Handler(run=optimizer.update) for kind in ("w", "s")},
        ("gather", "w"): Handler(gather),
        ("empty", "w"): Handler(parameters.allocate),
        **{("zeros", kind): Handler(zeros) for kind in ("dw", "dside")},
        ("alias", "dw"): Handler(lambda value, source, _: optimizer.keep(value, source, bindings.of(value))),
        ("alias", "x"): Handler(activations.keep),
    }


def moved_nbytes(op: Op, targets: Sequence[Any], tiers: Tiers, num_pieces: int) -> int:
    """The bytes that an operation of a lane moves into `targets`."""
    if op.verb == "update":
        return 0
    if op.results and op.results[0].piece is not None:
        start, stop = tiers.parameters.share(op.results[0], num_pieces)
        return (stop - start) * tiers.setting.unit(op.results[0]).itemsize
    return sum(target.nbytes for target in targets)
