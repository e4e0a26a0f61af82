"""The linear program against exhaustive search, its multipliers as bounds of others, and what must hold of any plan."""

from __future__ import annotations

import itertools
from dataclasses import replace

import cvxpy
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planned import A100, GB, formulas, gpt, lowered, on, placed
from tiers import peaks_of

from gs_compile.placement.traffic import traffic
from gs_compile.planner.lp.counting import CLASSES
from gs_compile.planner.lp.search import best_for
from gs_compile.planner.lp.solve import TRAFFIC_PRICE, ProblemData, System, _pair, short
from gs_compile.planner.request import Budgets, Request
from gs_compile.planner.step_plan import nbytes_by_home

ROOMY = Budgets(host_nbytes=400 * GB, device_nbytes=40 * GB, ssd_nbytes=8000 * GB)
ALL = np.eye(7)[0]
SMALL = gpt(3, 512, sequence=256, vocabulary=2000)
RATES = ("ssd_read", "ssd_write", "h2d", "d2h")
ELSEWHERE = Request(ratios={"device_parameter": 0.0, "device_checkpoint": 0.0})  # than on the device


def machine(draw):
    """A random machine; `draw(low, high)` gives numbers."""
    read, write, down, up = (draw(1e8, 1e10) for _ in range(4))
    update = draw(1e8, 1e10)
    separate = draw(0, 1) < 0.7
    links = {"h2d": down, "d2h": up} if separate else {"h2d": float("inf"), "d2h": float("inf")}
    rates = {"ssd_read": read, "ssd_write": write, **links}
    return replace(
        A100,
        device="cuda" if separate else "cpu",
        matmul_flops_per_second=dict.fromkeys(("bf16", "fp32"), draw(1e12, 1e14)),
        **{f"{lane}_bytes_per_second": rate for lane, rate in rates.items()},
        **{f"{lane}_mixed_bytes_per_second": rate * draw(0.3, 1.0) for lane, rate in rates.items()},
        update_elements_per_second=update,
        update_mixed_elements_per_second=update * draw(0.3, 1.0),
        compute_mixed_speed=draw(0.5, 1.0),
    )


def on_host(solution):
    """Its ratios in host memory, by class."""
    given = solution.decision.ratios[0].given()
    return {name: given[name] for name in CLASSES}


def memory(known, n, alpha, point):
    """Bytes of host memory, of plain formulas."""
    return (known.of(alpha, n).alive["host"] @ np.atleast_2d(point).T).max(axis=0)


def together(x, y, a, b):
    """Seconds of two lanes that run side by side, at speeds a and b while both do, or by turns."""
    first_done = np.minimum(x / a, y / b)
    return np.minimum(first_done + np.maximum(x - first_done * a, 0) + np.maximum(y - first_done * b, 0), x + y)


def step_seconds(known, n, alpha, points):
    """Of many points at a time, without the rows of the linear program."""
    needed = {key: array @ points.T for key, array in known.of(alpha, n).seconds.items()}
    speeds, total = known.profile.speeds(), 0.0
    for phase in ("forward", "backward"):
        mine = {lane: each for (of, lane), each in needed.items() if of == phase}
        pairs = [("ssd_read", "ssd_write"), ("h2d", "d2h"), ("cpu", "compute"), ("compute", "d2h")]
        total += np.max(
            [together(mine[x], mine[y], speeds.get((x, y), 1.0), speeds.get((y, x), 1.0)) for x, y in pairs], axis=0
        )
    return total


