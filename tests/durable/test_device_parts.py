"""What lives on the device is committed as the last step has left it, also between two steps that are due."""

from __future__ import annotations

import gc

import pytest
import torch
from tiered import gpt2, options, step, tokens, two_groups

import gs_compile


def trained(folder, last, durability):
    """What the model has learned by the last step; each run's last step is committed."""
    model = gpt2()
    optimizer = gs_compile.AdamW(two_groups(model), lr=1e-2)
    ratios = {"device_parameter": 1.0, "optimizer": 1.0}
    model.compile(
        backend="greedysnake",
        options=options(
            folder, separate_device=True, alpha=0.0, ratios=ratios, precision="bf16", durability=durability
        ),
    )
    run = gs_compile.resume(model, optimizer, storage=folder)
    for number in range(run.step, last):
        step(model, optimizer, tokens(number))
    optimizer.commit()
    return run.step, {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("durability", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_parts_on_the_device_go_on(durability, tmp_path):
    _, whole = trained(tmp_path / "whole", 6, durability)
    trained(tmp_path / "broken", 4, durability)
    gc.collect()
    start, values = trained(tmp_path / "broken", 6, durability)
    assert start == 4
    assert all(torch.equal(values[name], whole[name]) for name in whole)
