"""Plans of made-up models: what is given is kept, what is chosen is within budgets, and what contradicts is refused."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from planned import A100, gpt, problem, ratios
from transformers import GPT2Config

from gs_compile.errors import MemoryBudgetError, NoFitError, OptionError, PlanError, ProfileError
from gs_compile.placement.placement import Decision
from gs_compile.placement.shards import QUANTUM
from gs_compile.placement.workload import Products
from gs_compile.planner.builder import SCARCE_UPDATES, StepBuilder, planned_peak
from gs_compile.planner.decide import decide
from gs_compile.planner.measure.profile import Profile
from gs_compile.planner.plan import plan, planner_of
from gs_compile.planner.request import Request

HERE = Path(__file__).parents[1] / "machine.json"
TINY = gpt(4, 512, sequence=256, vocabulary=5000)  # 15 M parameters, 175 MiB of states
FIVE = {"micro_batch_size": 1, "num_micro_batches": 5}
EVERYTHING, NOTHING = (dict.fromkeys(("parameter", "checkpoint", "optimizer"), part) for part in (1.0, 0.0))
MiB = 2**20


def rated(nbytes: int) -> Profile:
    return replace(Profile.load(HERE), ssd_rated_nbytes=nbytes)


# What is given --------------------------------------------------------------------------------------------------------


def test_what_is_fixed_is_kept():
    found = plan(
        TINY,
        machine=HERE,
        alpha=0.3,
        ratios={"optimizer": 0.1, "parameter": 1.0},
        micro_batch_size=2,
        num_micro_batches=3,
        host_memory="200MiB",
    )
    assert (found.alpha, found.ratios["optimizer"], found.ratios["parameter"]) == (0.3, 0.1, 1.0)
    assert (found.workload.micro_batch_size, found.num_micro_batches) == (2, 3)
    assert found.budgets.host_nbytes == 200 * MiB
    trained = sum(unit.num_trained for unit in found.placement.units)
    late = sum(group.numel for unit in found.placement.units for group in unit.trained("late"))
    assert late / trained == pytest.approx(0.3, abs=2 * QUANTUM * len(found.placement.units) / trained)


def test_ratios_that_are_rounded_to_more_than_all_are_all():
    """Fault: no linear program had a solution then, which an assertion said."""
    given = {"parameter": 0.3333337, "device_parameter": 0.6666667}
    found = plan(TINY, machine=A100, micro_batch_size=1, num_micro_batches=2, ratios=given, alpha=0.0)
    assert found.device_ratios["parameter"] == pytest.approx(2 / 3, abs=1e-6)
    assert found.ratios["parameter"] == pytest.approx(1 / 3, abs=1e-6)


@pytest.mark.parametrize(
    ("settings", "size", "number"),
    [
        ({"batch_size": 12, "micro_batch_size": 4}, 4, 3),
        ({"batch_size": 12, "num_micro_batches": 6}, 2, 6),
        ({"batch_size": 5, "micro_batch_size": 2}, 2, 3),
        ({"batch_size": 5, "num_micro_batches": 3}, 2, 3),
        ({"batch_size": 3}, 1, 3),  # no other size cuts it evenly
    ],
)
def test_a_batch_is_cut(settings, size, number):
    problem = planner_of(TINY, Request(machine=HERE, **settings)).searched()[0]
    assert (problem.workload.micro_batch_size, problem.best.num_micro_batches) == (size, number)


def test_a_workload_has_other_micro_batches_when_asked():
    found = plan(replace(TINY, side_nbytes=(100,)), machine=HERE, micro_batch_size=3, num_micro_batches=2).workload
    assert (found.x_nbytes, found.side_nbytes) == ((3 * TINY.x_nbytes[0],), (300,))
    assert found.model_flops == 3 * TINY.model_flops
    assert found.sizes == TINY.sizes


def test_seconds_that_were_measured_grow_with_the_micro_batch():
    measured = {unit: replace(cost, seconds=(1.0, 2.0)) for unit, cost in TINY.costs.items()}
    found = plan(replace(TINY, costs=measured), machine=HERE, micro_batch_size=2, num_micro_batches=1)
    assert {cost.seconds for cost in found.workload.costs.values()} == {(2.0, 4.0)}
    assert found.seconds == pytest.approx(5 * 6.0 + 4.0, rel=0.1)  # embedding and layers; the head's backward has both


def test_clipping_makes_all_updates_late():
    found = plan(TINY, machine=HERE, clip=True, **FIVE)
    assert found.alpha == 1.0
    assert found.placement.clip


def test_device_memory_is_a_budget():
    found = plan(TINY, machine="a100", device_memory="100MiB", **FIVE)
    assert found.budgets.device_nbytes == 100 * MiB
    assert found.peaks["device"] <= 100 * MiB
    with pytest.raises(NoFitError, match="of device memory"):
        plan(TINY, machine="a100", device_memory="10MiB", **FIVE)


# What is chosen -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("machine", "host_memory"),
    [
        (HERE, "160MiB"),
        ("a100", "160MiB"),
        ("laptop", "220MiB"),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in ((HERE, "220MiB"), ("a100", "220MiB"), ("laptop", "160MiB"))
        ),
    ],
)
def test_the_planned_peak_keeps_the_budget(machine, host_memory):
    found = plan(TINY, machine=machine, host_memory=host_memory, **FIVE)
    assert found.peaks["host"] <= found.budgets.host_nbytes
    assert found.seconds >= 0.999 * found.bound_seconds
    assert any(tier == "ssd" for _, tier in found.homes) or machine == "a100"  # its device has room for the rest


@pytest.mark.slow
def test_the_micro_batch_size_is_chosen():
    """Of those within a percent of the best the smallest batch; what was searched is told."""
    found = plan(TINY, machine=HERE, host_memory="135MiB")
    others = [plan(TINY, machine=HERE, host_memory="135MiB", micro_batch_size=size) for size in (1, 4)]
    rate = found.history[-1][2] if len(found.history) == 1 else max(row[2] for row in found.history)
    assert all(max(row[2] for row in other.history) <= 1.011 * rate for other in others)
    assert found.history[0][0] == 1


def test_without_a_batch_it_is_the_smallest_that_saturates():
    """By the paper's rule one more brings less than 1 %, by the other less than a tenth of what it is more (fault 22)."""
    settings = {"machine": "laptop", "micro_batch_size": 1, "host_memory": "130MiB", "alpha": 0.0}
    found = {rule: plan(TINY, **settings, saturation=rule) for rule in ("paper", "relative")}
    rates = [rate for _, _, rate in found["paper"].history]
    number = found["paper"].num_micro_batches
    assert 1 < number == (len(rates) - 1 if rates[-1] < 1.01 * rates[-2] else len(rates))
    assert all(after >= 1.01 * before for before, after in pairwise(rates[:number]))
    rate = {number: rate for number, _, rate in found["relative"].history}
    number = found["relative"].num_micro_batches
    assert rate[number + 1] < (1 + 0.1 / number) * rate[number]
    assert number == 1 or rate[number] >= (1 + 0.1 / (number - 1)) * rate[number - 1]
    with pytest.raises(PlanError, match="saturation is 'never'; there are relative and paper"):
        plan(TINY, **settings, saturation="never")


