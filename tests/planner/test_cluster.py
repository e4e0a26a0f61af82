"""Planning for several ranks: what each has of a machine and of a model, what they exchange, and what that takes."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import numpy as np
import pytest
from planned import A100, formulas, gpt, lowered, placed, ratios
from tiers import peaks_of

from gs_compile.cli.report.timeline import kind_of
from gs_compile.errors import OptionError, PlanError
from gs_compile.placement.placement import Decision
from gs_compile.placement.shards import shared
from gs_compile.placement.traffic import op_nbytes, traffic
from gs_compile.planner.builder import StepBuilder
from gs_compile.planner.measure.cluster import NETWORK_HOP_SECONDS, of_one_rank
from gs_compile.planner.plan import plan
from gs_compile.planner.simulate.prices import op_prices

WORLD = 4
NODE = replace(A100, host_nbytes=4 << 30, net_bytes_per_second=20e9, net_hop_seconds=5e-6)
MODEL = gpt(4, 1024, vocabulary=5000)
GIVEN = {"micro_batch_size": 1, "num_micro_batches": 3, "alpha": 0.0}


# What is exchanged ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize(("schedule", "times"), [("vertical", 1), ("horizontal", "n")])
def test_bytes_of_the_network_are_the_closed_form(schedule, times, number):
    """Parameters are gathered for the forward and for the backward, whatever n is; in the horizontal order for each
    micro-batch. The head's backward is with its forward; what is tied is gathered with the prologue and with the head.
    """
    workload = shared(MODEL, WORLD)
    builder = StepBuilder.of(workload, number, separate=True, schedule=schedule)
    placement = builder.placement(Decision(ratios=(ratios(0.3, 0.5, 0.5),)))
    moved = traffic(builder.program(placement), placement)
    uses = {"h": 1, "t": 3}
    gathered = sum(uses.get(size.unit, 2) * size.numel * size.itemsize for size in workload.sizes)
    assert moved["net", "w"] == (number if times == "n" else 1) * (WORLD - 1) * gathered
    assert moved["net", "dw"] == (WORLD - 1) * 4 * workload.num_trained


def test_a_ring_takes_its_bytes_and_its_hops():
    workload = shared(MODEL, WORLD)
    placement = placed(workload, 2, ratios(0.5, 0.5, 0.5), 0.0, separate=True)
    program = lowered(workload, placement)[-1]
    found = dict(zip(program.ops, op_prices(program, placement, workload, NODE), strict=True))
    for op, seconds in found.items():
        unit = placement.by_unit.get(op.values[0].unit)
        if op.verb == "all_gather":
            assert seconds == pytest.approx(op_nbytes(op, placement) / 20e9 + 3 * 5e-6)
        elif op.verb == "reduce_scatter":
            passed = 4 * unit.num_trained / NODE.memory_bytes_per_second
            assert seconds == pytest.approx(3 * 4 * unit.num_trained / 20e9 + len(unit.pieces) * 3 * 5e-6 + passed)
    assert {op.lane for op in found} >= {"net", "h2d", "ssd_read"}


@pytest.mark.parametrize("point", [(0.0, 0.0, 0.0, 0.0, 0.0), (0.3, 0.4, 0.5, 0.2, 0.5)], ids=["ssd", "between"])
def test_the_linear_program_counts_a_ranks_share(point):
    """Bytes of the network exactly, and memory as for one rank, what was gathered included."""
    workload, one = shared(gpt(16, 1024, vocabulary=5000), WORLD), np.array([1.0, *point, 0.0])
    found = formulas(workload, NODE).of(0.4, 7)
    placement = placed(workload, 7, ratios(*point), 0.4, separate=True)
    program = lowered(workload, placement)[-1]
    moved = sum(nbytes for (lane, _), nbytes in traffic(program, placement).items() if lane == "net")
    assert sum(seconds @ one for (_, lane), seconds in found.seconds.items() if lane == "net") == pytest.approx(
        moved / 20e9
    )
    peaks = peaks_of(program.ops, placement)
    assert 0.99 * peaks["host"] <= float((found.alive["host"] @ one).max()) <= 1.15 * peaks["host"]
    on_it = float((found.alive["device"] @ one).max()) - workload.workspace_nbytes
    assert 0.99 * peaks["device"] <= on_it <= 1.15 * peaks["device"]


# Plans ----------------------------------------------------------------------------------------------------------------


def test_what_a_rank_has_of_its_node():
    found = of_one_rank(NODE, 8, 16, "25GB/s")
    assert (found.num_ranks, found.host_nbytes, found.ssd_nbytes) == (8, NODE.host_nbytes // 8, NODE.ssd_nbytes // 8)
    assert (found.device_nbytes, found.h2d_bytes_per_second) == (NODE.device_nbytes, NODE.h2d_bytes_per_second)
    assert found.ssd_read_mixed_bytes_per_second == NODE.ssd_read_mixed_bytes_per_second / 8
    assert found.update_elements_per_second == NODE.update_elements_per_second / 8
    assert found.net_bytes_per_second == 20e9
    assert found.net_hop_seconds == pytest.approx((112 * 5e-6 + 15 * NETWORK_HOP_SECONDS) / 127)
    assert of_one_rank(NODE, 8, 2, 5e9).net_bytes_per_second == 5e9
    cpu = replace(NODE, device="cpu", device_nbytes=0)
    assert of_one_rank(cpu, 2, 1, None).matmul_flops_per_second == {"bf16": 100e12}
    assert of_one_rank(NODE, 1, 1, None) == NODE
    of_two = replace(NODE, num_ranks=2)
    assert of_one_rank(of_two, 4, 1, None).host_nbytes == NODE.host_nbytes // 2
    assert of_one_rank(of_two, 1, 1, None).host_nbytes == 2 * NODE.host_nbytes  # fault: a rank alone had its half


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"gpus": 0}, PlanError, "gpus is 0; it must be a whole number, 1 or more"),
        ({"nodes": 2}, PlanError, "2 nodes: give the network between them"),
        ({"network": "fast"}, OptionError, "network must be a whole number of bytes, or text"),
        ({"nodes": 2, "network": 0}, PlanError, "network is 0; it must be bytes per second"),
        ({"nodes": 2, "network": "25 furlongs/s"}, OptionError, "network has an unknown unit"),
        ({"gpus": 2, "machine": replace(NODE, net_bytes_per_second=inf)}, PlanError, "the rate between its GPUs"),
        ({"gpus": 4, "batch_size": 6}, PlanError, "batch_size is 6: 4 ranks cannot divide it equally"),
    ],
)
def test_what_is_refused(given, error, words):
    with pytest.raises(error, match=words):
        plan(MODEL, **{"machine": NODE, **given})


def test_more_ranks_are_more_tokens():
    """On one node they share its drives, further nodes bring their own; a slow network binds."""
    rates, each = [], []
    for gpus, nodes, network in ((1, 1, None), (2, 1, None), (2, 2, "20GB/s"), (2, 4, "20GB/s")):
        found = plan(MODEL, machine=NODE, gpus=gpus, nodes=nodes, network=network, **GIVEN)
        assert found.ranks == gpus * nodes
        assert found.bound_seconds <= 1.01 * found.seconds
        assert found.tokens_per_second == pytest.approx(found.ranks * 3 * 2048 / found.seconds)
        if found.ranks > 1:
            moved = sum(nbytes for (lane, _), nbytes in found.traffic.items() if lane == "net")
            seconds, _ = found.lanes["net"]
            assert moved / found.profile.net_bytes_per_second < seconds <= 1.001 * found.seconds
            spans = [span for span in found.simulation.spans if span.lane == "net"]
            assert sum(span.nbytes for span in spans) == moved
            assert {kind_of(span.op) for span in spans} == {"w", "dw"}
            peaks, budgets = found.simulation.peaks, found.budgets
            assert peaks["host"] <= budgets.host_nbytes
            assert peaks["device"] + found.workload.workspace_nbytes <= budgets.device_nbytes
        rates.append(found.tokens_per_second)
        each.append(sum(size.numel for size in found.workload.sizes))
    assert rates == sorted(rates)
    assert each == sorted(each, reverse=True)
    slow = plan(MODEL, machine=NODE, gpus=2, nodes=2, network="2GB/s", **GIVEN)
    assert slow.tokens_per_second < 0.6 * rates[2]
    assert "a network twice as fast: 100% faster" in slow.binding


def test_a_batch_is_of_all_ranks():
    found = plan(MODEL, machine=NODE, gpus=2, batch_size=8, micro_batch_size=2, alpha=0.0)
    assert (found.num_micro_batches, found.workload.micro_batch_size) == (2, 2)
