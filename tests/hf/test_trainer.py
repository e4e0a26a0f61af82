"""transformers.Trainer with the backend attached, against Trainer as it comes."""

from __future__ import annotations

import math
import re
from functools import partial

import pytest
import torch
from learner import distance, values
from tiny import tiny
from transformers import DataCollatorWithFlattening, Trainer, TrainerCallback, TrainingArguments
from transformers.integrations.neftune import neftune_post_forward_hook
from zoo import VOCAB, small

import gs_compile
import gs_compile.hf
from gs_compile.capture.adapters import trace_libraries
from gs_compile.errors import LaneError, MemoryBudgetError, OptionError
from gs_compile.model.residency import is_offloaded

EAGER = {
    "compiler": "eager",
    "recompute": "all",
    "ratios": {"parameter": 0.0, "checkpoint": 0.0, "optimizer": 0.0},
    "alpha": 0.5,
}


def samples(number=22, lengths=(12,)):
    """Token ids; labels of some are ignored. `lengths` in turn."""
    draw = torch.Generator().manual_seed(7)
    found = []
    for index in range(number):
        ids = torch.randint(1, VOCAB, (lengths[index % len(lengths)],), generator=draw)
        labels = ids.clone()
        labels[: index % 5] = -100
        found.append({"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)})
    return found


def padded(batch):
    """A collator that pads to the longest of the batch."""
    fill = {"input_ids": 0, "labels": -100, "attention_mask": 0}
    return {
        name: torch.nn.utils.rnn.pad_sequence([each[name] for each in batch], batch_first=True, padding_value=value)
        for name, value in fill.items()
    }


def trainer(folder, name="tiny", data=None, **changes):
    """Steps of two samples at a time, in order."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    settings = {
        "output_dir": str(folder / "out"),
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "max_grad_norm": 0.1,
        "max_steps": 6,
        "warmup_steps": 2,
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "use_cpu": True,
        "dataloader_num_workers": 0,
        **changes,
    }
    data = samples() if data is None else data
    model = tiny() if name == "tiny" else small(name).train()
    return Trainer(
        model, TrainingArguments(**settings), train_dataset=data, eval_dataset=data[:5], data_collator=padded
    )


def attached(folder, *args, options=None, **changes):
    found = trainer(folder, *args, **changes)
    storage = {"storage": folder / "storage", "expert": EAGER}
    gs_compile.hf.attach(found, **{**storage, **(options or {})})
    return found


def curve(trainer, key):
    return [entry[key] for entry in trainer.state.log_history if key in entry]


def assert_alike(mine, theirs, tolerance=1e-5):
    for key in ("loss", "grad_norm", "learning_rate", "eval_loss"):
        assert curve(mine, key) == pytest.approx(curve(theirs, key), rel=tolerance), key
    assert distance(values(mine.model), values(theirs.model)) < tolerance


CHECKPOINTING = "activation_checkpointing"  # its name since transformers 5.23
if CHECKPOINTING not in TrainingArguments.__dataclass_fields__:
    CHECKPOINTING = "gradient_checkpointing"
CASES = {
    "every batch a step": {},
    "accumulated, ragged end": {"gradient_accumulation_steps": 4},
    "evaluated between": {"gradient_accumulation_steps": 2, "eval_strategy": "steps", "eval_steps": 2},
    "no clip": {"max_grad_norm": 0.0, "lr_scheduler_type": "cosine"},
    "norm of no clip": {"max_grad_norm": math.inf},
    "sgd": {"optim": "sgd", "gradient_accumulation_steps": 3},
    "checkpointed": {CHECKPOINTING: True},
    "kernels of Liger": {"use_liger_kernel": True},
    # With AdamW's usual eps of 1e-8 gradients that are zero but for rounding become whole steps of either sign, in
    # either Trainer.
    "bf16": {"bf16": True, "gradient_accumulation_steps": 2, "adam_epsilon": 1e-4},
}
SLOW = ("every batch a step", "no clip", "norm of no clip")
SLOW += ("evaluated between", "checkpointed")  # as ranks/test_hf.py and the best model below, and test_adapters.py


@pytest.mark.parametrize(
    ("case", "name"),
    [
        pytest.param(case, "gpt2" if case == "checkpointed" else "tiny", marks=[pytest.mark.slow] * (case in SLOW))
        for case in CASES
    ],
)
def test_the_same_curves_and_weights(case, name, tmp_path):
    """What is Trainer's own work, whatever the model; test_adapters.py and test_trl.py have models of transformers."""
    theirs = trainer(tmp_path / "theirs", name, **CASES[case])
    theirs.args.use_liger_kernel = False  # they need a GPU
    theirs.train()
    mine = attached(tmp_path / "mine", name, **CASES[case])
    mine.train()
    assert all(is_offloaded(parameter) for parameter in mine.model.parameters())
    assert len(curve(mine, "loss")) == 6
    # Products of bf16 round to 1e-2, the same in both for as long as weights are: norms then differ by 1e-4, weights by 5e-5.
    assert_alike(mine, theirs, 1e-3 if case == "bf16" else 1e-5)
    assert curve(mine, "gs/ssd_read_bytes")[-1] > 0


def test_fp16(tmp_path):
    """On a CPU Accelerate leaves fp16 out, so it is told what it finds out elsewhere: autocast, and a scale."""
    settings = {"fp16": True, "gradient_accumulation_steps": 2, "optim": "adamw_torch", "max_steps": 8}
    theirs, mine = (trainer(tmp_path / name, **settings) for name in ("theirs", "mine"))
    for each in (theirs, mine):
        each.accelerator.native_amp = True
        each.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**19)  # too large at first
    gs_compile.hf.attach(mine, storage=tmp_path / "storage", expert=EAGER)
    for each in (theirs, mine):
        each.train()
    assert mine.accelerator.scaler.get_scale() == theirs.accelerator.scaler.get_scale() < 2.0**19
    assert curve(mine, "learning_rate") == curve(theirs, "learning_rate")
    assert curve(mine, "loss") == pytest.approx(curve(theirs, "loss"), rel=1e-3)
    norms, wanted = ([norm for norm in curve(each, "grad_norm") if math.isfinite(norm)] for each in (mine, theirs))
    assert norms == pytest.approx(wanted, rel=1e-3)
    assert len(norms) >= 5
    assert distance(values(mine.model), values(theirs.model)) < 2e-3


def test_sequences_of_many_lengths(tmp_path):
    """Batches of a step are padded to one length, which changes nothing."""
    data = samples(lengths=(12, 7, 9))
    theirs = trainer(tmp_path / "theirs", data=data, gradient_accumulation_steps=2)
    mine = attached(tmp_path / "mine", data=data, gradient_accumulation_steps=2)
    theirs.train()
    mine.train()
    assert_alike(mine, theirs)


def test_a_batch_that_is_one_row_is_a_micro_batch(tmp_path):
    """Fault: a micro-batch had as many rows as a batch has sequences."""
    found = trainer(tmp_path)
    found.data_collator = DataCollatorWithFlattening()
    gs_compile.hf.attach(found, storage=tmp_path / "storage")
    assert found._compiled[0].options["micro_batch_size"] == 1


@pytest.mark.slow
def test_smoothed_labels_beside_a_loss_of_the_model(tmp_path, monkeypatch):
    """Fault: the routers' loss was taken for all that Trainer reads."""
    monkeypatch.setitem(globals(), "small", partial(small, output_router_logits=True))
    changes = {"name": "mixtral", "label_smoothing_factor": 0.1, "max_steps": 2, "adam_epsilon": 1e-4}
    theirs = trainer(tmp_path / "theirs", gradient_accumulation_steps=2, **changes)
    mine = attached(tmp_path / "mine", gradient_accumulation_steps=2, **changes)
    for each in (theirs, mine):
        each.train()
    assert_alike(mine, theirs)


@pytest.mark.slow
def test_noise_on_embeddings_of_sequences_of_many_lengths(tmp_path):
    """NEFTune's, with random numbers of each micro-batch's own."""
    settings = {"data": samples(lengths=(12, 7, 9)), "max_steps": 4}
    noisy = attached(tmp_path / "noisy", neftune_noise_alpha=5.0, **settings)
    quiet = trainer(tmp_path / "quiet", **settings)
    for each in (noisy, quiet):
        each.train()
    assert curve(noisy, "loss") == pytest.approx(curve(quiet, "loss"), rel=0.2)
    assert all(abs(one - other) > 1e-3 for one, other in zip(curve(noisy, "loss"), curve(quiet, "loss"), strict=True))


def test_noise_is_traced_within_its_bounds():
    """For all lengths at once, where the bound is no number."""
    trace_libraries()
    embedding = torch.nn.Embedding(VOCAB, 8)
    embedding.neftune_noise_alpha = 3.0
    embedding.register_forward_hook(neftune_post_forward_hook)
    noisy = torch.compile(lambda ids: embedding(ids), backend="eager", fullgraph=True, dynamic=True)
    for length in (50, 200):
        ids = torch.randint(VOCAB, (4, length))
        noise, bound = noisy(ids) - embedding.weight[ids], 3.0 / (length * 8) ** 0.5
        assert 0.95 * bound < noise.abs().max() < 1.001 * bound
    embedding.eval()
    assert torch.equal(noisy(ids), embedding.weight[ids])


@pytest.mark.slow
def test_experts_are_balanced_over_all_batches_of_a_step(tmp_path, monkeypatch):
    """As Trainer does where these are one batch; padding has no part in it."""
    monkeypatch.setitem(globals(), "small", partial(small, output_router_logits=True, router_aux_loss_coef=0.5))
    changes = {"name": "mixtral", "data": samples(24, lengths=(12, 7)), "adam_epsilon": 1e-4, "learning_rate": 1e-3}
    theirs = trainer(tmp_path / "theirs", per_device_train_batch_size=8, **changes)
    mine = attached(tmp_path / "mine", gradient_accumulation_steps=4, **changes)
    theirs.train()
    mine.train()
    assert_alike(mine, theirs)


@pytest.mark.parametrize(("precision", "gas"), [pytest.param("model", 4, marks=pytest.mark.slow), ("bf16", 1)])
def test_a_run_goes_on_from_its_checkpoint(precision, gas, tmp_path):
    """Bit for bit, and the saved model is an ordinary one. What is saved has fp32 masters, where there are any."""
    settings = {"options": {"precision": precision}, "gradient_accumulation_steps": gas}
    whole = attached(tmp_path / "whole", save_strategy="steps", save_steps=3, **settings)
    whole.train()
    again = attached(tmp_path / "again", **settings)
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "out" / "checkpoint-3"))
    assert curve(again, "loss") == curve(whole, "loss")
    wanted, found = values(whole.model), values(again.model)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    whole.save_model(str(tmp_path / "saved"))
    loaded = type(whole.model).from_pretrained(tmp_path / "saved")
    assert all(torch.equal(value, wanted[name]) for name, value in values(loaded).items())


