"""The trace of a few steps, as a user saves it."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import gs_compile
from gs_compile.errors import OptimizerError


def trained(tmp_path, **expert):
    torch._dynamo.reset()
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "n_positions": 8, "n_embd": 32, "n_layer": 2, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**sizes, use_cache=False, bos_token_id=0, eos_token_id=0))
    optimizer = gs_compile.AdamW(model.parameters(), lr=1e-3)
    expert |= {"compiler": "eager", "ratios": {"parameter": 0.0, "checkpoint": 0.0, "optimizer": 0.0}}
    options = {"micro_batch_size": 1, "outputs": "loss", "storage": tmp_path / "ssd", "expert": expert}
    model.compile(backend="greedysnake", options=options)
    ids = torch.zeros(2, 8, dtype=torch.long)
    for _ in range(2):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
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
