"""Trainer layer-major against Trainer as it comes, over 20 steps: kinds of models, accumulation, precision, places."""

from __future__ import annotations

import pytest
import torch
from learner import values
from test_trainer import EAGER, assert_alike, attached, curve, samples, trainer

RESIDENT = {**EAGER, "ratios": {"parameter": 1.0, "checkpoint": 1.0, "optimizer": 1.0}}
NAMES = ["gpt2", "llama", "qwen3", "gpt_neox", "mistral"]
CELLS = [(name, gas, bf16) for name in NAMES for gas in (1, 4) for bf16 in (False, True)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "gas", "bf16"), CELLS)
def test_twenty_steps(name, gas, bf16, tmp_path):
    """With clipping, a schedule, padding and a ragged last step of each epoch. Wherever data is stored: the same bits."""
    settings = {"max_steps": 20, "gradient_accumulation_steps": gas, "bf16": bf16, "data": samples(lengths=(12, 9))}
    settings |= {"max_grad_norm": 0.5, "lr_scheduler_type": "cosine", "learning_rate": 1e-3}
    theirs = trainer(tmp_path / "theirs", name, **settings)
    theirs.train()
    mine = attached(tmp_path / "mine", name, **settings)
    mine.train()
    assert len(curve(mine, "loss")) == 20
    assert_alike(mine, theirs, 5e-3 if bf16 else 1e-5)  # bf16 rounds each product to 2e-3
    resident = attached(tmp_path / "resident", name, options={"expert": RESIDENT}, **settings)
    resident.train()
    for key in ("loss", "grad_norm"):
        assert curve(resident, key) == curve(mine, key)
    found, wanted = values(resident.model), values(mine.model)
    assert all(torch.equal(found[each], wanted[each]) for each in wanted)
