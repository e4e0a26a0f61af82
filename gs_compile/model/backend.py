"""The backend: ``torch.compile(model, backend="greedysnake", options={"micro_batch_size": 2})``.

A model that an optimizer of this package trains goes to the tiers when it is first called: while Dynamo captures it,
its parameters become placeholders; when the capture runs, their engine is made.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import fx

from gs_compile.capture.ahead import Ahead, cut_ahead
from gs_compile.capture.dynamo import (
    SkipFrame,
    capture,
    complete_guards,
    forget_code,
    guard_model,
)
from gs_compile.capture.frame_settings import undo_if_it_fails
from gs_compile.capture.given_up import watch
from gs_compile.capture.graph_breaks import refuse, refuse_block, tell_of_wide, tell_of_wide_in_frame
from gs_compile.capture.hooks import is_in_hook
from gs_compile.capture.inductor import check_mode
from gs_compile.capture.internals import without_overrides, without_packing
from gs_compile.capture.tail import Tail
from gs_compile.codegen.compiled import Compilation, SpecializedModel, compilations_of, is_float_scalar
from gs_compile.codegen.layout import kept_dtype
from gs_compile.errors import (
    OPTIMIZERS,
    CaptureError,
    GraphBreakError,
    GreedySnakeError,
    MixedDeviceError,
    NothingRequiresGradError,
    OptimizerError,
    OptionError,
    SeparationError,
    StepOrderError,
    UncapturedWarning,
)
from gs_compile.model.as_written import run_as_written, run_until_it_raises
from gs_compile.model.call import Call, whole_batch
from gs_compile.model.engine import Engine
from gs_compile.model.first_step import FirstStep
from gs_compile.model.freezing import is_passed_on, train_others, trains_others
from gs_compile.model.materialize import stores_of
from gs_compile.model.meeting import meet, refuse_empty, refuse_uneven, turn
from gs_compile.model.micro_batches import cut_batch, sizes_of
from gs_compile.model.residency import for_evaluation, is_offloaded, residency_of, roll_back, stash
from gs_compile.model.settings import check_kind
from gs_compile.model.tiered_call import TieredCall
from gs_compile.model.tiered_optimizer import optimizers_of
from gs_compile.options import Options
from gs_compile.planner.measure.shipped import load
from gs_compile.runtime.random_state import random_state, set_random_state
from gs_compile.runtime.ranks import Ranks, failing_together
from gs_compile.runtime.stream import deterministic
from gs_compile.runtime.units import CompiledUnits, WholeBatch

log = logging.getLogger(__name__)

OF_A_CALL = ("micro_batch_size", "outputs", "deterministic", "mode")  # options that may differ between captures

OF_ONE_RANK = (
    "One rank alone computes this behind the model, of all samples of its batch at once; several ranks do not: return "
    "what it is made of, and compute it outside of the model"
)

watch()


def greedysnake(
    module: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | Options | None = None,
) -> Callable[..., Any]:
    """Compile a model's graph, which Dynamo hands over; returns what runs in its place.

    An error of this package is raised at the model's call: if it were raised here, Dynamo would wrap it.
    """
    if is_in_hook():
        raise SkipFrame("a hook runs as it is written")
    watch().forget()
    checked = Options.of({"storage": "/"})  # for a refused graph: it stores nothing, and the default may fail
    try:
        checked = check(mode=mode, options=options)
        captured, ahead = cut_ahead(capture(module, example_inputs, partial(_detach, options=checked)))
    except GreedySnakeError as error:
        complete_guards()
        return _Run(module, checked, refusal=(type(error), error.message)).run
    return _Run(module, checked, Compilation(captured, checked), ahead).run


@dataclass(eq=False, repr=False)
class _Run:
    """What runs in place of a captured graph. compilation: None if the graph is refused.

    ahead: the code that runs before the model, on all samples at once. refusal: the error of each call of a refused
    graph, by class and message: its traceback would hold the model.
    """

    module: fx.GraphModule
    options: Options
    compilation: Compilation | None = None
    ahead: Ahead | None = None
    refusal: tuple[type[GreedySnakeError], str] = (GreedySnakeError, "")
    is_new: bool = field(default=True, init=False)  # until a call has succeeded
    is_as_written: bool = field(default=False, init=False)  # an evaluation that cannot be cut into layers
    tail: Tail | None = field(default=None, init=False)  # the code that runs after the model, on all samples at once

    def run(self, *args: Any) -> list[Any]:
        try:
            with (
                turn(args),
                failing_together(ranks := self._met(args)),
                deterministic(self.options.deterministic),
            ):
                results = self._run_together(args, ranks)
        except BaseException as error:
            if self.is_new:  # a start that is refused leaves nothing
                forget_code()
                if type(error) is RuntimeError and self.compilation and self.options.precision == "bf16":
                    inputs = zip(self.compilation.captured.inputs, args, strict=False)
                    tell_of_wide(error, {each.path: arg for each, arg in inputs if each.role != "parameter"})
            raise
        self.is_new = False
        return results

    def _met(self, args: Sequence[Any]) -> Ranks | None:
        try:
            return meet(args, self.options, self.compilation)
        except BaseException:  # also where the user interrupts it: the others may not come
            roll_back(args)
            raise

    def _run_together(self, args: Sequence[Any], ranks: Ranks | None) -> list[Any]:
        if self.is_as_written:
            return run_as_written(self.module, args)
        try:
            given = args if self.ahead is None else self.ahead.run(args)
            with without_packing():
                call = self._begun(given, ranks)
        except BaseException as error:
            if isinstance(error, CaptureError) and not torch.is_grad_enabled():
                _warn_of_reads(error, args)
                self.is_as_written = True
                return run_as_written(self.module, args)
            roll_back(args)
            if not isinstance(error, CaptureError):
                raise
            try:
                refuse(error, watch().why(arg for arg in args if isinstance(arg, torch.nn.Parameter)))
            except GraphBreakError as broken:
                if ranks is not None or not broken.is_of_a_raise:
                    raise
                return run_until_it_raises(self.module, args, GraphBreakError(broken.message))
        with without_packing():
            results = call.run()
        return results if self.tail is None else self.tail.run(results, given)

    def _begun(self, args: Sequence[Any], ranks: Ranks | None) -> Call:
        """The call, before anything has run. If outputs do not separate, their code becomes the model's tail."""
        if self.compilation is None:  # the parameters may be on the tiers already
            kind, message = self.refusal
            raise kind(message)
        try:
            return _begin(self.compilation, args, ranks)
        except SeparationError as error:
            found = self.compilation.without_tail(sizes_of(self.compilation, args)) if self.tail is None else None
            if found is None:
                raise
            if ranks is not None:
                raise SeparationError(f"{error.message}. {OF_ONE_RANK}") from error
        self.compilation, self.tail = found
        return self._begun(args, ranks)


