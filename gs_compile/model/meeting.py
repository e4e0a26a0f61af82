"""meeting: ranks that train one model meet at its first call, and continue only if it is the same on all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import chain
from typing import Any

import torch

from gs_compile.capture.internals import without_modes
from gs_compile.codegen.compiled import Compilation, SpecializedModel
from gs_compile.errors import NoBatchInputError, OptimizerError, RankError
from gs_compile.model.call import Call
from gs_compile.model.in_memory import begin_alike, by_name, give_names, is_wrapped, ranks_that_average
from gs_compile.model.offloaded import REPLICATED
from gs_compile.model.optimizer import Optimizer
from gs_compile.model.optimizer_state import has_values
from gs_compile.model.residency import is_offloaded, residency_of
from gs_compile.model.saving import gather_when_saved
from gs_compile.model.settings import OF_PARAMETERS
from gs_compile.model.tiered_optimizer import optimizers_of
from gs_compile.options import Options
from gs_compile.passes.baselines.registry import SCHEDULES
from gs_compile.runtime.ranks import Ranks, ranks_of
from gs_compile.runtime.stream import device_of
from gs_compile.runtime.threads import correct_thread_count
from gs_compile.schedules import BY_MICRO_BATCH, Schedule
from gs_compile.version import __version__

# Options that may differ between ranks
OWN = ("storage", "group", "mesh", "progress", "report", "status")


@contextmanager
def turn(args: Sequence[Any]) -> Iterator[None]:
    """The lock that a call holds for the model whose parameters are among `args`: other threads wait for its end."""
    optimizer = next(optimizers_of(args), None)
    with nullcontext() if optimizer is None else optimizer.turn, without_modes():
        yield


def meet(args: Sequence[Any], options: Options, compilation: Compilation | None) -> Ranks | None:
    """The ranks that train the parameters among `args` together; None if there are no others.

    The first call waits for all of them, so that an error on one ends all. With an optimizer of ours they share the
    parameters, otherwise they average gradients. compilation: None if the model is refused.
    """
    parameters = [arg for arg in args if isinstance(arg, torch.nn.Parameter)]
    if (optimizer := next(optimizers_of(parameters), None)) is not None:
        if optimizer.engine is not None:
            return optimizer.engine.ranks
        if is_wrapped(parameters[0]):
            raise OptimizerError(f"the model is in a DistributedDataParallel, and {REPLICATED}")
        ranks = ranks_of(options)
        if ranks is not None:  # each has a device of its own, and no other is to have anything of it
            device_of(parameters[0].device).enter()
        return ranks
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if not trained or not torch.is_grad_enabled() or any(map(is_offloaded, parameters)):
        return None
    # Without what is made ahead of the model; none: all ranks are to end
    named = zip(compilation.captured.inputs, args, strict=False) if compilation else ()
    read = [(entry.path, arg) for entry, arg in named if entry.role in ("parameter", "buffer")]
    return ranks_that_average(trained[0], read, options)


def agree(ranks: Ranks, call: Call, optimizer: Optimizer) -> None:
    """Raise `RankError` on all ranks if they have different options, models, inputs, optimizers or versions.

    Parameters that stay in memory, outside the model, and buffers get the first rank's values. The number of threads is
    corrected before anything is timed.
    """
    correct_thread_count()
    give_names(optimizer.param_groups)
    facts = chain(_of_options(call.compilation.options), _of_optimizer(optimizer), _of_model(call, optimizer))
    ranks.require_same("the first step", {"torch's version": torch.__version__, **dict(facts)})
    gather_when_saved()
    begin_alike(ranks, [*by_name(optimizer.param_groups), *call.compilation.buffers(call.args).items()])


def refuse_empty(ranks: Ranks | None, num_rows: int) -> None:
    """Raise `NoBatchInputError` if the batch is empty; `RankError` if this is a step of several ranks."""
    if num_rows == 0 and ranks is None:
        raise NoBatchInputError(
            "the batch has no rows, so there is no loss and no gradient: leave it out (DataLoader's drop_last=True, or "
            "a check of len(batch))"
        )
    if num_rows == 0 and ranks is not None:
        raise RankError(
            f"the batch of rank {ranks.name} has no rows, and all ranks take part in each step: give every rank at "
            "least one row (a DistributedSampler does), or end the epoch on all ranks"
        )


def refuse_uneven(ranks: Ranks, schedule: Schedule, models: Sequence[SpecializedModel]) -> None:
    """Raise `RankError` on all ranks if they would exchange parameters in different orders.

    In the layer-major order a unit is gathered once, whatever the micro-batches are; in others once for each of them.
    If a schedule fills memory, its order also depends on the size of checkpoints.
    """
    if schedule in BY_MICRO_BATCH:
        fills = SCHEDULES[schedule].fills_memory
        sizes = {"the size of checkpoints": [each.x_nbytes for each in models]} if fills else {}
        facts = {"the number of micro-batches": len(models), **sizes}
        ranks.require_same(f'expert.schedule "{schedule}"', facts)


Facts = Iterator[tuple[str, Any]]


def _of_options(options: Options) -> Facts:
    yield "greedysnake's version", __version__
    yield "the number of directories of storage", len(options.storage)
    yield from ((f"the option {name}", value) for name, value in options.by_name.items() if name not in OWN)


def _of_optimizer(optimizer: Optimizer) -> Facts:
    yield "the optimizer", type(optimizer).__name__
    yield "max_grad_norm", optimizer.max_grad_norm
    yield "what state_dtype stores moments in", str(optimizer.moments)
    for number, group in enumerate(optimizer.param_groups):
        yield f"param group {number}", {name: value for name, value in group.items() if name not in OF_PARAMETERS}
    beside, group_of = by_name(optimizer.param_groups), optimizer.group_of
    words = (f"{name} {_role(each, group_of[each])}" for name, each in beside)
    yield "what the optimizer has beside the model", ", ".join(words) or "nothing"
    yield "the number of steps behind it", optimizer.as_set().number - 1
    yield "the number of states that were loaded", sum(map(has_values, optimizer.state.values()))


def _of_model(call: Call, optimizer: Optimizer) -> Facts:
    captured, group_of = call.compilation.captured, optimizer.group_of
    for entry, arg in zip(captured.inputs, call.args, strict=True):
        is_shared = entry.role == "constant" and arg.dim() > 0 and arg.shape[0] == 1  # of one row it would be a batch
        if entry.role == "batch" or is_shared:
            yield f"the dtype of {entry.path}", arg.dtype
    for graph in call.models[0].split.units:
        words = []
        for index, spec in graph.parameters(captured).items():
            words.append(f"{captured.inputs[index].path} {_role(spec, group_of.get(call.args[index]))}")
        yield f"what unit {graph.unit} has", ", ".join(words)
    shared = (residency_of(arg) for arg in call.args if is_offloaded(arg))
    yield "the number of values that were written to storage", sum(each.num_writes for each in shared if each.mesh)


def _role(parameter: Any, group: int | None) -> str:
    """What ranks compare of a parameter, or of the specification of one."""
    role = f"in group {group}" if parameter.requires_grad else "frozen"
    return f"{parameter.dtype} {tuple(parameter.shape)} {role}"
