"""Masters that are split between parameters and states learn what whole ones learn, bit for bit; states in bfloat16
and in 8 bits learn the same wherever they are.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from functools import partial

import pytest
import torch
from planned import A100
from tiered import Harness, adamw, gpt2, moved, options, step, tokens

from gs_compile.errors import OptimizerError
from gs_compile.runtime.formats import narrowed, shown

KEEPS_CAPTURES = True
NUM_STEPS = 20
CLASSES = ("parameter", "checkpoint", "optimizer")
PLACES = {
    "ssd": {"alpha": 0.5},
    "both": {"alpha": 0.0, "ratios": dict.fromkeys(CLASSES, 0.5)},
    "host": {"alpha": 1.0, "ratios": dict.fromkeys(CLASSES, 1.0), "separate_device": True},
    "device": {"alpha": 0.5, "separate_device": True, "ratios": {"device_parameter": 0.6}},
    "device, rolled back": {
        "alpha": 0.3,
        "separate_device": True,
        "clip": "speculative",
        "durability": "step",
        "ratios": {"device_parameter": 0.6, "optimizer": 0.5},
    },
}


@pytest.fixture(scope="module")
def harness():
    return Harness(gpt2, "bf16")


def trained(harness, directory, num_steps=NUM_STEPS, state_dtype=None, **chosen):
    """With clipping about every second step is scaled: what was speculated is taken back."""
    bound = {"max_grad_norm": 1.3} if "clip" in chosen else {}
    make = partial(adamw, state_dtype=state_dtype, **bound)
    return harness.train(make, options(directory, **chosen), num_steps)


@pytest.fixture(scope="module")
def whole(harness, tmp_path_factory):
    """In memory, with whole masters; also with clipping."""
    chosen = {"masters": "whole", "ratios": dict.fromkeys(CLASSES, 1.0)}
    directory = tmp_path_factory.mktemp("storage")
    found = {
        clip: trained(harness, directory, **chosen, **({"clip": clip} if clip else {})) for clip in ("", "delayed")
    }
    assert 5 < sum(norm > 1.3 for norm in found["delayed"].norms) < NUM_STEPS - 5
    return found


@pytest.mark.parametrize("place", PLACES)
def test_split_masters_learn_what_whole_ones_do(harness, whole, tmp_path, place):
    found = trained(harness, tmp_path, **PLACES[place])
    assert not found.differences(whole["delayed" if "clip" in PLACES[place] else ""])
    assert any(name.endswith(".master") and value.dtype == torch.float32 for name, value in found.values.items())


def rounded(values, number, state_dtype):
    """A moment as it is stored."""
    if state_dtype == torch.bfloat16:
        return values.bfloat16().float()
    return shown(narrowed(values, (torch.int8, torch.uint8)[number]))[: values.numel()].view(values.shape)


@pytest.mark.parametrize(
    ("precision", "state_dtype", "most"), [("model", torch.bfloat16, 0.03), ("bf16", "8bit", 0.15)]
)
def test_narrow_states_are_the_same_wherever_they_are(precision, state_dtype, most, tmp_path):
    harness, few = Harness(gpt2, precision), {"num_steps": 4, "state_dtype": state_dtype}
    chosen = {"clip": "delayed", "ratios": dict.fromkeys(CLASSES, 1.0)}
    reference = trained(harness, tmp_path, **few, **chosen)
    usual = trained(harness, tmp_path, 4, **chosen)
    moments = [name for name in usual.values if ".exp_avg" in name]
    assert set(moments) < set(reference.differences(usual))
    for name in moments:
        stored = rounded(reference.values[name], name.endswith("_sq"), state_dtype)
        assert torch.equal(reference.values[name], stored)
        off = (reference.values[name] - usual.values[name]).norm() / usual.values[name].norm()
        assert 0 < off < most, "a rounding is off by 2**-8 or 2**-4 at most, and moments of four steps by a few of them"
    for place in ({"alpha": 0.3, "ratios": {"optimizer": 0.5}}, {"alpha": 0.0, "separate_device": True, "threads": 2}):
        found = trained(harness, tmp_path / f"{place['alpha']}", **few, clip="speculative", durability="step", **place)
        assert not found.differences(reference)


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
        span, whole = optimizer.engine.trained_span(wide), optimizer.stored_state(wide)["exp_avg"].flatten()
        part = replace(span, offset=span.offset + 2000, shape=(500,))  # as a rank's rows begin anywhere
        assert torch.equal(optimizer.engine.tiers.read_state(part, 1), whole[2000:2500])


def test_another_type_of_states_is_refused(harness):
    with pytest.raises(OptimizerError, match=r"state_dtype must be None, .* \"8bit\"; got torch.float16"):
        adamw([{"params": list(harness.model.parameters())}], state_dtype=torch.float16)


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
