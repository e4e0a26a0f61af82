"""One plan for all ranks: from the least that any has, on figures that are the same on all."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import asdict
from functools import partial
from math import inf
from pathlib import Path

import pytest
from tiered import BATCH, adamw, options, outcome, shared, tokens
from typer.testing import CliRunner

from gs_compile.cli.main import app
from gs_compile.errors import MemoryBudgetError, RankError
from gs_compile.planner import run
from gs_compile.planner.builder import planned_peak
from gs_compile.planner.measure import machines
from gs_compile.planner.measure.profile import Profile
from gs_compile.planner.measure.shipped import ENVIRONMENT

KEEPS_CAPTURES = True  # each process captures its own
MACHINE = Path(__file__).parent.parent / "machine.json"
CHOSEN = dict.fromkeys(("parameter", "checkpoint", "optimizer"))


def learn(harness, given, rows=BATCH, make=adamw):
    with harness.fresh(make, given) as optimizer:
        for number in range(2):
            ids = tokens(number, rows)
            harness.model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return (
            optimizer.engine.planning,
            optimizer.engine.snapshots[-1],
            outcome(harness.model, optimizer, [], []).values,
        )


def plans(info, tmp_path):
    """The second rank has less memory: some is left to choose how to use."""
    harness = shared()
    given = options(tmp_path, alpha=0.0), options(tmp_path, alpha=0.0, ratios=dict.fromkeys(CHOSEN, 1.0))
    (_, small, values), (_, large, _) = (learn(harness, each) for each in given)
    budget = (planned_peak(small, "host") + planned_peak(large, "host")) // 2 + (1 - info.rank) * 2**20
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(run, "host_budget", lambda *_: budget)
        planning, program, found = learn(harness, options(tmp_path, ratios=CHOSEN) | {"machine": MACHINE})
    profile, plan = planning.planner.figures.profile, planning.planned.plan
    return {
        "budget": (budget, planning.host_nbytes, planned_peak(program, "host")),
        "plan": (planning.placement.units, planning.placement.decision.alpha),
        "profile": asdict(profile),
        "lanes": dict(plan.lanes) if plan else None,
        "same": all(one.equal(other) for one, other in zip(values.values(), found.values(), strict=True)),
    }


def test_ranks_have_one_plan(pair, tmp_path):
    first, second = pair.run(plans, tmp_path)
    for each in (first, second):
        _, budget, needed = each["budget"]
        assert needed <= budget == second["budget"][0] < first["budget"][0]
        assert each["plan"] == first["plan"]
        assert each["profile"] == first["profile"]
        assert each["same"]
    given = Profile.load(MACHINE)
    assert first["profile"]["net_bytes_per_second"] < inf
    assert first["profile"]["host_nbytes"] == given.host_nbytes // 2
    assert first["profile"]["ssd_read_bytes_per_second"] == given.ssd_read_bytes_per_second / 2
    assert 0 < first["lanes"]["net"][0] < 10


def stores(info, tmp_path):
    """With less than what clipping needs if the gradients wait in host memory, whose bytes a refusal names."""
    harness, make = shared(num_layers=4), partial(adamw, max_grad_norm=0.5)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(run, "host_budget", lambda *_: 1)
        with pytest.raises((MemoryBudgetError, RankError)) as refusal:
            learn(harness, options(tmp_path, clip="delayed", ratios=CHOSEN), make=make)
        least = int(re.search(r"\((\d+) bytes\) of it at least", str(refusal.value))[1])
        patched.setattr(run, "host_budget", lambda *_: least - 1)
        planning, _, found = learn(harness, options(tmp_path, ratios=CHOSEN), make=make)
    _, _, wanted = learn(harness, options(tmp_path, clip="delayed"), make=make)
    return planning.placement.accumulates, all(
        one.equal(other) for one, other in zip(wanted.values(), found.values(), strict=True)
    )


def test_gradients_that_wait_for_the_norm_go_to_ssd_where_host_memory_has_no_room(pair, tmp_path):
    for accumulates, same in pair.run(stores, tmp_path):
        assert accumulates
        assert same


def larger(info, tmp_path):
    """The second rank's batch needs all memory but a little, were all of it kept there."""
    harness, rows = shared(), 2 + 38 * info.rank
    _, program, _ = learn(harness, options(tmp_path, alpha=0.0, ratios=dict.fromkeys(CHOSEN, 1.0)), rows)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(run, "host_budget", lambda *_: planned_peak(program, "host") + (-8192 if info.rank else 2**20))
        planning, program, _ = learn(harness, options(tmp_path, ratios=CHOSEN) | {"machine": MACHINE}, rows)
    return planning.placement, planning.host_nbytes, planned_peak(program, "host")


def test_the_plan_is_for_the_largest_batch(pair, tmp_path):
    first, second = pair.run(larger, tmp_path)
    assert first[:2] == second[:2]
    assert first[2] < second[2] <= second[1]


def probes(info, tmp_path):
    """The command, with drives and processors that are measured already."""
    calls = []

    def probe(storage, device):
        calls.append(storage)
        return Profile.load(MACHINE)

    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        patched.delenv(ENVIRONMENT, raising=False)
        patched.setattr(machines, "probe", probe)
        found = [CliRunner().invoke(app, ["probe", "--storage", str(tmp_path), "--json"]) for _ in range(2)]
    return len(calls), [each.stdout if each.exit_code == 0 else repr(each.exception) + each.output for each in found]


def test_the_probe_of_ranks_knows_their_network(pair, tmp_path):
    (calls, printed), others = pair.run(probes, tmp_path)
    assert (calls, *others) == (1, 0, ["", ""])  # measured once, by the first, who prints it
    once, again = map(json.loads, printed)
    assert once["net_bytes_per_second"] == again["net_bytes_per_second"] > 0
    assert 0 < once["net_hop_seconds"] < 0.5
    assert "2 ranks gather and scatter 64 MiB" in once["sources"]["net_bytes_per_second"]
    shutil.rmtree(tmp_path / "cache")
