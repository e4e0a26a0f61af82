"""handlers: what each verb does with each kind of values, in a step on the tiers.

When the executor issues an operation, it asks for the content of each result (`allocate`). The lane runs the operation
later (`move`, or the optimizer's update). A new kind of values is a case of `allocate`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from gs_compile.placement.placement import Placement
from gs_compile.placement.traffic import op_nbytes
from gs_compile.program.ir import Op, Value, whole_kind
from gs_compile.runtime import coordinators
from gs_compile.runtime.coordinators import Bindings
from gs_compile.runtime.step_record import SharedNorm, StepRecord
from gs_compile.runtime.tiers import Tiers
from gs_compile.runtime.units import CompiledUnits
from gs_compile.runtime.values import tensors_of


@dataclass(frozen=True, eq=False, repr=False)
class Handlers:
    """The operations of one step, by verb and kind; the coordinators carry them out."""

    tiers: Tiers
    placement: Placement
    units: CompiledUnits
    bindings: Bindings
    number: int  # of the step among those under way

    def allocate(self, verb: str, value: Value, source: Any, memory: torch.Tensor | None) -> Any:
        """The content of a result, which may not be filled yet.

        source: the content from which it is made; memory: the bytes planned for it in host memory, if any.
        """
        tiers, unit = self.tiers, value.unit or 0
        match verb, value.kind:
            case "gather", _:
                parameters = tiers.parameters.gather(value, source, memory, self.bindings.parameters[unit])
                return {**self.bindings.others.get(unit, {}), **parameters}
            case "zeros", _ if value.kind == "dside" or unit not in self.placement.by_unit:
                return self.units.zeros(value)
            case _, "dw":
                return tiers.optimizer.gradient(verb, value, source, memory, self.bindings.parameters[unit])
            case "alias", _:
                return tiers.activations.keep(value, source, memory)
            case _, "w" | "shard":
                return tiers.parameters.allocate(value, memory)
            case _, "dshard":
                return tiers.optimizer.shard(value, memory)
            case _, "norm":
                return SharedNorm()
            case _, "s":
                return tiers.setting.part(value, memory)
            case _:
                return tiers.activations.allocate(value, source, memory, self.number)

    def move(self, op: Op, reads: Sequence[Any], targets: Sequence[Any], record: StepRecord | None = None) -> None:
        """Run a transfer on its lane, from `reads` to `targets`. record: of the step that a gradient belongs to."""
        if op.lane in ("ssd_read", "ssd_write"):
            coordinators.transfer(reads, targets)
        elif op.verb == "all_gather":
            self.tiers.parameters.all_gather(op, reads, targets[0])
        elif op.verb == "reduce_scatter":
            assert record is not None
            shard, norm, *sums = targets
            self.tiers.optimizer.reduce_scatter(op, reads[0], shard, norm, sums, record)
        elif op.results and (piece := op.results[0].piece) is not None:
            elements = self.placement.piece(self.tiers.setting.unit(op.results[0]), piece)
            self.tiers.parameters.send_piece(op, reads, targets[0], elements)
        elif whole_kind(op.reads[0]) == "dw" and not op.reads[0].part and op.results[0].part:
            self.tiers.optimizer.split(op, reads[0], targets)
        else:
            for source, target in zip(reads, targets, strict=True):
                for one, other in zip(tensors_of(source), tensors_of(target), strict=True):
                    self.tiers.setting.device.copy(other, one)

    def commit(self, op: Op) -> None:
        """Let shadow copies replace the values that they are copies of.

        Parameters in a zone that is read in one piece stay there: a lane copies the shadow copy over them.
        """
        table = self.tiers.values
        users = table.users
        for home, shadow in zip(op.into[::2], op.into[1::2], strict=True):
            if home.kind == "s" or home.tier == "ssd" or (home.tier == "host" and self.placement.separate):
                table.swap(home, shadow)
                continue
            copy = partial(self.tiers.parameters.commit, table.contents[home], table.contents[shadow])
            after = users.awaited([shadow], [home])
            lane = self.tiers.lane("h2d" if home.tier == "device" else "cpu")
            ticket = lane.submit(f"commit {home}", copy, after, kind="w", stage=str(op.stage))
            users.change(home, ticket)
            users.use(shadow, ticket)

    def seal(self, op: Op) -> None:
        """Commit the step before, after everything that has been written so far."""
        table, commits = self.tiers.values, self.tiers.commits
        assert commits is not None, "no step is committed"
        homes = [home for home, _ in commits.stale()]
        after = table.users.awaited(homes, ())
        nbytes = sum(table.contents[home].nbytes for home in homes)
        ticket = commits.under_way = self.tiers.submit(op, commits.seal(), after, nbytes)
        for home in homes:
            table.users.use(home, ticket)

    def moved_nbytes(self, op: Op, targets: Sequence[Any]) -> int:
        """The bytes that an operation of a lane moves into `targets`."""
        if op.verb == "update":
            return 0
        if op.lane == "net" or (op.results and op.results[0].piece is not None):
            return op_nbytes(op, self.placement)
        return sum(target.nbytes for target in targets)