def check(*, mode: str | None = None, options: Mapping[str, Any] | Options | None = None) -> Options:
    """Check the options of the backend as far as possible before a model is traced. Raises OptionError, and
    ProfileError for an invalid machine.
    """
    found = Options.of(options, mode)
    if found.machine is not None:
        load(found.machine)
    check_mode(found.mode)
    return found


greedysnake.check = check  # type: ignore[attr-defined]  # found where Dynamo has the function alone


def _warn_of_reads(error: CaptureError, args: Sequence[Any]) -> None:
    """Warn once for each reason: generation is captured twice, with a cache and without."""
    read = [residency_of(arg) for arg in args if is_offloaded(arg)]
    if all(each.warned_of == error.message for each in read):
        return
    for each in read:
        each.warned_of = error.message
    warnings.warn(
        f"this evaluation runs as plain PyTorch does, and reads parameters as gs_compile.streaming does: "
        f"{error.message}",
        UncapturedWarning,
        stacklevel=2,
    )


def _begin(compilation: Compilation, args: Sequence[Any], ranks: Ranks | None) -> Call:
    """The call of a captured model, before anything has run; `args` are the arguments of the captured graph."""
    models, parts = cut_batch(compilation, args)
    refuse_empty(ranks, sum(model.micro_batch_size for model in models))
    with without_overrides():
        training = torch.is_grad_enabled() and any(isinstance(a, torch.Tensor) and a.requires_grad for a in args)
    if torch.is_grad_enabled() and not training:
        _refuse_a_loss(models[0])
    for model in dict.fromkeys(models) if training else ():
        model.trace_step()
    random = random_state() if compilation.options.durability else None
    whole = whole_batch(compilation, models, args)
    units = CompiledUnits(parts, _seed(models, whole), whole)
    call = Call(compilation, models, args, units, training, ranks)
    if (engine := _engine_for(call)) is not None:
        call = _on_tiers(call, engine, random)
    elif any(isinstance(arg, torch.nn.Parameter) and arg.requires_grad for arg in args) and training:
        _tell_of_memory(compilation)
    if units.seed is not None and ranks is not None:
        units.seed ^= ranks.place << 48  # each rank draws its own
    _register(compilation, args)
    return call


