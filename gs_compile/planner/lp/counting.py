"""counting: what a step moves and keeps, counted on short lowered programs.

A step repeats from layer to layer. Its bytes are affine in the number of layers, in the number of micro-batches (from
three on: so many saved items are in host memory at a time), and in alpha (between 0 and 1). So short programs are
lowered, and their counts are extrapolated:

    layers          a few at either end, and one period more                            `_lengths`
    micro-batches   3 and 4; 1 and 2 are counted for themselves                         `Counted.readings`
    alpha           0 and 1, and for all between 1/4 and 1/2                            `anchors`
    saved           every layer but joints saves one byte beside its input, on each tier in turn; and one in its place

Bytes are counted at three points of each stage: when transfers come in; at updates, and what leaves; at computation.
The memory of a unit's update grows in steps if the unit is larger than a layer; there the readings are interpolated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from math import ceil

import numpy as np
import numpy.typing as npt

from gs_compile.options import Ratios
from gs_compile.placement.boundaries import in_parts
from gs_compile.placement.levels import Level, Share, Shares
from gs_compile.placement.liveness import live_ranges
from gs_compile.placement.placement import Decision, Layout, Placement
from gs_compile.placement.stacks import stack_of
from gs_compile.placement.workload import Workload
from gs_compile.planner.builder import StepBuilder
from gs_compile.planner.simulate.prices import runs_backward, work_nbytes
from gs_compile.program.ir import DRAIN, FILL, TIERS, Op, Program, Stage, Tier, Unit, Value, homed, whole_kind

Array = npt.NDArray[np.float64]
RATIOS = ("checkpoint", "parameter", "optimizer", "device_checkpoint", "device_parameter", "gradient")
WIDTH = 1 + len(RATIOS)
CLASSES = ("parameter", "checkpoint", "optimizer")  # of data that have a ratio in host memory
DEVICE_RATIOS = ("device_parameter", "device_checkpoint")
# After these, if layers may save more: a byte of every item on each tier, and no item's input.
SAVED: Mapping[Tier, int] = {"ssd": WIDTH, "host": WIDTH + 1, "device": WIDTH + 2}
UNKEPT = WIDTH + 3
PHASES = ("forward", "backward")
TIMED = ("compute", "cpu", "h2d", "d2h", "ssd_read", "ssd_write", "net")

PHASE_OF = {"fill": 0, "forward": 0, "backward": 1, "drain": 1}
# Classes of values, by kind, that are counted separately; the first four have columns of ratios, for host and device.
KINDS = {"x": 0, "dx": 0, "w": 1, "s": 2, "dw": 3, "side": 4, "a": 5, "dside": 6}
COLUMNS = ((1, 4), (2, 5), (3,), (6,))
NUM_CLASSES = 8  # the last is of all other values
ACTIVATIONS = [0, 4, 6]  # classes whose bytes are a micro-batch's
NOTHING = Ratios(checkpoint=0.0, parameter=0.0, optimizer=0.0, gradient=0.0)
EVERYTHING = Ratios(checkpoint=1.0, parameter=1.0, optimizer=1.0, gradient=1.0)
ON_DEVICE = Ratios(device_checkpoint=1.0, device_parameter=1.0, optimizer=1.0, gradient=0.0)
ENDS = 4  # layers at either end that may differ from those between: as far as `pipeline` looks ahead, plus one
MOST_PERIOD = 4  # layers
AFFINE_FROM = 3  # micro-batches


def host_classes(layout: Layout) -> tuple[str, ...]:
    """The classes that may live in host memory; gradient sums move between micro-batches or backwards."""
    return (*CLASSES, "gradient") if layout.has_sums else CLASSES


@dataclass(frozen=True)
class Readings:
    """The bytes of a program, counted or extrapolated from several.

    moved: `[phase, lane, stack, class, WIDTH]`, wider if layers may save more than their input; for the lane "cpu" what
        the optimizer's rule reads and writes, for "compute" passes over memory. alive: `[point, tier, stack, class,
        WIDTH]`. code: by phase, how often each unit's code runs (forward, backward). The unit of activations is one
        micro-batch's checkpoint, side inputs, or their gradient; or a common part of these if sizes differ.
    """

    moved: Array
    alive: Array
    code: Mapping[tuple[int, Unit, bool], float]

    def to(self, other: Readings, steps: float) -> Readings:
        """This one, plus `steps` times the difference of the other to it."""
        return _sum((1.0 - steps, self), (steps, other))


def _sum(*terms: tuple[float, Readings]) -> Readings:
    code: Counter[tuple[int, Unit, bool]] = Counter()
    for factor, each in terms:
        code.update({key: factor * times for key, times in each.code.items()})
    moved, alive = (sum(factor * getattr(each, name) for factor, each in terms) for name in ("moved", "alive"))
    return Readings(moved, alive, code)


class Counted:
    """Readings of one model, at any micro-batch size; programs are lowered when they are needed."""

    def __init__(
        self, workload: Workload, builder: StepBuilder, *, speculative: bool = False, layer_updates: int = 1
    ) -> None:
        """`builder`: how steps are laid out; its numbers of layers and micro-batches do not matter.

        speculative, layer_updates: as in `Decision`.
        """
        self.workload = workload
        self.builder = builder
        self.speculative, self.layer_updates = speculative, layer_updates
        self.saves = workload.num_levels > 0  # layers may save more than their input
        layers = [size.num_trained for size in workload.sizes if isinstance(size.unit, int)]
        groups = ceil(max(size.num_trained for size in workload.sizes) / max([1, *layers]))
        self.ends = ENDS + groups  # a unit that is updated in groups takes another stage for each
        self.stacks = workload.stacks
        self.lengths = _lengths(workload, self.ends)
        self._known = cache(self._made)  # cached as long as this object lives

    @property
    def key(self) -> Hashable:
        """What readings depend on: not the micro-batch size, nor the costs of code."""
        workload, activations = self.workload, self.workload.activations
        layout = self.builder.laid_out(levels=(), **dict.fromkeys(activations, ())).layout
        settings = layout, self.speculative, self.saves, self.layer_updates, self.lengths
        return settings, workload.sizes, workload.shape, tuple(map(in_parts, activations.values()))

    def decision(self, ratios: tuple[Ratios, ...], alpha: float, shares: Shares) -> Decision:
        """A decision with updates as they are counted here."""
        return Decision(
            ratios=ratios, alpha=alpha, shares=shares, speculative=self.speculative, layer_updates=self.layer_updates
        )

    def readings(self, alpha: float, number: int) -> Readings:
        """For one alpha and a number of micro-batches."""
        if number > AFFINE_FROM + 1:
            first, second = (self.readings(alpha, AFFINE_FROM + more) for more in (0, 1))
            return first.to(second, number - AFFINE_FROM)
        return self._known(alpha, number)

    def _made(self, alpha: float, number: int) -> Readings:
        between = anchors(alpha)
        if alpha not in between:
            low, high = between
            return self.readings(low, number).to(self.readings(high, number), (alpha - low) / (high - low))
        if number > 2 and alpha != between[-1]:  # what another micro-batch adds does not depend on alpha
            more, two = (self.readings(between[-1], each) for each in (number, 2))
            return _sum((1.0, self.readings(alpha, 2)), (1.0, more), (-1.0, two))
        by_length = [self._lowered(length, alpha, number) for length in self.lengths]
        if len(by_length) == 1:
            return by_length[0]
        short, long = self.lengths
        return by_length[0].to(by_length[1], (self.workload.num_layers - short) / (long - short))

    def _lowered(self, num_layers: int, alpha: float, number: int) -> Readings:
        """The readings of the model with as many layers, from a program for each corner."""
        workload = shortened(self.workload, num_layers)
        layout = {name: (in_parts(nbytes),) * number for name, nbytes in workload.activations.items()}
        builder = replace(self.builder, sizes=workload.sizes, shape=workload.shape)
        builder = builder.laid_out(num_layers=num_layers, joints=workload.shape.joints, **layout)
        corners: list[tuple[Ratios, Tier | None]] = [(NOTHING, "ssd"), (EVERYTHING, "host")]
        corners += [(ON_DEVICE, "device")] if builder.layout.separate else []
        corners += [(NOTHING, None)] if self.saves else []
        counts: list[_Count] = []
        for ratios, tier in corners:
            shares = Shares([Share(1, tier or "ssd", 1.0)] if self.saves else [])
            levels, joints = (Level((1,) * number, tier is not None),), workload.shape.joints
            each = builder.laid_out(levels=tuple(() if layer in joints else levels for layer in range(num_layers)))
            ratios = replace(ratios, checkpoint=0.0, device_checkpoint=0.0) if shares else ratios
            placement = each.placement(self.decision((ratios,), alpha, shares))
            count = _Count(placement, self.ends if len(self.lengths) > 1 else num_layers)
            most = builder.program(placement, planned=False)
            count.alive(most)
            usual = builder.program(placement, redo=False, planned=False) if self.speculative else most
            count.moves(usual)
            counts.append(count)
        moved = _affine([each.moved for each in counts], saves=self.saves)
        points = [np.concatenate([each.points[key] for key in sorted(each.points)]) for each in counts]
        return Readings(moved, _affine(points, saves=self.saves), counts[0].code)


def _affine(corners: Sequence[Array], *, saves: bool) -> Array:
    """`[..., class]` at each corner as `[..., class, WIDTH]`, or with the columns of what is saved."""
    affine = np.zeros((*corners[0].shape, UNKEPT + 1 if saves else WIDTH))
    affine[..., 0] = corners[0]
    if saves:
        *corners, unkept = corners
        affine[..., KINDS["a"], 0] = 0.0
        for column, corner in zip(SAVED.values(), corners, strict=False):
            affine[..., KINDS["a"], column] = corner[..., KINDS["a"]]
        affine[..., KINDS["x"], UNKEPT] = (unkept - corners[0])[..., KINDS["x"]]
    for kind, columns in enumerate(COLUMNS):
        for column, corner in zip(columns, corners[1:], strict=False):
            affine[..., kind, column] = corner[..., kind] - corners[0][..., kind]
    return affine


def anchors(alpha: float) -> tuple[float, ...]:
    """The alphas whose programs are lowered for one alpha: itself; if updates are early and late, two others."""
    return (alpha,) if alpha in (0.0, 1.0) else (0.25, 0.5)


class _Count:
    """What one program moves, and what is alive at its points; layers count from the nearer end."""

    def __init__(self, placement: Placement, ends: int) -> None:
        self.placement = placement
        self.ends = ends
        self.stacks = placement.layout.stacks
        self.moved = np.zeros((len(PHASES), len(TIMED), len(self.stacks), NUM_CLASSES))
        self.points: dict[tuple[str, str, bool], Array] = {}
        self.code: Counter[tuple[int, Unit, bool]] = Counter()

    def moves(self, program: Program) -> None:
        for op in program.ops:
            phase = PHASE_OF[op.stage.phase]
            if op.micro_batch is not None and op.lane == "compute":
                self.code[phase, op.unit, runs_backward(op)] += 1
            elif nbytes := work_nbytes(op, self.placement):
                lane = TIMED.index("compute" if op.lane == "memory" else op.lane)
                self.moved[phase, lane, *self._class((*op.reads, *op.values)[0])] += nbytes

    def alive(self, program: Program) -> None:
        """Three points of each stage: transfers come in; updates, and what leaves; computation."""
        shape = len(program.ops) + 2, len(TIERS), len(self.stacks), NUM_CLASSES  # the first is before all operations
        changes = np.zeros(shape)
        for live in live_ranges(program.ops, self.placement):
            place = TIERS.index(live.slot.tier), *self._class(live.value)
            changes[live.first + 1, *place] += live.slot.nbytes
            changes[-1 if live.last is None else live.last + 1, *place] -= live.slot.nbytes
        now = np.cumsum(changes, axis=0)[:-1]
        self._add(FILL, now[:1])
        start = 0
        for stage, ops in program.stages():
            self._add(stage, now[start : start + len(ops) + 1], ops)
            start += len(ops)
        if DRAIN.phase not in (phase for phase, *_ in self.points):
            self._add(DRAIN, now[-1:])

    def _class(self, value: Value) -> tuple[int, int]:
        """The stack of a value, and the class of its bytes there."""
        return stack_of(value.unit, self.stacks), KINDS.get(whole_kind(homed(value)), NUM_CLASSES - 1)

    def _add(self, stage: Stage, now: Array, ops: Sequence[Op] = ()) -> None:
        """Add the most bytes at each point of a stage; `now`: the bytes before it and after each of its operations."""
        moments = np.array([0, *accumulate(map(_moment, ops), max)])
        most = [now[: np.searchsorted(moments, 0, side="right")].max(axis=0)]
        for moment in (1, 2):
            first, last = np.searchsorted(moments, moment), np.searchsorted(moments, moment, side="right")
            most.append(now[first - 1 : last].max(axis=0) if last > first else now[last - 1])
        self.points.update(dict.fromkeys(self._keys(stage), np.array(most)))

    def _keys(self, stage: Stage) -> Iterator[tuple[str, str, bool]]:
        """The names of a stage, counted from the nearer end of the layers, and of the micro-batches if it is of one."""
        unit, last = stage.unit, self.placement.layout.num_micro_batches - 1
        if isinstance(unit, int):
            above = self.placement.layout.num_layers - unit
            if unit >= self.ends and above > self.ends:
                return
            name = f"{unit}" if unit < self.ends else f"-{above}"
        else:
            name = unit or ""
        if stage.micro_batch in (None, 0):
            yield stage.phase, name, False
        if stage.micro_batch == last:
            yield stage.phase, name, True


def _moment(op: Op) -> int:
    """The point of a stage that an operation belongs to."""
    return 2 if op.micro_batch is not None else min(op.verb not in ("prefetch", "free", "gather", "all_gather"), 1)


# Short models ---------------------------------------------------------------------------------------------------------


def _lengths(workload: Workload, ends: int) -> tuple[int, ...]:
    """The numbers of layers to lower: two, a period apart; or the model's own if it has no period."""
    number, shape = workload.num_layers, workload.shape
    sizes = {size.unit: replace(size, unit=0) for size in workload.sizes}
    layers = [(sizes.get(layer), workload.costs[layer], layer in shape.frozen) for layer in range(number)]
    named = (*shape.emits, *shape.outside, *shape.tied, *shape.joints)  # beside the first to have a gradient, at an end
    singled_out = any(isinstance(unit, int) for unit in named) or len(workload.x_nbytes) > 1
    for period in range(1, MOST_PERIOD + 1):
        short = 2 * ends + (number - 2 * ends) % period
        if short + period < number and not singled_out and layers[period:] == layers[:-period]:
            return short, short + period
    return (number,)


def shortened(workload: Workload, num_layers: int) -> Workload:
    """The workload of the first layers alone."""

    def is_left(unit: Unit) -> bool:
        return not isinstance(unit, int) or unit < num_layers

    return replace(
        workload,
        num_layers=num_layers,
        sizes=tuple(size for size in workload.sizes if is_left(size.unit)),
        costs={unit: cost for unit, cost in workload.costs.items() if is_left(unit)},
        shape=replace(workload.shape, frozen=frozenset(filter(is_left, workload.shape.frozen))),
    )
