"""A Trainer with durable steps goes on from the last of them, or from its own checkpoint if that is not older."""

from __future__ import annotations

import gc
import json
import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from learner import values
from peft import LoraConfig, get_peft_model
from test_trainer import EAGER, curve, samples, trainer
from transformers import TrainerCallback

import gs_compile.hf
from gs_compile.errors import LeftoverError, OptimizerError, ResumeError
from gs_compile.hf.durable import DurableTrainer, unwrapped
from gs_compile.model.resume import last_of
from gs_compile.options import Options
from gs_compile.runtime.storage.manifest import NAME

SETTINGS = {"gradient_accumulation_steps": 2, "data": samples(12)}  # three steps an epoch, in an order of their own
LORA = LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True)
SAVES = {"save_strategy": "steps", "save_steps": 2}
EVALUATES = {"eval_strategy": "steps", "eval_steps": 3}  # which commits at the end of an epoch


class InterruptedByTestError(Exception):
    pass


class Interrupts(TrainerCallback):
    """At the end of a step; `reads`: with a look at the values when Trainer has not counted that step yet."""

    def __init__(self, step, *, reads=False):
        self.step, self.reads = step, reads

    def on_optimizer_step(self, args, state, control, model, **kwargs):
        if self.reads and state.global_step == self.step - 1:
            assert all(torch.isfinite(value).all() for value in values(model).values())

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise InterruptedByTestError


class Watches(TrainerCallback):
    """The steps that are committed at the end of each."""

    def __init__(self, folder):
        self.folder, self.committed = folder, []

    def on_step_end(self, *args, **kwargs):
        self.committed.append(committed(self.folder))


def attached(folder, *, lora=False, options=None, **changes):
    found = trainer(folder, "gpt2" if lora else "tiny", **SETTINGS, **changes)
    if lora:
        found.model = found.model_wrapped = get_peft_model(found.model, LORA)
    options = {"durability": "step", **(options or {})}
    gs_compile.hf.attach(found, storage=folder / "storage", expert=EAGER, **options)
    return found


def interrupted(folder, *callbacks, **changes):
    first = attached(folder, **changes)
    for each in callbacks:
        first.add_callback(each)
    with pytest.raises(InterruptedByTestError):
        first.train()
    del first
    gc.collect()


def committed(folder):
    found = json.loads((folder / "storage" / "greedysnake-run" / NAME).read_text())
    return found.get("manifest", found)["step"]


def assert_same(mine, whole):
    """Bit for bit."""
    assert len(curve(whole, "loss")) == 6
    for key in ("loss", "grad_norm", "learning_rate", "eval_loss"):
        assert curve(mine, key) == curve(whole, key), key
    wanted, found = values(whole.model), values(mine.model)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    found = attached(tmp_path_factory.mktemp("whole"), options={"durability": "off"})
    found.train()
    return found


def test_its_checkpoint_is_older(whole, tmp_path, caplog, monkeypatch):
    """The last step of an epoch was committed in the first call of the next. A finished run has nothing left to do."""
    interrupted(tmp_path, Interrupts(4), **SAVES)
    assert committed(tmp_path) == 3
    with pytest.raises(LeftoverError, match=r'step 3 .*resume_from_checkpoint=True\) or the option resume="auto"'):
        attached(tmp_path).train()
    with monkeypatch.context() as patch:
        patch.setattr("gs_compile.hf.durable.last_of", lambda *given: replace(last_of(*given), states={}))
        with pytest.raises(ResumeError, match="has no state of a Trainer"):
            attached(tmp_path, options={"resume": "auto"}).train()
    again = attached(tmp_path, **SAVES)
    again.train(resume_from_checkpoint=True)
    assert "checkpoint-2 has only 2 steps" in caplog.text
    assert_same(again, whole)
    wanted = values(whole.model)
    del again
    gc.collect()
    assert committed(tmp_path) == 6
    over = attached(tmp_path, options={"resume": "auto"})
    over.train()
    assert over.state.global_step == len(curve(over, "loss")) == 6
    assert all(torch.equal(value, wanted[name]) for name, value in values(over.model).items())


