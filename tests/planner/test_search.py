"""Algorithm 1, and what is said where it finds nothing."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from cpu_work import work
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from planned import A100, GB, formulas, gpt, on
from standin import fails

from gs_compile.errors import OptionError, PlanError
from gs_compile.planner.lp.search import GROWTH, has_solution, search, shortfall
from gs_compile.planner.lp.solve import ProblemData, System
from gs_compile.planner.plan import plan
from gs_compile.planner.request import ALPHAS, Budgets, Request

SERVER = Budgets(host_nbytes=400 * GB, device_nbytes=40 * GB, ssd_nbytes=8000 * GB)
DESKTOP = Budgets(host_nbytes=20 * GB, device_nbytes=20 * GB, ssd_nbytes=1000 * GB)
XL = gpt(12, 2048)
ELSEWHERE = {"device_parameter": 0.0, "device_checkpoint": 0.0}  # than on the device
counted = cache(lambda: formulas(XL, A100))
of_eight_layers = cache(lambda: formulas(gpt(8, 1024, sequence=1024), A100))


def known(workload, profile):
    """The formulas of a model, whose programs are lowered once if it is the usual one."""
    return on(counted(), profile) if workload is XL and profile.separate else formulas(workload, profile)


def elsewhere(ratios=None, **asked):
    """A request that has nothing live on the device."""
    return Request(ratios={**ELSEWHERE, **(ratios or {})}, **asked)


def plainly(formula, budgets, request):
    """The paper's algorithm as it stands: every alpha of every n."""
    found, history = None, []
    for n in range(1, 200):
        alphas = (1.0,) if request.clip else ALPHAS[::3]
        fitting = filter(
            None, [System(ProblemData(formula, budgets, request), n, alpha).solution() for alpha in alphas]
        )
        solution = min(fitting, key=lambda each: each.seconds, default=None)
        history.append((n, solution))
        if solution is None or (found and solution.throughput < GROWTH * found.throughput):
            break
        found = solution
    return found, history


@settings(deadline=None, max_examples=2, phases=set(Phase) - {Phase.shrink})
@given(st.floats(5, 60), st.floats(1e9, 1e10), st.booleans(), st.booleans())
def test_leaving_alphas_out_changes_nothing(host, update, clip, roomy):
    """Of every third alpha there is."""
    profile = replace(
        A100,
        matmul_flops_per_second={"bf16": 2e13 if roomy else 6e13},
        update_elements_per_second=update,
        update_mixed_elements_per_second=update / 2,
    )
    budgets, request = replace(DESKTOP, host_nbytes=int(host * 1e8)), elsewhere(clip=clip, saturation="paper")
    formula = on(of_eight_layers(), profile)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("gs_compile.planner.request.ALPHAS", ALPHAS[::3])
        expected, history = plainly(formula, budgets, request)
        if expected is None:
            with pytest.raises(PlanError):
                search(ProblemData(formula, budgets, request))
            return
        found = search(ProblemData(formula, budgets, request))
    assert found.best.num_micro_batches == expected.num_micro_batches
    assert found.best.seconds == pytest.approx(expected.seconds, rel=2e-5)
    assert [n for n, _ in found.history] == [n for n, _ in history]
    for (_, mine), (_, plain) in zip(found.history, history, strict=True):
        assert (mine is None) == (plain is None)
        assert mine is None or mine.seconds == pytest.approx(plain.seconds, rel=2e-5)


def test_a_model_of_175_billion_parameters():
    """With little work."""
    workload = gpt(96, 12288)
    System(ProblemData(formulas(gpt(2, 512), A100), SERVER, Request()), 1, 0.0).solution()  # imports the solver
    times, found = work(lambda: search(ProblemData(formulas(workload, A100), SERVER, elsewhere(saturation="paper"))))
    assert times < 250
    assert workload.num_trained > 174e9
    assert [n for n, _ in found.history] == list(range(1, found.best.num_micro_batches + 2))
    growth = [b.throughput / a.throughput for (_, a), (_, b) in zip(found.history, found.history[1:], strict=False)]
    assert min(growth[:-1]) >= GROWTH > growth[-1]
    lanes = formulas(workload, A100).of(found.best.alpha, found.best.num_micro_batches).seconds
    compute = sum(lanes[phase, "compute"][0] for phase in ("forward", "backward"))
    assert compute > 0.9 * found.best.seconds  # saturated: it computes nearly all the time


