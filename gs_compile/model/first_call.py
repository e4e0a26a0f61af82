"""first_call: plan and open the tiers of a model, for the parameters that its optimizer trains."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from gs_compile.capture.graph import Captured
from gs_compile.capture.internals import backward_hooks
from gs_compile.capture.split import Split
from gs_compile.codegen.layout import ParameterLayout, encoded, lay_out, of_layers, tied_units
from gs_compile.errors import OptimizerError, OptionError
from gs_compile.model.call import Call
from gs_compile.model.commits import rest_nbytes
from gs_compile.model.former_run import former_plan, open_store
from gs_compile.model.offloaded import UnavailableGradient
from gs_compile.model.optimizer import Loop, Optimizer
from gs_compile.model.residency import is_offloaded, residency_of
from gs_compile.options import Masters, Options
from gs_compile.placement.units import UnitPlacement
from gs_compile.planner.at_hand import ModelAtHand
from gs_compile.planner.measure.machines import Where
from gs_compile.planner.programs import StepPrograms
from gs_compile.planner.resumed import ACCUMULATES, num_calls_of
from gs_compile.planner.run import RunPlanner
from gs_compile.program.ir import TIED, Unit
from gs_compile.runtime.coordinators import Setting
from gs_compile.runtime.formats import types_of
from gs_compile.runtime.muon import Matrices
from gs_compile.runtime.ranks import Ranks
from gs_compile.runtime.storage.stored import StoredParameter
from gs_compile.runtime.stream import device_of, is_in_host_memory
from gs_compile.runtime.tiers import Tiers
from gs_compile.runtime.trace import Trace
from gs_compile.runtime.updates import UpdateRules


class Prepared(NamedTuple):
    """What an engine begins with: the layout of a model's parameters, the same as commits have it, and the plan of its
    steps.
    """

    layout: ParameterLayout
    stored: tuple[StoredParameter, ...]
    planning: StepPrograms


def plan_tiers(optimizer: Optimizer, call: Call, host_nbytes: int | None = None, loop: Loop | None = None) -> Prepared:
    """Plan the steps of a model whose parameters go to the tiers, for the batch of a call.

    host_nbytes: the budget of host memory, if it is known. loop: the script's loop; None: the optimizer's.

    If the options do not say whether masters of parameters in bf16 are split or whole, the plan does; for ranks they
    are split.
    """
    args, ranks, options, split = call.args, call.ranks, call.compilation.options, call.models[0].split
    captured, loop = call.compilation.captured, loop or optimizer.loop
    matrices, groups = _matrices(call, optimizer), _param_groups(call, optimizer)
    codecs, share = codecs_of(split, captured, options, args), (ranks.rank, ranks.number) if ranks else (0, 1)
    laid_out = partial(lay_out, split, captured, groups=groups, share=share, codecs=codecs, matrices=matrices)
    kinds = _kinds_of_masters(options, args, ranks)
    types = {masters: partial(types_of, moments=optimizer.moments, pairs=masters != "whole") for masters in kinds}
    layouts = {masters: laid_out(types[masters]) for masters in kinds}
    first = layouts[kinds[0]]
    stored = stored_parameters(call, first, optimizer)
    former = {} if ranks else former_plan(options, stored, optimizer, training=call.training)
    planner = RunPlanner(
        ModelAtHand(
            options=options,
            sizes={masters: each.sizes for masters, each in layouts.items()},
            layouts=call.models,
            tied=tied_units(split, first.spans),
            where=where_of([args[index] for index in first.spans]),
            clip=optimizer.max_grad_norm is not None,
            is_provisional=not call.training and may_plan_again(ranks, options.expert.schedule),
            accumulate=loop.accumulates or bool(former.get(ACCUMULATES)),
            num_calls=max(loop.num_calls, num_calls_of(former)),
            ranks=ranks,
            host_nbytes=host_nbytes,
            rest_nbytes=rest_nbytes(optimizer, {args[i] for i in first.spans}, captured) if options.durability else 0,
        )
    )
    found = planner.plan(former)
    return Prepared(layouts[found.masters], stored, StepPrograms(planner, found))


def may_plan_again(ranks: Ranks | None, schedule: str) -> bool:
    """Whether the first step of such a run may have another plan than the run has begun with."""
    return ranks is None and schedule == "vertical"


def codecs_of(split: Split, captured: Captured, options: Options, args: Sequence[Any]) -> dict[int, str]:
    """By input index, the codec of each parameter that is encoded, or is to be encoded in the first call."""
    codecs = encoded(split, captured, options.frozen, options.frozen_skip)
    for index, arg in enumerate(args):
        residency = residency_of(arg) if is_offloaded(arg) else None
        if residency is None or not (residency.codec or residency.home):
            continue
        codec = residency.home.span.codec if residency.home else residency.codec
        if residency.home is None and arg.requires_grad:
            raise OptionError(
                f"{captured.inputs[index].path} is trained, but it was loaded in {codec}, a format for frozen matrices "
                "only: freeze it, or load the model without frozen="
            )
        codecs.pop(index, None)
        if codec and not arg.requires_grad:
            codecs[index] = codec
    return codecs


def where_of(parameters: Sequence[Tensor]) -> Where:
    """The device of parameters that go to the tiers, and the bytes of its memory that become free."""
    values = (residency_of(each).stash if is_offloaded(each) else each for each in parameters)
    there = (each for each in values if each is not None and not isinstance(each, DTensor))
    leaving = (each.untyped_storage() for each in there if not is_in_host_memory(each))
    nbytes = {memory.data_ptr(): memory.nbytes() for memory in leaving}  # of memory that several share once
    return Where(parameters[0].device, sum(nbytes.values()))


def _kinds_of_masters(options: Options, args: Sequence[Any], ranks: Ranks | None) -> tuple[Masters, ...]:
    """The kinds of masters from which the planner chooses, in the order in which it tries them."""
    asked = options.expert.masters
    narrow = (arg.dtype == torch.bfloat16 for arg in args if isinstance(arg, torch.nn.Parameter))
    return ("split", "whole") if not asked and ranks is None and any(narrow) else (asked or "split",)


def open_tiers(prepared: Prepared, optimizer: Optimizer) -> Tiers:
    """The tiers of a plan, with their storage if it uses any, and the commit in it that is resumed.

    Raises as `Store` and `Tiers` do, and then leaves nothing; ResumeError if the commit is of something else.
    """
    layout, stored, planning = prepared
    planner = planning.planner
    options, ranks = planner.options, planner.ranks
    if optimizer.kept.storage and not options.durability:
        raise OptionError(
            'gs_compile.resume() was called, but durability is "off": give durability="step", or a number'
        )
    asked, together = optimizer.kept.ranks, ranks.names if ranks else ()
    if optimizer.kept.storage and asked != together:
        one, other = (f"ranks {', '.join(map(str, each))}" if each else "one process" for each in (asked, together))
        raise OptionError(
            f"gs_compile.resume looked for the commit of {one}, but by its options the model is trained by {other}: "
            "give resume the same group= or mesh= as the model"
        )
    with ExitStack() as undo:
        store, same = None, frozenset[str]()
        if planning.uses_ssd:
            store, same = open_store(planning, layout, stored, optimizer)
            undo.callback(store.close)
        tiers = Tiers(
            Setting(planning.placement, layout.types, store, device_of(planner.model.device), ranks),
            UpdateRules(optimizer.rule, layout.runs),
            trace=Trace(events=options.expert.trace),
            host_nbytes=planner.whole_nbytes,
            num_calls=planner.num_calls,
            num_threads=planner.num_threads,
            alike=same,
        )
        undo.callback(tiers.close)
        for number in range(planner.num_calls):
            tiers.make_files(planning.planned_step, planning.placement, number)
        undo.pop_all()
    return tiers


def stored_parameters(call: Call, layout: ParameterLayout, optimizer: Optimizer) -> tuple[StoredParameter, ...]:
    """Where each parameter is in its unit, as commits have it, in the order of the layout."""
    args, group_of, captured = call.args, optimizer.group_of, call.compilation.captured
    names = [entry.path.removeprefix(captured.root) for entry in captured.inputs]
    return tuple(
        StoredParameter(
            names[index],
            span.unit,
            span.offset,
            tuple(span.shape),
            bool(args[index].requires_grad),
            str(span.dtype or "").removeprefix("torch."),
            span.codec,
            span.components,
            span.second,
            group_of[args[index]] if args[index].requires_grad else None,
            optimizer.steps.missed.get(args[index], 0),
        )
        for index, span in layout.spans.items()
    )


def _matrices(call: Call, optimizer: Optimizer) -> dict[int, Matrices] | None:
    """The matrices that updates orthogonalize, by input index; None: the optimizer never does so."""
    if not optimizer.orthogonalizes:
        return None
    if call.ranks:
        call.ranks.open_updates()
    args, split, captured = call.args, call.models[0].split, call.compilation.captured
    own, inputs, group_of = of_layers(split, captured), captured.inputs, optimizer.group_of
    trained = (index for graph in split.units for index in graph.parameters(captured) if args[index].requires_grad)

    def matrices(index: int) -> Matrices | None:
        group = optimizer.param_groups[group_of[args[index]]]
        return optimizer.matrices(args[index], group, inputs[index].path, of_layer=index in own)

    found = {index: matrices(index) for index in dict.fromkeys(trained)}
    return {index: each for index, each in found.items() if each is not None}


def _param_groups(call: Call, optimizer: Optimizer) -> dict[int, tuple[int, int, bool]]:
    """For each trained parameter, by input index: its param group, the steps that it has missed, whether it is idle.

    Raises `OptimizerError` for a parameter without a group, or with a gradient hook.
    """
    args, split = call.args, call.models[0].split
    captured, group_of = call.compilation.captured, optimizer.group_of
    read = {index for graph in split.units for index in graph.parameters(captured) if args[index].requires_grad}
    for index in read:
        if args[index] not in group_of:
            raise OptimizerError(
                f"{captured.inputs[index].path} is trained, but the gs_compile optimizer does not have it; give the "
                "optimizer all parameters that require a gradient, or freeze this one"
            )
        gradient = args[index].grad
        if gradient is not None and not isinstance(gradient, UnavailableGradient) and bool(gradient.any()):
            raise OptimizerError(
                f"{captured.inputs[index].path} has a gradient from before the model's first call, which would be "
                "lost: call optimizer.zero_grad() before, or call the model first"
            )
        if found := backward_hooks(args[index]):
            raise OptimizerError(
                f"{captured.inputs[index].path} has a hook on its gradient, {found[0]}, which would never be called, "
                "because a parameter on the tiers gives its gradient only to its update. Remove the hook, or use a "
                "torch.optim optimizer, which leaves parameters in memory"
            )
    return {i: (group_of[args[i]], optimizer.steps.missed.get(args[i], 0), i in split.idle) for i in read}


def refuse_inputs(args: Sequence[Any], read: Iterable[int], batch: Container[int]) -> None:
    """Raise `OptimizerError` for inputs that require a gradient, of those `read`, by index, that are not in `batch`."""
    for index in read:
        arg = args[index]
        if isinstance(arg, Tensor) and not is_offloaded(arg) and arg.requires_grad and index not in batch:
            raise OptimizerError(
                f"an input of shape {tuple(arg.shape)} requires a gradient, and has no row for each sample of the "
                "batch: detach it, or use a torch.optim optimizer, which leaves parameters in memory"
            )


def refuse_unread(placed: Mapping[Unit | None, UnitPlacement], tied: Collection[Unit]) -> None:
    """Raise `OptimizerError` if no unit reads what several share, and train: no operation would make its gradient."""
    if not tied and TIED in placed and placed[TIED].num_trained:
        raise OptimizerError(
            "this call reads none of the parameters that several layers share, which the first call did: call the "
            "model the same way in every step"
        )
