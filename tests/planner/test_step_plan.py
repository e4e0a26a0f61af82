"""What a plan says in numbers, against closed forms; and its prediction, which is the simulator's, at the prices told."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planned import A100, gpt, lowered, placed, problem, ratios, toys

from gs_compile.placement import boundaries
from gs_compile.planner.decide import decide
from gs_compile.planner.plan import plan
from gs_compile.planner.problem import Problem
from gs_compile.planner.request import Request
from gs_compile.planner.simulate.prices import op_prices
from gs_compile.planner.simulate.simulator import predict
from gs_compile.planner.step_plan import nbytes_by_home
from gs_compile.planner.summary import paragraph

WORKLOAD = gpt(4, 512, sequence=256, vocabulary=5000)
SLOW = replace(A100, ssd_write_bytes_per_second=3e8, ssd_write_mixed_bytes_per_second=2e8)
ASKED = {"machine": SLOW, "host_memory": "160MiB", "micro_batch_size": 2, "num_micro_batches": 3}
fractions = st.sampled_from((0.0, 0.3, 0.5, 1.0))


@pytest.fixture(scope="module")
def found():
    return plan(WORKLOAD, machine=A100, host_memory="160MiB", micro_batch_size=2, num_micro_batches=3)


@given(toy=toys(), shares=st.tuples(fractions, fractions, fractions), alpha=fractions, separate=st.booleans())
def test_homes_hold_everything_once(toy, shares, alpha, separate):
    workload, number = toy
    homes = nbytes_by_home(placed(workload, number, ratios(*shares), alpha, separate=separate))

    def total(kind):
        return sum(nbytes for (each, _), nbytes in homes.items() if each == kind)

    assert total("w") == sum(size.numel * size.itemsize for size in workload.sizes)
    assert total("s") == workload.states_nbytes
    assert total("x") == number * boundaries.total(workload.x_nbytes, workload.num_layers)
    assert {kind for kind, _ in homes} <= {"w", "s", "x", "dw"}
    assert all(homes.values())


def test_a_step_is_simulated_once(monkeypatch):
    """Where all is given the notes are the first to ask for it."""
    asked, predicted = [], Problem.predicted
    monkeypatch.setattr(Problem, "predicted", lambda *given: asked.append(given) or predicted(*given))
    everything = dict.fromkeys(("parameter", "checkpoint", "optimizer"), 1.0)
    settings = {"machine": replace(A100, device="cpu", device_nbytes=0), "micro_batch_size": 1, "num_micro_batches": 3}
    given = plan(WORKLOAD, **settings, alpha=0.0, ratios=everything)
    assert given.notes[0].startswith("ratios and alpha are given")
    assert given.seconds > 0
    assert len(asked) == 1


@pytest.mark.parametrize(("durability", "often", "alpha"), [("step", "every step", 0.5), (10, "every 10 steps", 0.0)])
def test_commits_are_priced_and_explained(durability, often, alpha):
    """A mean step writes an Nth of what lives in memory; SSD has one more of what is there, and two of what is not."""
    durable, usual = (plan(WORKLOAD, **ASKED, alpha=alpha, durability=each) for each in (durability, "off"))
    homes, steps = Counter(durable.homes), durable.placement.durability
    in_memory = homes["s", "host"]  # parameters are narrow: they follow from their masters
    stored = homes["w", "ssd"] + homes["s", "ssd"]
    assert in_memory * stored > 0
    assert durable.traffic["ssd_write", "seal"] == in_memory // steps
    assert durable.written == in_memory // steps + stored + homes["x", "ssd"]
    assert homes["seal", "ssd"] == stored + 2 * in_memory
    assert durable.peaks["ssd"] >= stored + homes["seal", "ssd"]
    assert f" is written {often}, " in durable.notes[0]
    assert durable.seconds >= usual.seconds
    alike = usual.problem.updated_in(durable.placement.decision.layer_updates).solved(usual.num_micro_batches)
    assert durable.bound_seconds == pytest.approx(alike.seconds * (1 + _slower(durable.notes[0])), rel=1e-3)


@pytest.mark.parametrize("will_run", [True, False])
def test_a_plan_says_whose_code_was_not_timed(will_run):
    """Fault: it stood in the log of a run alone, where nobody looks who reads the plan."""
    known = replace(WORKLOAD.costs["e"], seconds=(1e-3, 1e-3))
    part = replace(WORKLOAD, costs={u: c if u in (1, "h") else known for u, c in WORKLOAD.costs.items()})
    in_memory = Request(host_memory="160MiB", alpha=0.0)
    for workload, words in ((part, "2 of 6 units (1, h)"), (WORKLOAD, "6 of 6" if will_run else "")):
        found = decide(problem(workload, A100, 2, request=in_memory, will_run=will_run))
        said = [each for each in found.notes if "was not timed" in each]
        assert found.is_solved
        assert len(said) == bool(words)
        assert words in "".join(said)
        assert words in paragraph(found)


def _slower(note):
    return float(note.split("%")[0].rsplit(" ", 1)[1]) / 100


def test_rates_are_of_the_whole_batch(found):
    assert found.seconds == found.simulation.seconds > 0
    assert found.tokens_per_second == pytest.approx(3 * 2 * 256 / found.seconds)
    forward = sum(cost.forward_flops for cost in found.workload.costs.values())
    assert found.flops_per_second == pytest.approx(3 * 3 * forward / found.seconds)


def test_lanes_are_busy_for_a_part_of_the_step(found):
    assert found.lanes.keys() >= {"compute", "h2d", "d2h", "ssd_read", "ssd_write", "cpu"}
    for seconds, share in found.lanes.values():
        assert 0 < share <= 1
        assert seconds == pytest.approx(share * found.seconds)


def test_what_is_written_is_what_is_on_ssd(found):
    """Parameters, states and checkpoints that live there, once a step each."""
    assert found.written == sum(nbytes for (_, tier), nbytes in found.homes.items() if tier == "ssd")
    assert found.written_per_day == pytest.approx(found.written * 86400 / found.seconds)


def test_wear(found):
    assert found.wear.endswith(" written to SSD in a day")
    years = 7.0
    machine = replace(A100, ssd_rated_nbytes=int(years * 365 * found.written_per_day))
    rated = replace(found, problem=found.problem.of(profile=machine))
    assert rated.wear.startswith(found.wear + "; the drives are rated for ")
    assert rated.wear.endswith(", 7.0 years of it")


@pytest.mark.parametrize(
    ("days", "words"), [(730, "2.0 years"), (364, "364.0 days"), (12, "12.0 days"), (0.5, "12.0 hours")]
)
def test_wear_is_told_in_the_unit_that_fits(found, days, words):
    rated = replace(found.profile, ssd_rated_nbytes=int(days * found.written_per_day))
    assert replace(found, problem=found.problem.of(profile=rated)).wear.endswith(f", {words} of it")


def test_nothing_written_is_no_wear():
    one_memory = replace(A100, device="cpu")
    resident = plan(gpt(2, 64, vocabulary=500), machine=one_memory, micro_batch_size=1, num_micro_batches=1)
    assert resident.written == 0
    assert resident.wear == "nothing is written to SSD"


def predicted(machine=A100, host_nbytes=None, shares=(0.0, 0.0, 0.0), alpha=0.25):
    placement = placed(WORKLOAD, 3, ratios(*shares), alpha, separate=machine.separate)
    return predict(lowered(WORKLOAD, placement)[-1], placement, WORKLOAD, machine, host_nbytes=host_nbytes), placement


@pytest.mark.parametrize(("machine", "shares"), [(SLOW, (0.0, 0.0, 0.0)), (A100, (1.0, 1.0, 0.0))])
def test_no_lane_works_longer_than_the_step(machine, shares):
    """As one step follows on another, what is put off from one is done in the next, however many steps that takes."""
    found, placement = predicted(machine, shares=shares)
    work: Counter[str] = Counter()
    for op, seconds in zip(found.program.ops, op_prices(found.program, placement, WORKLOAD, machine), strict=True):
        work[op.lane] += seconds
    assert found.seconds >= max(work["compute"], 0.99 * work["ssd_write"])
    assert found.busy["compute"] * found.seconds >= 0.999 * work["compute"]  # it may be slowed down
    assert all(share <= 1 + 1e-9 for share in found.busy.values())


def test_a_device_that_is_the_host_computes_in_line():
    """Issuing costs such a machine the time of its computation."""
    one_memory = replace(A100, device="cpu", op_seconds=1e-3)
    slow, fast = (predicted(replace(one_memory, op_seconds=s))[0].seconds for s in (1e-3, 0.0))
    assert slow > fast + 1e-3


def test_a_budget_makes_the_step_wait_for_its_memory():
    free, _ = predicted(SLOW)
    needed = dict(free.program.peaks)["host"]
    held, _ = predicted(SLOW, host_nbytes=needed)
    assert held.peaks["host"] <= held.room["host"] == held.program.slab_nbytes == needed
    assert free.room["host"] == free.program.slab_nbytes > needed  # writes may lag behind
    assert needed < free.peaks["host"] <= free.room["host"]
    assert held.seconds > free.seconds
