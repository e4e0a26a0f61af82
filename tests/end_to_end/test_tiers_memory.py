"""A step runs in exactly the memory that was planned for it, whatever is placed where."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiered import Rig, adamw, gpt2, options, step, tokens

from gs_compile.planner.lp.fit import peak
from gs_compile.runtime.memory import PAGE_NBYTES

KEEPS_CAPTURES = True
NUM_LAYERS, NUM_MICRO_BATCHES = 3, 3
# Buffers are whole pages, and the plan counts bytes: only activations are of other sizes. A checkpoint and a gradient
# of each layer and micro-batch are more than are ever there.
ROUNDING = 2 * (NUM_LAYERS + 1) * NUM_MICRO_BATCHES * PAGE_NBYTES


@pytest.fixture(scope="module")
def rigs():
    return {precision: Rig(partial(gpt2, num_layers=NUM_LAYERS), precision) for precision in ("model", "bf16")}


ratios = st.sampled_from((0.0, 0.3, 0.7, 1.0))


@settings(deadline=None, max_examples=15)
@given(
    precision=st.sampled_from(("model", "bf16")),
    clip=st.sampled_from((None, "delayed", "speculative")),
    alpha=st.sampled_from((0.0, 0.25, 0.5, 1.0)),
    separate_device=st.booleans(),
    ratios=st.fixed_dictionaries({"parameter": ratios, "checkpoint": ratios, "optimizer": ratios}),
    on_device=st.sampled_from((0.0, 0.6)),
)
def test_the_planned_memory_is_enough(rigs, storage, precision, clip, alpha, separate_device, ratios, on_device):
    rig, make = rigs[precision], partial(adamw, max_grad_norm=0.5) if clip else adamw
    classes = (["checkpoint"] if separate_device else []) + (["parameter"] if precision == "bf16" else [])
    if separate_device:
        ratios = ratios | {f"device_{name}": on_device * (1 - ratios[name]) for name in classes}
    chosen = {
        "alpha": 1.0 if clip == "delayed" else alpha,
        "clip": clip,
        "separate_device": separate_device,
        "ratios": ratios,
    }
    with rig.fresh(make, options(storage, **chosen)) as optimizer:
        step(rig.model, optimizer, tokens(0))
        step(rig.model, optimizer, tokens(1))  # with the late updates of the first
        planned = peak(optimizer.engine.programs[-1], "host")
    budget = planned + ROUNDING
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("gs_compile.planner.lp.fit.MARGIN", 0)
        with rig.fresh(make, options(storage, host_memory=budget, **chosen)) as optimizer:
            for number in range(4):
                step(rig.model, optimizer, tokens(number))
            optimizer.synchronize()
            ledger = optimizer.engine.tiers.setting.arena.ledger
            assert ledger.peak_total <= budget
            assert ledger.total <= budget
