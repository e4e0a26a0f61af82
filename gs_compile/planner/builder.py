"""builder: from a decision to its placement, and to the program of a step with that."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, chain, pairwise
from typing import Any

from gs_compile.options import Ratios
from gs_compile.passes.lower import StepSpec, lower, scheduled
from gs_compile.placement.cut import cut_units
from gs_compile.placement.levels import Level, Share, Shares
from gs_compile.placement.placement import Decision, Layout, Placement, StepContext
from gs_compile.placement.stacks import Stacks
from gs_compile.placement.workload import UnitSize, Workload
from gs_compile.program.ir import DRAIN, Op, Program, StepShape

# Updates of a layer if memory is scarce: then three pieces of state are in memory, not the states of three layers. Less
# is read ahead, and more of the states of a model of few layers can stay in memory.
SCARCE_UPDATES = 4
ROUNDING = 1e-6  # in the parts that the linear program returns


@dataclass(frozen=True, kw_only=True)
class StepBuilder:
    """What all steps of one model have in common: its units, their layout, and the shape of a step."""

    sizes: tuple[UnitSize, ...]
    layout: Layout
    shape: StepShape

    @classmethod
    def of(cls, workload: Workload, number: int, **layout: Any) -> StepBuilder:
        """The builder for `number` equal micro-batches. layout: further fields of the layout."""
        shape = workload.shape
        found = Layout(num_layers=workload.num_layers, world=workload.world, joints=shape.joints, **layout)
        return cls(sizes=workload.sizes, layout=found, shape=shape).at(workload, number)

    def at(self, workload: Workload, number: int) -> StepBuilder:
        """The builder for `number` micro-batches like the workload's."""
        sizes = {name: (nbytes,) * number for name, nbytes in workload.activations.items()}
        return self.laid_out(**sizes, levels=workload_levels(workload, number))

    def laid_out(self, **changes: Any) -> StepBuilder:
        """The builder with other fields of its layout."""
        return replace(self, layout=replace(self.layout, **changes))

    def placement(self, decision: Decision) -> Placement:
        """The placement of a decision, whose parts of activations are rounded to whole items."""
        decision = self._whole(decision)
        return Placement(cut_units(self.sizes, decision, self.layout), self.layout, decision)

    def _whole(self, decision: Decision) -> Decision:
        """The decision with shares of whole items, no more than can save activations. Checkpoints in host and device
        memory get what the shares leave; all of it if nothing is to be on SSD.
        """
        stacks = decision.stacks(self.layout)
        shares = self._in_stacks(decision.shares, stacks)
        kept, whole = zip(
            *(self._whole_of(ratios, shares.of(stack), stacks[stack]) for stack, ratios in enumerate(decision.ratios)),
            strict=True,
        )
        return replace(decision, ratios=kept, shares=Shares(chain.from_iterable(whole)))

    def _whole_of(self, ratios: Ratios, shares: Shares, layers: range) -> tuple[Ratios, Shares]:
        """The ratios and shares of one stack, of whole items."""
        number, of_stack = self.layout.num_items, len(layers) * self.layout.num_micro_batches
        savable = self._savable(layers)
        parts = accumulate((share.part for share in shares), initial=0.0)
        ends = [min(int(part * number + ROUNDING), savable) for part in parts]
        counts = [stop - start for start, stop in pairwise(ends)]
        whole = Shares(
            share._replace(part=count / number) for share, count in zip(shares, counts, strict=True) if count
        )
        left = max(1.0 - whole.part() * (number / of_stack), 0.0)
        on_host, on_device = ratios.checkpoint or 0.0, ratios.device_checkpoint or 0.0
        asked = min(shares.part() * (number / of_stack), savable / of_stack) if shares else 0.0
        is_all = bool(shares) and on_host + on_device + asked >= 1 - ROUNDING
        on_device = left if is_all and on_device and not on_host else min(on_device, left)
        on_host = left - on_device if is_all else min(on_host, left - on_device)
        return replace(ratios, checkpoint=on_host, device_checkpoint=on_device), whole

    def _in_stacks(self, shares: Shares, stacks: Stacks) -> Shares:
        """The shares, those of the topmost layers of all stacks divided among the stacks."""
        if len(stacks) == 1:
            return shares
        in_stacks, number = list[Share](), self.layout.num_items
        left = [self._savable(layers) / number for layers in stacks]
        for share in shares:
            missing = share.part
            for stack in reversed(range(len(stacks))) if share.stack is None else (share.stack,):
                part = min(missing, left[stack])
                in_stacks.append(share._replace(part=part, stack=stack))
                left[stack] -= part
                missing -= part
        return Shares(in_stacks)

    def _savable(self, layers: range) -> int:
        """The number of items of some layers that can save activations."""
        return sum(map(bool, self.layout.levels[layers.start : layers.stop])) * self.layout.num_micro_batches

    def program(self, placement: Placement, *, redo: bool = True, planned: bool = True) -> Program:
        """A step in the middle of a run. It is not verified, as it will not run.

        Of all programs of a placement it takes the most memory. Without `redo` no updates of the step before were
        rolled back; without `planned` the program has no memory plan.
        """
        step = replace(self.step(placement, self._context(placement, redo=redo)), planned=planned)
        return lower(step, computations=self._computations(step), verified=False)[-1]

    def _computations(self, step: StepSpec) -> Program:
        """The computations, which programs of the same size have in common; cached."""
        key = step.num_layers, step.num_micro_batches, step.order
        if key not in self._known:
            self._known[key] = scheduled(step)
        return self._known[key]

    @cached_property
    def _known(self) -> dict[Hashable, Program]:
        return {}

    def programs(self, placement: Placement) -> Iterator[Program]:
        """The programs that may take the most memory: a step; if parameters are carried, also a step after which no
        updates are rolled back, and an evaluation, as these run while the carried parameters are in memory.
        """
        yield from self.steps(placement)
        if placement.carried_values:
            yield self._evaluating.program(placement)

    @cached_property
    def _evaluating(self) -> StepBuilder:
        return replace(self, shape=self.shape.forward_alone)

    def steps(self, placement: Placement) -> Iterator[Program]:
        """Those of `programs` that have this shape."""
        yield self.program(placement)
        if self.shape.training and placement.speculative and placement.carried_values:
            yield self.program(placement, redo=False)

    def _context(self, placement: Placement, *, redo: bool) -> StepContext:
        """The context after a step that has left everything that it may.

        Carried parameters are there, unless updates are repeated; an evaluation does not use them. In a durable
        placement all steps are committed; the price of that is a mean (`prices.work_nbytes`).
        """
        late = self.shape.training and any(unit.trained(*placement.waiting(redo=redo)) for unit in placement.units)
        carried = self.shape.training and bool(placement.carried_values)
        warm, durable = carried and not (late and placement.speculative and redo), placement.durability > 0
        return StepContext(late=late, redo=redo, warm=warm, copies=durable, seals=durable)

    def step(self, placement: Placement, context: StepContext) -> StepSpec:
        """The step to lower."""
        layout = placement.layout
        numbers = layout.num_layers, layout.num_micro_batches
        return StepSpec(*numbers, shape=self.shape, snake=layout.snake, placement=placement, context=context)

    def usual(self, placement: Placement) -> Program:
        """A step before and after which no updates are rolled back, with frees of what it carries."""
        program = self.program(placement, redo=False)
        if not placement.speculative:
            return program
        over = placement.homes(late=True) - placement.present(program.ops)
        frees = tuple(Op("free", (value,), DRAIN) for value in sorted(over, key=str))
        return replace(program, ops=(*program.ops, *frees))


def workload_levels(workload: Workload, number: int) -> tuple[tuple[Level, ...], ...]:
    """What each layer may save, for `number` equal micro-batches; () if none may save more than its input."""
    if not workload.num_levels:
        return ()
    costs = (workload.costs[layer].levels for layer in range(workload.num_layers))
    return tuple(tuple(Level((cost.nbytes,) * number, cost.reads_input) for cost in levels) for levels in costs)


def planned_peak(program: Program, tier: str) -> int:
    """The planned peak of a tier, in bytes; for host memory, what `program` needs."""
    return dict(program.peaks).get(tier, 0)
