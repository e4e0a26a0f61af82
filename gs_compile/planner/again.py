"""again: the plan of a run that goes on, taken again where nothing that it was made for has changed.

What is measured differs a little each time, and another plan would have all values copied to other files. A plan that
follows from options and budgets alone is simply made again.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from hashlib import sha256
from typing import TYPE_CHECKING, Any, NamedTuple

from gs_compile.errors import MemoryBudgetError, OptionError
from gs_compile.machine import format_bytes
from gs_compile.options import Options, Ratios
from gs_compile.placement.levels import Share, Shares
from gs_compile.placement.placement import Placement
from gs_compile.placement.workload import UnitSize
from gs_compile.planner.boundary import FIRST
from gs_compile.planner.builder import peak
from gs_compile.planner.given import host_budget
from gs_compile.planner.planner import Planner
from gs_compile.program.ir import StepShape, Unit

if TYPE_CHECKING:
    from gs_compile.codegen.compiled import SpecializedModel

log = logging.getLogger(__name__)

SAME = 0.1  # of host memory, by which a budget that is what happens to be free may differ

Make = Callable[[Options, Shares | None], tuple[Planner, Placement]]


def fingerprint(
    options: Options, sizes: Sequence[UnitSize], layouts: Sequence[SpecializedModel], shape: StepShape, *settled: Any
) -> str:
    """Of all that a plan follows from but what is measured; settled: what else it is made for, as text or numbers."""
    batches = [(each.x_nbytes, each.side_nbytes) for each in layouts]
    own = replace(options, group=None, mesh=None, resume=None)
    facts = own, sizes, batches, shape, settled, sys.modules["gs_compile"].__version__
    return sha256(json.dumps(facts, default=_plain, sort_keys=True).encode()).hexdigest()


def _plain(fact: Any) -> Any:
    if is_dataclass(fact):
        return {each.name: getattr(fact, each.name) for each in fields(fact)}
    return sorted(map(str, fact)) if isinstance(fact, frozenset) else str(fact)


class _Former(NamedTuple):
    """A former plan: the options with what it has chosen as given, and what no option says."""

    options: Options
    shares: Shares
    kept: tuple[Unit, ...]
    ahead: int


def planned(
    make: Make, options: Options, former: Mapping[str, Any], made_for: str
) -> tuple[Planner, Placement, Mapping[str, Any]]:
    """A plan, and what commits keep of it. former: what the commit has that the run goes on from; empty: nothing."""
    if (same := _as_before(options, former, made_for)) is not None:
        try:
            planner, placement = make(same.options, same.shares)
        except (MemoryBudgetError, OptionError) as error:  # no layer may save what it says, for one
            log.info("the plan that the run was made with does not fit any more: %s", error)
        else:
            planner.values_nbytes = former["values_nbytes"]
            placement = _at_the_boundary(planner, placement, same)
            log.info("the plan is the one that the run was made with: what it was made for has not changed")
            return planner, placement, former
    planner, placement = make(options, None)
    return planner, placement, _kept(planner, made_for)


def _at_the_boundary(planner: Planner, placement: Placement, former: _Former) -> Placement:
    """With what the former plan had between two steps (`boundary`), if there is room for it as there was."""
    before = replace(placement, kept=former.kept, ahead=former.ahead)
    if before == placement:
        return placement
    budgets = {"host": planner.host_nbytes, "device": planner.values_nbytes}
    most = {tier: nbytes for tier, nbytes in budgets.items() if nbytes is not None}
    programs = planner.builder.programs(before)
    fits = all(peak(program, tier) <= nbytes for program in programs for tier, nbytes in most.items())
    return before if fits else placement


def _kept(planner: Planner, made_for: str) -> dict[str, Any]:
    """Of a plan that was searched for: what the search has chosen, and what for."""
    plan, fixed = planner.plan, planner.fixed
    if plan is None:
        return {}
    on_device = {f"device_{name}": ratio for name, ratio in plan.device_ratios.items() if ratio}
    return {
        "made_for": made_for,
        "host_nbytes": planner.host_nbytes,
        "values_nbytes": planner.values_nbytes,
        "ratios": {**plan.ratios, **on_device},
        "alpha": plan.alpha,
        "shares": [list(share) for share in plan.shares],
        "kept": list(plan.placement.kept),
        "ahead": plan.placement.ahead,
        "clip": ("speculative" if fixed.speculative else "delayed") if fixed.clip else None,
    }


def _as_before(options: Options, former: Mapping[str, Any], made_for: str) -> _Former | None:
    """The former plan; None: it was made for something else."""
    if former.get("made_for") != made_for:
        return None
    before, now = former.get("host_nbytes"), host_budget(options)
    if not isinstance(before, int) or abs(now - before) > SAME * before:
        log.info("there is another amount of host memory than before, %s: the plan is made anew", format_bytes(now))
        return None
    try:
        if not isinstance(former["values_nbytes"], int | None):
            return None
        chosen = {"ratios": Ratios(**former["ratios"]), "alpha": former["alpha"], "clip": former["clip"]}
        shares = tuple(Share(*each) for each in former["shares"])
        kept = tuple(unit for unit in FIRST if unit in former["kept"])
        return _Former(replace(options, expert=replace(options.expert, **chosen)), shares, kept, int(former["ahead"]))
    except (KeyError, TypeError, ValueError, OptionError):  # nothing that was written here
        return None
