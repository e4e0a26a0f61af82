"""Whether to keep what is inactive: by the simulator; and what is told of it."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
from planned import A100, gpt, problem
from test_planner import FIVE, TINY

from gs_compile.cli.report.explain import step_dict, step_report
from gs_compile.passes.baselines.lifetime import Rooms
from gs_compile.planner.plan import plan
from gs_compile.planner.variants import as_dict, own_within

LINKS = [f"{lane}_bytes_per_second" for lane in ("h2d", "d2h", "h2d_mixed", "d2h_mixed")]


def predicted(seconds, nbytes):
    """A simulation by its seconds and what it moves."""
    return SimpleNamespace(seconds=seconds, moved_nbytes=nbytes)


@pytest.mark.parametrize(
    ("seconds", "nbytes", "reason"),
    [
        (3.0, 1 << 20, "1.0 MiB less are moved in a step, which takes 3 s in simulation, and 4 s by the horizo"),
        (3.0, 3 << 20, "1.0 MiB more are moved"),  # with ratios of its own
    ],
)
def test_what_keeping_brings(seconds, nbytes, reason):
    plain, why = predicted(4.0, 2 << 20), Rooms().why
    assert reason in why(plain, predicted(seconds, nbytes))
    assert "would not be faster than 4 s: nothing is kept" in why(plain, plain)


def test_a_room_is_what_budgets_leave():
    """In one memory a copy reads and writes, and nothing on the device is counted."""
    given = problem(gpt(2, 128), A100, host_nbytes=10**9, device_nbytes=10**8)
    room = own_within(given, Rooms())
    assert room.device_nbytes == 10**8 - given.workload.workspace_nbytes
    assert room.host_nbytes == 10**9
    assert dict(room.bytes_per_second) == {"h2d": 24e9, "d2h": 24e9, "ssd_read": 6e9, "ssd_write": 3e9}
    one_memory = replace(A100, device="cpu", device_nbytes=0, **dict.fromkeys(LINKS, math.inf))
    room = own_within(problem(given.workload, one_memory), Rooms())
    assert dict(room.bytes_per_second)["d2h"] == A100.memory_bytes_per_second / 2
    assert room.device_nbytes > 10**15


def test_what_is_told_of_a_plan():
    elsewhere = {"device_parameter": 0.0, "device_checkpoint": 0.0}
    found = plan(TINY, machine="a100", host_memory="220MiB", schedule="lifetime", ratios=elsewhere, **FIVE)
    shown = step_report(found, {})
    assert "What is inactive between two uses:" in shown
    assert re.search(r"^  checkpoints +device +from forward to backward +20 +5\.0 MiB +20 +5\.0 MiB$", shown, re.M)
    assert found.notes[0] in shown
    told = step_dict(found, {})["simulated"]["periods"]
    every = as_dict(found.placement, found.problem.builder)["periods"]
    assert len(told) == len(every) == 63 + 20 + 28
    assert {entry["tensor"].partition(".")[2] for entry in told} <= {"device", "host"}
    first = next(entry for entry in told if entry["tensor"] == "x0_0.device")
    assert (first["since"], first["until"], first["stays"]) == ("forward 0 of 0", "backward 1 of 0", True)
    assert (first["nbytes"],) == TINY.x_nbytes