def _on_tiers(call: Call, engine: Engine, random: Mapping[str, str] | None) -> TieredCall:
    """The call of a model whose parameters an engine has. random: the random state at its beginning."""
    models, ranks = call.models, call.ranks
    if call.training:
        with nullcontext() if engine.durable is None else engine.durable.within(random):
            engine = engine.first_step.engine_for_training(engine, call)
    _refuse_other_layers(engine, models[0], training=call.training)
    if not call.training:
        call.args = [for_evaluation(arg) if isinstance(arg, torch.nn.Parameter) else arg for arg in call.args]
    elif trains_others(engine, call.args):
        engine = train_others(engine, call)
    if engine.durable is not None and random is not None:
        if (before := engine.durable.take_random_state(random)) is not None:
            set_random_state(random := dict(before))
            call.units.seed = _seed(models, call.units.whole)
        engine.durable.note_buffers(call.compilation.captured, call.compilation.buffers(call.args))
    if ranks is not None:
        refuse_uneven(ranks, call.compilation.options.expert.schedule, models)
    return TieredCall(call.compilation, models, call.args, call.units, call.training, ranks, engine, random)


def _tell_of_memory(compilation: Compilation) -> None:
    """A run without an optimizer of this package has everything in memory: log the given options without effect.

    Raises OptionError if durable steps were asked for.
    """
    options = compilation.options
    if options.durability:
        raise OptionError(
            f"durability needs an optimizer of {OPTIMIZERS} that was made before the call: "
            "with others all stays in memory, so save state dicts, and leave durability out"
        )
    is_asked = options.host_memory is not None or options.as_given["storage"] is not None
    if is_asked and compilation.latest is None:
        log.warning(
            "all parameters, gradients and states stay in memory, and storage and host_memory have no effect: the "
            "model has no optimizer of gs_compile. Make one before its first call, such as gs_compile.AdamW"
        )


def _seed(models: Sequence[SpecializedModel], whole: WholeBatch | None) -> int | None:
    """The seed of a call's random numbers; None if it draws none."""
    draws = any(model.draws_random for model in models) or (whole is not None and whole.code.draws_random)
    return int(torch.randint(2**62, (), device="cpu")) if draws else None


def _register(compilation: Compilation, args: Sequence[Any]) -> None:
    """Register the compilation for the model that is called: Dynamo uses one capture for several equal models."""
    for entry, arg in zip(compilation.captured.inputs, args, strict=True):
        if entry.role == "parameter":
            known = compilations_of.setdefault(arg, [])
            if any(each is compilation for each in known):
                return
            known.append(compilation)


def _refuse_a_loss(model: SpecializedModel) -> None:
    if any(output.spec is not None and is_float_scalar(output.spec) for output in model.split.made):
        raise NothingRequiresGradError(
            "the model computes a loss, but no parameter requires a gradient: unfreeze what is to be trained "
            "(requires_grad_()), or evaluate under torch.no_grad()"
        )


# The first call -------------------------------------------------------------------------------------------------------


def _detach(parameters: Sequence[Any], *, options: Options) -> bool:
    """Stash the parameters that go to the tiers before they are captured, so that Dynamo guards their placeholders.

    So the model is captured once, and not again after its parameters have moved. Parameters that an evaluation reads in
    addition to those of a run, such as another adapter's, stay in memory. If the capture fails or is interrupted, all
    are restored. Returns whether any has another dtype on the tiers, with which it has to be captured.
    """
    if any(residency_of(parameter).is_materialized for parameter in parameters):
        return False  # their call will be refused
    _refuse_other_options(parameters, options)
    if not torch.is_grad_enabled() and any(residency_of(parameter).tiered for parameter in parameters):
        parameters = [parameter for parameter in parameters if is_offloaded(parameter)]
    tiered = options.precision == "bf16" or any(is_offloaded(parameter) for parameter in parameters)
    if not tiered and next(optimizers_of(parameters), None) is None:
        return False
    for parameter in parameters:
        check_kind(parameter)
    dtypes = {parameter: kept_dtype(parameter, options) for parameter in parameters}
    changed = [parameter for parameter, dtype in dtypes.items() if parameter.dtype != dtype]
    leaving = [parameter for parameter in parameters if not is_offloaded(parameter)]
    undo_if_it_fails(partial(roll_back, [*leaving, *changed]))
    if changed:
        undo_if_it_fails(tell_of_wide_in_frame)
    for parameter in dict.fromkeys([*leaving, *changed]):
        stash(parameter, dtypes[parameter])
    guard_model(parameters)
    return bool(changed)