@pytest.mark.slow
def test_its_checkpoint_is_as_new(whole, tmp_path, caplog):
    """It wins, and the commit stays until the next. But what Trainer had not written to its end does not win."""
    interrupted(tmp_path, Interrupts(5), **SAVES)
    assert committed(tmp_path) == 4
    again = attached(tmp_path, **SAVES)
    seen = Watches(tmp_path)
    again.add_callback(seen)
    again.add_callback(Interrupts(6))
    own = tmp_path / "out" / "checkpoint-4"
    with pytest.raises(InterruptedByTestError):
        again.train(resume_from_checkpoint=str(own))
    assert (seen.committed, curve(again, "loss")) == ([4, 5], curve(whole, "loss")[:5])
    del again, seen
    gc.collect()
    (own / "trainer_state.json").unlink()
    last = attached(tmp_path, **SAVES)
    last.train(resume_from_checkpoint=True)
    assert "checkpoint-4 is incomplete" in caplog.text
    assert_same(last, whole)


def test_its_checkpoint_has_weights_alone(tmp_path, monkeypatch, caplog):
    """Which Trainer would go on from with an optimizer that begins new."""
    weights = tmp_path / "checkpoint-4"
    weights.mkdir()
    (weights / "trainer_state.json").write_text('{"global_step": 4}')
    commit = SimpleNamespace(run="7", step=4, written="now", states={"trainer": {"state": {"global_step": 4}}})
    monkeypatch.setattr("gs_compile.hf.durable.last_of", lambda _: commit)
    (tmp_path / "commit").mkdir()
    mine, options = DurableTrainer(), Options(storage=tmp_path, durability=1)
    assert mine._later(str(weights), tmp_path / "commit", options) == str(tmp_path / "commit")
    assert "checkpoint-4 is incomplete" in caplog.text
    (weights / "optimizer.pt").touch()
    assert mine._later(str(weights), tmp_path / "commit", options) == str(weights)
    (weights / "trainer_state.json").write_text('{"global_st')  # fault: no run went on from a kill as that was written
    assert mine._later(str(weights), tmp_path / "commit", options) == str(tmp_path / "commit")


def test_a_trainer_that_is_gone(tmp_path):
    """Fault: whoever read the values of a run that had been broken off got an AttributeError of its state."""
    first = attached(tmp_path)
    first.add_callback(Interrupts(2))
    with pytest.raises(InterruptedByTestError):
        first.train()
    model, optimizer, gone = first.model, unwrapped(first.optimizer), weakref.ref(first)
    del first
    gc.collect()
    assert gone() is None
    assert all(torch.isfinite(value).all() for value in values(model).values())
    assert committed(tmp_path) == 1
    with pytest.raises(OptimizerError, match="state of its Trainer, which is gone"):
        optimizer.commit()
    optimizer.kept.states.pop("trainer")
    optimizer.commit()
    assert committed(tmp_path) == 2


@pytest.mark.slow
def test_a_commit_before_trainer_counts_its_step(whole, tmp_path):
    interrupted(tmp_path, Interrupts(4, reads=True))
    assert committed(tmp_path) == 4
    again = attached(tmp_path, options={"resume": "auto"})
    again.train()
    found = curve(again, "loss")  # the log of that step had not been written
    assert found == [*curve(whole, "loss")[:3], *curve(whole, "loss")[4:]]
    wanted = values(whole.model)
    assert all(torch.equal(value, wanted[name]) for name, value in values(again.model).items())


def test_the_scale_of_the_loss_goes_on(tmp_path):
    """The steps since it has changed are counted from the first process on."""
    for number, options in ((4, {}), (5, {"resume": "auto"})):
        mine = trainer(tmp_path, **SETTINGS)
        mine.accelerator.scaler = torch.amp.GradScaler("cpu")
        gs_compile.hf.attach(mine, storage=tmp_path / "storage", expert=EAGER, durability="step", **options)
        mine.add_callback(Interrupts(number))
        with pytest.raises(InterruptedByTestError):
            mine.train()
        assert mine.accelerator.scaler.state_dict()["_growth_tracker"] == number
        del mine
        gc.collect()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # peft asks for it
def test_adapters_and_an_evaluation_at_the_end_of_an_epoch(tmp_path):
    """That committed between two calls: random numbers go on before the order of the next epoch is drawn."""
    plain = attached(tmp_path / "whole", lora=True, options={"durability": "off"}, **EVALUATES)
    plain.train()
    interrupted(tmp_path / "mine", Interrupts(4), lora=True, **EVALUATES)
    assert committed(tmp_path / "mine") == 3
    again = attached(tmp_path / "mine", lora=True, options={"resume": "auto"}, **EVALUATES)
    again.train()
    assert_same(again, plain)  # the evaluation too: the forward after it committed the step again
