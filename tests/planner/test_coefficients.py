"""The formulas that are read off short programs, held against the whole programs that they stand for."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from planned import A100, formulas, gpt, lowered, placed, problem, ratios
from tiers import peaks_of

from gs_compile.errors import NoFitError
from gs_compile.placement.traffic import traffic
from gs_compile.planner.lp.coefficients import Formulas
from gs_compile.planner.lp.counting import Counted
from gs_compile.planner.plan import plan
from gs_compile.planner.request import Request

CPU = replace(A100, device="cpu", device_nbytes=0)
POINTS = [(0.0, 0.0, 0.0, 0.0, 0.0), (1.0, 1.0, 1.0, 0.0, 0.0), (0.0, 0.0, 1.0, 1.0, 1.0)]
MODELS = ["gpt-30b", "gpt-65b", "gpt-175b"]
MACHINES = [("a100", 1), ("a100", 4), ("h200", 1), ("a5000", 1), ("rtx4090", 1)]


@pytest.mark.parametrize("point", POINTS, ids=["ssd", "host", "device"])
@pytest.mark.parametrize("alpha", [0.0, 0.4])
@pytest.mark.parametrize(
    ("separate", "layer_updates"),
    [(True, 1), (True, 4), *(pytest.param(False, number, marks=pytest.mark.slow) for number in (1, 4))],
)
def test_whole_programs_are_what_short_ones_say(separate, layer_updates, alpha, point):
    """A model of 16 layers from programs of 10 and 11, seven micro-batches from three and four; updates in pieces too."""
    if not separate and point[3]:
        pytest.skip("there is no device memory")
    workload, machine = gpt(16, 1024, vocabulary=5000), A100 if separate else CPU
    known = formulas(workload, machine, layer_updates=layer_updates)
    assert len(known.counted.lengths) == 2
    found, one = known.of(alpha, 7), np.array([1.0, *point, 0.0])
    homes = {"separate": separate, "layer_updates": layer_updates}
    placement = placed(workload, 7, ratios(*point), alpha, **homes)
    program = lowered(workload, placement)[-1]
    peaks = peaks_of(program.ops, placement)
    for tier, alive in found.alive.items():
        said = float((alive @ one).max()) - (workload.workspace_nbytes if tier == "device" else 0)
        assert 0.99 * peaks[tier] <= said <= 1.15 * peaks[tier] + 1
    moved = sum(nbytes for (lane, _), nbytes in traffic(program, placement).items() if lane.startswith("ssd"))
    assert float(found.ssd @ one) == pytest.approx(moved, rel=0.01, abs=1e5)


def test_short_programs_say_the_same_where_the_backward_ends_at_the_first_layer():
    """As of adapters: nothing but a part of each layer is trained."""
    whole = gpt(16, 512, vocabulary=5000)

    def adapted(size):
        own = size.trained_numels[:1] if isinstance(size.unit, int) else ()
        return replace(size, trained_numels=own, frozen_numels=size.trained_numels[len(own) :])

    shape = replace(whole.shape, frozen=frozenset("eht"), first_grad=0)
    workload = replace(whole, sizes=tuple(map(adapted, whole.sizes)), shape=shape)
    short = formulas(workload, A100)
    assert len(short.counted.lengths) == 2
    all_layers = Counted(workload, short.counted.builder)
    all_layers.lengths = (16,)
    long = Formulas(workload, A100, all_layers)
    for alpha, point in ((alpha, np.array([1.0, *point, 0.0])) for alpha in (0.0, 0.4) for point in POINTS):
        found, expected = (each.of(alpha, 7) for each in (short, long))
        for lane, seconds in expected.seconds.items():
            assert float(found.seconds[lane] @ point) == pytest.approx(float(seconds @ point), rel=1e-9)
        for tier, alive in expected.alive.items():
            assert float((found.alive[tier] @ point).max()) == pytest.approx(float((alive @ point).max()), rel=1e-9)


def test_what_is_counted_serves_all_problems_of_a_model():
    """At any micro-batch size and with any costs of code; not where updates run in another way."""
    given = problem(gpt(16, 64), A100, 2)
    known, larger = given.formulas.counted, given.workload.scaled(code=2.0, activations=2.0)
    alike = given.at(5), given.of(larger), given.asked(Request(alpha=0.5)), given.updated_in(4).updated_in(1)
    assert all(each.formulas.counted is known for each in alike)
    speculative = given.asked(Request(clip=True, clipping="speculative"))
    assert all(each.formulas.counted is not known for each in (given.updated_in(4), speculative))


@pytest.mark.slow  # small plans: test_planner.py
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("machine", "ranks"), MACHINES)
def test_simulated_peaks_keep_the_budgets(model, machine, ranks):
    """With what code computes with, and as far as lanes lag behind the order of issue (fault 20)."""
    if (model, machine) == ("gpt-175b", "rtx4090"):
        with pytest.raises(NoFitError, match=r"279.5 GiB more than it may use"):  # of 1.6 TiB of SSD
            plan(model, machine=machine, sequence=2048)
        return
    found = plan(model, machine=machine, gpus=ranks, sequence=2048)
    peaks = found.simulation.peaks
    assert peaks["device"] + found.workload.workspace_nbytes <= found.budgets.device_nbytes
    assert peaks["host"] <= found.budgets.host_nbytes
