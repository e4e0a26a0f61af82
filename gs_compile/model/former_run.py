"""former_run: find the durable run that this one resumes, if any, and refuse it if it is of another model."""

from __future__ import annotations

import errno
import gc
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from gs_compile.capture.internals import has_scheduler
from gs_compile.codegen.layout import ParameterLayout
from gs_compile.errors import LeftoverError, ResumeError, StepOrderError, StorageError
from gs_compile.model.optimizer import Optimizer
from gs_compile.model.residency import is_offloaded
from gs_compile.options import Options
from gs_compile.planner.programs import StepPrograms
from gs_compile.runtime.former import alike
from gs_compile.runtime.groups import Team, gathered
from gs_compile.runtime.ranks import Ranks
from gs_compile.runtime.rest import read_rest
from gs_compile.runtime.storage.folder import folder_in, folder_of
from gs_compile.runtime.storage.last_commit import commits_in, newest_of
from gs_compile.runtime.storage.store import Store
from gs_compile.runtime.storage.stored import Manifest, StoredParameter

log = logging.getLogger(__name__)

BESIDE = "it has other parameters beside the compiled model"


def former_plan(
    options: Options, stored: Sequence[StoredParameter], optimizer: Optimizer, *, training: bool
) -> Mapping[str, Any]:
    """The plan in the newest commit that is to be resumed, if there is one. training: for a step, not for an
    evaluation, which may read further parameters.

    Raises ResumeError if the commit is of something else, before time is spent on a plan. Other errors are raised when
    the storage is opened.
    """
    goes_on = options.resume or optimizer.kept.storage
    looks_in = dict.fromkeys((*options.storage, *optimizer.kept.storage)) if goes_on else ()
    with suppress(StorageError):
        newest = newest_of(commits_in(map(folder_in, looks_in)))
        if newest is not None:
            check_alike(newest, optimizer, stored, world=1, may_have_more=not training)
            return newest.plan
    return {}


def rest_left(former: Manifest, storage: Sequence[Path], team: Team | None) -> Mapping[str, Tensor]:
    """What a commit has beside parameters of the compiled model; raises as `Store` does.

    team: the ranks that train together, all of which call this.
    """
    if not former.rest:
        return {}
    gc.collect()  # what earlier models have left: their folders are locked
    weights, agree = [1.0] * len(storage), partial(gathered, team) if team else None
    with Store(storage, weights=weights, durable=True, resume=storage, agree=agree) as store:
        return read_rest(store)


def open_store(
    planning: StepPrograms, layout: ParameterLayout, stored: Sequence[StoredParameter], optimizer: Optimizer
) -> tuple[Store, frozenset[str]]:
    """The storage of a plan, and the names of the parts there that stay in their files."""
    options, ranks, same = planning.planner.options, planning.planner.ranks, frozenset[str]()
    anew = optimizer.kept.begins_anew
    looks_in = optimizer.kept.storage or (() if options.resume or anew else None)
    agree = partial(ranks.agree, "the steps that are committed") if ranks and options.durability else None
    if options.durability:
        optimizer.kept.snapshot(optimizer.param_groups)  # before time is lost: it raises for what no commit can keep
    with ExitStack() as undo:
        store = Store(options.storage, durable=options.durability > 0, resume=looks_in, agree=agree)
        undo.callback(store.close)
        if anew:
            store.former = None
        found = store.former.step if store.former else 0
        if optimizer.kept.step not in (None, found):
            one, other = (f"a commit of step {step}" if step else "no commit" for step in (optimizer.kept.step, found))
            named, here = (", ".join(map(str, each)) for each in (looks_in or (), options.storage))
            raise ResumeError(
                f"gs_compile.resume found {one} in {named}, but {here} has {other}: give it the directories that have "
                "the newest commit"
            )
        if store.former is None and looks_in is not None and not anew:
            words = ", ".join(map(str, looks_in or options.storage))
            if ranks is not None:
                _refuse_misplaced(store, ranks)
            log.info("no durable run has left a commit in %s: a new run starts", words)
        if store.former is not None:
            log.info("run %s resumes from step %d (%s)", store.run, store.former.step, store.former.written)
            place = planning.placement.world, ranks.rank if ranks else 0
            check_alike(store.former, optimizer, stored, *place, may_have_more=ranks is None)  # as the plan was made
            _refuse_what_is_lost(store.former, optimizer)
            folders = [drive.folder for drive in store.drives]
            same = alike(store.former, planning.placement, layout.types, stored, folders)
        store.reserve(planning.ssd_nbytes - store.nbytes_of(same), len(planning.files))
        undo.pop_all()
    return store, same


def _refuse_what_is_lost(former: Manifest, optimizer: Optimizer) -> None:
    """Raise StepOrderError if only the option ``resume`` is given, but the script needs what `gs_compile.resume`
    restores: it has read another number of steps, has a scheduler, or has registered states.
    """
    if optimizer.kept.step is not None:
        return
    found, read = former.step - former.num_skipped, optimizer.steps.read
    if read not in (None, found):
        raise StepOrderError(
            f"optimizer.num_steps was read as {read} before the model's first call, but run {former.run} resumes from "
            f"{found} steps: call `run = gs_compile.resume(model, optimizer, storage=...)` before you read it, and "
            "begin with batch run.step"
        )
    states = ["a scheduler"] if has_scheduler(optimizer.step) else []
    states += [f"the commit's state of {name}" for name in sorted(former.states)]
    if states:
        raise StepOrderError(
            f"run {former.run} resumes from step {former.step} by the option resume alone, and {states[0]} would not "
            "be restored: call `run = gs_compile.resume(model, optimizer, storage=..., scheduler=scheduler)` before "
            "the model's first call, with all objects whose states the commit has"
        )