def test_drives_last_as_long_as_they_are_to():
    """What cannot be kept in memory has to be written more slowly."""
    free = plan(TINY, machine=rated(10**15), host_memory="160MiB", **FIVE)
    years = 2 * 10**15 / free.written_per_day / 365  # so that half as much may be written
    spared = plan(TINY, machine=rated(10**15), host_memory="160MiB", wear_years=years, **FIVE)
    assert spared.written <= free.written
    assert spared.bound_seconds > 1.1 * free.bound_seconds
    (note,) = (note for note in spared.notes if "the drives last as long as asked" in note)
    seconds = spared.written / spared.budgets.wear_bytes_per_second
    assert f"if a step begins every {seconds:.3g} s" in note
    assert not any("the drives last as long as asked" in note for note in free.notes)


def test_drives_last_twice_as_long_with_what_a_plan_says_of_that():
    """What is left to the plan does not have it write more again."""
    asked = {"machine": rated(10**15), "host_memory": "160MiB", "micro_batch_size": 1}
    free = plan(TINY, **asked)
    (years,) = (
        float(year) for note in free.notes for year in re.findall(r"^with `--wear-years (.*?)` the drives", note)
    )
    spared = plan(TINY, **asked, wear_years=years)
    assert spared.written_per_day < 0.55 * free.written_per_day