def test_alpha_leaves_the_saturation_and_lowers_the_batch_that_reaches_it():
    """Section 6 of the paper."""
    free, without = (
        search(ProblemData(known(XL, A100), SERVER, Request(alpha=alpha, ratios={"optimizer": 0.0})))
        for alpha in (None, 0.0)
    )
    assert free.best.num_micro_batches < without.best.num_micro_batches
    assert free.best.throughput == pytest.approx(without.best.throughput, rel=0.05)


def test_the_search_ends_where_memory_does():
    """More micro-batches need more memory for their checkpoints, in host memory or on SSD."""
    fast = replace(A100, matmul_flops_per_second={"bf16": 4e15})
    request = Request(ratios=dict.fromkeys(("parameter", "checkpoint", "optimizer"), 0.0))
    found = search(ProblemData(known(XL, fast), replace(DESKTOP, ssd_nbytes=11 * GB), request))
    assert found.history[-1][1] is None
    assert found.best == [solution for _, solution in found.history if solution][-1]


# Errors --------------------------------------------------------------------------------------------------------------


def refused(workload, profile, budgets, request, num_micro_batches=None):
    with pytest.raises(PlanError) as caught:
        search(ProblemData(known(workload, profile), budgets, request), num_micro_batches)
    return caught.value.message


def test_a_model_that_fits_nowhere():
    said = refused(XL, A100, Budgets(host_nbytes=GB, device_nbytes=2 * GB, ssd_nbytes=5 * GB), Request())
    assert "gpt 12 x 2048 does not fit with 1 micro-batch of 1 and alpha 0: it needs" in said
    assert "of host memory" in said
    assert "more than it may use" in said
    assert said.endswith("Give it more")  # a micro-batch of one sample is the smallest
    more = refused(replace(XL, micro_batch_size=2), A100, Budgets(host_nbytes=GB, ssd_nbytes=5 * GB), Request())
    assert more.endswith("Give it more, or make micro_batch_size smaller")


def test_what_one_alpha_shows_of_memory_holds_for_others(monkeypatch):
    """Few are solved, and the answer is that of all."""
    solved, usual = [], System.optimum

    def counted(system, **settings):
        solved.append(system)
        return usual(system, **settings)

    monkeypatch.setattr(System, "optimum", counted)
    found = {}
    for host in (1.0, 2.0, 2.2, 2.4, 3.0):
        budgets = replace(DESKTOP, host_nbytes=int(host * GB))
        found[host] = any(
            System(ProblemData(known(XL, A100), budgets, Request()), 4, alpha).solution() for alpha in ALPHAS
        )
        solved.clear()
        assert has_solution(ProblemData(known(XL, A100), budgets, Request()), 4) == found[host]
        assert len(solved) < 8
    assert not found[1.0]
    assert found[3.0]


@pytest.mark.parametrize("tier", ["device", "host"])
def test_where_one_budget_is_exceeded_whatever_the_ratios_nothing_is_solved(monkeypatch, tier):
    budgets = replace(DESKTOP, **{f"{tier}_nbytes": 1 << 20})
    monkeypatch.setattr(System, "optimum", fails(AssertionError("solved")))
    assert not has_solution(ProblemData(known(XL, A100), budgets, Request()), 4)
    with pytest.raises(AssertionError, match="solved"):
        has_solution(ProblemData(known(XL, A100), DESKTOP, Request()), 4)


def test_what_is_short_is_said_of_each_tier():
    said = refused(XL, A100, replace(DESKTOP, device_nbytes=GB), Request())
    assert "of device memory" in said
    assert "of host memory" not in said
    request = Request(alpha=0.0, ratios=dict.fromkeys(("parameter", "checkpoint", "optimizer"), 0.0))
    said = refused(XL, A100, replace(DESKTOP, ssd_nbytes=GB), request)
    assert "of SSD" in said


