"""A loop of one's own with accelerate, prepared layer-major, against the same loop as it comes."""

from __future__ import annotations

from functools import partial
from itertools import chain
from types import SimpleNamespace

import accelerate
import pytest
import torch
from learner import distance, values
from test_trainer import EAGER, padded, samples
from tiny import tiny
from transformers import BatchEncoding
from zoo import small

import gs_compile.hf
from gs_compile.errors import OptimizerError, OptionError
from gs_compile.hf.fitting import _share_among_ranks
from gs_compile.hf.loop import gather_steps
from gs_compile.model.residency import is_offloaded

MAX_NORM = 0.1


def data(number=32, lengths=(12, 9)):
    """All samples have the same number of labels, so the mean of batches' means is that of the step."""
    found = samples(number, lengths)
    for sample in found:
        sample["labels"] = torch.where(torch.arange(len(sample["input_ids"])) < 9, sample["input_ids"], -100)
    return found


class Loop:
    """The loop of accelerate's guides; `mine`: with the model prepared layer-major."""

    def __init__(
        self, folder, *, mine, gas=4, precision="no", build=tiny, make=None, loader=None, scaled=False, options=()
    ):
        torch._dynamo.reset()
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        accelerate.state.GradientState._reset_state()
        accelerate.utils.set_seed(0)
        self.accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=gas, mixed_precision=precision)
        if scaled:  # as Accelerate has it for fp16, where a device is fit for that
            self.accelerator.scaler = torch.amp.GradScaler("cpu")
        model = build()
        settings = {"lr": 1e-2, "weight_decay": 0.1}
        loader = loader or torch.utils.data.DataLoader(data(), batch_size=2, shuffle=True, collate_fn=padded)
        if not mine:
            optimizer = torch.optim.AdamW(model.parameters(), **settings)
            prepare = self.accelerator.prepare
        else:
            optimizer = (make or partial(gs_compile.AdamW, max_grad_norm=MAX_NORM))(model.parameters(), **settings)
            given = {"storage": folder / "storage", "expert": EAGER, **dict(options)}
            prepare = lambda *args: gs_compile.hf.prepare(self.accelerator, *args, **given)  # noqa: E731
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 8)
        self.model, self.optimizer, self.loader, self.schedule = prepare(model, optimizer, loader, schedule)
        self.losses, self.norms, self.rates = [], [], []

    def epoch(self, loader=None, stop=None):
        sums = []
        for batch in loader or self.loader:
            with self.accelerator.accumulate(self.model):
                loss = self.model(**batch).loss
                self.accelerator.backward(loss)
                sums.append(loss.item())
                if self.accelerator.sync_gradients:
                    norm = self.accelerator.clip_grad_norm_(self.model.parameters(), MAX_NORM)
                    self.norms.append(norm.item())
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()
            if self.accelerator.sync_gradients:
                self.losses.append(sum(sums) / len(sums))
                self.rates.append(self.schedule.get_last_lr())
                sums = []
            if len(self.losses) == stop:
                return


def gpt2():
    return small("gpt2")


def trained(folder, **given):
    loop = Loop(folder, **given)
    loop.epoch()
    return loop


@pytest.mark.parametrize(
    ("gas", "precision", "build", "tolerance"),
    [
        (4, "no", tiny, 1e-5),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in ((4, "no", gpt2, 1e-5), (2, "bf16", gpt2, 1e-3))),
    ],
)
def test_the_same_curve_and_weights(gas, precision, build, tolerance, tmp_path):
    theirs, mine = (trained(tmp_path, mine=mine, gas=gas, precision=precision, build=build) for mine in (False, True))
    assert all(is_offloaded(parameter) for parameter in mine.model.parameters())
    assert len(mine.losses) == 16 // gas
    assert mine.losses == pytest.approx(theirs.losses, rel=tolerance)
    assert mine.norms == pytest.approx(theirs.norms, rel=tolerance)
    assert mine.rates == theirs.rates
    # Each of 8 updates moves an element by about its own size, whatever the size of its gradient, which bf16 rounds.
    assert distance(values(mine.model), values(theirs.model)) < (tolerance if precision == "no" else 5e-3)