def test_a_plan_says_why():
    found = plan(TINY, machine="a100", host_memory="160MiB", micro_batch_size=1, num_micro_batches=2)
    assert [words.split(":")[0] for words in found.binding] == [
        "1.0 GiB more host memory",
        "a second SSD like the first",
        "10.0 GiB more device memory",
        "a link to the device twice as fast",
        "an optimizer twice as fast",
        "a device that computes 10% faster",
    ]
    assert found.alternatives


@pytest.mark.parametrize("machine", [HERE, "a100"], ids=["cpu", "a100"])
def test_the_baseline_is_planned_for_the_same_batch(machine):
    vertical, baseline = (
        plan(TINY, machine=machine, host_memory="220MiB", schedule=schedule, **FIVE)
        for schedule in ("vertical", "horizontal")
    )
    assert (baseline.schedule, baseline.program.by_micro_batch) == ("horizontal", True)
    assert baseline.num_micro_batches == vertical.num_micro_batches == 5
    assert baseline.peaks["host"] <= baseline.budgets.host_nbytes
    assert baseline.seconds > (1.1 if vertical.profile.separate else 0.99) * vertical.seconds
    assert baseline.ratios.keys() == {"gradient", "parameter", "checkpoint", "optimizer"}


def test_the_baseline_keeps_what_is_fixed():
    found = plan(TINY, machine=HERE, schedule="horizontal", alpha=0.5, ratios={"optimizer": 0.25}, **FIVE)
    assert (found.alpha, found.ratios["optimizer"], found.ratios["parameter"]) == (0.5, 0.25, 1.0)
    assert found.placement.has_late


@pytest.mark.parametrize(("machine", "host_memory"), [(HERE, "190MiB"), ("a100", "220MiB"), ("a100", "1GiB")])
def test_keeping_what_is_inactive_is_never_slower(machine, host_memory):
    plain, kept = (
        plan(TINY, machine=machine, host_memory=host_memory, schedule=schedule, **FIVE)
        for schedule in ("horizontal", "lifetime")
    )
    assert (kept.schedule, kept.program.by_micro_batch) == ("lifetime", True)
    assert kept.seconds <= plain.seconds
    assert kept.peaks["host"] <= kept.budgets.host_nbytes
    assert kept.peaks["device"] <= max(kept.budgets.device_nbytes, plain.peaks["device"])
    note = next(each for each in kept.notes if "kept" in each or "to keep" in each or "stays where it is" in each)
    assert ("stays where it is" in note) == (kept.placement.decision.own is not None)
    assert ("nothing is kept" in note or "nothing to keep" in note) == (kept.placement.decision.own is None)


def test_where_nothing_moves_there_is_nothing_to_keep():
    found = plan(TINY, machine=HERE, host_memory="2GiB", schedule="lifetime", **FIVE)
    assert found.notes[0] == "nothing is moved away and back within a step: there is nothing to keep"
    assert found.placement.decision.own is None


# Models by name and config --------------------------------------------------------------------------------------------


def test_a_config_is_planned_in_bf16_like_a_name():
    config = GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=100, n_positions=32)
    settings = {"machine": HERE, "sequence": 16, "micro_batch_size": 1, "num_micro_batches": 2, "recompute": "all"}
    found = planner_of(config, Request(**settings)).problem(1).workload
    assert (found.name, found.num_layers, found.sequence, found.dtype) == ("gpt2", 2, 16, "bf16")
    assert all((size.itemsize, size.state_itemsize) == (2, 10) for size in found.sizes)
    assert planner_of(config, Request(precision="model", **settings)).problem(1).workload.dtype == "fp32"


