"""timing: how long the code of a model's units takes on its device.

The code of each class of units runs once to warm up, and then a few times on made-up values, as in a step: gradients
are also added to sums. Parameters are made up too, for one unit at a time, so that nothing of the model is read and
little memory is needed. Levels of saving are timed when a plan asks for them.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from gs_compile.capture.checks import MADE_UP
from gs_compile.capture.dealing import masks_of
from gs_compile.capture.exchange import Alone, first_exchange
from gs_compile.capture.graph import TensorSpec, UnitGraph
from gs_compile.capture.operations import operation
from gs_compile.codegen.compiled import SpecializedModel, levels_of
from gs_compile.placement.boundaries import BoundaryNbytes, at
from gs_compile.placement.levels import Level, Levels, aligned
from gs_compile.placement.workload import UnitCost, UnitSize, Workload
from gs_compile.planner.cost.known_times import SAME, KnownTimes, Timings, UnitSeconds
from gs_compile.planner.cost.workload import classes, keyed, levelled
from gs_compile.planner.measure.probe import conversion_nbytes
from gs_compile.planner.measure.profile import Profile
from gs_compile.planner.simulate.prices import lane_rate
from gs_compile.program.ir import EPILOGUE, PROLOGUE, StepShape, Unit, height
from gs_compile.progress import stage
from gs_compile.runtime.formats import CONVERSION_NBYTES
from gs_compile.runtime.stream import device_of, without_autocast
from gs_compile.runtime.units import Accumulator, CompiledUnits, MicroBatch
from gs_compile.runtime.values import Gradient

log = logging.getLogger(__name__)

MOST_RUNS = 15  # of one function: a few disturbed ones do not change the median
SECONDS = 2.0  # for all runs together, except the first two of each function, which are always made
CHECK_SECONDS = 0.1  # for the runs that show whether code is as fast as before
MOST_CHECKS = 3  # if it is not: it may have been disturbed, and to time everything again takes seconds
SEED = 0

OwnLevels = Mapping[Unit, Sequence[int]]  # of each layer that has several


def priced(sizes: tuple[UnitSize, ...], profile: Profile, num_threads: int) -> tuple[UnitSize, ...]:
    """The sizes with the cost of converting narrow states in updates on this machine, whose `profile` this is."""
    if not any(size.conversion_nbytes for size in sizes):
        return sizes
    two = conversion_nbytes(num_threads, lane_rate("cpu", profile))
    times = two / (2 * CONVERSION_NBYTES[torch.bfloat16])
    return tuple(replace(size, conversion_nbytes=int(size.conversion_nbytes * times)) for size in sizes)


def timed(
    workload: Workload,
    layout: SpecializedModel,
    known: KnownTimes | None = None,
    beside: Callable[[], OwnLevels] = dict,
) -> Workload:
    """`workload`, which is `layout`'s, with the seconds of each unit's forward and backward; a class is run once.

    known: times of before, which are used if the first layer's forward is still as fast. beside: levels that will be
    timed next, and are compiled at the same time.
    """
    known, firsts, costs = known or KnownTimes(), classes(layout), workload.costs
    share = SECONDS / (2 * len(firsts))

    def measure() -> Timings:
        _compile(layout, workload.shape, beside())
        return _each(firsts.values(), lambda unit: _timed(workload, layout, unit, share), "timing the layers' code")

    if (before := known.get(layout.fingerprint)) and not _is_as_fast(layout, before):
        known.forget()
    rows = known.get_or(layout.fingerprint, len(firsts), measure)
    by_class: dict[Hashable, UnitCost] = {}
    for (key, unit), row in zip(firsts.items(), rows, strict=True):
        by_class[key] = replace(costs[unit.unit], seconds=_both(*row))
    return _with_costs(workload, layout, by_class)


def timed_levels(
    workload: Workload, layout: SpecializedModel, levels: Collection[int], known: KnownTimes | None = None
) -> Workload:
    """`workload`, which is timed, with the seconds of its layers' code at these levels of saving. Other levels are as
    fast as the level below.

    Levels and level 0 run in turns: so a machine that becomes slower meanwhile makes no level look worse.
    known: see `timed`, which has checked whether these times still hold.
    """
    known, costs = known or KnownTimes(), workload.costs
    firsts = {key: unit for key, unit in classes(layout).items() if costs[unit.unit].levels}
    chosen = _own_levels(costs, levels)
    share = SECONDS / (2 * (1 + len(levels)) * len(set(layout.uniform.layer_classes)))

    def time_one(unit: UnitGraph) -> UnitSeconds:
        return _timed_levels(layout, unit, costs[unit.unit], chosen[unit.unit][1:], share)

    def measure() -> Timings:
        _compile(layout, workload.shape, chosen)
        return _each(firsts.values(), time_one, "timing the code of saved activations")

    rows = known.get_or(f"{layout.fingerprint} {sorted(levels)}", len(firsts), measure)
    by_class: dict[Hashable, UnitCost] = {}
    for (key, unit), row in zip(firsts.items(), rows, strict=True):
        each = zip(costs[unit.unit].levels, row[::2], row[1::2], strict=True)
        of_unit = tuple(replace(level, seconds=_both(ahead, back)) for level, ahead, back in each)
        by_class[key] = replace(costs[unit.unit], levels=of_unit)
    return _with_costs(workload, layout, by_class)


def _own_levels(costs: Mapping[Unit, UnitCost], levels: Collection[int]) -> OwnLevels:
    """Of each layer that has any, level 0 and those of `levels` that it has."""
    most = {unit: len(cost.levels) for unit, cost in costs.items() if cost.levels}
    return {unit: sorted({0, *(min(level, last) for level in levels)}) for unit, last in most.items()}


def _both(ahead: float | None, back: float | None) -> tuple[float, float] | None:
    return None if ahead is None or back is None else (ahead, back)


def _with_costs(workload: Workload, layout: SpecializedModel, by_class: Mapping[Hashable, UnitCost]) -> Workload:
    """With those of some classes of units; others keep theirs."""
    new = {unit.unit: by_class[key] for unit, key in keyed(layout) if key in by_class}
    return replace(workload, costs={**workload.costs, **new})


def _each(units: Collection[UnitGraph], time_one: Callable[[UnitGraph], UnitSeconds], words: str) -> Timings:
    with stage(words, len(units)) as advance:
        rows = []
        for unit in units:
            rows.append(time_one(unit))
            advance()
    return rows


def _compile(layout: SpecializedModel, shape: StepShape, levels: OwnLevels) -> None:
    """Compile the code. (A separate function, so that it can be replaced where the seconds of code are given.)"""
    layout.compile_code(shape, levels)


def _is_as_fast(layout: SpecializedModel, before: Timings) -> bool:
    """Whether the first layer's forward takes as long as before."""
    then = before[1][0]
    if then is None:
        return False
    with _as_in_a_step(unit := layout.split.by_unit[0]):
        trial = _Trial(layout, unit)
        looks = (_median_seconds([trial.forward], CHECK_SECONDS, trial.device)[0] for _ in range(MOST_CHECKS))
        return any(abs(now - then) <= SAME * then for now in looks)