def _refuse_misplaced(store: Store, ranks: Ranks) -> None:
    """Raise `LeftoverError` on all ranks, none of which has its own commit, if one has another rank's."""
    pairs = ((name, drive.folder.parent) for name in ranks.names for drive in store.drives if name != ranks.name)
    own = sorted({name for name, directory in pairs if commits_in([folder_of(directory, name)])})
    every = dict(zip(ranks.names, ranks.agree("commits of other ranks", own), strict=True))
    if any(every.values()):
        having = ((name, ", ".join(map(str, each))) for name, each in every.items() if each)
        words = "; ".join(f"rank {name} has that of rank {others}" for name, others in having)
        what = (
            f"no rank finds its commit, and {words}: they have come to other machines than before. Give each the "
            "number that it had (torchrun --node-rank), or bring it the folder of its number; nothing was changed"
        )
        raise LeftoverError(errno.EEXIST, what, str(store.drives[0].folder.parent))


def check_alike(
    former: Manifest,
    optimizer: Optimizer,
    parameters: Sequence[StoredParameter],
    world: int,
    rank: int = 0,
    *,
    may_have_more: bool = False,
) -> None:
    """Raise ResumeError if a commit is of another model, optimizer, number of ranks or rank.

    may_have_more: the model may have more parameters than the commit.
    """
    check_parameters(former, {each.name: each.shape for each in parameters}, is_all=not may_have_more)
    for what in _differences(former, optimizer, {each.name: each for each in parameters}, world, rank):
        raise _other(former, what)


def _differences(
    former: Manifest, optimizer: Optimizer, here: Mapping[str, StoredParameter], world: int, rank: int
) -> Iterator[str]:
    """How a commit differs from parameters of these names and shapes."""
    pairs = [(each, here[each.name]) for each in former.parameters]
    for there, ours in pairs:
        if there.trained != ours.trained:
            yield f"{ours.name} was {'trained' if there.trained else 'frozen'} there"
    if (former.optimizer, tuple(former.components)) != (type(optimizer).__name__, optimizer.components):
        yield f"its optimizer is {former.optimizer}, with {', '.join(former.components)} of each parameter"
    for there, ours in pairs:
        if tuple(there.components) != tuple(ours.components):
            yield f"{ours.name} was {'no' if ours.components else 'a'} matrix that updates orthogonalize there"
    if len(former.groups) != len(optimizer.param_groups):
        yield f"its optimizer has {len(former.groups)} param groups, and {len(optimizer.param_groups)} here"
    beside = {each.name: tuple(each.shape) for each in former.rest if each.name.isdecimal()}
    found = ((str(number), each) for number, each in enumerate(optimizer.group_of))
    trained = {name: each for name, each in found if name in beside or (each.requires_grad and not is_offloaded(each))}
    if beside != {name: tuple(each.shape) for name, each in trained.items()}:  # one may have been frozen since
        yield BESIDE
    for there, ours in pairs:
        if there.group != ours.group:
            yield f"{ours.name} was in param group {there.group} there, and is in {ours.group} here"
    for there, ours in pairs:
        if there.missed != ours.missed and world > 1:  # elsewhere each step tells its updates
            yield (
                f"{ours.name} took {there.missed} steps fewer than others there, and {ours.missed} here "
                "(`gs_compile.resume` takes them up, the option resume alone does not)"
            )
    if former.rank != rank:
        yield f"it is of rank {former.rank} of those that share the model, and this is rank {rank} of them"
    if former.world != world:
        yield f"it is of {former.world} ranks, this run of {world}, which can load a checkpoint of state dicts"


def check_parameters(former: Manifest, shapes: Mapping[str, tuple[int, ...]], *, is_all: bool = False) -> None:
    """Raise ResumeError if parameters have other shapes than in a commit; `is_all`: or if there are more."""
    stored = {each.name: tuple(each.shape) for each in former.parameters}
    names = stored.keys() | shapes.keys() if is_all else stored.keys()
    differ = sorted(name for name in names if stored.get(name) != shapes.get(name))
    if differ:
        found, wanted = (each.get(differ[0], "absent") for each in (stored, shapes))
        what = f"{len(differ)} of {len(names)} parameters differ: {differ[0]} is {found} there, and {wanted} here"
        if wanted == "absent":
            what += " (an evaluation that does not read it can come after the first step)"
        raise _other(former, what)


def check_beside(former: Manifest, optimizer: Optimizer) -> None:
    """Raise ResumeError if an optimizer cannot take a commit's parameters that are outside the compiled model."""
    shapes = {str(number): tuple(each.shape) for number, each in enumerate(optimizer.group_of)}
    stored = {each.name: tuple(each.shape) for each in former.rest if each.name.isdecimal()}
    if stored and former.optimizer != type(optimizer).__name__:
        raise _other(former, f"its optimizer is {former.optimizer}")
    if not stored.items() <= shapes.items():
        raise _other(former, BESIDE)


def _other(former: Manifest, what: str) -> ResumeError:
    return ResumeError(
        f"run {former.run} at step {former.step}, which is to be resumed, is not of this model and optimizer: {what}. "
        "Build what was trained, choose another storage=, or export its values with greedysnake store export"
    )