def test_a_smaller_alpha_is_near():
    budgets = replace(DESKTOP, host_nbytes=int(2.8 * GB))
    said = refused(XL, A100, budgets, Request(alpha=0.9), num_micro_batches=4)
    assert "What would fit: alpha 0." in said
    near = float(said.split("alpha ")[-1])
    assert System(ProblemData(known(XL, A100), budgets, Request()), 4, near).solution()
    assert not System(ProblemData(known(XL, A100), budgets, Request()), 4, near + 0.01).solution()


def test_fewer_micro_batches_are_near():
    budgets = replace(DESKTOP, ssd_nbytes=11 * GB, host_nbytes=6 * GB)
    said = refused(XL, A100, budgets, Request(alpha=0.0), num_micro_batches=2000)
    near = int(said.split("What would fit: ")[1].split()[0])
    assert System(ProblemData(known(XL, A100), budgets, Request()), near, 0.0).solution()
    assert not System(ProblemData(known(XL, A100), budgets, Request()), near + 1, 0.0).solution()


@pytest.mark.parametrize("optimizer", [0.4, 1.0])
def test_other_ratios_are_near(optimizer):
    request = Request(ratios={"optimizer": optimizer})
    said = refused(XL, A100, replace(DESKTOP, host_nbytes=4 * GB), request)
    assert f"other ratios than optimizer {optimizer:g}" in said


def test_no_clipping_is_near():
    assert "no clipping" in refused(XL, A100, replace(DESKTOP, host_nbytes=4 * GB), Request(clip=True))


@pytest.mark.parametrize("asked", [{"clip": True}, {"accumulate": True}])
def test_where_all_updates_wait_no_other_alpha_is_near(asked):
    """Nor is a step without clipping that is asked for the same alpha."""
    said = refused(XL, A100, replace(DESKTOP, host_nbytes=4 * GB), Request(alpha=1.0, **asked))
    assert said.endswith("Give it more")


def test_nothing_is_near_where_only_more_memory_helps():
    assert "Give it more" in shortfall(ProblemData(known(XL, A100), replace(DESKTOP, host_nbytes=GB // 2), Request()))


def test_device_ratios_need_a_device_memory_and_masters():
    laptop = replace(A100, name="laptop", device="cpu", device_nbytes=0)
    given = {"micro_batch_size": 1, "num_micro_batches": 2}
    with pytest.raises(OptionError, match=r"the ratio device_checkpoint is 0\.5, but this device has no memory of its"):
        plan(XL, machine=laptop, ratios={"device_checkpoint": 0.5}, **given)
    wide = replace(A100, matmul_flops_per_second={"fp32": 1e12})
    with pytest.raises(OptionError, match="updated in the type they are computed in"):
        plan(gpt(2, 256, bf16=False), machine=wide, ratios={"device_parameter": 0.5}, **given)


def test_a_ratio_in_host_memory_alone_leaves_the_rest_on_ssd():
    request = Request(ratios={"parameter": 0.25})
    found = search(ProblemData(known(XL, A100), DESKTOP, request), 2).best.decision.ratios[0]
    assert found.parameter == 0.25
    assert found.on_device()["parameter"] == 0.0
    free = search(ProblemData(known(XL, A100), DESKTOP, Request()), 2).best.decision.ratios[0]
    assert free.on_device()["parameter"] > 0
    request = Request(ratios={"device_parameter": 0.125, "device_checkpoint": 0.0})
    found = search(ProblemData(known(XL, A100), DESKTOP, request), 2).best.decision.ratios[0]
    assert found.on_device() == {"parameter": 0.125, "checkpoint": 0.0}


def test_a_type_without_a_rate():
    assert "no matrix rate, only of bf16: add" in refused(gpt(2, 256, bf16=False), A100, DESKTOP, Request())
