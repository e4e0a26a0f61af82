from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planned import gpt, problem
from tiers import PLAIN, Options, options, place, tiered_steps

from gs_compile.passes.lower import StepSpec, lower
from gs_compile.placement.cut import cut
from gs_compile.placement.placement import Layout, Placement, StepContext
from gs_compile.placement.shards import QUANTUM
from gs_compile.placement.traffic import traffic
from gs_compile.placement.workload import Products, UnitCost, UnitSize, Workload
from gs_compile.planner.cost.timing import priced
from gs_compile.planner.decide import decide
from gs_compile.planner.measure.profile import Profile
from gs_compile.planner.request import Request
from gs_compile.planner.simulate.prices import op_prices, update_nbytes, with_products, work_nbytes
from gs_compile.program.ir import DRAIN, EPILOGUE, PROLOGUE, Op, Program, Stage, StepShape, Value

GPU = Profile(
    name="test",
    device="cuda",
    host_nbytes=1 << 40,
    ssd_nbytes=1 << 44,
    device_nbytes=1 << 36,
    matmul_flops_per_second={"fp32": 1e12, "bf16": 4e12},
    memory_bytes_per_second=1e12,
    ssd_read_bytes_per_second=4e9,
    ssd_write_bytes_per_second=2e9,
    ssd_read_mixed_bytes_per_second=3e9,
    ssd_write_mixed_bytes_per_second=1e9,
    h2d_bytes_per_second=20e9,
    d2h_bytes_per_second=10e9,
    h2d_mixed_bytes_per_second=16e9,
    d2h_mixed_bytes_per_second=8e9,
    update_elements_per_second=1e9,
    update_mixed_elements_per_second=0.5e9,
    op_seconds=1e-5,
    request_seconds=1e-4,
)
CPU = replace(
    GPU,
    device="cpu",
    device_nbytes=0,
    **{f"{lane}{mixed}_bytes_per_second": math.inf for lane in ("h2d", "d2h") for mixed in ("", "_mixed")},
)


def model(num_layers: int, dtype: str = "fp32", **layer: float) -> Workload:
    """A model whose layers cost 1 and 3 TFLOPs, the prologue 0.5 and 1, the epilogue 2 and 6."""
    costs = dict.fromkeys(range(num_layers), UnitCost(**{"forward_flops": 1e12, "backward_flops": 3e12, **layer}))
    ends = {
        PROLOGUE: UnitCost(forward_flops=5e11, backward_flops=1e12),
        EPILOGUE: UnitCost(forward_flops=2e12, backward_flops=6e12),
    }
    return Workload(
        name="toy",
        num_layers=num_layers,
        sizes=(),
        costs=costs | ends,
        micro_batch_size=1,
        sequence=8,
        x_nbytes=(1000,),
        dtype=dtype,
    )


class Price(NamedTuple):
    """What an operation moves, and how long that takes."""

    nbytes: int = 0
    seconds: float = 0.0


def prices(program: Program, placement: Placement, profile: Profile = GPU, **model_options: object) -> list:
    found = op_prices(program, placement, model(program.num_layers, **model_options), profile)
    return [(op, Price(work_nbytes(op, placement), each)) for op, each in zip(program.ops, found, strict=True)]


def price(op: Op, placement: Placement, profile: Profile = GPU) -> Price:
    sizes = placement.layout.num_layers, placement.layout.num_micro_batches
    ((_, found),) = prices(Program((op,), *sizes, "by hand"), placement, profile)
    return found


# Code ----------------------------------------------------------------------------------------------------------------


def test_code_takes_its_flops_by_the_matrix_rate():
    seconds = {op.verb: found.seconds for op, found in prices(lower(StepSpec(2, 2))[-1], Placement(), dtype="bf16")}
    assert seconds["embed"] == 5e11 / 4e12
    assert seconds["forward"] == 1e12 / 4e12
    assert seconds["head"] == 6e12 / 4e12  # with its backward
    assert seconds["backward"] == 3e12 / 4e12
    assert seconds["embed_backward"] == 1e12 / 4e12


def test_measured_seconds_come_first():
    found = prices(lower(StepSpec(2, 2))[-1], Placement(), seconds=(7.0, 11.0))
    seconds = {op.verb: each for op, each in found}
    assert seconds["forward"] == Price(0, 7.0)
    assert seconds["backward"] == Price(0, 11.0)


def test_a_head_without_backward_is_its_forward():
    shape = StepShape(training=False)
    (head, _) = [each for op, each in prices(lower(StepSpec(2, 2, shape=shape))[-1], Placement()) if op.verb == "head"]
    assert head == Price(0, 2.0)
    frozen = StepShape(frozen=frozenset({"h"}))
    (head, _) = [each for op, each in prices(lower(StepSpec(2, 2, shape=frozen))[-1], Placement()) if op.verb == "head"]
    assert head == Price(0, 6.0)


