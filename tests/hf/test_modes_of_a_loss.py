"""Losses that change the model's mode, their batch, or the random state, in a step of several batches."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial

import peft
import pytest
import torch
from learner import distance, values
from test_trainer import padded, samples
from test_trl import both, curve, settings
from tiny import tiny
from torch.nn import functional
from transformers import Trainer, TrainingArguments
from trl.trainer.utils import use_adapter
from zoo import VOCAB, small

import gs_compile
from gs_compile.hf import strands
from gs_compile.hf.gather import Padding
from gs_compile.hf.together import AskedModel, Mode, answered

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6:FutureWarning")  # in PEFT


@contextmanager
def evaluated(model):
    """As contexts that set back what they have found."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


class Referred(Trainer):
    """As TRL's DPOTrainer with an adapter that was trained before: the reference is another adapter."""

    def compute_loss(self, model, inputs, *args, **kwargs):
        with torch.no_grad(), use_adapter(model, "ref"), evaluated(model):
            theirs = model(**inputs).logits
        with torch.no_grad(), use_adapter(model, None):
            base = model(**inputs).logits
        own = model(**inputs).logits
        self.modes.append(model.training)
        return functional.mse_loss(own, theirs) + functional.mse_loss(own, base)


def with_two_adapters():
    config = peft.LoraConfig(r=2, target_modules=["up"], init_lora_weights=False)
    model = peft.get_peft_model(tiny(), config)
    model.add_adapter("ref", config)
    return model


def test_each_strand_finds_the_model_as_it_has_left_it():
    """Contexts that set back what they have found: all strands enter one before the first leaves it."""
    model = with_two_adapters()
    asked = AskedModel(model, {"micro_batch_size": 2, "storage": "/"})
    own = Mode.of(model)

    def mode(**batch):  # a row for each sample
        numbers = [float(model.training), float(model.active_adapter == "ref"), float(model._adapters_disabled)]
        return torch.tensor([numbers] * len(batch["input_ids"]))

    def loss(batch):
        own.enter(model)
        with use_adapter(model, "ref"), evaluated(model):
            found = [ask(**batch)]
        with use_adapter(model, None):
            found += [ask(**batch), ask(**batch)]
        return torch.stack([each[0] for each in [*found, ask(**batch)]]).tolist()

    ask = asked._asked(mode)
    batches = [{"input_ids": torch.zeros(2, 9)}] * 3
    with torch.no_grad():
        found = strands.run(
            [partial(loss, each) for each in batches], partial(answered, padding=Padding(), has_loss_alone=False)
        )
    assert found == [[[0, 1, 0], [1, 0, 1], [1, 0, 1], [1, 0, 0]]] * 3
    assert Mode.of(model) == own


def test_a_loss_may_run_the_model_as_it_is_written():
    """As `generate` does, with which a loss may sample: the forward called itself without end."""
    model, ids = tiny(), torch.ones(2, 5).long()
    asked = AskedModel(model, {"micro_batch_size": 2, "storage": "/"})
    with torch.no_grad(), asked.wrappable(), gs_compile.streaming(model):
        found = model(input_ids=ids).logits
    torch.testing.assert_close(found, tiny()(input_ids=ids).logits)


def referred(folder):
    trainer = Referred(
        with_two_adapters(), settings(TrainingArguments, folder), train_dataset=samples(), data_collator=padded
    )
    trainer.modes = []
    return trainer


@pytest.mark.slow
def test_each_batch_has_the_adapter_and_the_mode_that_its_own_loss_has_set(tmp_path):
    """Losses of a step run interleaved: the second found the adapter of the first one's reference, and went back to it,
    so the loss was of other adapters.
    """
    mine, theirs = both(referred, tmp_path)
    for key in ("loss", "grad_norm"):
        assert curve(mine, key) == pytest.approx(curve(theirs, key), rel=1e-5), key
    assert mine.modes == theirs.modes == [True] * 6
    assert (mine.model.active_adapter, mine.model._adapters_disabled) == ("default", False)
    trained = [[name for name, each in of.model.named_parameters() if each.requires_grad] for of in (mine, theirs)]
    assert trained[0] == trained[1]
    assert distance(values(mine.model), values(theirs.model)) < 1e-5


class WithoutPrompts(Trainer):
    """As DPOTrainer with prompts that are trained: the reference is the model without them."""

    def compute_loss(self, model, inputs, *args, **kwargs):
        with torch.no_grad(), model.disable_adapter():
            base = model(**inputs).logits
        return functional.mse_loss(model(**inputs).logits[:, 3:], 2 * base)


@pytest.mark.slow
def test_a_reference_without_the_prompts_runs_on_the_tiers(tmp_path):
    """PEFT puts the forward of the model within in place of its own, which found its parameters on the tiers."""

    def prompted(folder):
        config = peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")
        torch.manual_seed(0)
        model = peft.get_peft_model(small("llama"), config)
        return WithoutPrompts(model, settings(TrainingArguments, folder), train_dataset=samples(), data_collator=padded)

    mine, theirs = both(prompted, tmp_path)
    for key in ("loss", "grad_norm"):
        assert curve(mine, key) == pytest.approx(curve(theirs, key), rel=1e-5), key
    assert distance(values(mine.model), values(theirs.model)) < 1e-4
    assert mine.model.forward.__func__ is peft.PeftModelForCausalLM.forward


class Drawing(Trainer):
    """It reads logits, which the model does not return beside its loss at first, so the first step's losses are computed again."""

    def compute_loss(self, model, inputs, *args, **kwargs):
        weight, labels = torch.rand(()), inputs["labels"].add_(1).remainder_(VOCAB)
        return weight * functional.cross_entropy(model(**inputs).logits.flatten(0, 1), labels.flatten())


@pytest.mark.slow
def test_a_loss_that_is_computed_again_finds_its_batch_and_draws_as_before(tmp_path):
    """Labels that it changes in place were changed twice, and all later numbers were others than Trainer's."""

    def drawing(folder):
        return Drawing(tiny(), settings(TrainingArguments, folder), train_dataset=samples(), data_collator=padded)

    mine, theirs = both(drawing, tmp_path)
    assert curve(mine, "loss") == pytest.approx(curve(theirs, "loss"), rel=1e-5)
