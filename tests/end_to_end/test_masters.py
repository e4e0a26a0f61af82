"""Masters that are split between parameters and states, and states in bfloat16 and in 8 bits: what they hold, what they
move, and when they are chosen. That they learn the same wherever they are, test_same_bits.py has.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from functools import partial

import pytest
import torch
from planned import A100
from tiered import adamw, gpt2, moved, options, shared, step, tokens

from gs_compile.errors import OptimizerError
from gs_compile.runtime.formats import narrowed, shown

KEEPS_CAPTURES = True
MODEL = {"precision": "bf16"}


def rounded(values, number, state_dtype):
    """A moment as it is stored."""
    if state_dtype == torch.bfloat16:
        return values.bfloat16().float()
    return shown(narrowed(values, (torch.int8, torch.uint8)[number]))[: values.numel()].view(values.shape)


@pytest.mark.parametrize(
    ("precision", "state_dtype", "most"), [("model", torch.bfloat16, 0.03), ("bf16", "8bit", 0.15)]
)
def test_narrow_states_are_rounded_once(precision, state_dtype, most, tmp_path):
    given = options(tmp_path, ratios=dict.fromkeys(("parameter", "checkpoint", "optimizer"), 1.0))
    narrow, usual = (
        shared(precision).train(partial(adamw, state_dtype=dtype), given, num_steps=4) for dtype in (state_dtype, None)
    )
    moments = [name for name in usual.values if ".exp_avg" in name]
    assert set(moments) < set(narrow.differences(usual))
    for name in moments:
        assert torch.equal(narrow.values[name], rounded(narrow.values[name], name.endswith("_sq"), state_dtype))
        off = (narrow.values[name] - usual.values[name]).norm() / usual.values[name].norm()
        assert 0 < off < most, "a rounding is off by 2**-8 or 2**-4 at most, and moments of four steps by a few of them"


def test_states_in_8_bits_move_their_bytes_and_come_back(harness, tmp_path):
    """A step reads and writes the rest of a master and two moments; what a state dict shows is what it is loaded with."""
    given = options(tmp_path, alpha=0.0, trace=True)
    with harness.fresh(partial(adamw, state_dtype="8bit"), given) as optimizer:
        step(harness.model, optimizer, tokens(0))
        found = moved(harness.model, optimizer, tokens(1))
        assert found.traced == found.planned
        numel = sum(unit.num_trained for unit in optimizer.engine.placement.units)
        for lane in ("ssd_read", "ssd_write"):
            assert found.planned[lane, "s"] == found.asked[lane, "s"] == numel * (2 + 2 * (1 + 4 / 256))
        before = deepcopy(optimizer.state_dict())
        optimizer.load_state_dict(before)
        for number, state in optimizer.state_dict()["state"].items():
            assert all(torch.equal(value, before["state"][number][name]) for name, value in state.items())
        for state in before["state"].values():
            state["exp_avg_sq"].mul_(1.1)
        optimizer.load_state_dict(before)
        for number, state in optimizer.state_dict()["state"].items():
            wanted = rounded(before["state"][number]["exp_avg_sq"], 1, "8bit")
            assert torch.equal(state["exp_avg_sq"], wanted)
        wide = harness.model.transformer.h[0].up.weight
        span, whole = optimizer.trained_span(wide), optimizer.stored_state(wide)["exp_avg"].flatten()
        part = replace(span, offset=span.offset + 2000, shape=(500,))  # as a rank's rows begin anywhere
        assert torch.equal(optimizer.engine.tiers.read_state(part, 1), whole[2000:2500])


def test_another_type_of_states_is_refused():
    with pytest.raises(OptimizerError, match=r"state_dtype must be None, .* \"8bit\"; got torch.float16"):
        adamw([{"params": list(gpt2().parameters())}], state_dtype=torch.float16)


@pytest.mark.parametrize(("up", "state"), [(1e6, {12}), (1e12, {10})], ids=["slow", "fast"])
def test_masters_are_whole_where_the_way_from_the_device_binds(harness, tmp_path, up, state):
    """Of split ones the parameters that live there come to the host for every update."""
    rates = {"h2d": 1e6, "d2h": up}
    links = {f"{lane}{how}_bytes_per_second": rate for lane, rate in rates.items() for how in ("", "_mixed")}
    given = options(tmp_path, separate_device=True, host_memory="30MiB")
    given["expert"]["ratios"] = {"optimizer": 0.0}
    given["machine"] = replace(A100, name="small", device_nbytes=8 << 20, **links)
    with harness.fresh(adamw, given) as optimizer:
        step(harness.model, optimizer, tokens(0))
        units = optimizer.engine.placement.units
        assert any(unit.num_resident for unit in units)
        assert {unit.state_itemsize for unit in units} == state