class LayerLevels:
    """What the layers of a model in this process may save in addition to their inputs (`problem.Saving`).

    workload: the model's, timed. known: see `timed_levels`. compiled: the code of levels is compiled already.
    """

    def __init__(
        self,
        layouts: Sequence[SpecializedModel],
        workload: Callable[[], Workload],
        known: KnownTimes | None = None,
        *,
        compiled: bool,
    ) -> None:
        self.layouts, self.timed, self.known, self.compiled = layouts, workload, known, compiled
        self._asked = False
        self.costs = cache(self._costs)

    def levels(self, x_nbytes: Sequence[BoundaryNbytes]) -> Levels:
        """Each layer's levels; for the batch of another rank, in proportion to the inputs. (): no layer has any."""
        self._asked = True
        of_batch = levels_of(self.layouts)
        if not any(of_batch):
            return ()
        first = self.layouts[0].x_nbytes
        if tuple(x_nbytes) == tuple(each.x_nbytes for each in self.layouts):
            return of_batch

        def like(layer: int, level: Level) -> Level:
            inputs = (at(nbytes, layer) for nbytes in x_nbytes)
            return replace(level, nbytes=tuple(aligned(level.nbytes[0] * each // at(first, layer)) for each in inputs))

        return tuple(tuple(like(layer, level) for level in levels) for layer, levels in enumerate(of_batch))

    def refusals(self) -> Iterator[str]:
        """A sentence for each reason for which layers can save nothing else, if saving was asked for."""
        if self._asked:
            by_reason: dict[str, list[str]] = {}
            for layer in range(self.layouts[0].split.num_layers):
                if not (code := self.layouts[0].codes[layer]).levels:
                    by_reason.setdefault(code.no_levels_reason, []).append(str(layer))
            for reason, layers in by_reason.items():
                yield f"layer{'s' * (len(layers) > 1)} {', '.join(layers)} can save the input alone: {reason}"

    def reasons(self) -> str:
        """Why layers can save nothing."""
        return "; ".join(sorted({code.no_levels_reason for code in self.layouts[0].codes.values()} - {""}))

    def to_compile(self, workload: Workload, *, last: bool) -> OwnLevels:
        """The levels that are timed once `workload` is; none if no level was asked for."""
        with_levels = levelled(workload, self.layouts[0]) if self._asked else workload
        return _own_levels(with_levels.costs, self._worthwhile(with_levels, last))

    def _costs(self, last: bool) -> Mapping[Unit, UnitCost]:
        """The costs of units, with the levels as timed; with `last` only the last level."""
        with_levels = levelled(self.timed(), self.layouts[0])
        if with_levels.num_levels:
            with_levels = timed_levels(with_levels, self.layouts[0], self._worthwhile(with_levels, last), self.known)
        return with_levels.costs

    def _worthwhile(self, workload: Workload, last: bool) -> Sequence[int]:
        most = workload.num_levels
        return [most] if last else [each for each in range(1, most + 1) if self._may_pay(workload, each)]

    def _may_pay(self, workload: Workload, level: int) -> bool:
        """Whether a level is worth compiling. A compiler fuses everything except products with its readers: so a level
        that computes as many products as the level below is not faster.
        """
        layers = [workload.costs[layer] for layer in range(workload.num_layers)]
        pairs = [(cost, *cost.levels)[level - 1 : level + 1] for cost in layers if len(cost.levels) >= level]
        return not self.compiled or any(one.backward_flops > other.backward_flops for one, other in pairs)


def _timed_levels(
    layout: SpecializedModel, unit: UnitGraph, cost: UnitCost, levels: Sequence[int], share: float
) -> UnitSeconds:
    """The seconds of forward and backward of each level of one layer. Levels are timed relative to level 0."""
    if cost.seconds is None:
        return [None, None] * len(cost.levels)
    with _as_in_a_step(unit):
        trials = [_Trial(layout, unit)]
        trials += [_Trial(layout, unit, level, reads_input=cost.levels[level - 1].reads_input) for level in levels]
        forward, *forwards = _median_seconds([trial.forward for trial in trials], share, trials[0].device)
        backward, *backwards = _median_seconds([trial.backward for trial in trials], share, trials[0].device)
    slower = dict(zip(levels, zip(forwards, backwards, strict=True), strict=True))
    times = cost.seconds
    seconds_of_levels = list[float]()
    for level in range(1, len(cost.levels) + 1):
        if level in slower:
            ahead, back = slower[level]
            times = cost.seconds[0] * ahead / forward, cost.seconds[1] * back / backward
        seconds_of_levels += times
    return seconds_of_levels


def _timed(workload: Workload, layout: SpecializedModel, unit: UnitGraph, share: float) -> UnitSeconds:
    """The seconds of forward and backward of one unit; None for one whose sizes depend on the data, or that fails on
    made-up values.
    """
    cost = workload.costs[unit.unit]
    if any(-1 in spec.shape for spec in (*unit.specs, *unit.result_specs)):
        return cost.seconds or (None, None)
    try:
        return _seconds(workload, layout, unit, share)
    except torch.OutOfMemoryError:
        raise
    except (IndexError, RuntimeError) as error:
        log.info("unit %s is not timed, as its code does not run on numbers that are made up: %s", unit.unit, error)
        return cost.seconds or (None, None)


def _seconds(workload: Workload, layout: SpecializedModel, unit: UnitGraph, share: float) -> UnitSeconds:
    cost = workload.costs[unit.unit]
    is_head = unit.unit == EPILOGUE
    has_backward = bool(unit.differentiable and unit.differentiated)
    runs_back = has_backward and height(unit.unit) >= height(workload.shape.first_grad)
    with _as_in_a_step(unit):
        trial = _Trial(layout, unit)
        if is_head and runs_back:  # a step never runs its forward alone, and to compile that would take long
            (backward,) = _median_seconds([trial.backward], share, trial.device)
            forward = backward * cost.forward_flops / max(cost.backward_flops, 1.0)
        else:
            (forward,) = _median_seconds([trial.forward], share, trial.device)
            (backward,) = _median_seconds([trial.backward], share, trial.device) if runs_back else [forward * is_head]
    return forward, backward


@contextmanager
def _as_in_a_step(unit: UnitGraph) -> Iterator[None]:
    """Inside the block code runs as in a step, but without communication: only one rank times it."""
    with torch.no_grad(), without_autocast(), Alone() if first_exchange(unit.module) else nullcontext():
        yield


class _Trial:
    """One unit, with made-up values for all that it reads; above level 0 the forward runs before the backward."""

    def __init__(self, layout: SpecializedModel, unit: UnitGraph, level: int = 0, *, reads_input: bool = True) -> None:
        self.unit, self.level, self.reads_input = unit, level, reads_input
        self.device = next((spec.device for spec in unit.specs if spec.shape), torch.device("cpu"))
        assert not unit.is_meta, "there is no code to run on the meta device"
        generator = torch.Generator(self.device).manual_seed(SEED)
        most = _smallest_table(unit)
        self._reads: dict[str, Any] = {"w": {}, "batch": {}, "side": {}, "tap": {}, "whole": {}, "total": {}}
        fraction = torch.full((), MADE_UP, device=self.device)
        placeholders, dealt = unit.module.graph.find_nodes(op="placeholder"), masks_of(unit.module.graph)
        for source, spec, placeholder in zip(unit.sources, unit.specs, placeholders, strict=True):
            given = layout.whole_numbers.get(source.index) if source.kind == "input" else None
            tensor = _random(spec, most, generator) if given is None else given.to(self.device)
            if spec.dtype == torch.bool and placeholder in dealt:
                _memory(tensor).fill_(False)  # more places than there are entries would be an error
            if source.kind == "x":
                self._reads["x"] = tensor
            elif source.kind != "fraction":
                self._reads["w" if source.kind == "input" else source.kind][source.index] = tensor
        self._gradients = [_random(spec, most, generator) for spec in unit.gradient_specs]
        self._sums = self._zeros()
        self._saved: dict[str, Any] = {}
        self._units = CompiledUnits([MicroBatch(layout.split, layout.codes, {}, fraction, {})], SEED)
        self._units.taps = {(index, 0): tensor for index, tensor in self._reads.pop("tap").items()}
        self._units.of_whole = tuple(tensor for _, tensor in sorted(self._reads.pop("whole").items()))

    def forward(self) -> None:
        wants = ("a",) if self.level else ()
        found = self._units.forward(self.unit.unit, 0, wants=wants, level=self.level, **self._reads)
        self._saved = dict(zip(wants, found, strict=True))

    def backward(self) -> None:
        unit, reads = self.unit, {**self._reads, **self._sums, **self._saved}
        if not self.reads_input:
            del reads["x"]
        if unit.unit == EPILOGUE and "loss" in unit.results:
            self._units.head(unit.unit, 0, wants=("dx",), **reads)
        elif unit.unit == EPILOGUE:
            self._units.head_backward(unit.unit, 0, wants=("dx",), dy=tuple(self._gradients), **reads)
        else:
            x = unit.results.index("x")
            if x in unit.differentiated:
                reads["dx"] = self._gradients[unit.differentiated.index(x)]
            wants = () if unit.unit == PROLOGUE else ("dx",)
            self._units.backward(unit.unit, 0, wants=wants, level=self.level, **reads)

    def _zeros(self) -> dict[str, Any]:
        """The sums that gradients are added to, as in a step."""
        specs = {
            source.index: spec
            for source, spec in zip(self.unit.sources, self.unit.specs, strict=True)
            if source.kind == "input" and spec.requires_grad
        }
        views = {
            index: torch.zeros(spec.shape, dtype=torch.promote_types(spec.dtype, torch.float32), device=spec.device)
            for index, spec in specs.items()
        }
        sums = {"dw": Gradient(torch.empty(0), views)}
        return sums | ({} if self.unit.unit == PROLOGUE else {"dsides": Accumulator()})


def _random(spec: TensorSpec, most: int, generator: torch.Generator) -> torch.Tensor:
    """Small normal numbers, also of complex dtypes; for integers, indices below `most`; for booleans, True."""
    tensor = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=spec.device)
    memory = _memory(tensor)
    if spec.dtype.is_floating_point or spec.dtype.is_complex:
        memory.normal_(0.0, 0.02, generator=generator)
    elif spec.dtype == torch.bool:
        memory.fill_(True)
    else:
        memory.random_(0, most, generator=generator)
    return tensor


def _memory(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor without expanded dimensions, as torch does not write to expanded tensors."""
    return tensor.new_empty(0).set_(tensor.untyped_storage())


def _smallest_table(unit: UnitGraph) -> int:
    """The fewest rows of a matrix that the unit reads, or classes of its loss: smaller indices are valid for all."""
    inputs = [spec for spec, source in zip(unit.specs, unit.sources, strict=True) if source.kind == "input"]
    rows = [spec.shape[0] for spec in inputs if spec.dtype.is_floating_point and len(spec.shape) == 2]
    losses = [node for node in unit.module.graph.nodes if operation(node) in ("cross_entropy", "nll_loss")]
    classes = [node.all_input_nodes[0].meta["spec"].shape[:2][-1] for node in losses]  # (C), or (samples, C, ...)
    return min([*rows, *classes], default=1)


def _median_seconds(runs: Sequence[Callable[[], None]], share: float, device: torch.device) -> list[float]:
    """The median of each, run in turns, at most `MOST_RUNS` times: as often as `share` seconds hold, after a first."""
    rounds: list[list[float]] = []
    while len(rounds) < 2 or (len(rounds) <= MOST_RUNS and sum(map(sum, rounds[1:])) < share * len(runs)):
        rounds.append([])
        for run in runs:
            start = time.perf_counter()
            run()
            device_of(device).synchronize()
            rounds[-1].append(time.perf_counter() - start)
    return [statistics.median(each) for each in zip(*rounds[1:], strict=True)]