def test_a_head_whose_gradient_comes_from_outside_runs_twice():
    shape = StepShape(has_loss=False, outside=frozenset({"h"}), emits=frozenset({"h"}))
    seconds = {op.verb: each.seconds for op, each in prices(lower(StepSpec(2, 2, shape=shape))[-1], Placement())}
    assert (seconds["head"], seconds["head_backward"]) == (2.0, 6.0)


# Movement ------------------------------------------------------------------------------------------------------------


@given(tiered_steps(), options(), st.booleans())
def test_transfers_are_the_traffic_by_its_rates(step, options, late):
    num_layers, num_micro_batches, shape = step
    placement = place(num_layers, num_micro_batches, shape, options)
    program = lower(
        StepSpec(num_layers, num_micro_batches, shape=shape, placement=placement, context=StepContext(late=late))
    )[-1]
    moved: Counter[tuple[str, str]] = Counter()
    for op, found in prices(program, placement):
        if op.verb in ("prefetch", "offload"):
            moved[op.lane, op.reads[0].kind] += found.nbytes
            rate = {"h2d": 20e9, "d2h": 10e9, "ssd_read": 4e9, "ssd_write": 2e9}[op.lane]
            asked = 1e-4 if op.lane.startswith("ssd") else 0.0
            assert found.seconds == pytest.approx(found.nbytes / rate + asked)
        assert found.seconds >= 0
        assert math.isfinite(found.seconds)
    assert {key: nbytes for key, nbytes in moved.items() if nbytes} == traffic(program, placement)


def test_within_one_memory_a_copy_is_two_passes():
    placement = place(2, 2, PLAIN, Options(separate=False))
    (copy, *_) = [
        found
        for op, found in prices(lower(StepSpec(2, 2, placement=placement))[-1], placement, CPU)
        if op.lane == "d2h"
    ]
    assert copy == Price(1000, 2 * 1000 / 1e12)


def test_what_a_layer_saves_is_copied_within_one_memory():
    """Checkpoints come back under another name, and gradients leave so."""
    placement = place(2, 2, PLAIN, Options(separate=False, checkpoint_ratio=1.0))
    found = prices(lower(StepSpec(2, 2, placement=placement))[-1], placement, CPU)
    copies = {op.results[0]: each for op, each in found if op.verb == "alias" and each.nbytes}
    assert {str(value) for value in copies} == {"x0_0.host", "x0_1.host", "x1_0.host", "x1_1.host"}
    assert set(copies.values()) == {Price(2000, 2000 / 1e12)}


@pytest.mark.parametrize("verb", ["gather", "empty", "free"])
def test_memory_under_another_name_costs_nothing(verb):
    placement = place(2, 2, PLAIN, Options(separate=False, checkpoint_ratio=1.0))
    found = [
        each for op, each in prices(lower(StepSpec(2, 2, placement=placement))[-1], placement, CPU) if op.verb == verb
    ]
    assert set(found) == {Price()}


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("has_master", [False, True])
def test_what_was_speculated_changes_places_unless_the_code_reads_it_there(separate, has_master):
    """Parameters that are masters themselves have shadow copies; in one memory those of the host's are copied home."""
    chosen = Options(
        parameter_ratio=1.0, optimizer_ratio=1.0, separate=separate, has_master=has_master, clip=True, speculative=True
    )
    placement = place(2, 2, PLAIN, chosen)
    found = [
        each
        for op, each in prices(lower(StepSpec(2, 2, placement=placement))[-1], placement, CPU)
        if op.verb == "commit"
    ]
    trained = sum(unit.num_trained * unit.itemsize for unit in placement.units)
    copied = 0 if separate or has_master else trained
    assert sum(each.seconds for each in found) == pytest.approx(2 * copied / 1e12)
    assert found
    assert not any(each.nbytes for each in found)


# The optimizer -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("itemsize", "gradient", "state", "has_master", "nbytes"),
    [
        (4, 4, 8, False, 28),  # AdamW in fp32: the rule of the rate
        (2, 4, 12, True, 30),  # AdamW in bf16 with masters: the parameter is written only
        (4, 4, 4, False, 20),  # momentum
        (4, 4, 0, False, 12),  # plain SGD
        (2, 4, 4.03125, False, 16.0625),  # moments in 8 bits beside the rests of masters
    ],
)
def test_an_update_takes_its_bytes_beside_those_of_adamw(itemsize, gradient, state, has_master, nbytes):
    toy = place(1, 1)
    sizes = {"itemsize": itemsize, "gradient_itemsize": gradient, "state_itemsize": state, "has_master": has_master}
    unit = replace(toy.by_unit[0], **sizes)
    placement = replace(toy, units=(unit,))
    (group,) = unit.trained()
    into = tuple(unit.value("w", part, "host") for part in group.w)
    found = price(Op("update", (Value("dw", 0),), DRAIN, into=into), placement)
    assert update_nbytes(unit) == nbytes
    assert found.nbytes == group.numel * nbytes
    assert found.seconds == pytest.approx(group.numel / 1e9 * nbytes / 28)


