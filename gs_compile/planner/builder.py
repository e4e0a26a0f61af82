"""builder: from ratios to the placement that they describe, and to the program of a step in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from gs_compile.passes.lower import StepSpec, lower
from gs_compile.placement.cut import cut_units
from gs_compile.placement.placement import Placement
from gs_compile.placement.workload import UnitSize, Workload
from gs_compile.program.ir import DRAIN, Op, Program, Schedule, StepShape

# Updates of a layer where memory is scarce: three pieces of state, not the states of three layers, are in it. As less
# is read ahead a step that waits for drives is slower so: nothing that fits with whole updates has pieces.
SCARCE_UPDATES = 4


@dataclass(frozen=True, kw_only=True)
class StepBuilder:
    """Of one model: its units, and how its steps are laid out.

    x_nbytes, side_nbytes: of the checkpoint and of the side inputs of each micro-batch.
    separate: the device has memory of its own. clip: gradients are clipped. world: the ranks that share the units, of
        which `sizes` are one's shares. layer_updates, durability: as in `Placement`.
    """

    sizes: tuple[UnitSize, ...]
    num_layers: int
    shape: StepShape
    x_nbytes: tuple[int, ...]
    side_nbytes: tuple[int, ...]
    separate: bool
    clip: bool = False
    schedule: Schedule = "vertical"
    snake: bool = True
    world: int = 1
    layer_updates: int = 1
    durability: int = 0

    @classmethod
    def of(
        cls, workload: Workload, number: int, *, separate: bool, clip: bool = False, schedule: Schedule = "vertical"
    ) -> StepBuilder:
        """For `number` micro-batches that are all alike."""
        return cls(
            sizes=workload.sizes,
            num_layers=workload.num_layers,
            shape=workload.shape,
            x_nbytes=(workload.x_nbytes,) * number,
            side_nbytes=(workload.side_nbytes,) * number,
            separate=separate,
            clip=clip,
            schedule=schedule,
            world=workload.world,
        )

    def placement(
        self,
        ratios: Mapping[str, float],
        alpha: float,
        device_ratios: Mapping[str, float] | None = None,
        *,
        speculative: bool = False,
    ) -> Placement:
        """The placement of `ratios` ("parameter", "checkpoint", "optimizer", perhaps "gradient") in host memory.

        device_ratios: of "parameter" and "checkpoint" in device memory. With clipping that is not speculative, alpha
        is 1; a smaller one describes a step without clipping.
        """
        device_ratios = device_ratios or {}
        on_device, updates = device_ratios.get("checkpoint", 0.0), self.layer_updates
        return Placement(
            cut_units(self.sizes, ratios, device_ratios, alpha=alpha, separate=self.separate, layer_updates=updates),
            separate=self.separate,
            clip=self.clip and (speculative or alpha == 1.0),
            speculative=speculative,
            checkpoint_ratio=min(ratios["checkpoint"], 1 - on_device),
            device_checkpoint_ratio=on_device,
            gradient_ratio=ratios.get("gradient", 1.0),
            x_nbytes=self.x_nbytes,
            side_nbytes=self.side_nbytes,
            num_layers=self.num_layers,
            schedule=self.schedule,
            world=self.world,
            layer_updates=updates,
            durability=self.durability,
        )

    def program(self, placement: Placement, *, redo: bool = True) -> Program:
        """A step among others. It will not run here, and all passes were tested: it is not verified.

        Of all programs of a placement it takes the most memory; without `redo` it is one whose updates before held.
        """
        late = self.shape.training and any(unit.trained(*placement.waiting(redo=redo)) for unit in placement.units)
        return lower(self.step(placement, late=late, redo=redo), verified=False)[-1]

    def step(self, placement: Placement, *, late: bool, redo: bool) -> StepSpec:
        """What is lowered: a step after one that has left gradients (`late`), of speculative updates too (`redo`).

        Of a durable placement all steps are committed; what that takes is priced as a mean (`prices.work_nbytes`).
        """
        durable = placement.durability > 0
        return StepSpec(
            self.num_layers,
            len(placement.x_nbytes),
            shape=self.shape,
            snake=self.snake,
            placement=placement,
            late=late,
            redo=redo,
            copies=durable,
            seals=durable,
        )

    def usual(self, placement: Placement) -> Program:
        """A step before and after which updates hold, with the end of what it has kept for the case."""
        program = self.program(placement, redo=False)
        if not placement.speculative:
            return program
        over = placement.homes(late=True) - placement.present(program.ops)
        frees = tuple(Op("free", (value,), DRAIN) for value in sorted(over, key=str))
        return replace(program, ops=(*program.ops, *frees))


def peak(program: Program, tier: str) -> int:
    """The planned peak of a tier, in bytes; of host memory, what a run of `program` has to be given."""
    return dict(program.peaks).get(tier, 0)
