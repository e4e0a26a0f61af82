"""transformers.Trainer and a loop with Accelerate on two ranks, against the same with DistributedDataParallel."""

from __future__ import annotations

import math
import warnings

import accelerate
import pytest
import torch
from launch import Fleet
from learner import distance
from tiny import Tiny, tiny
from transformers import Trainer, TrainingArguments
from zoo import VOCAB

import gs_compile
import gs_compile.hf

KEEPS_CAPTURES = True  # each process captures its own
EXPERT = {
    "compiler": "eager",
    "recompute": "all",
    "ratios": {"parameter": 0.0, "checkpoint": 0.0, "optimizer": 0.0},
    "alpha": 0.5,
}


@pytest.fixture(scope="module")
def pair():
    with Fleet(2, initialize=False) as fleet:
        yield fleet


def samples(number):
    """Token ids; labels of some are ignored."""
    draw = torch.Generator().manual_seed(7)
    found = []
    for index in range(number):
        ids = torch.randint(1, VOCAB, (12,), generator=draw)
        labels = ids.clone()
        labels[: index % 5] = -100
        found.append({"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)})
    return found


def trainer(folder, storage=None, **changes):
    settings = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "max_grad_norm": 0.5,
        "max_steps": 5,  # of three in an epoch, whose last is ragged
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 4,
        "report_to": [],
        "save_strategy": "no",
        "use_cpu": True,
        "ddp_find_unused_parameters": False,
        **changes,
    }
    data = samples(22)
    found = Trainer(tiny(), TrainingArguments(**settings), train_dataset=data, eval_dataset=data[:5])
    if storage is not None:
        gs_compile.hf.attach(found, storage=storage, expert=EXPERT)
    return found


def result(trainer):
    """Logs and weights."""
    logs = {
        key: [entry[key] for entry in trainer.state.log_history if key in entry]
        for key in ("loss", "grad_norm", "eval_loss")
    }
    return logs, {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def trains(info, tmp_path):
    warnings.simplefilter("ignore")  # of the libraries; what this package warns of is tested elsewhere
    stock = trainer(tmp_path / "stock")
    stock.train()
    logs, weights = result(stock)
    attached = trainer(tmp_path / "out", tmp_path, save_strategy="steps", save_steps=3)
    attached.train()
    found_logs, found = result(attached)
    resumed = trainer(tmp_path / "out", tmp_path)
    resumed.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-3"))
    again_logs, again = result(resumed)
    saved = Tiny.from_pretrained(tmp_path / "out" / "checkpoint-5")
    return {
        "logs": [logs, found_logs],
        "weights": distance(found, weights),
        "resumed": [name for name, value in again.items() if not torch.equal(value, found[name])],
        "resumed logs": again_logs["loss"][-2:] == found_logs["loss"][-2:],
        "saved": [name for name, value in saved.named_parameters() if not torch.equal(value, found[name])],
    }


def test_trainer_on_two_ranks(pair, tmp_path):
    for found in pair.run(trains, tmp_path):
        stock, mine = found["logs"]
        assert len(stock["loss"]) == 5
        for key in stock:
            assert mine[key] == pytest.approx(stock[key], rel=1e-5), key
        assert all(map(math.isfinite, mine["grad_norm"]))
        assert found["weights"] < 1e-5
        assert (found["resumed"], found["resumed logs"], found["saved"]) == ([], True, [])


# A loop of one's own --------------------------------------------------------------------------------------------------


def loop(folder, *, mine, size=2, **how):
    """Two epochs of four steps, with accumulation and a schedule: the loss and norm of each step, and weights.

    `mine`: the second is repeated from a checkpoint, and is the same bit for bit. size: of the loader's batches; how:
    Accelerate hands them out.
    """
    accelerate.state.AcceleratorState._reset_state()
    accelerate.state.GradientState._reset_state()
    how = accelerate.DataLoaderConfiguration(**how)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2, dataloader_config=how)
    data = [{**each, "labels": each["input_ids"]} for each in samples(32)]  # each has as many labels
    model, loader = tiny(), torch.utils.data.DataLoader(data, batch_size=size)
    if mine:
        optimizer = gs_compile.AdamW(model.parameters(), lr=1e-2, max_grad_norm=0.5)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 8)
        prepared = gs_compile.hf.prepare(accelerator, model, optimizer, loader, schedule, storage=folder, expert=EXPERT)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 8)
        prepared = accelerator.prepare(model, optimizer, loader, schedule)
    model, optimizer, loader, schedule = prepared

    def epoch():
        sums, found = [], []
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                sums.append(loss.detach())
                if accelerator.sync_gradients:
                    norm = float(accelerator.clip_grad_norm_(model.parameters(), 0.5))
                    found.append((accelerator.gather(torch.stack(sums)).mean().item(), norm))
                    sums = []
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        return *found, {name.removeprefix("module."): p.detach().clone() for name, p in model.named_parameters()}

    *first, _ = epoch()
    if mine:
        accelerator.save_state(folder / "state")
    *second, weights = epoch()
    if mine:
        accelerator.load_state(folder / "state")
        *again, same = epoch()
        assert again == second
        assert all(torch.equal(value, weights[name]) for name, value in same.items())
    return [*first, *second], weights


def loops(info, tmp_path, **how):
    warnings.simplefilter("ignore")  # of the libraries
    stock, wanted = loop(tmp_path, mine=False, **how)
    mine, found = loop(tmp_path, mine=True, **how)
    return stock, mine, distance(found, wanted)


@pytest.mark.slow
@pytest.mark.parametrize(
    "how", [{}, {"split_batches": True, "size": 4}, {"dispatch_batches": True}, {"even_batches": False}], ids=str
)
def test_a_loop_on_two_ranks(pair, tmp_path, how):
    for stock, mine, difference in pair.run(loops, tmp_path, **how):
        assert len(stock) == len(mine) == 8
        for one, other in zip(stock, mine, strict=True):
            assert other == pytest.approx(one, rel=1e-5)
        assert difference < 1e-5