def test_converting_narrow_states_is_timed_where_a_run_is():
    sizes = tuple(UnitSize(unit, (QUANTUM,), (), 4, 4, 4, False, each) for unit, each in enumerate((0, 12, 24)))
    none, two, four = (size.conversion_nbytes for size in priced(sizes, CPU, 1))
    assert none == 0
    assert 0 < two <= four / 2 <= two + 1


@pytest.mark.parametrize("profile", [CPU, GPU], ids=lambda profile: profile.device)
def test_products_of_matrices_take_their_time_on_both_lanes(profile):
    """An update waits for them; a device with memory of its own computes them beside the step, so that takes longer."""
    plain = UnitSize(0, (8 * QUANTUM, 2 * QUANTUM), (), 4, 4, 4, False)
    flops = 1e9
    sizes = with_products((plain, replace(plain, products=Products(flops, 1, 1))), profile)
    assert with_products(sizes, profile) == sizes  # as of a workload that is planned again
    shares = {"parameter": 0.0, "optimizer": 0.0}
    units = [cut(each, shares, alpha=0.0, most_numel=1 << 30, separate=profile.separate) for each in sizes]
    found = {}
    for name, unit in zip(("plain", "products"), units, strict=True):
        placement = Placement((unit,), Layout(separate=profile.separate))
        into = tuple(unit.value("w", part, "host") for part in unit.groups[0].w)
        ops = (
            Op("update", (Value("dw", 0),), DRAIN, into=into),
            Op("norm", (Value("dw", 0),), DRAIN, (Value("norm", 0),)),
        )
        found[name] = op_prices(Program(ops, 1, 1, made_by="test"), placement, model(1), profile)
    update, norm = (found["products"][at] - found["plain"][at] for at in range(2))
    seconds = flops / profile.matmul_flops_per_second["bf16"]
    assert update == pytest.approx(seconds, rel=1e-2)
    assert norm == pytest.approx(seconds * profile.separate, rel=1e-2)


@pytest.mark.parametrize("schedule", ["vertical", "lifetime"])
def test_a_plan_that_needs_no_machine_has_the_price_of_updates_once_it_is_known(schedule):
    """A run lays its units out before; here the products of their updates, as Muon has them, take a second each."""
    plain = gpt(4, 512, sequence=256, vocabulary=5000)
    products = Products(CPU.matmul_flops_per_second["bf16"], 0, 0)
    sizes = tuple(replace(size, products=products) for size in plain.sizes)
    unpriced, known = replace(plain, sizes=sizes), replace(plain, sizes=with_products(sizes, CPU))
    steps = problem(unpriced, CPU, 2, will_run=True, request=Request(schedule=schedule), host_nbytes=10**12)
    found = decide(replace(steps, code=lambda: known))
    assert found.is_solved == (schedule == "lifetime")
    assert found.seconds > len(sizes) > decide(steps).seconds


@settings(max_examples=20, deadline=None)
@given(options())
def test_all_updates_together_are_all_trained_elements(options):
    placement = place(3, 2, PLAIN, options)
    late = placement.has_late
    found = prices(lower(StepSpec(3, 2, placement=placement, context=StepContext(late=late)))[-1], placement)
    total = sum(unit.num_trained * update_nbytes(unit) for unit in placement.units)
    assert sum(each.nbytes for op, each in found if op.verb == "update") == total


@pytest.mark.parametrize("verb", ["norm", "zeros"])
def test_a_pass_over_the_gradient(verb):
    placement = place(1, 1)
    gradient = Value("dw", 0)
    reads, results = ((gradient,), (Value("norm", 0),)) if verb == "norm" else ((), (gradient,))
    unit = placement.by_unit[0]
    nbytes = unit.num_trained * unit.gradient_itemsize
    found = price(Op(verb, reads, Stage("backward", 0), results), placement)
    assert found == Price(nbytes, nbytes / 1e12)
    users_own = price(
        Op(verb, reads, Stage("backward", 0), results), Placement(layout=Layout(num_layers=1, x_nbytes=((1,),)))
    )
    assert users_own == Price()


@pytest.mark.parametrize("verb", ["count", "clip"])
def test_a_few_numbers_cost_an_operation(verb):
    assert price(Op(verb, (), DRAIN, (Value("scale"),)), Placement(layout=Layout(num_layers=1))) == Price(0, 1e-5)


def test_an_unknown_verb_is_our_own_fault():
    with pytest.raises(AssertionError, match="no price is known for gossip"):
        price(Op("gossip", (), Stage("forward", 0)), Placement(layout=Layout(num_layers=1, x_nbytes=((1,),))))
