"""Plans of the single schedule: the vertical order's batch in one forward and backward, or what fits of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import zoo
from planned import gpt
from transformers import GPT2Config

from gs_compile.errors import PlanError
from gs_compile.planner.cost.workload import ModelSpec
from gs_compile.planner.plan import plan, planner_of
from gs_compile.planner.request import Request

HERE = Path(__file__).parents[1] / "machine.json"
CONFIG = GPT2Config(vocab_size=512, n_positions=128, n_embd=256, n_layer=4, n_head=4)
ASKED = {"machine": "a100", "sequence": 128, "host_memory": "200MiB"}


@pytest.fixture(scope="module")
def planners():
    """To plans in either order, with what is captured for each."""
    given = Request(**ASKED, micro_batch_size=2, num_micro_batches=4, recompute="all")
    vertical = planner_of(CONFIG, given)
    return vertical, planner_of(CONFIG, replace(given, schedule="single"), [vertical])


def test_the_spec_has_two_layers_of_each_block(planners):
    whole, halves = (planner.workloads.captured(planner.request.schedule).workload(2) for planner in planners)
    assert (whole.num_layers, halves.num_layers) == (4, 8)
    assert halves.num_trained == whole.num_trained
    assert halves.x_nbytes == whole.x_nbytes
    assert halves.model_flops == pytest.approx(whole.model_flops, rel=1e-6)
    sizes = {size.unit: size.num_trained for size in halves.sizes}
    assert sizes[0] + sizes[1] == {size.unit: size.num_trained for size in whole.sizes}[0]
    assert [sizes[unit] for unit in range(8)] == [sizes[0], sizes[1]] * 4
    assert halves.costs[6] is halves.costs[0] is not halves.costs[1]


@pytest.mark.slow
def test_a_short_capture_has_the_workload_of_a_whole_one(monkeypatch):
    config = zoo.configuration("gpt2")
    short = ModelSpec.of(config, sequence=zoo.TOKENS, schedule="single").workload(2)
    monkeypatch.setattr("gs_compile.planner.cost.workload.repeated", lambda _: None)
    assert ModelSpec.of(config, sequence=zoo.TOKENS, schedule="single").workload(2) == short
    assert short.num_layers == 2 * zoo.LAYERS


def test_the_batch_that_is_searched_is_one_micro_batch(planners):
    """Of `greedysnake fit`, whatever says how large it is."""
    single = planners[1]
    for settings, size in (({}, 2), ({"batch_size": 8, "micro_batch_size": None, "num_micro_batches": None}, 8)):
        problem = single.asked(**settings).searched()[0]
        assert (problem.workload.micro_batch_size, problem.best.num_micro_batches) == (size, 1)


def test_the_batch_of_the_vertical_order_is_one_micro_batch(planners):
    vertical, found = (planner.plan() for planner in planners)
    assert (found.schedule, found.program.by_micro_batch, found.num_micro_batches) == ("single", False, 1)
    assert found.workload.micro_batch_size == 8
    assert found.workload.tokens == vertical.num_micro_batches * vertical.workload.tokens
    assert not any("horizontal" in note or "fit in one" in note for note in found.notes)
    assert found.peaks["host"] <= found.budgets.host_nbytes


@pytest.mark.slow
def test_what_does_not_fit_is_left_out():
    given = ASKED | {"batch_size": 64, "micro_batch_size": 1, "device_memory": "64MiB"}
    found = plan(CONFIG, schedule="single", **given)
    fitting = found.workload.micro_batch_size
    assert 1 <= fitting < 64
    assert found.notes[0] == (
        f"of the 64 samples that the vertical order takes, {fitting} fit in one forward and backward"
    )
    assert plan(CONFIG, schedule="single", **given | {"batch_size": fitting}).workload.micro_batch_size == fitting
    more = plan(CONFIG, schedule="single", **given | {"batch_size": fitting + 1})
    assert more.workload.micro_batch_size == fitting


def test_numbers_alone_do_not_tell_the_halves():
    tiny = gpt(4, 512, sequence=256, vocabulary=5000)
    with pytest.raises(
        PlanError, match=r"cuts each block in halves, and the numbers of the workload .* do not tell where"
    ):
        plan(tiny, machine=HERE, schedule="single", micro_batch_size=1, num_micro_batches=2)
