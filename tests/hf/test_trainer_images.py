"""transformers.Trainer with models of images and texts that read sizes of images, against Trainer as it comes."""

from __future__ import annotations

import gc

import pytest
import torch
from learner import distance, values
from pictures import collated, qwen, samples
from test_trainer import EAGER
from test_trainer_durable import InterruptedByTestError, Interrupts
from transformers import Trainer, TrainingArguments

import gs_compile.hf

# Qwen3-VL's first layers get features of images, the others none
pytestmark = pytest.mark.filterwarnings("ignore::gs_compile.errors.UniformityWarning")


def trained(folder, kind, steps, *, is_frozen, is_mine, stop=None, **options):
    """Losses and norms, and what was learned, of steps of four samples: one batch, or two of which the loss is one mean.

    stop: the step at whose end the run is broken off.
    """
    torch._dynamo.reset()
    number = 2 if is_mine else 1
    model = qwen(kind)
    model.model.visual.requires_grad_(not is_frozen)
    args = TrainingArguments(
        str(folder / "out"),
        per_device_train_batch_size=4 // number,
        gradient_accumulation_steps=number,
        max_steps=steps,
        learning_rate=1e-2,
        adam_epsilon=1e-3,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        remove_unused_columns=False,
    )
    data = [
        each for step in range(steps) for each in samples(step, has_video=not is_frozen, num_seen=2 if is_frozen else 4)
    ]
    trainer = Trainer(model, args, train_dataset=data, eval_dataset=data[:2], data_collator=collated)
    if is_mine:
        gs_compile.hf.attach(trainer, storage=folder, host_memory="100MiB", expert=EAGER, **options)
    if stop is not None:
        trainer.add_callback(Interrupts(stop))
    trainer.train()
    found = trainer.evaluate()["eval_loss"]
    curve = [each[name] for each in trainer.state.log_history for name in ("loss", "grad_norm") if name in each]
    return [*curve, found], values(model)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "is_frozen"), [("qwen2_5", True), ("qwen2_5", False), ("qwen3", True), ("qwen3", False)]
)
def test_the_curve_is_that_of_trainer(tmp_path, kind, is_frozen):
    """With Trainer's own `max_grad_norm`, 1. The encoder that is trained sees videos, too; with the other one, a batch of
    each step has no images.
    """
    curve, learned = trained(tmp_path / "theirs", kind, 2, is_frozen=is_frozen, is_mine=False)
    own, found = trained(tmp_path / "mine", kind, 2, is_frozen=is_frozen, is_mine=True)
    assert own == pytest.approx(curve, rel=1e-4)
    assert distance(found, learned) < 1e-5


@pytest.mark.slow
def test_a_durable_run_goes_on_with_a_trained_encoder(tmp_path):
    """Fault: it was refused, unless a callback of the user's called the model before the first step."""
    given = {"is_frozen": False, "is_mine": True, "durability": "step"}
    curve, learned = trained(tmp_path / "whole", "qwen2_5", 3, **given)
    with pytest.raises(InterruptedByTestError):
        trained(tmp_path / "mine", "qwen2_5", 3, stop=2, **given)
    gc.collect()
    again, found = trained(tmp_path / "mine", "qwen2_5", 3, resume="auto", **given)
    assert again == curve
    assert all(torch.equal(found[name], value) for name, value in learned.items())