def checkpointed():
    model = small("llama", use_cache=True)
    model.activation_checkpointing_enable()
    return model


@pytest.mark.slow
def test_packed_sequences_stay_apart_in_a_model_that_is_checkpointed(tmp_path):
    """transformers then trains without a cache. Fault: with one, attention took a row for one sequence."""
    rows = [{"input_ids": each["input_ids"], "labels": each["labels"]} for each in data(8, lengths=(12,))]
    rows = [row | {"position_ids": torch.arange(12) % 5} for row in rows]
    loader = torch.utils.data.DataLoader(rows, batch_size=1)
    given = {"build": checkpointed, "loader": loader, "gas": 2}
    theirs, mine = (trained(tmp_path, mine=mine, **given) for mine in (False, True))
    assert mine.losses == pytest.approx(theirs.losses, rel=1e-5)


@pytest.mark.parametrize("precision", [pytest.param("model", marks=pytest.mark.slow), "bf16"])
def test_a_saved_state_goes_on(precision, tmp_path):
    """Bit for bit, from the middle of an epoch, also where masters are wider than what the model computes with."""
    settings = {
        "mine": True,
        "gas": 2,
        "build": partial(tiny, 0.1),
        "scaled": True,
        "options": {"precision": precision},
    }
    whole = Loop(tmp_path, **settings)
    whole.epoch(stop=3)
    whole.accelerator.save_state(tmp_path / "state")
    whole.epoch(whole.accelerator.skip_first_batches(whole.loader, 3))
    again = Loop(tmp_path / "again", **settings)
    again.accelerator.load_state(tmp_path / "state")
    again.epoch(again.accelerator.skip_first_batches(again.loader, 3))
    assert again.losses == whole.losses[3:]
    assert again.norms == whole.norms[3:]
    assert again.accelerator.scaler.state_dict() == whole.accelerator.scaler.state_dict()
    assert again.accelerator.scaler.state_dict()["_growth_tracker"] == 8
    found, wanted = values(again.model), values(whole.model)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_the_number_of_steps_of_a_run_that_goes_on_is_true_before_the_first_call(tmp_path):
    """A loop finds its place in the data by it; its schedule goes on, too, and the scale of fp16, which began anew."""
    options = {"durability": "step", "resume": "auto"}
    first = Loop(tmp_path, mine=True, options=options, scaled=True)
    first.epoch(stop=2)
    first.optimizer.optimizer.commit()
    first.optimizer.optimizer.engine.tiers.close()
    again = Loop(tmp_path, mine=True, options=options, scaled=True)
    assert again.accelerator.scaler.state_dict() == first.accelerator.scaler.state_dict()
    assert again.optimizer.optimizer.num_steps == 2
    assert again.schedule.get_last_lr() == first.schedule.get_last_lr()
    again.epoch(stop=1)
    assert again.optimizer.optimizer.num_steps == 3


class Stream(torch.utils.data.IterableDataset):
    def __init__(self, number):
        self.number = number

    def __iter__(self):
        return iter(data(self.number))

    def __len__(self):
        return self.number


@pytest.mark.parametrize(
    ("dataset", "drop_last", "sizes"),
    [
        (data(), False, [6, 6, 6, 6, 6, 2]),
        (Stream(11), False, [6, 5]),
        (Stream(11), True, [6, 4]),
        (Stream(13), True, [6, 6]),
    ],
)
def test_a_ragged_end(dataset, drop_last, sizes, tmp_path, caplog):
    """The last step of an epoch has the batches that are left, and a batch that is not full may be left out."""
    loader = torch.utils.data.DataLoader(dataset, batch_size=2, drop_last=drop_last, collate_fn=padded)
    loop = Loop(tmp_path, mine=True, gas=3, loader=loader)
    assert [len(batch["input_ids"]) for batch in loop.loader] == sizes
    assert len(loop.loader) == len(sizes)
    assert "must not divide that length by gradient_accumulation_steps again" in caplog.text


