"""The examples with HuggingFace's tools run, and learn."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6:FutureWarning")  # in PEFT
@pytest.mark.parametrize("lora", [False, True])
def test_the_loss_falls(lora, tmp_path):
    assert runpy.run_path(str(EXAMPLES / "finetune_trainer.py"))["train"](tmp_path, lora=lora, max_steps=10) < 5.0


@pytest.mark.slow
def test_the_loss_falls_in_a_loop_of_ones_own(tmp_path):
    assert runpy.run_path(str(EXAMPLES / "finetune_accelerate.py"))["train"](tmp_path, num_steps=10) < 4.0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6:FutureWarning")  # in PEFT
def test_the_loss_falls_with_sft_trainer(tmp_path, monkeypatch):
    monkeypatch.setenv("CI", "1")  # TRL tells nobody that it was used
    assert runpy.run_path(str(EXAMPLES / "finetune_lora_sft.py"))["train"](tmp_path, max_steps=10) < 4.2