# What is refused ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"batch_size": 0}, "batch_size is 0; it must be a whole number, 1 or more"),
        ({"micro_batch_size": 0}, "micro_batch_size is 0; it must be a whole number, 1 or more"),
        ({"micro_batch_size": 10**18}, f"micro_batch_size is {10**18}; it is in samples, 1,000,000 at most"),
        ({"num_micro_batches": -1}, "num_micro_batches is -1; it must be a whole number, 1 or more"),
        (
            {"batch_size": 10, "micro_batch_size": 2, "num_micro_batches": 3},
            "a batch of 10 cannot be cut into 3 micro-batches of 2: leave one of batch_size, micro_batch_size and "
            "num_micro_batches out",
        ),
        ({"batch_size": 4, "num_micro_batches": 3}, "a batch of 4 cannot be cut into 3 micro-batches of 2: "),
        ({"batch_size": 4, "num_micro_batches": 8}, "a batch of 4 cannot be cut into 8 micro-batches of 1: "),
        ({"batch_size": 4, "micro_batch_size": 8}, "a batch of 4 cannot be cut into 1 micro-batch of 8: "),
        (
            {"clip": True, "clipping": "delayed", "alpha": 0.2},
            'alpha is 0.2, but with clipping="delayed" all updates wait for the norm',
        ),
        ({"alpha": 1.5}, "alpha is 1.5; it must be a part of each update"),
        (
            {"wear_years": 3},
            "for tests does not have the rated endurance of its drives: add ssd_rated_nbytes to its profile",
        ),
        ({"wear_years": 0}, "wear_years is 0; it must be more than 0"),
        ({"schedule": "diagonal"}, "schedule is 'diagonal'; there are vertical and horizontal"),
    ],
)
def test_settings_that_contradict_are_refused(settings, complaint):
    with pytest.raises(PlanError) as caught:
        plan(TINY, machine=HERE, **settings)
    assert str(caught.value).startswith(complaint)


def test_a_model_that_fits_nowhere_is_refused():
    with pytest.raises(NoFitError, match=r"gpt 4 x 512 does not fit with 5 micro-batches of 1 .* of host memory, .*"):
        plan(TINY, machine=HERE, host_memory="20MiB", **FIVE)
    with pytest.raises(NoFitError, match=r"with 5 micro-batches of 1 and alpha 0: it needs .* of host memory"):
        plan(TINY, machine=HERE, host_memory="60MiB", schedule="horizontal", **FIVE)


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"host_memory": "100MiB", "alpha": 0.0, "ratios": EVERYTHING}, "it needs .* of host memory"),
        ({"machine": replace(Profile.load(HERE), ssd_nbytes=50 * MiB), "host_memory": "135MiB"}, "does not fit with 5"),
        (
            {"machine": replace(Profile.load(HERE), ssd_nbytes=50 * MiB), "alpha": 0.0, "ratios": NOTHING},
            "it needs .* of SSD",
        ),
    ],
)
def test_what_is_given_or_the_least_is_no_plan_where_a_tier_has_no_room_for_it(settings, complaint):
    with pytest.raises(NoFitError, match=complaint):
        plan(TINY, **{"machine": HERE, **settings, **FIVE})


@pytest.mark.parametrize(
    ("tier", "settings"),
    [
        ("host", {"machine": HERE, "alpha": 0.5, "schedule": "horizontal"}),
        ("host", {"machine": HERE, "ratios": EVERYTHING}),
        ("device", {"machine": "a100"}),
    ],
)
def test_in_the_memory_that_a_refusal_names_the_same_plan_fits(tier, settings):
    with pytest.raises(NoFitError) as refusal:
        plan(TINY, **{f"{tier}_memory": "10MiB"}, **settings, **FIVE)
    (needed,) = re.findall(rf"it needs (\S+ \w+) of {tier} memory", str(refusal.value))
    found = plan(TINY, **{f"{tier}_memory": needed}, **settings, **FIVE)
    assert found.num_micro_batches == 5


def test_a_refusal_is_that_of_the_masters_that_are_tried_first():
    """Whole ones, which are tried then, need more."""
    split, whole = (problem(gpt(2, width), A100, 2, will_run=True, host_nbytes=10**6) for width in (128, 256))
    said = []
    for others in (None, lambda: whole):
        with pytest.raises(MemoryBudgetError) as refusal:
            decide(replace(split, whole_masters=others))
        said.append(str(refusal.value))
    assert said[0] == said[1]


