"""A Trainer that makes a model in each training, and one of a class of the user's own, with the backend attached."""

from __future__ import annotations

from abc import ABC

import pytest
from learner import distance, values
from test_trainer import EAGER, assert_alike, curve, padded, trainer
from tiny import tiny
from torch.nn.functional import cross_entropy
from transformers import Trainer

import gs_compile.hf
from gs_compile.model.residency import is_offloaded


def test_a_model_that_each_training_makes(tmp_path):
    """By `model_init`, as a search of hyperparameters has it: it is trained as the arguments say by then."""
    runs = {}
    for kind in ("mine", "theirs"):
        like = trainer(tmp_path / kind, weight_decay=0.0, max_steps=2)
        given = {"args": like.args, "train_dataset": like.train_dataset, "data_collator": padded}
        found = Trainer(model_init=lambda: tiny(), **given)
        if kind == "mine":
            gs_compile.hf.attach(found, storage=tmp_path / "storage", expert=EAGER)
        runs[kind] = []
        for found.args.learning_rate in (1e-2, 3e-2):
            found.train()
            runs[kind].append((curve(found, "loss"), values(found.model)))
        assert is_offloaded(found.model.head.weight) == (kind == "mine")
    for (losses, learned), (expected, known) in zip(runs["mine"], runs["theirs"], strict=True):
        assert losses == pytest.approx(expected, rel=1e-5)
        assert distance(learned, known) < 1e-5


def test_a_trainer_that_is_abstract_first_is_attached(tmp_path):
    """Its objects have another layout than those of a class that begins with Trainer."""

    class Abstract(ABC, Trainer):
        def _get_grad_norm(self, *args, **kwargs):
            raise AssertionError("the optimizer of the tiers knows it")

    plain = trainer(tmp_path, max_steps=1)
    mine = Abstract(plain.model, plain.args, train_dataset=plain.train_dataset, data_collator=padded)
    gs_compile.hf.attach(mine, storage=tmp_path / "storage", expert=EAGER)
    mine.train()
    assert isinstance(mine, Abstract)
    assert len(curve(mine, "grad_norm")) == 1


class ByHand(Trainer):
    """Makes each batch's backward by itself, of a loss of its own."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        model.train()
        inputs = self._prepare_inputs(inputs)
        logits, labels = model(**inputs).logits[:, :-1], inputs["labels"][:, 1:]
        loss = cross_entropy(logits.flatten(0, 1), labels.flatten()) / self.args.gradient_accumulation_steps
        self.accelerator.backward(loss)
        return loss.detach()


def test_a_training_step_of_its_own_reads_all_that_the_model_returns(tmp_path):
    runs = {kind: trainer(tmp_path / kind, max_steps=3, gradient_accumulation_steps=2) for kind in ("mine", "theirs")}
    for kind, found in runs.items():
        found.__class__ = ByHand
        if kind == "mine":
            gs_compile.hf.attach(found, storage=tmp_path / "storage", expert=EAGER)
        found.train()
    assert is_offloaded(runs["mine"].model.head.weight)
    assert_alike(runs["mine"], runs["theirs"])
