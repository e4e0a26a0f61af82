"""reporting: the record of a run, from its plan and its tiers, and where the options show it."""

from __future__ import annotations

import logging
import os
import platform
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

from gs_compile.machine import format_bytes, free_storage, usable_cores, usable_memory
from gs_compile.model.commits import VERSIONS
from gs_compile.placement.placement import Placement
from gs_compile.placement.traffic import traffic
from gs_compile.planner.programs import StepPrograms
from gs_compile.planner.run import words
from gs_compile.planner.step_plan import StepPlan, nbytes_by_home, nested
from gs_compile.program.ir import Program
from gs_compile.progress import Line
from gs_compile.runtime import alarm
from gs_compile.runtime.lanes import Failure
from gs_compile.runtime.slab import Slab
from gs_compile.runtime.storage.folder import STATUS
from gs_compile.runtime.storage.store import Store
from gs_compile.runtime.tiers import Tiers
from gs_compile.runtime.trace import Total
from gs_compile.status import runs
from gs_compile.status.file import free_name, in_turn, process_space, process_start
from gs_compile.status.form import About
from gs_compile.status.record import RunRecord
from gs_compile.status.reporter import Outlets, Reporter

log = logging.getLogger(__name__)


def report_on(planning: StepPrograms, tiers: Tiers, num_parameters: int) -> Reporter | None:
    """The reporter of a run, until its tiers are closed; None: nothing is to be reported.

    Of several ranks each has its status file, and the first one has the bar and the page.
    """
    store, directory = tiers.setting.store, planning.planner.options.status
    folders = [drive.folder for drive in store.drives] if store is not None else []
    about = _about(planning, tiers, num_parameters)
    resting = Counter[str]()
    for nbytes_by_tier in about.homes.values():
        resting.update(nbytes_by_tier)
    if store is not None:
        resting["ssd"] = planning.ssd_nbytes
    measure = partial(_measure, tiers.slab, resting, folders)
    with nullcontext() if directory is None else in_turn(directory):
        outlets = _outlets(planning, tiers)
        if outlets[:3] == (None, None, None):
            return None
        reporter = Reporter(RunRecord(about, tiers.trace, measure), outlets, partial(_why, tiers.failure))
    tiers.followers.append(reporter.close)
    return reporter


def tell_what_calls_cost(num_backwards: int, program: Program, placement: Placement) -> None:
    """Log what one call with the whole batch would save in each step, if the first step had several backwards.

    program: of the latest backward.
    """
    if num_backwards > 1:
        nbytes = sum(nbytes for (_, kind), nbytes in traffic(program, placement).items() if kind in ("w", "dw"))
        log.info(
            "a step has %d backwards: one call with the whole batch would move %s less in each step, because every "
            "call loads the parameters, and adds to the gradients, once more",
            num_backwards,
            format_bytes((num_backwards - 1) * nbytes),
        )


def _outlets(planning: StepPrograms, tiers: Tiers) -> Outlets:
    options, ranks, store = planning.planner.options, planning.planner.ranks, tiers.setting.store
    is_first = ranks is None or ranks.place == 0
    line = Line(always=options.progress is True)
    has_line = is_first and (line.is_terminal if options.progress is None else options.progress)
    status, entry = None, runs.entry()
    if options.status is not None:
        status = free_name(options.status)
    elif store is not None:
        status = store.drives[0].folder / STATUS
    if entry is not None and status is not None:
        runs.link(entry, status)
    page = options.report if is_first else None

    def keeps() -> bool:
        """Whether the status file stays after the run: if the user has asked for one, and beside a commit."""
        return options.status is not None or (store is not None and store.made is not None)

    return Outlets(status or entry, page, line if has_line else None, keeps, entry)


def _why(failure: Failure) -> str:
    """Why a run has failed; "": it has not."""
    error = failure.first.error if failure.first is not None else None
    return "" if error is None else alarm.in_words(error)


def _measure(
    slab: Slab, resting: Mapping[str, int], folders: list[Path]
) -> tuple[Mapping[str, int], Mapping[str, int]]:
    """Bytes in use by tier, and free by drive."""
    free = dict[str, int]()
    for folder in folders:
        with suppress(OSError):  # of a run that has ended, or a drive that does not answer
            free[str(folder.parent)] = free_storage(folder)
    return {**resting, "host": slab.nbytes}, free


def _about(planning: StepPrograms, tiers: Tiers, num_parameters: int) -> About:
    planner, plan, store = planning.planner, planning.planned.plan, tiers.setting.store
    device_nbytes = planning.device_nbytes or 0
    return About(
        pid=(pid := os.getpid()),
        process_start=process_start(pid),
        process_space=process_space(),
        began=time.time(),
        rank=planner.ranks.place if planner.ranks else 0,
        num_ranks=planner.ranks.total if planner.ranks else 1,
        versions=VERSIONS,
        machine=plan.profile.name if plan and plan.is_solved else platform.machine(),
        device=str(tiers.setting.device.name),
        num_cores=usable_cores(),
        memory_nbytes=usable_memory(),
        num_parameters=num_parameters,
        num_layers=planning.placement.layout.num_layers,
        plan=words(plan) if plan else "",
        binding=plan.binding if plan else (),
        homes=nested(nbytes_by_home(planning.placement)),
        budgets={"host": planner.whole_nbytes, **({"device": device_nbytes} if device_nbytes else {})},
        drives=_shares(store),
        **_predicted(plan),
    )


def _predicted(plan: StepPlan | None) -> dict[str, Any]:
    """The plan's figures, if it was simulated."""
    if plan is None or not plan.is_solved:
        return {"predicted": {}, "predicted_seconds": float("nan"), "rated_nbytes": 0}
    moved = nested(plan.traffic)
    kinds = {lane: Counter(moved.get(lane, {})) for lane in plan.lanes}
    lanes = {lane: Total(seconds, kinds[lane].total(), kinds[lane]) for lane, (seconds, _) in plan.lanes.items()}
    return {"predicted": lanes, "predicted_seconds": plan.seconds, "rated_nbytes": plan.profile.ssd_rated_nbytes}


def _shares(store: Store | None) -> dict[str, float]:
    """The part of all bytes that each directory of storage gets."""
    if store is None:
        return {}
    pairs = zip(store.drives, store.weights, strict=True)
    return {str(drive.folder.parent): weight / sum(store.weights) for drive, weight in pairs}
