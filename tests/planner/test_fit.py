"""What a machine makes of a model: by the linear program, as a plan has it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import zoo
from planned import gpt
from standin import fails

from gs_compile.errors import CaptureError, PlanError
from gs_compile.planner import fit as module
from gs_compile.planner.fit import Fit, _fit, fit, ways
from gs_compile.planner.lp.counting import Counted
from gs_compile.planner.measure.machines import profile
from gs_compile.planner.plan import Planner, planner_of
from gs_compile.planner.request import Request

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6:FutureWarning")  # in PEFT
SIZES = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4, "max_position_embeddings": 128}
WIDER = SIZES | {"max_position_embeddings": 4096}
ASKED = {"machine": "rtx4090", "sequence": 64, "host_memory": "24MiB", "device_memory": "20MiB", "lora": 4}
SMALL = {"micro_batch_size": 4, "recompute": "all", "alpha": 0.0}
BATCH = {**SMALL, "num_micro_batches": 2}  # a plan is then made in seconds


@pytest.fixture(scope="module")
def config():
    return zoo.configuration("llama", **SIZES)


@pytest.fixture(scope="module")
def planners():
    """To the plan of each way, with what was captured for it, once `found` is made."""
    return []


def of_full_training(planner, size, largest=module._largest):
    """In the place of `_largest`: of adapters it takes as long, and no test looks at it."""
    return size if planner.request.lora else largest(planner, size)


@pytest.fixture(scope="module")
def found(config, planners):
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, "_largest", of_full_training)
        return fit(config, **ASKED, **BATCH, planners=planners)


def test_the_ways():
    request = Request(lora=None, frozen=None)
    assert [(way, asked.lora, asked.frozen) for way, asked in ways(request)] == [
        ("in full", None, None),
        ("LoRA of rank 16", 16, None),
        ("the same over nf4", 16, "nf4"),
    ]
    _, *others = ways(replace(request, lora=8, frozen="int8"))
    assert [(asked.lora, asked.frozen) for _, asked in others] == [(8, None), (8, "int8")]


@pytest.mark.parametrize("number", [0, pytest.param(1, marks=pytest.mark.slow), 2])
def test_each_way_keeps_the_budgets_and_is_a_bound_of_its_plan(found, planners, number):
    assert [each.missing for each in found] == ["", "", ""]
    assert [planner.request for planner in planners] == [asked for _, asked in ways(Request(**ASKED, **BATCH))]
    each, made = found[number], planners[number].plan()
    assert each.peaks["host"] <= 24 << 20
    assert each.peaks["device"] <= 20 << 20
    assert (each.micro_batch_size, each.batch_size) == (4, 8)
    assert each.seconds <= made.seconds * 1.01
    assert each.seconds == pytest.approx(made.bound_seconds, rel=0.2)  # of what fits as a program too
    assert each.written_nbytes == pytest.approx(made.written, rel=0.2)


def test_fewer_bytes_are_less_to_store_and_to_write(found):
    full, lora, frozen = (sum(each.peaks.values()) for each in found)  # of equal plans any may be found
    assert full > lora > frozen
    assert found[0].written_nbytes / found[0].batch_size > found[1].written_nbytes / found[1].batch_size


def test_hours_bytes_and_days():
    one = Fit(way="", tokens_per_second=200.0, seconds=10.0, written_nbytes=10**9, rated_nbytes=10**14)
    assert one.hours(7.2e6) == pytest.approx(10.0)
    assert one.written_for(7.2e6) == pytest.approx(3.6e12)  # 3600 steps of 2000 tokens
    assert one.drive_days == pytest.approx(10**14 / 10**8 / 86400)
    assert replace(one, written_nbytes=0).drive_days is None


def test_the_largest_micro_batch_is_the_last_that_fits(found, planners):
    """Of the model itself, whose code is counted at that size."""
    planner, largest = planners[0], found[0].largest_micro_batch
    assert largest > 1
    assert module.does_fit(planner, largest)
    assert not module.does_fit(planner, 2 * largest)


def test_code_that_computes_in_more_memory_than_the_device_has_is_not_counted(planners, found, monkeypatch):
    monkeypatch.setattr(Counted, "readings", fails(AssertionError("counted")))
    assert not planners[0].asked(device_memory="1MiB").problem(4).does_fit()


@pytest.mark.parametrize("most", [pytest.param(None, marks=pytest.mark.slow), 128])
def test_the_longest_sequence(config, found, planners, monkeypatch, most):
    """As many tokens as fit in samples, or fewer; no more than the model has positions for."""
    monkeypatch.setattr(module, "ways", lambda request: [("in full", replace(request, lora=None))])
    model, known = (config, [*planners]) if most else (zoo.configuration("llama", **WIDER), None)
    (one,) = fit(model, **ASKED, **SMALL, longest=True, planners=known)
    assert one.longest == most or one.largest_micro_batch * 64 / 4 < one.longest <= one.largest_micro_batch * 64
    if not most:
        assert module.longest_sequence(model, Request(**{**ASKED, **SMALL, "lora": None})) == one.longest


def test_what_does_not_fit_says_what_is_missing(config, found, planners, monkeypatch):
    monkeypatch.setattr(module, "ways", lambda request: [("in full", replace(request, lora=None))])
    (full,) = fit(config, **{**ASKED, "host_memory": "1MiB"}, planners=[*planners])
    assert "it needs" in full.missing
    assert "of host memory" in full.missing
    assert full.tokens_per_second == 0.0


def test_a_batch_is_that_of_all_ranks(config, planners, found, monkeypatch):
    monkeypatch.setattr(module, "ways", lambda request: [("in full", replace(request, lora=None))])
    monkeypatch.setattr(module, "_largest", lambda planner, size: size)
    linked = replace(profile("rtx4090"), net_bytes_per_second=1e10)
    (one,) = fit(config, **{**ASKED, "machine": linked, "gpus": 2}, **BATCH, planners=[*planners])
    assert (one.ranks, one.batch_size, one.micro_batch_size) == (2, 16, 4)
    with pytest.raises(PlanError, match="2 ranks cannot divide it equally, so give a multiple of 2"):
        fit(config, **{**ASKED, "machine": linked, "gpus": 2}, batch_size=3, planners=[*planners])


def test_adapters_that_cannot_be_captured_leave_the_other_ways(config, found, planners, monkeypatch):
    """As PEFT's are on experts whose matrices are one parameter: PEFT changes that in each forward."""
    searched = Planner.searched

    def refused(planner):
        if planner.request.lora:
            raise CaptureError("no batch")
        return searched(planner)

    monkeypatch.setattr(Planner, "searched", refused)
    monkeypatch.setattr(module, "_largest", lambda planner, size: size)
    full, *adapted = fit(config, **ASKED, **BATCH, planners=list(planners))
    assert full.tokens_per_second == pytest.approx(found[0].tokens_per_second)
    assert [each.missing for each in adapted] == ["no batch", "no batch"]


def test_what_fits_in_memory_wears_no_drive():
    """As of a run: the linear program has a checkpoint on SSD, which spares a copy of it."""
    words = gpt(4, 512, sequence=256, vocabulary=5000)
    planner = planner_of(words, Request(machine="laptop", sequence=256, micro_batch_size=1))
    found = _fit("in full", planner, longest=False)
    assert (found.peaks["ssd"], found.written_nbytes, found.drive_days) == (0, 0, None)