def test_the_memory_that_a_refusal_names_has_room_for_the_products_of_updates():
    """As Muon has them: the budget of all else is without that."""
    products = Products(1e9, 0, 50 * MiB)
    sizes = tuple(replace(size, products=products) if isinstance(size.unit, int) else size for size in TINY.sizes)
    given = problem(replace(TINY, sizes=sizes), A100, 2, will_run=True, host_nbytes=1)
    with pytest.raises(MemoryBudgetError, match=r"host_memory is 50\.0 MiB") as refusal:
        decide(given)
    (needed,) = re.findall(r"\((\d+) bytes\) of it at least", str(refusal.value))
    enough = replace(given, host_nbytes=int(needed) - 50 * MiB)
    assert decide(enough).peaks["host"] <= enough.host_nbytes


@pytest.mark.parametrize(
    ("alpha", "machine"),
    [
        (0.0, "a100"),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in ((0.0, HERE), (0.3, HERE), (0.3, "a100"))),
    ],
)
def test_a_vocabulary_larger_than_layers_fits_with_updates_in_pieces(machine, alpha):
    """In less host memory than whole updates need; with enough of it they stay whole."""
    words = gpt(6, 512, sequence=256, vocabulary=20000, tied=False)  # 10 M words beside 3 M elements of a layer
    given = {"machine": machine, "alpha": alpha, **FIVE}
    whole = StepBuilder.of(words, 5, separate=machine == "a100")
    nothing = Decision(ratios=(ratios(0.0, 0.0, 0.0),), alpha=alpha)
    least = planned_peak(whole.program(whole.placement(nothing)), "host")
    for host_memory, layer_updates in ((2 * least, 1), (3 * least // 4, SCARCE_UPDATES)):
        found = plan(words, host_memory=host_memory, **given)
        assert found.placement.decision.layer_updates == layer_updates
        assert found.peaks["host"] <= host_memory
        assert any("in pieces" in note for note in found.notes) == (layer_updates > 1)


def test_what_others_refuse_arrives_as_it_is():
    with pytest.raises(OptionError, match="host_memory has an unknown unit"):
        plan(TINY, machine=HERE, host_memory="3 stones")
    with pytest.raises(PlanError, match="precision is 'fp8'; there are bf16 and model"):
        plan("gpt2", machine=HERE, precision="fp8", sequence=8)
    with pytest.raises(ProfileError, match="unknown machine abacus"):
        plan(TINY, machine="abacus")


# Better machines ------------------------------------------------------------------------------------------------------

LANES = {
    "ssd": [f"ssd_{way}{mixed}_bytes_per_second" for way in ("read", "write") for mixed in ("", "_mixed")],
    "link": [f"{way}{mixed}_bytes_per_second" for way in ("h2d", "d2h") for mixed in ("", "_mixed")],
    "optimizer": ["update_elements_per_second", "update_mixed_elements_per_second"],
}


QUICK = (139,)
SLOW = [pytest.param(seed, marks=pytest.mark.slow) for seed in range(200) if seed not in QUICK]


@pytest.mark.parametrize("seed", [*QUICK, *SLOW])
def test_a_better_machine_is_never_slower(seed):
    """By more than 1 %: 200 changes of memory, bandwidth and rates, of machines with and without a device."""
    numbers = np.random.default_rng(seed)
    machine = replace(A100, device_nbytes=int(numbers.uniform(0.1, 0.4) * 10**9))
    if numbers.integers(2):
        machine = replace(A100, device="cpu", device_nbytes=0, matmul_flops_per_second={"bf16": 2e12})
    host_nbytes = int(numbers.uniform(150, 400) * 2**20)
    more = float(numbers.uniform(1.05, 3.0))
    resource = str(numbers.choice(["host", "device", "compute", *LANES]))
    better = replace(machine, **{name: more * getattr(machine, name) for name in LANES.get(resource, ())})
    if resource == "device":
        better = replace(better, device_nbytes=int(more * better.device_nbytes))
    if resource == "compute":
        rates = {name: more * rate for name, rate in better.matmul_flops_per_second.items()}
        better = replace(better, matmul_flops_per_second=rates)
    given = {"micro_batch_size": 1, "num_micro_batches": int(numbers.integers(2, 6))}
    before = plan(TINY, machine=machine, host_memory=host_nbytes, **given)
    after = plan(TINY, machine=better, host_memory=int(host_nbytes * (more if resource == "host" else 1)), **given)
    assert after.seconds <= 1.01 * before.seconds
