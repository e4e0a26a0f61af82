"""What lives on the device is committed as the last step has left it, also between two steps that are due."""

from __future__ import annotations

import pytest
import torch
from tiered import adamw, options, step, tokens

import gs_compile

MODEL = {"precision": "bf16"}


def trained(harness, folder, last, durability):
    """What the model has learned by the last step; each run's last step is committed."""
    ratios = {"device_parameter": 1.0, "optimizer": 1.0}
    given = options(folder, separate_device=True, alpha=0.0, ratios=ratios, durability=durability)
    with harness.fresh(adamw, given) as optimizer:
        run = gs_compile.resume(harness.model, optimizer, storage=folder)
        for number in range(run.step, last):
            step(harness.model, optimizer, tokens(number))
        optimizer.commit()
        return run.step, {name: value.clone() for name, value in harness.model.state_dict().items()}


@pytest.mark.parametrize("durability", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_parts_on_the_device_go_on(harness, durability, tmp_path):
    _, whole = trained(harness, tmp_path / "whole", 6, durability)
    trained(harness, tmp_path / "broken", 4, durability)
    start, values = trained(harness, tmp_path / "broken", 6, durability)
    assert start == 4
    assert all(torch.equal(values[name], whole[name]) for name in whole)
