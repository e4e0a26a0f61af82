"""Where a tiny GPT-2's data goes when nobody says it, and that the step then keeps what was planned."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from standin import fails
from tiered import Harness, adamw, gpt2, loss_of, moved, options, outcome, step, tokens

import gs_compile
from gs_compile.errors import MemoryBudgetError, NoFitError, PlanError
from gs_compile.planner import at_hand, decide, reasons
from gs_compile.planner.builder import planned_peak
from gs_compile.planner.cost import timing
from gs_compile.planner.cost.known_times import KnownTimes
from gs_compile.planner.measure.profile import Profile

KEEPS_CAPTURES = True
MACHINE = Path(__file__).parent.parent / "machine.json"
NUM_LAYERS = 4
MODEL = {"num_layers": NUM_LAYERS, "width": 128}
FREE = {"parameter": None, "checkpoint": None, "optimizer": None}
EVERYTHING = {"parameter": 1.0, "checkpoint": 1.0, "optimizer": 1.0}


@pytest.fixture
def unasked(monkeypatch):
    """The machine may not be measured, and nothing is solved."""

    monkeypatch.setattr(at_hand, "measured_profile", fails(AssertionError("asked")))
    monkeypatch.setattr(decide, "_best_clipping", fails(AssertionError("asked")))


def given(storage, **changes):
    """Options that leave ratios to the choice, but for those in `changes`."""
    machine = changes.pop("machine", None)
    found = options(storage, **{"recompute": "auto", **changes, "ratios": FREE | changes.pop("ratios", {})})
    return found if machine is None else found | {"machine": machine}


def needed(harness, storage, make, **changes):
    """The bytes of host memory of a step."""
    with harness.fresh(make, options(storage, **changes)) as optimizer:
        for number in range(2):  # the second has late updates of the first
            step(harness.model, optimizer, tokens(number))
        return planned_peak(optimizer.engine.snapshots[-1], "host")


def tight(harness, storage, make=adamw, *, ratios=None, **changes):
    """A budget between the least that the step needs and all that it could use."""
    all_ratios = [dict.fromkeys(EVERYTHING, ratio) | (ratios or {}) for ratio in (0.0, 1.0)]
    return sum(needed(harness, storage, make, **changes, ratios=each) for each in all_ratios) // 2


def least(harness, storage, make=adamw, **changes):
    """The bytes that a refusal names."""
    with (
        harness.fresh(make, given(storage, host_memory=1, **changes)) as optimizer,
        pytest.raises(MemoryBudgetError) as refusal,
    ):
        step(harness.model, optimizer, tokens(0))
    return int(re.search(r"\((\d+) bytes\) of it at least", str(refusal.value))[1])


@pytest.fixture(scope="module")
def budget(harness, storage):
    return tight(harness, storage)


# Without the linear program -------------------------------------------------------------------------------------------


def test_what_fits_is_in_host_memory_and_the_machine_is_not_measured(harness, storage, unasked, slow_code, caplog):
    with caplog.at_level(logging.INFO, "gs_compile.planner.run"), harness.fresh(adamw, given(storage)) as optimizer:
        step(harness.model, optimizer, tokens(0))
        planning = optimizer.engine.planning
        assert not planning.planned.plan.is_solved
        assert not planning.uses_ssd
        assert not planning.placement.has_late
        described = planning.describe(optimizer.engine.snapshots[-1])
        assert "(alpha 0)" in described
        assert "planned:" not in described
    assert caplog.messages == [
        "all that may be in host memory fits there: nothing was planned; 12 of 12 layer inputs keep their activations in "
        "host memory"
    ]


def test_what_is_given_is_not_planned(harness, storage, unasked, caplog):
    ratios = {"parameter": 0.0, "checkpoint": 0.5, "optimizer": 0.0}
    everything = given(storage, alpha=0.5, recompute="all", ratios=ratios)
    with caplog.at_level(logging.INFO, "gs_compile.planner.run"), harness.fresh(adamw, everything) as optimizer:
        step(harness.model, optimizer, tokens(0))
        assert optimizer.engine.placement.activations.checkpoints("host") == 0.5
        assert optimizer.engine.planning.ssd_nbytes > 0
    assert caplog.messages == ["ratios and alpha are given: nothing was planned"]


def test_too_little_memory_is_refused_before_anything_is_measured(harness, storage, unasked):
    with (
        harness.fresh(adamw, given(storage, host_memory="2MiB")) as optimizer,
        pytest.raises(MemoryBudgetError, match=r"host_memory is 2\.0 MiB; this step needs .* with ratios parameter 0"),
    ):
        step(harness.model, optimizer, tokens(0))


def test_too_little_memory_for_clipping_says_what_would_fit_without(harness, storage, unasked):
    make = partial(adamw, max_grad_norm=0.5)
    budget = least(harness, storage, make, clip="delayed") - 1
    with (
        harness.fresh(make, given(storage, host_memory=budget, clip="delayed")) as optimizer,
        pytest.raises(MemoryBudgetError, match=r"the largest alpha possible here is 0\.\d\d, not 1 \(max_grad_norm"),
    ):
        step(harness.model, optimizer, tokens(0))


# By the linear program ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("separate_device", "clip"),
    [
        (False, None),
        # its parts: a device in test_device_homes.py, and speculation with the vocabulary below
        pytest.param(True, "speculative", marks=pytest.mark.slow),
        pytest.param(False, "chosen", marks=pytest.mark.slow),
        pytest.param(True, None, marks=pytest.mark.slow),
        pytest.param(False, "delayed", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_what_does_not_fit_is_planned_and_learns_the_same(harness, storage, budget, caplog, separate_device, clip):
    """And a step moves the bytes that the plan says."""
    make = partial(adamw, max_grad_norm=0.5) if clip else adamw
    changes = {"separate_device": separate_device}
    if clip or separate_device:
        budget = tight(harness, storage, make, alpha=float(clip is not None), **changes)
    changes["clip"] = None if clip == "chosen" else clip
    if clip == "speculative":
        changes["alpha"] = 0.3  # the best of all is looked for in the case without clipping
    with (
        caplog.at_level(logging.INFO, "gs_compile.planner.run"),
        harness.fresh(make, given(storage, host_memory=budget, **changes)) as optimizer,
    ):
        for number in range(3):
            step(harness.model, optimizer, tokens(number))
        engine = optimizer.engine
        program, placement, plan = engine.snapshots[-1], engine.placement, engine.planning.planned.plan
        nbytes = moved(harness.model, optimizer, tokens(3))
        optimizer.synchronize()
        found = outcome(harness.model, optimizer, [], [])
        assert engine.tiers.slab.nbytes <= budget
        described = engine.planning.describe(program)
    assert plan.placement == placement
    assert clip or plan.traffic == nbytes.planned == nbytes.traced
    assert engine.planning.ssd_nbytes > 0
    assert any(plan.ratios.values())
    assert placement.clip == (clip is not None)
    assert placement.speculative == (clip == "speculative" or "Clipping is speculative" in caplog.text)
    assert (clip == "chosen") == ("with delayed updates, " in caplog.text)
    assert plan.alpha == 1.0 if clip and not placement.speculative else plan.alpha <= 0.5
    assert f"(alpha {plan.alpha:g})" in described
    assert re.search(rf"^planned: +{plan.seconds:.3g} s a step$", described, re.MULTILINE)
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith(
        "Plan of model on for tests, vertical: 3 micro-batches of 2 samples of 8 tokens, alpha "
    )
    assert dict(program.peaks)["host"] <= budget
    changes |= {"clip": "delayed", "alpha": float(clip is not None)}
    in_memory = options(storage, ratios=EVERYTHING, **changes)
    assert found.differences(replace(harness.train(make, in_memory, num_steps=4), losses=[], norms=[])) == []


def test_gradients_that_wait_for_the_norm_go_to_ssd_where_host_memory_has_no_room(harness, storage, caplog):
    """Unless somebody has said how updates are to run."""
    make = partial(adamw, max_grad_norm=0.5)
    budget = least(harness, storage, make, clip="delayed") - 1
    with harness.fresh(make, given(storage, host_memory=budget)) as optimizer:
        losses = [step(harness.model, optimizer, tokens(number)) for number in range(3)]
        engine = optimizer.engine
        assert engine.placement.accumulates
        assert engine.planning.planned.facts["accumulates"]
        found = outcome(harness.model, optimizer, losses, [])
        assert engine.tiers.slab.nbytes <= budget
    assert reasons.STORES_GRADIENTS in caplog.messages
    in_memory = options(storage, ratios=EVERYTHING, clip="delayed")
    assert found.differences(replace(harness.train(make, in_memory, num_steps=3), norms=[])) == []


@pytest.mark.parametrize(
    ("separate_device", "clip"),
    [
        pytest.param(False, None, marks=pytest.mark.slow),
        pytest.param(True, "delayed", marks=pytest.mark.slow),
        (False, "speculative"),
    ],
    ids=str,
)
def test_a_vocabulary_larger_than_layers_fits_with_updates_in_pieces_and_learns_the_same(
    storage, separate_device, clip
):
    """In less host memory than whole updates need."""
    harness = Harness(partial(gpt2, num_layers=2, width=64, vocab_size=2500, tied=False))
    make = partial(adamw, max_grad_norm=0.5) if clip else adamw
    changes = {"separate_device": separate_device, "clip": clip, "alpha": 1.0 if clip == "delayed" else 0.0}
    whole = needed(harness, storage, make, **changes)
    budget = least(harness, storage, make, **changes)
    assert budget < 0.8 * whole
    with harness.fresh(make, given(storage, host_memory=budget, **changes)) as optimizer:
        losses = [step(harness.model, optimizer, tokens(number)) for number in range(3)]
        engine = optimizer.engine
        assert engine.placement.decision.layer_updates > 1
        found = outcome(harness.model, optimizer, losses, [])
        assert engine.tiers.slab.nbytes <= budget
    in_memory = options(storage, ratios=EVERYTHING, **changes)
    assert found.differences(replace(harness.train(make, in_memory, num_steps=3), norms=[])) == []


def test_a_machine_from_a_file(harness, storage, budget, tmp_path):
    named = replace(Profile.load(MACHINE), name="from a file")
    named.save(tmp_path / "mine.json")
    with harness.fresh(
        adamw, given(storage, host_memory=budget, alpha=0.0, machine=tmp_path / "mine.json")
    ) as optimizer:
        step(harness.model, optimizer, tokens(0))
        assert optimizer.engine.planning.planned.plan.profile == named


def test_code_is_timed_once_for_a_machine_in_a_file(harness, storage, budget, tmp_path, monkeypatch):
    """Runs after the first, which plan with the same figures, plan the same."""
    machine, asked, measure = tmp_path / "machine.json", [], timing._timed
    machine.write_text(MACHINE.read_text())
    monkeypatch.setattr(at_hand, "KnownTimes", KnownTimes)
    monkeypatch.setattr(timing, "_timed", lambda *given: asked.append(given[2].unit) or measure(*given))
    monkeypatch.setattr(timing, "_is_as_fast", lambda *_: True)
    times = []
    for named in (machine, machine, Profile.load(machine)):
        with harness.fresh(adamw, given(storage, host_memory=budget, machine=named, alpha=0.0)) as optimizer:
            step(harness.model, optimizer, tokens(0))
        times.append(len(asked))
    assert 0 < times[0] == times[1] < times[2]
    assert {path.name for path in tmp_path.iterdir()} == {"machine.json", "machine.json.code"}


@pytest.mark.parametrize(
    ("broken", "error"),
    [("problem.search", NoFitError("nothing fits")), ("decide.choose", MemoryBudgetError("no program fits"))],
    ids=["infeasible", "no program"],
)
def test_what_fits_runs_where_the_linear_program_finds_nothing(
    harness, storage, budget, monkeypatch, caplog, broken, error
):
    monkeypatch.setattr(f"gs_compile.planner.{broken}", fails(error))
    with (
        caplog.at_level(logging.INFO, "gs_compile.planner.run"),
        harness.fresh(adamw, given(storage, host_memory=budget)) as optimizer,
    ):
        step(harness.model, optimizer, tokens(0))
        assert {part.tier for unit in optimizer.engine.placement.units for part in unit.w.values()} == {"ssd"}
        assert not optimizer.engine.planning.planned.plan.is_solved
    said = [record.message for record in caplog.records if record.name == "gs_compile.planner.run"]
    assert said == ["no plan fits by the linear program's bounds: host memory keeps the least it can"]


def test_what_is_wrong_with_a_plan_is_told(harness, storage, budget, monkeypatch):
    """Only that nothing fits has another way out."""
    monkeypatch.setattr("gs_compile.planner.problem.search", fails(PlanError("no matrix rate")))
    with (
        harness.fresh(adamw, given(storage, host_memory=budget)) as optimizer,
        pytest.raises(PlanError, match="no matrix rate"),
    ):
        step(harness.model, optimizer, tokens(0))


def test_a_first_batch_that_is_larger_than_one_evaluated_before_it(harness, storage):
    """What the plan for the smaller one has put into the memory that a step needs, goes to SSD."""
    losses = []
    for evaluates in (False, True):
        with harness.fresh(adamw, given(storage, host_memory="4700KiB", micro_batch_size=32, alpha=0.0)) as optimizer:
            if evaluates:
                with torch.no_grad():
                    loss_of(harness.model, tokens(0, 1))
            losses.append(step(harness.model, optimizer, tokens(1, 64)))
    assert losses[0] == losses[1]


@pytest.mark.parametrize("schedule", ["horizontal", pytest.param("lifetime", marks=pytest.mark.slow)])
def test_the_baselines_have_the_linear_program_too(harness, storage, schedule):
    ratios = {"gradient": 1.0}
    budget = tight(harness, storage, schedule=schedule, ratios=ratios)
    with harness.fresh(adamw, given(storage, schedule=schedule, host_memory=budget, ratios=ratios)) as optimizer:
        step(harness.model, optimizer, tokens(0))
        engine = optimizer.engine
        assert engine.planning.planned.plan.ratios["gradient"] == 1.0
        assert any(engine.planning.planned.plan.ratios[name] for name in EVERYTHING)
        assert dict(engine.snapshots[-1].peaks)["host"] <= budget


# What is said of a model at hand --------------------------------------------------------------------------------------


def test_what_a_step_will_take(harness, storage):
    """Also where nothing had to be planned."""
    with harness.fresh(adamw, given(storage)) as optimizer:
        step(harness.model, optimizer, tokens(0))
        engine = optimizer.engine
        found = engine.planning.predict(*engine.latest)
        assert found.seconds > 0
        assert found.program.ops == engine.snapshots[-1].ops
        assert found.peaks["host"] <= engine.planning.host_nbytes


def test_a_live_model_is_planned_before_and_after_it_has_left(harness, storage):
    """Its shapes stay when its values have gone: they are all that a plan looks at."""
    settings = {"machine": MACHINE, "sequence": 8, "micro_batch_size": 2, "num_micro_batches": 3, "alpha": 0.0}
    before = gs_compile.plan(harness.model, **settings)
    with harness.fresh(adamw, given(storage)) as optimizer:
        step(harness.model, optimizer, tokens(0))
        after = gs_compile.plan(harness.model, **settings)
        assert after.seconds == before.seconds
        assert after.placement == before.placement
        assert after.workload.sizes == before.workload.sizes
        assert [size.numel for size in before.workload.sizes] == [u.numel for u in optimizer.engine.placement.units]
        step(harness.model, optimizer, tokens(1))  # and the plan has left it alone
