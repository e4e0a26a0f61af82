"""The planner's choice beside placements that are asked for by hand within the same memory, all by the simulator: what
`benchmarks.chosen` measures, with no clock.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from planned import A100, SSD_RATES, gpt, problem
from test_saved_plans import levelled

from gs_compile.errors import MemoryBudgetError
from gs_compile.options import Ratios
from gs_compile.placement.workload import Workload
from gs_compile.planner.choose import choose
from gs_compile.planner.decide import decide
from gs_compile.planner.measure.profile import Profile
from gs_compile.planner.problem import Problem
from gs_compile.planner.request import Request

MOST_SLOWER = 1.02  # times the fastest by hand: `benchmarks.chosen` has the same bound
BY_HAND = {
    **{f"homes={ratio}": {"ratios": Ratios(checkpoint=ratio, parameter=ratio, optimizer=ratio)} for ratio in (0, 0.5)},
    **{f"alpha={alpha}": {"alpha": alpha} for alpha in (0.0, 0.3, 1.0)},
    **{f"recompute={word}": {"recompute": word} for word in ("all", "none")},
}


def machine(ssd_bytes_per_second: float) -> Profile:
    """A CPU of two cores, on which what computes has half of its speed beside copies."""
    cpu = replace(A100, device="cpu", device_nbytes=0, matmul_flops_per_second={"fp32": 1.6e11})
    updates = {"update_elements_per_second": 4e8, "update_mixed_elements_per_second": 2e8}
    rates = dict.fromkeys(SSD_RATES, ssd_bytes_per_second)
    return replace(cpu, memory_bytes_per_second=1e10, compute_mixed_speed=0.5, **updates, **rates)


def model(num_layers: int, hidden: int, vocabulary: int = 8000) -> Workload:
    return levelled(gpt(num_layers, hidden, sequence=256, vocabulary=vocabulary, bf16=False), hidden)


def part_of(workload: Workload, part: float) -> int:
    """Bytes: a part of parameters and states, which are fp32."""
    return int(part * 12 * sum(size.num_trained for size in workload.sizes))


def test_a_placement_with_nothing_in_memory_is_a_candidate_of_its_own(monkeypatch):
    """What `boundary` makes of it no linear program knows: parameters that stay from the forward to the backward."""
    workload = model(4, 256, vocabulary=2000)
    known = {"request": Request(alpha=0.0), "host_nbytes": part_of(workload, 0.6), "layer_updates": 8}
    given = problem(workload, machine(2e8), 8, **known)
    found = choose(given)
    assert given.best.decision.ratios[0].checkpoint > 0.5 > 0.0 == found.ratios["checkpoint"]
    monkeypatch.setattr(Problem, "emptied", property(lambda problem: problem))
    assert choose(given).seconds / found.seconds > 1.05


@pytest.mark.slow
@pytest.mark.parametrize("bytes_per_second", [1e8, 2e8])
@pytest.mark.parametrize("part", [0.6, 0.75])
@pytest.mark.parametrize("number", [4, 16])
@pytest.mark.parametrize(("num_layers", "hidden"), [(4, 768), (6, 512)])
def test_no_placement_by_hand_is_faster(num_layers, hidden, number, part, bytes_per_second):
    workload = model(num_layers, hidden)
    given = {"bare": True, "host_nbytes": part_of(workload, part)}
    chosen = decide(problem(workload, machine(bytes_per_second), number, **given))
    seconds = {}
    for name, asked in BY_HAND.items():
        try:
            by_hand = decide(problem(workload, machine(bytes_per_second), number, request=Request(**asked), **given))
        except MemoryBudgetError:
            continue
        seconds[name] = by_hand.seconds
    assert len(seconds) >= 2
    assert {name: each for name, each in seconds.items() if chosen.seconds > MOST_SLOWER * each} == {}, chosen.seconds
