"""The batches of a step with a collator that pads ahead of the tokens, against Trainer as it comes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from learner import distance, values
from test_trainer import EAGER, curve, samples, trainer
from transformers import AutoConfig, AutoModelForSequenceClassification
from zoo import VOCAB

import gs_compile.hf


def padded_ahead(batch):
    """A collator that pads ahead of the tokens, as tokenizers of some models do."""
    longest = max(len(each["input_ids"]) for each in batch)
    missing = [longest - len(each["input_ids"]) for each in batch]
    found = {
        name: torch.stack([torch.nn.functional.pad(each[name], (n, 0)) for each, n in zip(batch, missing, strict=True)])
        for name in ("input_ids", "attention_mask")
    }
    return found | {"labels": torch.tensor([int(each["input_ids"][0]) % 2 for each in batch])}


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "size"), [("xlnet", 2), ("gpt2", 1)])
def test_batches_of_a_step_are_padded_where_the_model_reads_them_as_before(tmp_path, kind, size):
    """XLNet's classifier reads the last token; GPT-2 learns a vector for each place, and tokens must not move.

    Where padding goes test_together.py has of both, and that batches are padded to one length test_trainer.py.
    """
    shape: dict[str, Any] = {"vocab_size": VOCAB, "num_labels": 2, "pad_token_id": 0}
    shape |= {
        "xlnet": {"d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 32, "dropout": 0.0, "summary_last_dropout": 0.0},
        "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    }[kind]

    def made(folder):
        found = trainer(folder, data=samples(16, (7, 12, 5)), **both)
        torch.manual_seed(0)
        model = AutoModelForSequenceClassification.from_config(AutoConfig.for_model(kind, **shape))
        found.model = found.model_wrapped = model
        found.data_collator, found.processing_class = padded_ahead, SimpleNamespace(padding_side="left", pad_token_id=0)
        return found

    both = {"per_device_train_batch_size": size, "gradient_accumulation_steps": 2, "max_steps": 2}
    theirs, mine = made(tmp_path / "theirs"), made(tmp_path / "mine")
    theirs.model_accepts_loss_kwargs = False  # else Trainer takes the sum of the batches' means
    gs_compile.hf.attach(mine, storage=tmp_path / "storage", expert=EAGER)
    for each in (theirs, mine):
        each.train()
    assert curve(mine, "loss") == pytest.approx(curve(theirs, "loss"), rel=1e-5)
    assert distance(values(mine.model), values(theirs.model)) < 1e-5
