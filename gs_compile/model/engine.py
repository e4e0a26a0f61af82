"""engine: a model whose parameters and optimizer states live on the tiers, from the first call of its backend on.

take over    parameters leave the module, unit by unit, for their homes; placeholders stay
begin        one call of the model: a program with its transfers, on an executor
backward     the rest of the program, with the optimizer's settings of now
finish       optimizer.step(): late updates may run in the next forward
flush        all updates brought to an end: before evaluation, saving, reading
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from gs_compile.codegen.parameters import kept_dtype
from gs_compile.errors import OptimizerError, OptionError, StepOrderError, StorageLockedError
from gs_compile.model.keeper import Keeper
from gs_compile.model.layout import Members
from gs_compile.model.materialized import is_materialized, keep, keeper_of, watch_callers
from gs_compile.model.optim import TieredOptimizer, optimizer_of
from gs_compile.model.placeholders import is_released, release
from gs_compile.model.storage_init import contents_of, discard, set_aside
from gs_compile.options import Options
from gs_compile.placement.placement import Placement
from gs_compile.planner.prediction import Prediction
from gs_compile.planner.programs import Planning
from gs_compile.program.ir import EPILOGUE, TIED, Program, Unit, Value
from gs_compile.runtime.arena import Arena
from gs_compile.runtime.handlers import Bindings
from gs_compile.runtime.issue import TieredExecutor
from gs_compile.runtime.memory import memory_for
from gs_compile.runtime.optimizer import Recipe, StepRecord
from gs_compile.runtime.store import Store
from gs_compile.runtime.stream import device_of
from gs_compile.runtime.threads import correct_thread_count
from gs_compile.runtime.tiers import Tiers
from gs_compile.runtime.trace import Trace

if TYPE_CHECKING:
    from gs_compile.codegen.compiled import Compilation, SpecializedModel


class Engine(Keeper):
    """One model's parameters, and the optimizer that updates them."""

    def __init__(
        self,
        optimizer: TieredOptimizer,
        compilation: Compilation,
        layouts: Sequence[SpecializedModel],
        args: Sequence[Any],
    ) -> None:
        self.optimizer = optimizer
        self.components = optimizer.components
        self.options: Options = compilation.options
        self.open: TieredExecutor | None = None  # a training step between its forward and the end of its backward
        self.record: StepRecord | None = None  # of a backward that optimizer.step() has not closed yet
        self.programs: tuple[Program, ...] = ()  # of the latest call
        self.members = Members(optimizer, compilation, layouts[0], args)
        self.slices = self.members.slices
        self.planning = Planning(
            self.options,
            self.members.sizes(len(self.components)),
            layouts,
            self._tied(layouts[0], args),
            clip=optimizer.max_grad_norm is not None,
            device=self.members.parameters[0].device,
        )
        self._latest = self.planning.placement, self.planning.choice.shape  # of the latest call
        self.tiers = self._make_tiers()
        self._take_over()
        keep(self.members.parameters, self)
        watch_callers(self.members.parameters)

    @property
    def placement(self) -> Placement:
        return self.planning.placement

    def describe(self) -> str:
        """For people: where everything lives, and the planned peaks of the latest call's program."""
        return self.planning.describe(self.programs[-1])

    def predict(self) -> Prediction:
        """What steps like the latest call take, by the simulator; measures the machine and the layers' code first."""
        return self.planning.predict(*self._latest)

    # Taking over -----------------------------------------------------------------------------------------------------

    def _make_tiers(self) -> Tiers:
        planning, expert = self.planning, self.options.expert
        device = self.members.parameters[0].device
        store = self._open_store() if planning.uses_ssd else None
        if store is not None:
            try:
                store.reserve_check(planning.ssd_nbytes)
            except BaseException:
                store.close()
                raise
        components = {size.unit: len(self.components) + size.has_master for size in planning.sizes}
        return Tiers(
            planning.placement,
            self.members.dtypes,
            Recipe(self.optimizer.rule, self.members.runs, components),
            Arena(planning.host_nbytes, memory=memory_for(device_of(device))),
            store,
            device,
            trace=Trace(events=expert.trace),
            num_threads=expert.threads or max(1, correct_thread_count() // 2),
        )

    def _open_store(self) -> Store:
        """The storage, once the garbage of models before this one has let go of it."""
        try:
            return Store(self.options.storage)
        except StorageLockedError:
            gc.collect()
            return Store(self.options.storage)

    def _take_over(self) -> None:
        """Move values home, and leave placeholders. What fails midway gives back what it has moved."""
        taken: list[torch.nn.Parameter] = []
        try:
            for parameter in self.members.parameters:
                values = contents_of(parameter) if is_released(parameter) else parameter.data
                self.tiers.fill(self.slices[id(parameter)], values)
                discard(parameter)
                release(parameter, kept_dtype(parameter, self.options))
                taken.append(parameter)
        except BaseException:
            self._hand_back(taken)
            raise

    def _hand_back(self, taken: Sequence[torch.nn.Parameter]) -> None:
        """Set values aside again and end the tiers: no model is lost because its storage failed at the start."""
        try:
            for parameter in taken:
                parameter.data = self.tiers.read(self.slices[id(parameter)], master=True)
                set_aside(parameter, kept_dtype(parameter, self.options))
        finally:
            self.tiers.close()

    def _tied(self, layout: SpecializedModel, args: Sequence[Any]) -> set[Unit]:
        """The units that read parameters of "t"."""
        tied = {index for index, unit in self.members.owners(layout, args).items() if unit == TIED}
        return {g.unit for g in layout.split.units if any(s.kind == "input" and s.index in tied for s in g.sources)}

    # Steps -----------------------------------------------------------------------------------------------------------

    def begin(
        self,
        layouts: Sequence[SpecializedModel],
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
            self.members.check(args)
            self.abandon()  # its loss was never differentiated
        else:
            self.flush()
        shape = self.planning.shape(layouts[0], self._tied(layouts[0], args), training=training)
        if apart and training:
            shape = replace(shape, outside=frozenset({EPILOGUE}))
        placement = self.planning.sized(layouts, shape)
        self._latest = placement, shape
        pending = self.tiers.pending if training and placement.has_late else None
        redo = pending is not None and placement.rolls_back(confirmed=pending.confirmed)
        self.programs = self.planning.programs(placement, shape, late=pending is not None, redo=redo)
        bindings = self.members.bindings(layouts[0], args)
        executor = TieredExecutor(self.tiers, placement, self.programs[-1], units, inputs, bindings)
        if training:
            self.open = executor
        return executor

    def forwarded(self, executor: TieredExecutor, *, failed: bool = False) -> None:
        """The forward half is issued, and all late updates with it, also where the model's own code has failed."""
        if executor is self.open:
            self.tiers.pending = None
            self.open = None if failed else executor

    def backward(self, executor: TieredExecutor, losses: Sequence[torch.Tensor]) -> StepRecord:
        """What the backward half needs of the optimizer, as it is set now."""
        if executor is not self.open:
            raise StepOrderError(
                "this loss belongs to a step that was given up when the model was called again: call backward before "
                "the next forward (greedysnake holds the checkpoints of one step)"
            )
        record = StepRecord(self.optimizer.num_steps + 1, self.optimizer.settings(), self.optimizer.max_grad_norm)
        record.losses = [self.tiers.setting.device.read(loss.double().sum()) for loss in losses]
        executor.record = self.record = record
        return record

    def abandon(self) -> None:
        """Let go of a step whose backward has not begun; its loss cannot be differentiated any more."""
        if self.open is not None and self.record is None:
            self.open.close()
            self.open = None

    def finish(self) -> StepRecord | None:
        """Close the step whose backward has run; late updates may follow. None: there was no backward."""
        self.tiers.check()
        record, self.record = self.record, None
        if record is not None and self.placement.has_late:
            self.tiers.leave(record)
        return record

    def flush(self) -> None:
        """Bring all updates to an end, as evaluation and reading need it."""
        self._refuse_unfinished()
        pending = self.tiers.pending
        if pending is not None:
            program = self.planning.flush(redo=self.placement.rolls_back(confirmed=pending.confirmed))
            nothing = Bindings({unit.unit: () for unit in self.placement.units}, {})
            executor = TieredExecutor(self.tiers, self.placement, program, None, {}, nothing)  # type: ignore[arg-type]
            executor.backward()
            self.tiers.pending = None

    def synchronize(self) -> None:
        """All updates done and written."""
        self.flush()
        self.tiers.synchronize()

    def _refuse_unfinished(self) -> None:
        self.tiers.check()
        if self.record is not None:
            raise StepOrderError(
                "a backward has run and optimizer.step() has not: some parameters are updated and some are not. Call "
                "optimizer.step() first (greedysnake makes one step of each backward; give the model the whole batch "
                "instead of accumulating)"
            )


def claim(parameters: Sequence[Any], *, options: Options) -> bool:
    """Set parameters of gs_compile optimizers aside before they are captured: what is captured are placeholders.

    So the model is captured once, not once more when its parameters have left. Returns whether there were any.
    """
    claimed = False
    if any(not is_released(parameter) and keeper_of(parameter) is not None for parameter in parameters):
        return False  # their call will be refused
    if any(optimizer_of(parameter) is not None for parameter in parameters):
        for parameter in parameters:
            dtype = kept_dtype(parameter, options)
            if not is_released(parameter) or parameter.dtype != dtype:
                set_aside(parameter, dtype)
                claimed = True
    elif options.precision == "bf16":
        raise OptionError(
            'precision="bf16" keeps fp32 masters, so it needs an optimizer of gs_compile, made before the call'
        )
    return claimed


def engine_for(compilation: Compilation, layouts: Sequence[SpecializedModel], args: Sequence[Any]) -> Engine | None:
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
        with torch.inference_mode(False):  # homes outlive this call
            optimizer.engine = Engine(optimizer, compilation, layouts, args)
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