STEP = 1 / 20
GRID = np.array([(1.0, *point, 0.0, 0.0, 0.0) for point in itertools.product(np.arange(21) / 20, repeat=3)])


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 8))])
def test_no_point_of_a_fine_grid_is_better(seed):
    """25 machines a seed, 200 in all, and a model for those with device memory and one for the others."""
    numbers, gaps = np.random.default_rng(seed), []

    def draw(low, high):
        if not low:
            return float(numbers.uniform(low, high))
        return float(np.exp(numbers.uniform(np.log(low), np.log(high))))

    models = {}
    for _ in range(25):
        profile, n = machine(draw), int(numbers.integers(1, 20))
        if profile.separate not in models:
            layers, hidden = int(numbers.integers(1, 5)), int(numbers.choice([256, 384, 512]))
            workload = gpt(layers, hidden, sequence=256, vocabulary=1000, bf16=bool(numbers.integers(2)))
            models[profile.separate] = formulas(workload, profile)
        known = on(models[profile.separate], profile)
        alpha = float(numbers.choice([0.0, 0.2, 0.5, 1.0]))
        least, most = (float(memory(known, n, alpha, np.array([1.0, *[r] * 3, 0, 0, 0]))[0]) for r in (0, 1))
        host = int(least + numbers.uniform(0.05, 1.05) * max(most - least, 1)) + 1
        solution = System(ProblemData(known, replace(ROOMY, host_nbytes=host), ELSEWHERE), n, alpha).solution()
        grid = step_seconds(known, n, alpha, GRID[memory(known, n, alpha, GRID) <= host])
        assert solution.seconds <= grid.min() * (1 + 1e-5)
        found = np.array(
            [1.0, *(on_host(solution)[name] for name in ("checkpoint", "parameter", "optimizer")), 0, 0, 0]
        )
        assert solution.seconds == pytest.approx(step_seconds(known, n, alpha, found[None])[0], rel=1e-9)
        assert memory(known, n, alpha, found)[0] <= host * (1 + 1e-6)
        # The point of the grid below it takes less memory, and no more time than a step of the grid can cost.
        steepest = sum(float(np.abs(array[1:]).sum()) for array in known.of(alpha, n).seconds.values())
        assert grid.min() <= solution.seconds + 2 * STEP * steepest
        gaps.append(float(grid.min() / solution.seconds - 1))
    assert np.median(gaps) < STEP


@given(*[st.floats(0.01, 100)] * 2, *[st.floats(0.05, 1)] * 2)
def test_two_lanes_that_disturb_each_other(x, y, a, b):
    assert max(float(row[0]) for row in _pair(x * ALL, y * ALL, a, b)) == pytest.approx(together(x, y, a, b))


# What must hold ------------------------------------------------------------------------------------------------------

RESOURCES = ("host_nbytes", "device_nbytes", "ssd_nbytes", "ssd", *RATES, "update", "compute")


def richer(profile, budgets, resource, part):
    """The same with `part` more of one resource."""
    if resource.endswith("_nbytes"):
        return profile, replace(budgets, **{resource: round(getattr(budgets, resource) * (1 + part))})
    names = {
        "ssd": [f"ssd_{way}{mixed}_bytes_per_second" for way in ("read", "write") for mixed in ("", "_mixed")],
        "update": ["update_elements_per_second", "update_mixed_elements_per_second"],
        **{lane: [f"{lane}{mixed}_bytes_per_second" for mixed in ("", "_mixed")] for lane in RATES},
    }
    if resource == "compute":
        flops = {dtype: rate * (1 + part) for dtype, rate in profile.matmul_flops_per_second.items()}
        memory = profile.memory_bytes_per_second * (1 + part)
        return replace(profile, matmul_flops_per_second=flops, memory_bytes_per_second=memory), budgets
    return replace(profile, **{name: getattr(profile, name) * (1 + part) for name in names[resource]}), budgets


@pytest.fixture(scope="module")
def xl():
    return formulas(gpt(12, 2048), A100)


@given(st.integers(2, 30), st.integers(2, 30), *[st.sampled_from([0.01, 0.1, 0.25, 0.4, 0.5])] * 2, st.integers(5, 40))
def test_the_multipliers_of_one_program_bound_another(xl, n, other, alpha, another, host):
    """Whatever the alpha and the micro-batches, and tightly that of their own."""
    budgets = replace(ROOMY, host_nbytes=host * GB, wear_bytes_per_second=1e9 if host % 2 else None)
    solution = System(ProblemData(xl, budgets, Request()), n, alpha).solution()
    for number, part in ((n, alpha), (other, another)):
        system = System(ProblemData(xl, budgets, Request()), number, part)
        bound = float(system.least(system.lagrangian(solution.multipliers[None]))[0])
        assert bound <= system.solution().seconds * (1 + 1e-6)
    own = System(ProblemData(xl, budgets, Request()), n, alpha)
    apart = TRAFFIC_PRICE * own.unit_seconds  # the multipliers are those of seconds and that price of traffic
    found = own.least(own.lagrangian(solution.multipliers[None]))[0]
    assert found == pytest.approx(solution.seconds, rel=1e-6, abs=apart)


