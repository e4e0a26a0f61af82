"""The optimizer that an attached Trainer makes: of its arguments, of the user's own class, or given."""

from __future__ import annotations

import pytest
import torch
from test_trainer import EAGER, assert_alike, trainer
from transformers import Trainer

import gs_compile
import gs_compile.hf
from gs_compile.errors import OptimizerError, OptionError


def test_an_optimizer_of_this_package_gets_the_bound(tmp_path):
    found = trainer(tmp_path, optim="lion_32bit", max_grad_norm=0.3)
    gs_compile.hf.attach(found)
    assert found.get_optimizer_cls_and_kwargs(found.args) == (
        gs_compile.Lion, {"max_grad_norm": 0.3, "lr": 1e-2, "betas": (0.9, 0.999)}
    )  # fmt: skip
    for name, states in (("paged_adamw_32bit", {}), ("adamw_8bit", {"state_dtype": "8bit"})):
        found = trainer(tmp_path, optim=name, max_grad_norm=0.3, adam_epsilon=1e-6)
        gs_compile.hf.attach(found)
        assert found.get_optimizer_cls_and_kwargs(found.args) == (
            gs_compile.AdamW, {"max_grad_norm": 0.3, "lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-6, **states}
        )  # fmt: skip
    found = trainer(tmp_path, max_grad_norm=0)
    given = {"lr": 1e-3, "ns_steps": 3, "adamw_lr": 1e-4, "max_grad_norm": 0.7}
    found.optimizer_cls_and_kwargs = gs_compile.Muon, given
    gs_compile.hf.attach(found)
    assert found.optimizer_cls_and_kwargs == (gs_compile.Muon, given)
    assert not found.accelerator.prepare(found.create_optimizer()).device_placement  # of all states, before a step
    found = trainer(tmp_path, max_grad_norm=0.3)
    found.optimizer = gs_compile.AdamW(found.model.parameters())
    gs_compile.hf.attach(found)
    assert found.optimizer.max_grad_norm == 0.3


def test_an_optimizer_of_torch_is_refused(tmp_path):
    found = trainer(tmp_path)
    found.optimizer = torch.optim.AdamW(found.model.parameters())
    with pytest.raises(OptionError, match="leave the optimizer to the arguments, or give one of gs_compile"):
        gs_compile.hf.attach(found)


def own_groups(model):
    """Blocks alone, each with a rate of its own."""
    return [{"params": list(block.parameters()), "lr": 1e-3 * (1 + n)} for n, block in enumerate(model.blocks)]


class Groups(Trainer):
    def create_optimizer(self, *args, **kwargs):
        self.optimizer = torch.optim.AdamW(own_groups(self.model), weight_decay=0.1)
        return self.optimizer


def given_groups(trainer):
    trainer.optimizer_cls_and_kwargs = torch.optim.AdamW, {"lr": 1e-2, "params": own_groups(trainer.model)}


def makes_groups(trainer):
    trainer.__class__ = Groups


@pytest.mark.parametrize("change", [given_groups, makes_groups])
def test_param_groups_of_the_users_own(change, tmp_path):
    """By `optimizer_cls_and_kwargs`, or a `create_optimizer` that makes torch's."""
    found = []
    for name in ("mine", "theirs"):
        one = trainer(tmp_path / name)
        for parameter in {*one.model.parameters()} - {*one.model.blocks.parameters()}:
            parameter.requires_grad_(False)
        change(one)
        if name == "mine":
            gs_compile.hf.attach(one, storage=tmp_path / "storage", expert=EAGER)
        one.train()
        found.append(one)
    assert_alike(*found)


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


def test_a_rule_that_is_not_followed_is_refused(tmp_path):
    one = trainer(tmp_path)
    one.optimizer_cls_and_kwargs = torch.optim.AdamW, {"lr": 1e-2, "amsgrad": True}
    with pytest.raises(OptimizerError, match="amsgrad"):
        gs_compile.hf.attach(one, storage=tmp_path / "storage", expert=EAGER)
