"""builder: from ratios to the placement that they describe, and to the program of a step in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from gs_compile.passes.lower import StepSpec, lower
from gs_compile.placement.cut import cut_units
from gs_compile.placement.levels import Level, Share
from gs_compile.placement.placement import Placement
from gs_compile.placement.workload import UnitSize, Workload
from gs_compile.program.ir import DRAIN, Op, Program, Schedule, StepShape

# Updates of a layer where memory is scarce: three pieces of state, not the states of three layers, are in it. As less
# is read ahead a step that waits for drives is slower so: nothing that fits with whole updates has pieces.
SCARCE_UPDATES = 4
ROUNDING = 1e-6  # of the linear program's parts


@dataclass(frozen=True, kw_only=True)
class StepBuilder:
    """Of one model: its units, and how its steps are laid out.

    x_nbytes, side_nbytes: of the checkpoint and of the side inputs of each micro-batch. levels: as in `Placement`.
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
    levels: tuple[tuple[Level, ...], ...] = ()

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
            levels=workload_levels(workload, number),
        )

    @property
    def num_items(self) -> int:
        """Pairs of a layer and a micro-batch."""
        return self.num_layers * len(self.x_nbytes)

    def placement(
        self,
        ratios: Mapping[str, float],
        alpha: float,
        device_ratios: Mapping[str, float] | None = None,
        *,
        speculative: bool = False,
        shares: Sequence[Share] = (),
    ) -> Placement:
        """The placement of `ratios` ("parameter", "checkpoint", "optimizer", perhaps "gradient") in host memory.

        device_ratios: of "parameter" and "checkpoint" in device memory. shares: of items that save more than their
        input; what is in no share is left for the ratios of checkpoints. With clipping that is not speculative, alpha
        is 1; a smaller one describes a step without clipping.
        """
        device_ratios = device_ratios or {}
        on_host, on_device, shares = self._checkpoints(
            ratios["checkpoint"], device_ratios.get("checkpoint", 0.0), shares
        )
        updates = self.layer_updates
        return Placement(
            cut_units(self.sizes, ratios, device_ratios, alpha=alpha, separate=self.separate, layer_updates=updates),
            separate=self.separate,
            clip=self.clip and (speculative or alpha == 1.0),
            speculative=speculative,
            checkpoint_ratio=on_host,
            device_checkpoint_ratio=on_device,
            gradient_ratio=ratios.get("gradient", 1.0),
            x_nbytes=self.x_nbytes,
            side_nbytes=self.side_nbytes,
            num_layers=self.num_layers,
            schedule=self.schedule,
            world=self.world,
            layer_updates=updates,
            durability=self.durability,
            levels=self.levels if shares else (),
            shares=shares,
        )

    def _checkpoints(
        self, on_host: float, on_device: float, shares: Sequence[Share]
    ) -> tuple[float, float, tuple[Share, ...]]:
        """Shares of whole items, of no more than those whose layers can save any; of checkpoints in host and device
        memory what these leave, and all of it where nothing is to be on SSD.
        """
        number, savable = self.num_items, sum(map(bool, self.levels)) * len(self.x_nbytes)
        parts = accumulate((share.part for share in shares), initial=0.0)
        ends = [min(int(part * number + ROUNDING), savable) for part in parts]
        counts = (stop - start for start, stop in pairwise(ends))
        whole = tuple(share._replace(part=count / number) for share, count in zip(shares, counts, strict=True))
        left = max(1.0 - sum(share.part for share in whole), 0.0)
        asked = min(sum(share.part for share in shares), savable / number) if shares else 0.0
        is_all = bool(shares) and on_host + on_device + asked >= 1 - ROUNDING
        on_device = left if is_all and on_device and not on_host else min(on_device, left)
        on_host = left - on_device if is_all else min(on_host, left - on_device)
        return on_host, on_device, tuple(share for share in whole if share.part)

    def program(self, placement: Placement, *, redo: bool = True) -> Program:
        """A step among others. It will not run here, and all passes were tested: it is not verified.

        Of all programs of a placement it takes the most memory; without `redo` it is one whose updates before held.
        """
        late = self.shape.training and any(unit.trained(*placement.waiting(redo=redo)) for unit in placement.units)
        return lower(self.step(placement, late=late, redo=redo), verified=False)[-1]

    def programs(self, placement: Placement) -> Iterator[Program]:
        """Those that may take the most memory of all: a step; where parameters are kept also one without rolled back
        updates, if they may be, and an evaluation, which run beside what is kept.
        """
        yield from self.steps(placement)
        if placement.kept_values:
            yield replace(self, shape=self.shape.forward_alone).program(placement)

    def steps(self, placement: Placement) -> Iterator[Program]:
        """Those of `programs` that are of this shape."""
        yield self.program(placement)
        if self.shape.training and placement.speculative and placement.kept_values:
            yield self.program(placement, redo=False)

    def step(self, placement: Placement, *, late: bool, redo: bool) -> StepSpec:
        """What is lowered: a step after one that has left gradients (`late`), of speculative updates too (`redo`).

        What it was to keep is there, unless updates are done again; an evaluation does not use it.

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
            warm=self.shape.training and bool(placement.kept_values) and not (late and placement.speculative and redo),
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


def workload_levels(workload: Workload, number: int) -> tuple[tuple[Level, ...], ...]:
    """Of each layer what it may save, for `number` micro-batches that are all alike; () where none may save more."""
    if not workload.num_levels:
        return ()
    costs = (workload.costs[layer].levels for layer in range(workload.num_layers))
    return tuple(tuple(Level((cost.nbytes,) * number, cost.reads_input) for cost in levels) for levels in costs)


def peak(program: Program, tier: str) -> int:
    """The planned peak of a tier, in bytes; of host memory, what a run of `program` has to be given."""
    return dict(program.peaks).get(tier, 0)