@given(st.data(), st.sampled_from(RESOURCES), st.integers(1, 12), st.booleans())
def test_more_of_anything_never_makes_it_slower(data, resource, n, device):
    profile = machine(lambda low, high: data.draw(st.floats(low, high)))
    if not profile.separate and resource in ("h2d", "d2h"):
        resource = "ssd"
    host_nbytes = data.draw(st.integers(20_000_000, 400_000_000))
    budgets = Budgets(host_nbytes=host_nbytes, device_nbytes=100_000_000, ssd_nbytes=150_000_000)
    better, more = richer(profile, budgets, resource, data.draw(st.floats(0.001, 1)))
    known = formulas(SMALL, profile)
    for alpha in (0.0, 0.3, 1.0):
        old = System(ProblemData(known, budgets, Request() if device else ELSEWHERE), n, alpha).solution()
        new = System(ProblemData(on(known, better), more, Request() if device else ELSEWHERE), n, alpha).solution()
        assert old is None or new.seconds <= old.seconds * (1 + 3e-6)


def test_what_does_not_fit_is_none(xl):
    budgets = replace(ROOMY, host_nbytes=4 * GB)
    found = [System(ProblemData(xl, budgets, ELSEWHERE), 8, alpha).solution() for alpha in (0.0, 0.2, 1.0)]
    assert [each is None for each in found] == [False, False, True]
    assert (
        System(ProblemData(formulas(SMALL, A100), replace(ROOMY, device_nbytes=0), ELSEWHERE), 1, 0.0).solution()
        is None
    )


def test_a_full_ssd_keeps_more_in_host_memory(xl):
    """All on SSD would not fit there."""
    host = replace(ROOMY, host_nbytes=20 * GB)
    roomy, full = (
        System(ProblemData(xl, replace(host, ssd_nbytes=ssd * GB), ELSEWHERE), 60, 0.0).solution() for ssd in (100, 6)
    )
    kept = [sum(on_host(solution).values()) for solution in (roomy, full)]
    assert kept[0] < kept[1] or full.seconds >= roomy.seconds
    assert (
        System(ProblemData(xl, replace(ROOMY, host_nbytes=4 * GB, ssd_nbytes=6 * GB), ELSEWHERE), 60, 0.0).solution()
        is None
    )


def test_traffic_is_saved_where_time_is_not():
    """With all the time in the world for the SSD, host memory is used nevertheless."""
    slow = replace(A100, matmul_flops_per_second={"bf16": 1e10})
    solution = System(ProblemData(formulas(SMALL, slow), ROOMY, ELSEWHERE), 2, 0.0).solution()
    assert all(ratio == pytest.approx(1.0) for ratio in on_host(solution).values())


def test_wear_makes_a_step_wait_or_write_less(xl):
    budgets = replace(ROOMY, host_nbytes=8 * GB)
    each_rate = (replace(budgets, wear_bytes_per_second=rate) for rate in (None, 1e8))
    free, worn = (System(ProblemData(xl, each, ELSEWHERE), 8, 0.1).solution() for each in each_rate)
    point = np.array([1.0, *(on_host(worn)[name] for name in ("checkpoint", "parameter", "optimizer")), 0, 0, 0])
    written = float(xl.of(0.1, 8).written @ point)
    assert worn.seconds > free.seconds
    assert written / worn.seconds <= 1e8 * (1 + 1e-6)


def test_spare_device_memory_is_a_home_if_asked_for(xl):
    without, with_device = (
        System(ProblemData(xl, ROOMY, asked), 4, 0.0).solution() for asked in (ELSEWHERE, Request())
    )
    assert set(without.decision.ratios[0].on_device().values()) == {0.0}
    assert max(with_device.decision.ratios[0].on_device().values()) > 0
    assert with_device.seconds <= without.seconds * (1 + 1e-6)
    for name, ratio in with_device.decision.ratios[0].on_device().items():
        assert ratio + on_host(with_device)[name] <= 1 + 1e-6


def test_what_is_short_is_counted(xl):
    budgets = Budgets(host_nbytes=1 * GB, device_nbytes=40 * GB, ssd_nbytes=800 * GB)
    needed = short(ProblemData(xl, budgets, ELSEWHERE), 4, 0.0)
    assert set(needed) == {"host"}
    enough = replace(budgets, host_nbytes=budgets.host_nbytes + needed["host"] + 4096)
    assert System(ProblemData(xl, enough, ELSEWHERE), 4, 0.0).solution()
    assert not System(
        ProblemData(xl, replace(enough, host_nbytes=enough.host_nbytes - 10**6), ELSEWHERE), 4, 0.0
    ).solution()