def test_a_checkpoint_moves_from_stock_trainer_and_back(tmp_path):
    whole, saves = trainer(tmp_path / "whole"), {"save_strategy": "steps", "save_steps": 2}
    whole.train()
    stock = trainer(tmp_path / "stock", **saves)
    stock.train()
    mine = attached(tmp_path / "mine", **saves)
    mine.train(resume_from_checkpoint=str(tmp_path / "stock" / "out" / "checkpoint-2"))
    assert_alike(mine, whole)
    back = trainer(tmp_path / "back")
    back.train(resume_from_checkpoint=str(tmp_path / "mine" / "out" / "checkpoint-4"))
    assert_alike(back, whole)


def test_the_best_model_comes_back(tmp_path):
    """The learning rate is so large that the first steps are the best."""
    best = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    best |= {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "learning_rate": 0.3}
    theirs, mine = trainer(tmp_path / "theirs", **best), attached(tmp_path / "mine", **best)
    for each in (theirs, mine):
        each.train()
    assert mine.state.best_global_step == theirs.state.best_global_step < 6
    assert distance(values(mine.model), values(theirs.model)) < 1e-5
    assert mine.evaluate()["eval_loss"] == pytest.approx(theirs.evaluate()["eval_loss"], rel=1e-5)


def test_predictions_have_logits(tmp_path):
    """The loss alone is for training. Text is generated from the stored model."""
    mine, theirs = attached(tmp_path / "mine", "gpt2"), trainer(tmp_path / "theirs", "gpt2")
    for each in (mine, theirs):
        each.train()
    found, wanted = (each.predict(samples()[:4]).predictions for each in (mine, theirs))
    assert found.shape == wanted.shape == (4, 12, VOCAB)
    assert torch.allclose(torch.tensor(found), torch.tensor(wanted), atol=1e-4)
    prompt = samples()[0]["input_ids"][None]
    texts = [each.model.generate(prompt, max_new_tokens=6, do_sample=False, pad_token_id=0) for each in (mine, theirs)]
    assert torch.equal(*texts)
    assert all(is_offloaded(parameter) for parameter in mine.model.parameters())