def _refuse_other_options(parameters: Sequence[Any], options: Options) -> None:
    """Raise `OptionError` if a run is captured with other options than at its first call: they would have no effect.

    If a new optimizer was made since then, the run is planned again. A call that also reads parameters that are not on
    the tiers is that of another model.
    """
    if not all(residency_of(parameter).tiered for parameter in parameters):
        return
    for engine in stores_of(parameters):
        assert isinstance(engine, Engine)
        settled, now = engine.options.by_name, options.by_name
        is_planned_anew = is_passed_on(engine, parameters)
        for name in ("precision",) if is_planned_anew or not torch.is_grad_enabled() else settled:
            if settled[name] != now[name] and name not in OF_A_CALL:
                raise OptionError(
                    f"{name} is {now[name]!r} in this call, and was {settled[name]!r} in the first call of the run, "
                    "which has settled it: compile the model with the options of that call, or build model and "
                    "optimizer anew, and load their state dicts"
                )


def _engine_for(call: Call) -> Engine | None:
    """The engine of the parameters that a call reads, made at the first call; None if they stay in memory."""
    parameters = [arg for arg in call.args if isinstance(arg, torch.nn.Parameter)]
    _refuse_materialized(parameters)
    if not any(map(is_offloaded, parameters)):
        if not call.training or next(optimizers_of(parameters), None) is None:
            return None
        for parameter in parameters:  # the optimizer was made after a first call without it
            stash(parameter)
    refuse_block(each() for each in call.compilation.captured.models.values())
    engines, optimizers = set(stores_of(parameters)), set(optimizers_of(parameters))
    if len(engines) == 1 and len(optimizers) < 2:
        (engine,) = engines
        assert isinstance(engine, Engine)
        _refuse_moved(engine, parameters)
        return engine
    if not optimizers and call.compilation.options.precision == "bf16":
        raise OptionError(
            'precision="bf16" keeps fp32 masters, so it needs an optimizer of gs_compile that was made before the call'
        )
    if len(optimizers) != 1:
        raise OptimizerError(
            f"the parameters of this model belong to {len(optimizers)} gs_compile optimizers; they need one: make it "
            "before the first call, with all parameters that are trained. Of a model that is only read, such as a "
            "teacher, it is gs_compile.SGD(model.parameters(), lr=0.0)"
        )
    (optimizer,) = optimizers
    if optimizer.engine is None or optimizer.engine.failed_at_start:
        return FirstStep().begin(optimizer, call)
    if not engines and not optimizer.engine.closed:
        raise OptimizerError(
            "the gs_compile optimizer of this model trains another compiled model, which was called earlier: make an "
            "optimizer for each of them, or compile one module whose forward calls both"
        )
    return optimizer.engine


def _refuse_moved(engine: Engine, parameters: Sequence[torch.nn.Parameter]) -> None:
    """Raise if the model was moved to another device since its engine was made."""
    home, now = engine.tiers.setting.device.device, parameters[0].device
    if now != home:
        raise MixedDeviceError(
            f"the model was moved to {now} after its first call, and trains on {home}: move it back, and its batches, "
            "or evaluate it under torch.no_grad()"
        )


def _refuse_other_layers(engine: Engine, model: SpecializedModel, *, training: bool) -> None:
    """Raise if a call has another number of layers than the first one, for which the engine has a plan."""
    found, planned = model.split.num_layers, engine.placement.layout.num_layers
    if found == planned:
        return
    words = f"this call runs {found} layers, and the first call of the run {planned}"
    if training:
        raise OptimizerError(
            f"{words}, and only these are planned: run all of them in each step, and multiply the output of a layer to "
            "leave out by 0; call a teacher on the tiers, which another model's hook calls, before it; or use a "
            "torch.optim optimizer, which leaves parameters in memory. A hook that makes a layer another one has to be "
            "there from the first call on, or in calls under torch.no_grad() alone. Nothing was updated"
        )
    raise CaptureError(words)


def _refuse_materialized(parameters: Sequence[torch.nn.Parameter]) -> None:
    """Raise if parameters on the tiers are materialized: they would have two values."""
    if any(residency_of(parameter).is_materialized for parameter in parameters):
        raise StepOrderError(
            "inside gs_compile.materialize() the compiled model does not run: leave the block, or call the module that "
            "was materialized under torch.no_grad()"
        )
