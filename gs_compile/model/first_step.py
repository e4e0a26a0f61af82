"""first_step: an engine is made at a model's first call, and once more where the first step has several backwards.

Nobody says how many backwards come before `optimizer.step()`, or that the learning rate is set after them. So updates
run beside the first one, and when the first step has another, or settings after it, the run begins again with updates
that wait: first values are there until a step has ended, and the backwards so far run once more, with the same inputs,
random numbers and gradients. What the first step has settled holds from then on.
"""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from gs_compile.codegen.compiled import Compilation, SpecializedModel
from gs_compile.errors import MemoryBudgetError, OptimizerError
from gs_compile.model.aliases import aliases_of, refuse_overlaps
from gs_compile.model.engine import Engine
from gs_compile.model.first_call import Prepared, plan_tiers
from gs_compile.model.meeting import agree
from gs_compile.model.offloaded import Alias
from gs_compile.model.tiered_optimizer import TieredOptimizer
from gs_compile.runtime.ranks import Ranks

log = logging.getLogger(__name__)


class Call(Protocol):
    """What an engine is made for: the arguments of a captured model, cut into micro-batches."""

    compilation: Compilation
    models: Sequence[SpecializedModel]
    args: Sequence[Any]


def begin(
    optimizer: TieredOptimizer,
    compilation: Compilation,
    models: Sequence[SpecializedModel],
    args: Sequence[Any],
    ranks: Ranks | None,
    prepared: Prepared | None = None,
) -> Engine:
    """The engine of an optimizer, with the state that this has loaded or that a durable run has left.

    prepared: as of `Engine`.
    """
    with torch.inference_mode(False):  # what is made lives longer than this call
        if ranks is not None:
            agree(ranks, compilation, models[0], args, optimizer)
        refuse_overlaps(compilation.captured.inputs, args)
        aliases = aliases_of(args)
        optimizer.first_group_of = optimizer.group_of
        optimizer.engine = engine = Engine(optimizer, compilation, models, args, ranks, prepared)
        if engine.durable is None or engine.durable.former is None:
            try:
                optimizer.load_into_engine()
            except OptimizerError as error:
                engine.tiers.fail(error)
                raise
        else:
            optimizer.show_stored()
            if optimizer.kept.step is None:  # else `resume` has done so, and what was set since then counts
                optimizer.go_on(engine.durable.former)
                optimizer.kept.step = engine.durable.former.step
    for each in aliases:
        Alias.follow(each)
    # `model.compile` ties a module into a reference cycle; it often goes with its optimizer, and its files with it.
    weakref.finalize(optimizer, gc.collect).atexit = False
    return engine


def begin_again(engine: Engine, call: Call, *, accumulates: bool, num_calls: int) -> Engine:
    """Another engine for the rest of the first step, with what the step has done so far.

    call: one of the step. accumulates: steps have several backwards. num_calls: that have memory at a time. Raises
    `MemoryBudgetError` where there is no room for that, and leaves the engine as it is.
    """
    optimizer, done = engine.optimizer, engine.done
    assert isinstance(optimizer, TieredOptimizer)
    given = call.compilation, call.models, call.args, engine.ranks
    before = optimizer.accumulates, optimizer.num_calls
    optimizer.accumulates, optimizer.num_calls = accumulates, num_calls
    try:
        prepared = plan_tiers(optimizer, *given, engine.planning.run.whole_nbytes)
    except MemoryBudgetError:
        optimizer.accumulates, optimizer.num_calls = before
        raise
    words = ["updates wait for step(), as several backwards or settings come before it"] if accumulates else []
    words += [f"{num_calls} calls are between forward and backward at a time"] if num_calls > 1 else []
    log.info("in this loop %s: the first step, under way, begins again", ", and ".join(words))
    engine.end("the run began again")
    optimizer.state.update(optimizer.loaded)
    engine.successor = found = begin(optimizer, *given, prepared)
    if found.durable is not None:
        found.durable.goes_on()  # random numbers do already
    for other, gradients in done:
        other.repeat(gradients, found)
    return found