@pytest.mark.parametrize("number", [6, 20, 22])
@pytest.mark.parametrize(("size", "split"), [(2, False), (4, True)])
@pytest.mark.parametrize("even", [True, False])
def test_a_step_has_the_batches_that_accumulation_would_have(number, size, split, even):
    """Of each of two processes, in an epoch that does not end with a whole step, in an order that all agree on."""
    accelerate.PartialState(cpu=True)
    how = {"num_processes": 2, "split_batches": split, "even_batches": even, "use_seedable_sampler": True}

    def prepared(rank):
        loader = torch.utils.data.DataLoader(range(number), batch_size=size, shuffle=True, collate_fn=list)
        return accelerate.data_loader.prepare_data_loader(loader, process_index=rank, data_seed=1, **how)

    for rank in range(2):
        batches, steps = list(prepared(rank)), prepared(rank)
        gather_steps(steps, 2, size, padding=None)
        wanted = [list(chain(*batches[start : start + 2])) for start in range(0, len(batches), 2)]
        assert list(steps) == wanted
        assert len(steps) == len(wanted)
        left = accelerate.skip_first_batches(steps, 1)
        left.set_epoch(0)
        assert list(left) == wanted[1:]


def test_ranks_without_data_do_not_join(tmp_path):
    own = dict.fromkeys(("prepare_model", "save_state", "load_state", "get_state_dict"), print)
    accelerator = SimpleNamespace(num_processes=2, even_batches=True, **own)
    _share_among_ranks(accelerator, tiny(), {})
    with accelerator.join_uneven_inputs([]):
        pass
    with pytest.raises(OptionError, match="join_uneven_inputs has ranks without data follow those that have some"):
        accelerator.join_uneven_inputs([], even_batches=False)


def test_batches_keep_their_type(tmp_path):
    """Loops ask what a tokenizer gives for more than its entries, as `batch.to(device)`."""
    collate = lambda batch: BatchEncoding(padded(batch))  # noqa: E731
    loop = Loop(
        tmp_path, mine=True, loader=torch.utils.data.DataLoader(data(), batch_size=2, collate_fn=collate), gas=2
    )
    batch = next(iter(loop.loader)).to("cpu")
    assert batch.input_ids.shape == (4, 12)


def test_what_is_prepared_may_come_in_any_order(tmp_path):
    accelerator, model = Loop(tmp_path, mine=False).accelerator, tiny()
    optimizer = gs_compile.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer)
    loaders = [torch.utils.data.DataLoader(data(number), batch_size=2, collate_fn=padded) for number in (8, 4)]
    found = gs_compile.hf.prepare(accelerator, *loaders, schedule, model, optimizer, storage=tmp_path / "storage")
    assert [len(each) for each in found[:2]] == [1, 2]  # steps of 4 batches, and batches
    assert found[3] is model
    assert [each.__class__.__name__ for each in found[2:]] == ["AcceleratedScheduler", "Tiny", "AcceleratedOptimizer"]


def test_what_cannot_be_followed_is_refused(tmp_path):
    with pytest.raises(OptionError, match="AdamW keeps its states in memory: make one of gs_compile"):
        Loop(tmp_path, mine=True, make=torch.optim.AdamW)
    loop = Loop(tmp_path, mine=True)
    with pytest.raises(OptimizerError, match=r"Make the optimizer with max_grad_norm=0\.5"):
        loop.accelerator.clip_grad_norm_(loop.model.parameters(), 0.5)
    with pytest.raises(OptimizerError, match="only the 2-norm of all parameters"):
        loop.accelerator.clip_grad_norm_(list(loop.model.parameters())[:2], MAX_NORM)
    other = torch.nn.Parameter(torch.zeros(2))
    other.grad = torch.ones(2)
    assert loop.accelerator.clip_grad_norm_([other], 1.0) == pytest.approx(2**0.5)


def test_processes_that_accelerate_does_not_know_are_named(tmp_path, monkeypatch):
    """On a CPU it takes no notice of torchrun unless it is told to."""
    accelerator = Loop(tmp_path, mine=False).accelerator
    places = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in places.items():
        monkeypatch.setenv(name, value)
    model, loader = tiny(), torch.utils.data.DataLoader(data(), batch_size=2, collate_fn=padded)
    with pytest.raises(OptionError, match=r"there are 2 processes.*Accelerator\(cpu=True\)"):
        gs_compile.hf.prepare(accelerator, model, gs_compile.AdamW(model.parameters()), loader)