@pytest.mark.parametrize(("host", "n", "alpha"), [(3, 2, 0.0), (5, 6, 0.3), (9, 12, 0.15), (8, 3, 1.0)])
def test_the_program_of_a_plan_keeps_its_budgets(xl, host, n, alpha):
    """As it is counted when it is lowered, and with little of host memory left unused."""
    workload, budgets = xl.workload, Budgets(host_nbytes=host * GB, device_nbytes=12 * GB, ssd_nbytes=20 * GB)
    solution = System(ProblemData(xl, budgets, ELSEWHERE), n, alpha).solution()
    placement = placed(workload, n, solution.decision.ratios[0], alpha, separate=True)
    peaks = peaks_of(lowered(workload, placement)[-1].ops, placement)
    for tier, peak in peaks.items():
        assert peak <= getattr(budgets, f"{tier}_nbytes")
    if min(on_host(solution).values()) < 1:
        assert peaks["host"] >= 0.93 * budgets.host_nbytes


def test_what_the_linear_program_keeps_off_a_tier_is_not_there():
    """0 bytes of a class on a tier are 0 bytes in the placement, and in what its program moves (fault 21)."""
    known = formulas(SMALL, A100)
    none, all_of_it = ({"parameter": r, "checkpoint": r, "optimizer": r} for r in (0.0, 1.0))
    for ratios, empty in ((none, "host"), (all_of_it, "ssd")):
        solution = System(ProblemData(known, ROOMY, Request(ratios=ratios)), 3, 0.3).solution()
        placement = placed(SMALL, 3, solution.decision.ratios[0], 0.3, separate=True)
        stored = nbytes_by_home(placement)
        assert not [kind for kind, tier in stored if tier == empty and kind != "dw"]
        moved = traffic(lowered(SMALL, placement)[-1], placement)
        assert (empty == "ssd") == (not any(lane.startswith("ssd") for lane, _ in moved))


def test_split_masters_are_never_slower_where_parameters_live_elsewhere():
    """Of those on the device the planner asks for both: split ones come from there for every update."""
    numbers, models, gains = np.random.default_rng(3), {}, []

    def draw(low, high):
        return float(numbers.uniform(low, high) if not low else np.exp(numbers.uniform(np.log(low), np.log(high))))

    halves = (replace(size, state_itemsize=10, has_master=False) for size in SMALL.sizes)
    split = replace(SMALL, sizes=tuple(halves))
    for _ in range(10):
        profile, n = machine(draw), int(numbers.integers(1, 8))
        if profile.separate not in models:
            models[profile.separate] = [formulas(workload, profile) for workload in (SMALL, split)]
        budgets = replace(ROOMY, host_nbytes=int(draw(100e6, 400e6)))
        seconds = [
            best_for(ProblemData(on(known, profile), budgets, ELSEWHERE), n).seconds
            for known in models[profile.separate]
        ]
        gains.append(seconds[0] / seconds[1])
    assert min(gains) > 1 - 1e-6
    assert max(gains) > 1.15


@pytest.mark.parametrize("speculative", [False, True])
@pytest.mark.parametrize("profile", [A100, replace(A100, device="cpu")], ids=["device", "host"])
def test_the_computation_is_the_same_for_all_alphas(profile, speculative):
    """The search starts from what it takes, before any alpha is solved."""
    known = formulas(SMALL, profile, speculative=speculative)
    for n in (1, 2, 5):
        systems = [System(ProblemData(known, ROOMY, Request()), n, alpha) for alpha in (0.0, 0.13, 0.5, 1.0)]
        assert [each.computing for each in systems] == pytest.approx([systems[0].computing] * 4)
        assert all(each.solution().seconds >= each.computing for each in systems)


@pytest.mark.parametrize("number", [1, 2])
def test_what_the_solver_cannot_tell_it_is_asked_again(monkeypatch, number):
    """HiGHS says that it does not know of some that nearly fit, unless it takes them as they are, or by another method."""
    known, usual, asked = formulas(SMALL, A100), cvxpy.Problem.solve, []
    expected = System(ProblemData(known, ROOMY, ELSEWHERE), 4, 0.5).solution()

    def unknown(problem, **settings):
        asked.append({name: settings[name] for name in ("presolve", "highs_options") if name in settings})
        if len(asked) <= number:
            raise ValueError("Cannot unpack invalid solution")
        return usual(problem, **settings)

    monkeypatch.setattr(cvxpy.Problem, "solve", unknown)
    found = System(ProblemData(known, ROOMY, ELSEWHERE), 4, 0.5).solution()
    assert found.seconds == pytest.approx(expected.seconds)
    assert asked == [{}, {"presolve": "off"}, {"highs_options": {"solver": "ipm"}}][: number + 1]
