"""transformers' Trainer with an adapter of PEFT's on the card: it learns bit for bit what it learns on a CPU."""

from __future__ import annotations

import sys
from pathlib import Path

import card
import peft
import pytest
import torch
from carded import to
from tiny import tiny

sys.path.append(str(Path(__file__).parent.parent / "hf"))
from learner import values
from test_adapters import adapted, pytestmark, trained  # noqa: F401  the mark is of this module too
from test_trainer import EAGER, curve


def learned(folder, where="", **given):
    """By a trainer of an adapter, of a model that Dynamo soon has read; on the card, where the model is moved there."""
    model = adapted(peft.LoraConfig(r=4, target_modules=["mix"]), tiny())
    return trained(to(model, where) if where else model, folder, checkpointing=False, expert=EAGER, **given)


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    return learned(tmp_path_factory.mktemp("cpu"))


@pytest.mark.parametrize(
    ("where", "is_moved"), [pytest.param("card:0", True, marks=pytest.mark.slow), ("card:1", False)]
)
def test_an_adapter_learns_what_it_does_on_a_cpu(expected, tmp_path, monkeypatch, where, is_moved):
    """On the other device while the first is current, too; who does not move the model leaves that to Trainer."""
    monkeypatch.setenv(
        "ACCELERATE_TORCH_DEVICE", where
    )  # batches go there: Accelerate asks torch for known types alone
    card.delays(copy=2e-4)
    before = card.counts()
    found = learned(tmp_path, where if is_moved else "", use_cpu=False)
    after = card.counts()
    assert {each.device for each in found.model.parameters()} == {torch.device(where)}
    assert after.asynchronous - before.asynchronous > 100
    assert curve(found, "loss") == curve(expected, "loss")
    assert curve(found, "grad_norm") == pytest.approx(curve(expected, "grad_norm"), rel=1e-6)
    wanted = values(expected.model)
    assert [name for name, each in values(found.model).items() if not torch.equal(each.cpu(), wanted[name])] == []
