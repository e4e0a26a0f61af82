"""engine: a model whose parameters and optimizer states live on the tiers, from the first call of its backend on.

adopt        parameters leave the module, unit by unit; placeholders stay
begin        one call of the model: a program with its transfers, on an executor
backward     the rest of the program, with the optimizer's settings of now
finish       optimizer.step(): late updates may run in the next forward
flush        all updates brought to an end: before evaluation, saving, reading

An engine is held by its parameters and by its optimizer, and holds neither: when they go, it closes the tiers, and its
threads and files end.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from gs_compile.codegen.compiled import Compilation, SpecializedModel
from gs_compile.codegen.parameters import kept_dtype
from gs_compile.errors import OptimizerError, StepOrderError
from gs_compile.model.layout import UnitLayout, arrange, bindings, owners, tied_units
from gs_compile.model.residency import adopt, hand_back, is_offloaded, residency_of, stash
from gs_compile.model.state_dict import StoredValues
from gs_compile.options import Options
from gs_compile.placement.placement import Placement
from gs_compile.planner.cache import PlanCache
from gs_compile.planner.prediction import Prediction
from gs_compile.program.ir import EPILOGUE, Program, Unit, Value
from gs_compile.runtime.handlers import Bindings
from gs_compile.runtime.issue import TieredExecutor
from gs_compile.runtime.kernels import Rule
from gs_compile.runtime.optimizer import Recipe, StepRecord
from gs_compile.runtime.store import Store
from gs_compile.runtime.stream import has_own_memory
from gs_compile.runtime.threads import update_threads
from gs_compile.runtime.tiers import Slice, Tiers
from gs_compile.runtime.trace import Trace

Tensor = torch.Tensor


class Optimizer(Protocol):
    """What an engine asks of its optimizer."""

    rule: Rule
    max_grad_norm: float | None
    num_steps: int

    @property
    def components(self) -> tuple[str, ...]: ...
    @property
    def group_of(self) -> Mapping[Tensor, int]: ...
    def settings(self) -> list[dict[str, Any]]: ...


@dataclass(frozen=True)
class Request:
    """One call of the model."""

    models: Sequence[SpecializedModel]  # of every micro-batch
    args: Sequence[Any]
    units: Any  # the computations
    inputs: dict[Value, Any]
    training: bool
    apart: bool  # the head's backward is apart from its forward


class Engine:
    """One model's parameters, and the updates of them. `gs_compile.model.residency.ParameterStore` for each of them."""

    def __init__(
        self, optimizer: Optimizer, compilation: Compilation, models: Sequence[SpecializedModel], args: Sequence[Any]
    ) -> None:
        gc.collect()  # what earlier models have left: memory that counts against the budget, and locks of storage
        self._optimizer = weakref.ref(optimizer)
        self.components = optimizer.components
        self.options: Options = compilation.options
        self.open: TieredExecutor | None = None  # a training step between its forward and the end of its backward
        self.record: StepRecord | None = None  # of a backward that optimizer.step() has not closed yet
        self.programs: tuple[Program, ...] = ()  # of the latest call
        self.version = 0
        self.accepted_factor = 1.0  # of the loss: no GradScaler's
        arranged = list(arrange(compilation, models[0], args, optimizer.group_of))
        units = [unit for unit, _ in arranged]
        spans = {id(p): span for unit, members in arranged for p, span in zip(members, unit.spans, strict=True)}
        device = arranged[0][1][0].device
        by_index = {index: spans[id(arg)] for index, arg in enumerate(args) if id(arg) in spans}
        self.planning = PlanCache(
            self.options,
            tuple(unit.size(len(self.components)) for unit in units),
            models,
            tied_units(models[0], owners(models[0], args, by_index)),
            clip=optimizer.max_grad_norm is not None,
            device=device,
        )
        self._latest = self.planning.placement, self.planning.first_shape  # of the latest call
        self.tiers = self._make_tiers(units, optimizer.rule, device)
        self.values = StoredValues(self.tiers, self.options.storage[0], self.components)
        self._adopt([(parameter, spans[id(parameter)]) for _, members in arranged for parameter in members])
        weakref.finalize(self, self.tiers.close).atexit = False

    @property
    def placement(self) -> Placement:
        return self.planning.placement

    @property
    def closed(self) -> bool:
        return self.tiers.closed

    def predict(self) -> Prediction:
        """What steps like the latest call take, by the simulator; measures the machine and the layers' code first."""
        return self.planning.predict(*self._latest)

    # Start -----------------------------------------------------------------------------------------------------------

    def _make_tiers(self, units: Sequence[UnitLayout], rule: Rule, device: torch.device) -> Tiers:
        planning, expert = self.planning, self.options.expert
        store = Store(self.options.storage) if planning.uses_ssd else None
        if store is not None:
            try:
                store.reserve_check(planning.ssd_nbytes)
            except BaseException:
                store.close()
                raise
        components = {size.unit: len(self.components) + size.has_master for size in planning.sizes}
        return Tiers(
            planning.placement,
            {unit.unit: unit.dtype for unit in units},
            Recipe(rule, {unit.unit: unit.runs for unit in units}, components),
            store,
            device,
            trace=Trace(events=expert.trace),
            host_nbytes=planning.host_nbytes,
            num_threads=expert.threads or update_threads(beside_compute=not has_own_memory(device)),
        )

    def _adopt(self, members: Sequence[tuple[torch.nn.Parameter, Slice]]) -> None:
        """Move values into the tiers. What fails midway stashes again what it has moved, and ends the tiers."""
        adopted: list[torch.nn.Parameter] = []
        try:
            for parameter, span in members:
                if not is_offloaded(parameter):
                    stash(parameter)
                self.tiers.fill(span, residency_of(parameter).stashed_value(parameter).cpu())
                residency_of(parameter).release(parameter, kept_dtype(parameter, self.options))
                adopt(parameter, self, span)
                adopted.append(parameter)
        except BaseException:
            try:
                for parameter in adopted:
                    hand_back(parameter)
            finally:
                self.tiers.close()
            raise

    # Steps -----------------------------------------------------------------------------------------------------------

    def begin(self, request: Request) -> TieredExecutor:
        """The executor of one call, its program chosen; raises `StepOrderError` where a step is still to be closed."""
        self._refuse_unfinished()
        spans = self._spans(request.args, check=request.training)
        if request.training:
            self.abandon()  # its loss was never differentiated
        else:
            self.flush()
        model = request.models[0]
        tied = tied_units(model, owners(model, request.args, spans))
        shape = self.planning.shape(model, tied, training=request.training)
        if request.apart and request.training:
            shape = replace(shape, outside=frozenset({EPILOGUE}))
        placement = self.planning.sized(request.models, shape)
        self._latest = placement, shape
        pending = self.tiers.pending if request.training and placement.has_late else None
        redo = pending is not None and placement.rolls_back(confirmed=pending.confirmed)
        self.programs = self.planning.programs(placement, shape, late=pending is not None, redo=redo)
        bound = bindings(model, request.args, spans, self._units)
        executor = TieredExecutor(self.tiers, placement, self.programs[-1], request.units, request.inputs, bound)
        if request.training:
            self.open = executor
        return executor

    def forwarded(self, executor: TieredExecutor, *, failed: bool = False) -> None:
        """The forward half is issued, and all late updates with it, also where the model's own code has failed."""
        if executor is self.open:
            self.tiers.pending = None
            self.open = None if failed else executor

    def backward(self, executor: TieredExecutor, losses: Sequence[Tensor]) -> StepRecord:
        """What the backward half needs of the optimizer, as it is set now."""
        if executor is not self.open:
            raise StepOrderError(
                "this loss belongs to a step that was given up when the model was called again: call backward before "
                "the next forward (greedysnake holds the checkpoints of one step)"
            )
        optimizer = self._optimizer()
        if optimizer is None:
            raise OptimizerError("the optimizer of this model is gone, so the model cannot be trained: keep it")
        record = StepRecord(optimizer.num_steps + 1, optimizer.settings(), optimizer.max_grad_norm)
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
        if record is not None:
            self.version += 1
            if self.placement.has_late:
                self.tiers.leave(record)
        return record

    def flush(self) -> None:
        """Bring all updates to an end, as evaluation and reading need it."""
        self._refuse_unfinished()
        pending = self.tiers.pending
        if pending is not None:
            program = self.planning.flush(redo=self.placement.rolls_back(confirmed=pending.confirmed))
            nothing = Bindings(dict.fromkeys(self._units, ()), {})
            executor = TieredExecutor(self.tiers, self.placement, program, None, {}, nothing)
            executor.backward()
            self.tiers.pending = None

    def synchronize(self) -> None:
        """All updates done and written."""
        self.flush()
        self.tiers.synchronize()

    # Values ----------------------------------------------------------------------------------------------------------

    def read(self, span: Slice, *, master: bool = False) -> Tensor:
        """A parameter's value after all updates, or its master's, mapped from a file."""
        self.synchronize()
        return self.values.read(span, master=master)

    def write(self, span: Slice, values: Tensor) -> None:
        """A new value for a parameter; a step whose backward has not begun is given up."""
        self.synchronize()
        self.abandon()
        self.values.write(span, values)
        self.version += 1

    def trained_span(self, parameter: Tensor) -> Slice | None:
        """The span of a parameter that this engine trains; None for others."""
        found = residency_of(parameter)
        return found.span if found.store is self and found.is_trained else None

    @property
    def _units(self) -> list[Unit]:
        return [unit.unit for unit in self.placement.units]

    def _spans(self, args: Sequence[Any], *, check: bool) -> dict[int, Slice]:
        """Of the parameters among the arguments, by index.

        With `check`, raises `OptimizerError` where other gradients are asked for than in the first call.
        """
        spans = {}
        for index, arg in enumerate(args):
            if not isinstance(arg, Tensor):
                continue
            found = residency_of(arg) if isinstance(arg, torch.nn.Parameter) else None
            if found is not None and found.store is self and found.span is not None:
                spans[index] = found.span
                if check and arg.requires_grad != found.is_trained:
                    raise OptimizerError(
                        f"requires_grad of a parameter of shape {tuple(arg.shape)} has changed since the first call: "
                        "what is trained is settled there. Make the model and the optimizer anew (state_dict() has the "
                        "values)"
                    )
            elif check and arg.requires_grad:
                raise OptimizerError(
                    f"an input of shape {tuple(arg.shape)} requires a gradient; with parameters on the tiers only they "
                    "get gradients: detach it, or use a torch.optim optimizer, which leaves parameters in memory"
                )
        return spans

    def _refuse_unfinished(self) -> None:
        self.tiers.check()
        if self.record is not None:
            raise StepOrderError(
                "a backward has run and optimizer.step() has not: some parameters are updated and some are not. Call "
                "optimizer.step() first (greedysnake makes one step of each backward; give the model the whole batch "
                "instead of accumulating)"
            )
