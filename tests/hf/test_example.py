"""The example with Trainer runs, and learns."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "finetune_trainer.py"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6:FutureWarning")  # in PEFT
@pytest.mark.parametrize("lora", [False, True])
def test_the_loss_falls(lora, tmp_path):
    assert runpy.run_path(str(EXAMPLE))["train"](tmp_path, lora=lora, max_steps=10) < 5.0