class Full(Trainer):
    """Has memory for one long sequence at a time."""

    def training_step(self, model, inputs, *args, **kwargs):
        if inputs["input_ids"].numel() > 48:
            raise RuntimeError("The device is out of memory.")
        return super().training_step(model, inputs, *args, **kwargs)


@pytest.mark.parametrize(("short", "gas"), [pytest.param(0, 2, marks=pytest.mark.slow), (4, 1)])
def test_a_batch_that_does_not_fit_becomes_smaller(short, gas, tmp_path, caplog):
    """The first one, or one that comes when the model has run."""
    long = samples(lengths=(48,))
    settings = {
        "gradient_accumulation_steps": gas,
        "max_grad_norm": 0.0,
        "max_steps": 4,
        "train_sampling_strategy": "sequential",
    }
    options = {"expert": {**EAGER, "ratios": {**EAGER["ratios"], "checkpoint": 1.0}}}
    with pytest.raises(MemoryBudgetError, match="of it at least") as error:
        attached(tmp_path, data=long, options={**options, "host_memory": 1}, **settings).train()
    options["host_memory"] = int(re.search(r"\((\d+) bytes\)", str(error.value))[1]) - 1  # a byte too few
    settings |= {"data": samples(short) + long, "auto_find_batch_size": True}
    mine, theirs = attached(tmp_path / "mine", options=options, **settings), trainer(tmp_path / "theirs", **settings)
    theirs.__class__ = Full
    for each in (mine, theirs):
        each.train()
        assert each.state.train_batch_size == 1
    assert "a batch of 2 does not fit" in caplog.text
    assert_alike(mine, theirs)


