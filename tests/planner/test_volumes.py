"""The formulas of bytes and seconds, held against the programs they stand for."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planned import A100, gpt, lowered, on_device, placed, ratios, toys

from gs_compile.placement.traffic import traffic
from gs_compile.planner.lp.volumes import PHASES, rate_of, seconds, volumes
from gs_compile.planner.simulate.prices import measure

WHOLE = st.sampled_from([(0.0, 0.0), (1.0, 0.0), (0.0, 1.0)])  # of a class in host memory, and on the device
SHARES = st.tuples(WHOLE, WHOLE, st.sampled_from([0.0, 1.0])).map(lambda s: (s[0][0], s[1][0], s[2], s[0][1], s[1][1]))


def halves(program):
    """The program's operations by the phase they belong to, whatever the stage they are issued in."""
    for phase, stages in zip(PHASES, (("fill", "forward"), ("backward", "drain")), strict=True):
        yield phase, program.with_ops([op for op in program.ops if op.stage.phase in stages], "offload")


def counted(workload, placement):
    program = next(each for each in lowered(workload, placement) if each.made_by == "offload")
    found = Counter()
    for phase, half in halves(program):
        for (lane, kind), nbytes in traffic(half, placement).items():
            found[phase, lane, kind] += nbytes
    return dict(found)


def at(formulas, *shares):
    point = np.array([1.0, *shares, *[0.0] * (5 - len(shares))])
    return {key: float(array[0] @ point) for key, array in formulas.items() if abs(array[0] @ point) > 1e-6}


@settings(deadline=None, max_examples=100)
@given(toys(whole=True), st.sampled_from([0.0, 1.0]), SHARES, st.booleans())
def test_bytes_are_those_of_the_program(toy, alpha, shares, separate):
    workload, n = toy
    shares = shares if separate else (*shares[:3], 0.0, 0.0)
    resident = on_device(*shares[3:])
    placement = placed(workload, n, ratios(*shares[:3]), alpha, separate=separate, device_ratios=resident)
    assert at(volumes(workload, n, [alpha], separate=separate), *shares) == counted(workload, placement)


@pytest.mark.parametrize("shares", [(0.5, 0.3, 0.7), (0.2, 0.8, 0.1), (0.5, 0.3, 0.7, 0.2, 0.0)])
@pytest.mark.parametrize("alpha", [0.3, 1.0])
@pytest.mark.parametrize("bf16", [True, False])
def test_bytes_of_what_is_cut_differ_by_padding(shares, alpha, bf16):
    workload = gpt(8, 1024, sequence=256, bf16=bf16)
    found = at(volumes(workload, 5, [alpha], separate=True), *shares)
    resident = on_device(*shares[3:]) if shares[3:] else {}
    expected = counted(workload, placed(workload, 5, ratios(*shares[:3]), alpha, separate=True, device_ratios=resident))
    assert found.keys() == expected.keys()
    for key, nbytes in expected.items():
        if key[2] == "x" and shares[3:]:  # of each layer the micro-batch that has not left may be one that stays
            assert abs(found[key] - nbytes) <= workload.num_layers * workload.x_nbytes
        else:
            assert found[key] == pytest.approx(nbytes, rel=2e-2 if key[2] == "x" else 3e-3)


@pytest.mark.parametrize("machine", [A100, replace(A100, device="cpu", device_nbytes=0, h2d_bytes_per_second=float("inf"), h2d_mixed_bytes_per_second=float("inf"), d2h_bytes_per_second=float("inf"), d2h_mixed_bytes_per_second=float("inf"))])  # fmt: skip
def test_seconds_are_the_prices_of_the_program(machine):
    workload, n, alpha = gpt(4, 1024, sequence=256), 3, 1.0
    placement = placed(workload, n, ratios(0, 0, 0), alpha, separate=machine.separate)
    program = next(each for each in lowered(workload, placement) if each.made_by == "offload")
    expected = Counter()
    for phase, half in halves(program):
        for op, price in zip(half.ops, measure(half, placement, workload, machine), strict=True):
            expected[phase, "compute" if op.lane == "memory" else op.lane] += price.seconds
    found = at(seconds(workload, machine, n, [alpha]), 0, 0, 0)
    assert found == pytest.approx({key: value for key, value in expected.items() if value > 1e-6}, rel=1e-3)


def test_a_copy_in_one_memory_reads_and_writes():
    assert rate_of("h2d", replace(A100, device="cpu", h2d_bytes_per_second=float("inf"), h2d_mixed_bytes_per_second=float("inf"))) == A100.memory_bytes_per_second / 2  # fmt: skip


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("part", [0.1, 0.37, 0.8])
def test_whole_tensors_on_the_device_are_the_part_to_a_tensor(part, alpha):
    """All units together have it; the largest tensor is a third of a layer."""
    workload = gpt(24, 1024, sequence=256, tied=False)
    shares = (0.0, 0.1, 0.0, 0.0, part)
    found = at(volumes(workload, 5, [alpha], separate=True), *shares)
    expected = counted(workload, placed(workload, 5, ratios(*shares[:3]), alpha, separate=True, device_ratios=on_device(*shares[3:])))  # fmt: skip
    largest = 50257 * 1024 * 2
    assert found.keys() == expected.keys()
    for key, nbytes in expected.items():
        assert abs(found[key] - nbytes) <= 3 * largest + 3e-3 * nbytes, key


def test_a_home_on_the_device_saves_the_way_there():
    """What is updated still comes there once; without a master nothing has a home there."""
    for bf16 in (True, False):
        workload = gpt(2, 256, bf16=bf16, tied=False)
        found = volumes(workload, 4, [0.0], separate=True)
        point = np.array([1.0, 0, 0, 0, 1, 1])
        moved = {key: float(array[0] @ point) for key, array in found.items()}
        nbytes = workload.parameters_nbytes
        assert moved["forward", "ssd_write", "x"] == 0
        if bf16:
            assert moved["backward", "h2d", "w"] == nbytes
            assert moved["forward", "h2d", "w"] == moved["forward", "ssd_read", "w"] == 0
        else:
            assert moved["forward", "h2d", "w"] == moved["forward", "ssd_read", "w"] > 0
        assert ("backward", "d2h", "w") not in moved
