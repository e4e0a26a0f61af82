"""A Trainer that makes a model in each training, and one of a class of the user's own, with the backend attached."""

from __future__ import annotations

from abc import ABC

import pytest
from learner import distance, values
from test_trainer import EAGER, curve, own_groups, padded, trainer
from tiny import tiny
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


class GroupsIfGiven(Trainer):
    def create_optimizer(self, *args, **kwargs):
        """Groups of its own with an optimizer that was given, else Trainer's."""
        if self.optimizer_cls_and_kwargs is None:
            return super().create_optimizer(*args, **kwargs)
        kind, settings = self.optimizer_cls_and_kwargs
        self.optimizer = kind(own_groups(self.model), **settings)
        return self.optimizer


def test_an_optimizer_that_was_not_given_is_seen_as_such(tmp_path):
    one = trainer(tmp_path, weight_decay=0.1)
    one.__class__ = GroupsIfGiven
    gs_compile.hf.attach(one)
    assert [group["weight_decay"] for group in one.create_optimizer().param_groups] == [0.1, 0.0]
    assert type(one.optimizer) is gs_compile.AdamW
