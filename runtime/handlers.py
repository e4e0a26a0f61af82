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
from gs_compile.runtime.coordinators import Binding
from gs_compile.runtime.tiers import Tiers

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

    def move_parameters(op: Op, reads: Sequence[Any], targets: Sequence[Any]) -> None:
        parameters.carry_out(op, reads, targets, placement.num_pieces)

    def allocate_gradient(value: Value, source: Any, memory: Memory) -> Any:
        return optimizer.allocate_gradient(value, source, memory, bindings.of(value))

    def zeros(value: Value, _: Any, memory: Memory) -> Any:
        if value.kind == "dw" and value.unit in placement.by_unit:
            return optimizer.zeros(value, memory, bindings.of(value))
        return units.zeros(value)

    activation = Handler(activations.allocate, activations.carry_out)
    parameter = Handler(parameters.allocate, move_parameters)
    state = Handler(optimizer.allocate, optimizer.carry_out)
    gradient = Handler(allocate_gradient, optimizer.carry_out)
    movements = {"x": activation, "dx": activation, "w": parameter, "s": state, "dw": gradient}
    return {
        **{(verb, kind): handler for kind, handler in movements.items() for verb in ("prefetch", "offload")},
        ("update", "w"): Handler(run=optimizer.update),
        ("update", "s"): Handler(run=optimizer.update),
        ("gather", "w"): Handler(gather),
        ("empty", "w"): parameter,
        ("zeros", "dw"): Handler(zeros),
        ("zeros", "dside"): Handler(zeros),
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
