"""The trace of a few steps, as a user saves it."""

from __future__ import annotations

import json

import pytest
from tiered import gpt2, options, step, tokens

import gs_compile
from gs_compile.errors import OptimizerError


def trained(tmp_path, **expert):
    model = gpt2()
    optimizer = gs_compile.AdamW(model.parameters(), lr=1e-3)
    model.compile(backend="greedysnake", options=options(tmp_path / "ssd", micro_batch_size=1, **expert))
    for number in range(2):
        step(model, optimizer, tokens(number, 2))
    optimizer.synchronize()
    return optimizer


def test_every_lane_of_every_step_is_in_the_file(tmp_path):
    optimizer = trained(tmp_path, trace=True)
    optimizer.save_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    rows = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    slices = [event for event in events if event["ph"] == "X"]
    assert {rows[event["tid"]].split()[0] for event in slices} >= {"compute", "ssd_read", "ssd_write", "cpu"}
    assert sum(event["name"].startswith("backward 1_") for event in slices) == 2 * 2  # steps, micro-batches
    optimizer.engine.tiers.close()


def test_without_a_trace(tmp_path):
    optimizer = trained(tmp_path)
    with pytest.raises(OptimizerError, match="there is no trace"):
        optimizer.save_trace(tmp_path / "trace.json")
    optimizer.engine.tiers.close()
