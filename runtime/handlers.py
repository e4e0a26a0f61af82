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
from gs_compile.program.reference import Units
from gs_compile.runtime.coordinators import Binding
from gs_compile.runtime.tiers import Tiers
from gs_compile.runtime.values import Gradient, Kept, Region


@dataclass(frozen=True)
class Bindings:
    """How one capture of the model reads its inputs: the parameters of each unit, and what is no parameter."""

    parameters: Mapping[Unit, Sequence[Binding]]
    others: Mapping[Unit, Mapping[int, torch.Tensor]]


class Handler(NamedTuple):
    """How one verb treats values of one kind.

    allocate: the content of a result, given the value and the content it is made of; its memory may not be filled yet
    run: what the operation's lane does, given the operation and the contents it reads and those it defines or changes
    """

    allocate: Callable[[Value, Any], Any] | None = None
    run: Callable[..., None] | None = None


def handlers(tiers: Tiers, placement: Placement, units: Units, bindings: Bindings) -> Mapping[tuple[str, str], Handler]:
    """The table of one step; the kind of a shadow copy is that of what it is a copy of."""
    parameters, optimizer, inter_layer = tiers.parameters, tiers.optimizer, tiers.inter_layer
    gradients = _Gradients(tiers, placement, units, bindings)

    def gather(value: Value, staged: Any) -> Any:
        assert value.unit is not None
        others = bindings.others.get(value.unit, {})
        return parameters.gather(value, staged, bindings.parameters[value.unit], others)

    def move_parameters(op: Op, reads: Sequence[Any], targets: Sequence[Any]) -> None:
        parameters.carry_out(op, reads, targets, placement.num_pieces)

    activation = Handler(inter_layer.allocate, inter_layer.carry_out)
    parameter = Handler(lambda value, _: parameters.allocate(value), move_parameters)
    state = Handler(lambda value, _: optimizer.allocate(value), optimizer.carry_out)
    gradient = Handler(gradients.allocate, optimizer.carry_out)
    movements = {"x": activation, "dx": activation, "w": parameter, "s": state, "dw": gradient}
    return {
        **{(verb, kind): handler for kind, handler in movements.items() for verb in ("prefetch", "offload")},
        ("update", "w"): Handler(run=optimizer.update),
        ("update", "s"): Handler(run=optimizer.update),
        ("gather", "w"): Handler(gather),
        ("empty", "w"): parameter,
        ("zeros", "dw"): Handler(gradients.zeros),
        ("zeros", "dside"): Handler(gradients.zeros),
        ("alias", "dw"): Handler(gradients.alias),
        ("alias", "x"): Handler(inter_layer.keep),
        ("alias", "dx"): Handler(inter_layer.keep),
    }


class _Gradients:
    """The contents of gradient sums, on their way and where they are summed."""

    def __init__(self, tiers: Tiers, placement: Placement, units: Units, bindings: Bindings) -> None:
        self.optimizer = tiers.optimizer
        self.placement = placement
        self.units = units
        self.bindings = bindings

    def allocate(self, value: Value, source: Any) -> Any:
        if value.part:
            return self.optimizer.allocate(value)
        return self.optimizer.allocate_sum(value, source, self._of(value))

    def zeros(self, value: Value, _: Any) -> Any:
        if value.kind == "dw" and value.unit in self.placement.by_unit:
            return self.optimizer.zeros(value, self._of(value))
        return self.units.zeros(value)

    def alias(self, value: Value, source: Any) -> Any:
        if value.tier == "device":
            return self.optimizer.keep_sum(value, source, self._of(value))
        return self.optimizer.keep(value, source)

    def _of(self, value: Value) -> Sequence[Binding]:
        assert value.unit is not None
        return self.bindings.parameters[value.unit]


def moved_nbytes(op: Op, targets: Sequence[Any], tiers: Tiers, num_pieces: int) -> int:
    """The bytes that an operation of a lane moves into `targets`."""
    if op.verb == "update":
        return 0
    if op.results and op.results[0].piece is not None:
        start, stop = tiers.parameters.share(op.results[0], num_pieces)
        return (stop - start) * tiers.setting.unit(op.results[0]).itemsize
    return sum(_nbytes(target) for target in targets)


def _nbytes(content: Any) -> int:
    match content:
        case None:
            return 0
        case Region() | torch.Tensor():
            return content.nbytes
        case Kept():
            return content.like.untyped_storage().nbytes()
        case Gradient():
            return content.flat.nbytes
    nbytes: int = content.tensor.nbytes
    return nbytes