class MemoryEnds(TrainerCallback):
    def on_step_end(self, args, state, control, optimizer, **kwargs):
        optimizer.optimizer.engine.tiers.fail(RuntimeError("The device is out of memory."))


def test_a_step_that_failed_half_way_is_not_tried_again(tmp_path):
    mine = attached(tmp_path, auto_find_batch_size=True)
    mine.add_callback(MemoryEnds())
    with pytest.raises(LaneError, match="choose a smaller per_device_train_batch_size"):
        mine.train()


def test_what_cannot_be_followed_is_refused(tmp_path):
    found = trainer(tmp_path, optim="adafactor")
    with pytest.raises(OptionError, match="optim='adafactor' has no equivalent here"):
        gs_compile.hf.attach(found)
    assert type(found) is Trainer


def test_a_batch_size_that_each_of_several_ranks_would_choose_is_refused(tmp_path, monkeypatch):
    found = trainer(tmp_path, auto_find_batch_size=True)
    monkeypatch.setattr(type(found.args), "world_size", 2)
    with pytest.raises(OptionError, match="of which each would choose for itself: choose per_device_train_batch_size"):
        gs_compile.hf.attach(found)
    assert type(found) is Trainer


def test_a_refused_option_changes_nothing(tmp_path):
    """Who goes on without us trains as before: with checkpointing, and with the optimizer of the arguments."""
    found = trainer(tmp_path, **{CHECKPOINTING: True})
    before = found.optimizer_cls_and_kwargs
    with pytest.raises(OptionError, match="micro_batch_size"):
        gs_compile.hf.attach(found, micro_batch_size=0)
    assert getattr(found.args, CHECKPOINTING)
    assert found.optimizer_cls_and_kwargs == before
    found.optimizer = gs_compile.AdamW(found.model.parameters(), max_grad_norm=0.5)
    with pytest.raises(OptionError, match="micro_batch_size"):
        gs_compile.hf.attach(found, micro_batch_size=0)
    assert found.optimizer.max_grad_norm == 0.5
