"""engine: a model whose parameters and optimizer states live on the tiers, from the first call of its backend on.

take over    parameters leave the module, unit by unit, for their homes; placeholders stay
begin        one call of the model: a program with its transfers, on an executor
backward     the rest of the program, with the optimizer's settings of now
finish       optimizer.step(): late updates may run in the next forward
flush        all updates brought to an end: before evaluation, saving, reading
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from gs_compile.config import Options, parse_bytes
from gs_compile.errors import MemoryBudgetError, OptimizerError, OptionError, StepOrderError
from gs_compile.graph import TensorSpec
from gs_compile.initialise import contents_of, discard, set_aside
from gs_compile.keeper import Keeper
from gs_compile.machine import available_memory, format_bytes, usable_memory
from gs_compile.materialized import is_materialized, keep, keeper_of, watch_callers
from gs_compile.optim import TieredOptimizer, optimizer_of
from gs_compile.passes.fit import UnitSize, fit, most_alpha, peak, place
from gs_compile.passes.lower import flush, lower
from gs_compile.placeholders import is_released, release
from gs_compile.placement import QUANTUM, Placement
from gs_compile.program import PROLOGUE, TIED, Program, StepShape, Unit, Value, height
from gs_compile.runtime.arena import Arena
from gs_compile.runtime.coordinators import Binding
from gs_compile.runtime.optimizer_step import Recipe, StepRecord
from gs_compile.runtime.store import Store
from gs_compile.runtime.threads import correct_thread_count
from gs_compile.runtime.tiered import Bindings, TieredExecutor
from gs_compile.runtime.tiers import Slice, Tiers
from gs_compile.runtime.trace import Trace

if TYPE_CHECKING:
    from gs_compile.plan import Layout, Plan

DEFAULT_SHARE = 0.8  # of the memory that is free at the start: the rest is for activations and the user's own


@dataclass(frozen=True)
class Fit:
    """A step of one size, as planned."""

    placement: Placement
    shape: StepShape


class Engine(Keeper):
    """One model's parameters, and the optimizer that updates them."""

    def __init__(self, optimizer: TieredOptimizer, plan: Plan, layouts: Sequence[Layout], args: Sequence[Any]) -> None:
        self.optimizer = optimizer
        self.components = optimizer.components
        self.options: Options = plan.options
        self.slices: dict[int, Slice] = {}  # by the id of a parameter
        self.parameters: dict[int, torch.nn.Parameter] = {}
        self.open: TieredExecutor | None = None  # a training step between its forward and the end of its backward
        self.record: StepRecord | None = None  # of a backward that optimizer.step() has not closed yet
        self._programs: dict[Any, tuple[Program, ...]] = {}
        self._placements: dict[Any, Placement] = {}
        layout = layouts[0]
        self.owners = owners_of(layout, plan)
        self.device = next(arg.device for arg in args if isinstance(arg, torch.nn.Parameter))
        members = self._members(plan, args)
        self.sizes = tuple(self._size(unit, found) for unit, found in members.items())
        self.separate = self.device.type != "cpu" or self.options.expert.separate_device
        self.host_nbytes = self._budget()
        self.placement = self._place(layouts, plan)
        self.tiers = self._make_tiers(members)
        taken: list[torch.nn.Parameter] = []
        try:
            for found in members.values():
                self._take_over(found, taken)
        except BaseException:
            self._hand_back(taken)
            raise
        keep(self.parameters.values(), self)
        watch_callers(self.parameters.values())

    # Taking over -----------------------------------------------------------------------------------------------------

    def _members(self, plan: Plan, args: Sequence[Any]) -> dict[Unit, list[torch.nn.Parameter]]:
        """The parameters of each unit in the order of its flat space: trained ones by param group, frozen ones last."""
        groups = self.optimizer.group_of
        members: dict[Unit, list[torch.nn.Parameter]] = {}
        for index, unit in self.owners.items():
            parameter = args[index]
            if parameter.requires_grad and parameter not in groups:
                raise OptimizerError(
                    f"{plan.captured.inputs[index].path} is trained, but the gs_compile optimizer does not have it; "
                    "give the optimizer all parameters that require a gradient, or freeze this one"
                )
            members.setdefault(unit, []).append(parameter)
        for unit, found in members.items():
            found.sort(key=lambda p: groups[p] if p.requires_grad else math.inf)  # stable
            dtypes = {_kept_dtype(parameter, self.options) for parameter in found}
            if len(dtypes) > 1:
                raise OptimizerError(
                    f"unit {unit} has parameters of {', '.join(sorted(map(str, dtypes)))}; greedysnake keeps a unit in "
                    "one flat buffer of one dtype: convert the model with .to(dtype)"
                )
            offset = 0
            for parameter in found:
                self.slices[id(parameter)] = Slice(unit, offset, tuple(parameter.shape))
                self.parameters[id(parameter)] = parameter
                offset += _padded(parameter.numel())
        return members

    def _size(self, unit: Unit, members: Sequence[torch.nn.Parameter]) -> UnitSize:
        dtype = _kept_dtype(members[0], self.options)
        wide = torch.promote_types(dtype, torch.float32)
        components = len(self.components) + (dtype != wide)
        return UnitSize(
            unit,
            tuple(_padded(p.numel()) for p in members if p.requires_grad),
            tuple(_padded(p.numel()) for p in members if not p.requires_grad),
            dtype.itemsize,
            wide.itemsize,
            wide.itemsize * components,
            dtype != wide,
        )

    def _budget(self) -> int:
        if self.options.host_memory is None:
            return int(available_memory() * DEFAULT_SHARE)
        return parse_bytes(self.options.host_memory, whole=usable_memory(), name="host_memory")

    def _make_tiers(self, members: Mapping[Unit, Sequence[torch.nn.Parameter]]) -> Tiers:
        expert = self.options.expert
        uses_ssd = any(
            part.tier == "ssd" for unit in self.placement.units for part in (*unit.w.values(), *unit.s.values())
        )
        uses_ssd = uses_ssd or self.placement.checkpoint_ratio < 1
        store = Store(self.options.storage) if uses_ssd else None
        if store is not None:
            try:
                store.reserve_check(self.ssd_nbytes)
            except BaseException:
                store.close()
                raise
        dtypes = {unit: _kept_dtype(found[0], self.options) for unit, found in members.items()}
        runs = {unit: tuple(self._runs(found)) for unit, found in members.items()}
        masters = {size.unit: size.has_master for size in self.sizes}
        number = len(self.components)
        recipe = Recipe(self.optimizer.rule, runs, {unit: number + has for unit, has in masters.items()})
        arena = Arena(self.host_nbytes, pinned=self.device.type == "cuda")
        threads = expert.threads or max(1, correct_thread_count() // 2)
        trace = Trace(events=expert.trace)
        return Tiers(self.placement, dtypes, recipe, arena, store, self.device, trace=trace, num_threads=threads)

    @property
    def ssd_nbytes(self) -> int:
        """What the files of this run take: parameters and states by their homes, and checkpoints."""
        total = 0
        for unit in self.placement.units:
            total += sum(p.numel * unit.itemsize for p in unit.w.values() if p.tier == "ssd")
            total += sum(p.numel * unit.state_itemsize for p in unit.s.values() if p.tier == "ssd")
        checkpoints = sum(self.placement.x_nbytes) * self.placement.num_layers
        return total + math.ceil(checkpoints * (1 - self.placement.checkpoint_ratio))

    def _runs(self, members: Sequence[torch.nn.Parameter]) -> list[tuple[int, int, int]]:
        """Stretches of trained elements of one param group: start, stop, group."""
        runs: list[tuple[int, int, int]] = []
        for parameter in members:
            if not parameter.requires_grad:
                continue
            group, offset = self.optimizer.group_of[parameter], self.slices[id(parameter)].offset
            stop = offset + _padded(parameter.numel())
            if runs and runs[-1][2] == group and runs[-1][1] == offset:
                runs[-1] = (runs[-1][0], stop, group)
            else:
                runs.append((offset, stop, group))
        return runs

    def _take_over(self, members: Sequence[torch.nn.Parameter], taken: list[torch.nn.Parameter]) -> None:
        """Move values home, and leave placeholders; `taken` grows by every parameter that has arrived."""
        for parameter in members:
            values = contents_of(parameter) if is_released(parameter) else parameter.data
            self.tiers.fill(self.slices[id(parameter)], values)
            discard(parameter)
            release(parameter, _kept_dtype(parameter, self.options))
            taken.append(parameter)

    def _hand_back(self, taken: Sequence[torch.nn.Parameter]) -> None:
        """Set values aside again and end the tiers: no model is lost because its storage failed at the start."""
        try:
            for parameter in taken:
                parameter.data = self.tiers.read(self.slices[id(parameter)], master=True)
                set_aside(parameter, _kept_dtype(parameter, self.options))
        finally:
            self.tiers.close()

    # Planning --------------------------------------------------------------------------------------------------------

    def _place(self, layouts: Sequence[Layout], plan: Plan) -> Placement:
        expert, clip = self.options.expert, self.optimizer.max_grad_norm is not None
        if clip and expert.alpha not in (None, 1.0):
            raise OptionError(
                f"expert.alpha is {expert.alpha}, but with max_grad_norm all updates wait for the norm of all "
                "gradients, so alpha is 1: leave one of the two out"
            )
        alpha = expert.alpha if expert.alpha is not None else float(clip)
        given = {name: ratio for name, ratio in vars_of(expert.ratios).items() if ratio is not None}
        shape = self.shape(layouts[0], training=True)

        def make(ratios: Mapping[str, float], alpha: float = alpha) -> Placement:
            return place(
                self.sizes,
                ratios,
                alpha=alpha,
                clip=clip,
                separate=self.separate,
                num_layers=layouts[0].split.num_layers,
                x_nbytes=tuple(_x_nbytes(layout) for layout in layouts),
                side_nbytes=tuple(sum(spec.nbytes for spec in layout.split.sides) for layout in layouts),
            )

        def lowered(placement: Placement) -> Program:
            return self._lower(placement, shape, late=placement.has_late)[-1]

        try:
            return self._within_device(fit(make, lowered, given, self.host_nbytes), lowered)
        except MemoryBudgetError as error:
            least = {name: given.get(name, 0.0) for name in ("parameter", "checkpoint", "optimizer")}
            most = most_alpha(lambda a: peak(lowered(make(least, a)), "host") + (1 << 20) <= self.host_nbytes)
            if alpha and most is not None:
                raise MemoryBudgetError(
                    f"{error}. Late gradients need the memory that obsolete parameters and checkpoints leave: the "
                    f"largest alpha possible here is {most:.2f}, not {alpha:g}"
                    + (" (max_grad_norm needs alpha 1)" if clip else "")
                ) from None
            raise

    def _within_device(self, placement: Placement, lowered: Any) -> Placement:
        if self.options.device_memory is not None:
            whole = usable_memory() if self.device.type == "cpu" else torch.cuda.mem_get_info(self.device)[1]
            budget = parse_bytes(self.options.device_memory, whole=whole, name="device_memory")
            needed = peak(lowered(placement), "device")
            if needed > budget:
                raise MemoryBudgetError(
                    f"device_memory is {format_bytes(budget)}; this step keeps {format_bytes(needed)} there, and what "
                    "a layer computes with comes on top: give it more, or a smaller micro_batch_size"
                )
        return placement

    def shape(self, layout: Layout, *, training: bool) -> StepShape:
        """The layout's shape with tied parameters apart."""
        trained = {size.unit for size in self.sizes if size.trained}
        tied = frozenset(
            graph.unit
            for graph in layout.split.units
            if any(s.kind == "input" and self.owners.get(s.index) == TIED for s in graph.sources)
        )
        units: set[Unit] = {graph.unit for graph in layout.split.units}
        differentiable = trained | (tied if TIED in trained else frozenset())
        first = min(differentiable & units, key=height)
        sides = any(spec.requires_grad for spec in layout.split.sides)
        return replace(
            layout.shape,
            training=training,
            tied=tied,
            frozen=frozenset((units | {TIED}) - trained),
            first_grad=first,
            side_gradient=sides and first == PROLOGUE,
        )

    def _lower(self, placement: Placement, shape: StepShape, *, late: bool) -> tuple[Program, ...]:
        key = (placement, shape, late)
        if key not in self._programs:
            programs = lower(
                placement.num_layers,
                len(placement.x_nbytes),
                shape=shape,
                snake=self.options.expert.snake,
                placement=placement,
                late=late,
            )
            self._programs[key] = tuple(programs)
        return self._programs[key]

    # Steps -----------------------------------------------------------------------------------------------------------

    def begin(
        self,
        layouts: Sequence[Layout],
        args: Sequence[Any],
        units: Any,
        inputs: dict[Value, Any],
        *,
        training: bool,
        apart: bool,
    ) -> TieredExecutor:
        """The executor of one call, its program chosen; raises `StepOrderError` where a step is still to be closed."""
        self._refuse_unfinished()
        if training:
            self.abandon()  # its loss was never differentiated
        if not training:
            self.flush()
        shape = self.shape(layouts[0], training=training)
        if apart and training:
            shape = replace(shape, outside=frozenset({"h"}))
        placement = self._sized(layouts)
        late = training and self.tiers.pending is not None and placement.has_late
        self.programs = self._lower(placement, shape, late=late)
        executor = TieredExecutor(
            self.tiers, placement, self.programs[-1], units, inputs, self._bindings(layouts[0], args)
        )
        if training:
            self.open = executor
        return executor

    def forwarded(self, executor: TieredExecutor) -> None:
        """The forward half is issued, and all late updates with it."""
        if executor is self.open:
            self.tiers.pending = None

    def backward(self, executor: TieredExecutor, losses: Sequence[torch.Tensor]) -> StepRecord:
        """What the backward half needs of the optimizer, as it is set now."""
        if executor is not self.open:
            raise StepOrderError(
                "this loss belongs to a step that was given up when the model was called again: call backward before "
                "the next forward (greedysnake holds the checkpoints of one step)"
            )
        record = StepRecord(self.optimizer.num_steps + 1, self.optimizer.settings(), self.optimizer.max_grad_norm)
        record.skipped = not all(bool(torch.isfinite(loss).all()) for loss in losses)
        executor.record = self.record = record
        return record

    def abandon(self) -> None:
        """Let go of a step whose backward has not begun; its loss cannot be differentiated any more."""
        if self.open is not None and self.record is None:
            self.open.close()
            self.open = None

    def finish(self) -> StepRecord | None:
        """Close the step whose backward has run; late updates may follow. None: there was no backward."""
        self.tiers.failure.check()
        record, self.record = self.record, None
        if record is not None and self.placement.has_late:
            self.tiers.pending = record
        return record

    def flush(self) -> None:
        """Bring all updates to an end, as evaluation and reading need it."""
        self._refuse_unfinished()
        if self.tiers.pending is not None:
            key = "flush"
            if key not in self._programs:
                self._programs[key] = tuple(flush(self.placement.num_layers, self.placement))
            program = self._programs[key][-1]
            nothing = Bindings({unit.unit: () for unit in self.placement.units}, {})
            executor = TieredExecutor(self.tiers, self.placement, program, None, {}, nothing)  # type: ignore[arg-type]
            executor.backward()
            self.tiers.pending = None

    def synchronize(self) -> None:
        """All updates done and written."""
        self.flush()
        self.tiers.synchronize()

    def describe(self, program: Program) -> str:
        """For people: each class of data by tier, and the planned peaks of a program."""
        placement = self.placement
        bytes_of: dict[tuple[str, str], int] = {}
        for unit in placement.units:
            for kind, parts, itemsize in (
                ("parameters", unit.w, unit.itemsize),
                ("states", unit.s, unit.state_itemsize),
            ):
                for part in parts.values():
                    key = (kind, part.tier)
                    bytes_of[key] = bytes_of.get(key, 0) + part.numel * itemsize
        checkpoints = sum(placement.x_nbytes) * placement.num_layers
        bytes_of["checkpoints", "host"] = int(checkpoints * placement.checkpoint_ratio)
        bytes_of["checkpoints", "ssd"] = checkpoints - bytes_of["checkpoints", "host"]
        late, all_ = (sum(g.numel for u in placement.units for g in u.trained(*when)) for when in (("late",), ()))
        lines = [
            f"{kind + ':':<12} {format_bytes(bytes_of.get((kind, 'host'), 0))} on host, "
            f"{format_bytes(bytes_of.get((kind, 'ssd'), 0))} on SSD"
            for kind in ("parameters", "states", "checkpoints")
        ]
        lines.append(f"updates:     {late / max(all_, 1):.0%} late, in the next forward")
        peaks = ", ".join(f"{tier} {format_bytes(nbytes)}" for tier, nbytes in program.peaks)
        return "\n".join([*lines, f"peaks:       {peaks}; host budget {format_bytes(self.host_nbytes)}"])

    def _refuse_unfinished(self) -> None:
        self.tiers.failure.check()
        if self.record is not None:
            raise StepOrderError(
                "a backward has run and optimizer.step() has not: some parameters are updated and some are not. Call "
                "optimizer.step() first (greedysnake makes one step of each backward; give the model the whole batch "
                "instead of accumulating)"
            )

    def _sized(self, layouts: Sequence[Layout]) -> Placement:
        """The homes as they are, for a step of this size; raises `MemoryBudgetError` if it does not fit."""
        x_nbytes = tuple(_x_nbytes(layout) for layout in layouts)
        side_nbytes = tuple(sum(spec.nbytes for spec in layout.split.sides) for layout in layouts)
        if (x_nbytes, side_nbytes) == (self.placement.x_nbytes, self.placement.side_nbytes):
            return self.placement
        key = (x_nbytes, side_nbytes)
        if key not in self._placements:
            sized = replace(self.placement, x_nbytes=x_nbytes, side_nbytes=side_nbytes)
            shape = self.shape(layouts[0], training=True)
            needed = peak(self._lower(sized, shape, late=sized.has_late)[-1], "host")
            if needed > self.host_nbytes and self.tiers.setting.store is not None:
                sized = replace(sized, checkpoint_ratio=0.0)
                needed = peak(self._lower(sized, shape, late=sized.has_late)[-1], "host")
            if needed > self.host_nbytes:
                raise MemoryBudgetError(
                    f"host_memory is {format_bytes(self.host_nbytes)}; a batch of this size needs "
                    f"{format_bytes(needed)} beside what the first batch has settled: begin with the largest batch"
                )
            self._placements[key] = sized
        return self._placements[key]

    def _bindings(self, layout: Layout, args: Sequence[Any]) -> Bindings:
        parameters: dict[Unit, list[Binding]] = {unit.unit: [] for unit in self.placement.units}
        for index, unit in self.owners_in(layout, args).items():
            found = self.slices[id(args[index])]
            parameters[unit].append(Binding(index, found.offset, found.shape, bool(args[index].requires_grad)))
        return Bindings(parameters, self._others(layout, args))

    def owners_in(self, layout: Layout, args: Sequence[Any]) -> dict[int, Unit]:
        """The unit of each parameter that a capture reads; raises `OptimizerError` for one that is not on the tiers."""
        owners: dict[int, Unit] = {}
        for graph in layout.split.units:
            for source in graph.sources:
                if source.kind == "input" and isinstance(args[source.index], torch.nn.Parameter):
                    place_ = self.slices.get(id(args[source.index]))
                    if place_ is None or place_.unit not in (graph.unit, TIED):
                        raise OptimizerError(
                            f"this call reads a parameter of shape {tuple(args[source.index].shape)} in unit "
                            f"{graph.unit} that the first call did not: call the model the same way in every step"
                        )
                    owners[source.index] = place_.unit
        return owners

    def _others(self, layout: Layout, args: Sequence[Any]) -> dict[Unit, dict[int, torch.Tensor]]:
        """What units read beside parameters and the batch: buffers, constants."""
        return {
            graph.unit: {
                s.index: args[s.index]
                for s in graph.sources
                if s.kind == "input" and not isinstance(args[s.index], torch.nn.Parameter)
            }
            for graph in layout.split.units
        }


def claim(parameters: Sequence[Any], *, options: Options) -> bool:
    """Set parameters of gs_compile optimizers aside before they are captured: what is captured are placeholders.

    So the model is captured once, not once more when its parameters have left. Returns whether there were any.
    """
    claimed = False
    if any(not is_released(parameter) and keeper_of(parameter) is not None for parameter in parameters):
        return False  # their call will be refused
    if any(optimizer_of(parameter) is not None for parameter in parameters):
        for parameter in parameters:
            dtype = _kept_dtype(parameter, options)
            if not is_released(parameter) or parameter.dtype != dtype:
                set_aside(parameter, dtype)
                claimed = True
    elif options.precision == "bf16":
        raise OptionError(
            'precision="bf16" keeps fp32 masters, so it needs an optimizer of gs_compile, made before the call'
        )
    return claimed


def engine_for(plan: Plan, layouts: Sequence[Layout], args: Sequence[Any]) -> Engine | None:
    """The engine of the parameters that a call reads, made at the first call; None where they are the user's."""
    parameters = [arg for arg in args if isinstance(arg, torch.nn.Parameter)]
    found = {id(o): o for p in parameters if (o := optimizer_of(p)) is not None}
    _refuse_in_memory(parameters)
    if not any(is_released(parameter) for parameter in parameters):
        return None
    if len(found) != 1:
        raise OptimizerError(
            f"the parameters of this model belong to {len(found)} gs_compile optimizers; they need one: make it before "
            "the first call, with all parameters that are trained"
        )
    optimizer = next(iter(found.values()))
    if optimizer.engine is None:
        optimizer.engine = Engine(optimizer, plan, layouts, args)
        optimizer.load_into(optimizer.engine)
    return optimizer.engine


def _refuse_in_memory(parameters: Sequence[torch.nn.Parameter]) -> None:
    """Parameters that are on the tiers must not have other values beside."""
    if any(is_materialized(parameter) for parameter in parameters):
        raise StepOrderError(
            "inside gs_compile.materialize() the compiled model does not run: leave the block, or call the module that "
            "was materialized under torch.no_grad()"
        )
    for parameter in parameters:
        if not is_released(parameter) and keeper_of(parameter) is not None:
            raise OptimizerError(
                f"a parameter of shape {tuple(parameter.shape)} lives on the tiers, but was given other values (.data, "
                "or .to() another dtype or device): change it in `with gs_compile.materialize(model, write=True):`"
            )


def owners_of(layout: Layout, plan: Plan) -> dict[int, Unit]:
    """The unit of each parameter, by input index: "t" for those that several units read."""
    owners: dict[int, Unit] = {}
    for graph in layout.split.units:
        for source in graph.sources:
            if source.kind == "input" and plan.captured.inputs[source.index].role == "parameter":
                known = owners.setdefault(source.index, graph.unit)
                if known != graph.unit:
                    owners[source.index] = TIED
    return owners


def _x_nbytes(layout: Layout) -> int:
    """The bytes of one checkpoint: the largest of the layers' inputs."""
    specs: list[TensorSpec] = [
        spec
        for graph in layout.split.units
        for kind, spec in zip(graph.results, graph.result_specs, strict=True)
        if kind == "x"
    ]
    return max(spec.nbytes for spec in specs)


def _kept_dtype(parameter: torch.Tensor, options: Options) -> torch.dtype:
    narrow = options.precision == "bf16" and parameter.dtype.is_floating_point
    return torch.bfloat16 if narrow else parameter.dtype


def _padded(numel: int) -> int:
    return -(-numel // QUANTUM) * QUANTUM


def vars_of(ratios: Any) -> dict[str, float | None]:
    """The ratios by class."""
    return {name: getattr(ratios, name, None) for name in ("checkpoint", "parameter", "optimizer")}
