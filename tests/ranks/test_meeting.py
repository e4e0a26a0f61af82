"""A model that ranks train together: what is refused on one, or fails there, ends all; two ranks never share a folder."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
import torch.distributed as dist
from launch import Fleet, held_port
from tiered import Harness, gpt2, loss_of, options, shared, tokens, two_groups

import gs_compile
from gs_compile.errors import LaneError, OptimizerError, RankError, StorageError
from gs_compile.runtime.storage import ssd
from gs_compile.runtime.storage.folder import Folder

LIMIT = 60  # seconds: the others end at once; what is more is a loaded machine


def renamed():
    """The usual model with another name for its last norm's parameters."""
    model = gpt2()
    model.transformer.ln_f = torch.nn.Sequential(model.transformer.ln_f)
    return model


@contextmanager
def begun(tmp_path, sizes=MappingProxyType({}), groups=torch.nn.Module.parameters, *, renames=False, **changes):
    """The usual model, which is captured already, or one of other sizes or names; and its optimizer."""
    harness = Harness(renamed, "model") if renames else shared(**sizes)
    given = options(tmp_path / "storage", **changes)
    with harness.fresh(lambda _: gs_compile.AdamW(groups(harness.model), lr=1e-2), given) as optimizer:
        yield harness.model, optimizer


def step(model, optimizer, ids):
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def steps(model, optimizer, rows):
    """More than the ranks that are whole will make."""
    for index in range(1000):
        step(model, optimizer, tokens(index, rows))


def one_moved(model):
    matrices, others = two_groups(model)
    matrices["params"].append(others["params"].pop())
    return [matrices, others]


class Scale(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))


def with_a_scale(model):
    with_a_scale.keeps = Scale()
    return [*model.parameters(), with_a_scale.keeps.weight]


def states():
    """Those of a step of torch's."""
    step(model := gpt2(), optimizer := torch.optim.AdamW(model.parameters(), lr=1e-2), tokens(0))
    return optimizer.state_dict()


def refused(info, tmp_path, mine, others, rows=4):
    """The message of the `RankError` that the first step raises on this rank."""
    given = dict(mine if info.rank == 1 else others)
    ids = tokens(0, rows if info.rank == 1 else 4).to(given.pop("dtype", torch.int64))
    loads = given.pop("loads", False)
    with begun(tmp_path, **given) as (model, optimizer):
        if loads:
            optimizer.load_state_dict(states())
        with pytest.raises(RankError) as caught:
            step(model, optimizer, ids)
    return str(caught.value)


@pytest.mark.parametrize(
    ("mine", "others", "message"),
    [
        ({"micro_batch_size": 1}, {}, "the option micro_batch_size is 2 on rank 0; 1 on rank 1."),
        ({"dtype": torch.int32}, {}, "the dtype of input_ids is torch.int64 on rank 0; torch.int32 on rank 1."),
        (
            {"sizes": {"num_layers": 3}},
            {},
            "what unit 2 has is absent on rank 0; transformer.h.2.ln_1.weight torch.float32 (32,) in group 0, ",
        ),
        (
            {"groups": one_moved},
            {"groups": two_groups},
            "what unit h has is transformer.ln_f.weight torch.float32 (32,) in group 1, ",
        ),
        ({"renames": True}, {}, "what unit h has is transformer.ln_f"),
        (
            {"groups": with_a_scale},
            {},
            "what the optimizer has beside the model is nothing on rank 0; Scale.weight torch",
        ),
        ({"loads": True}, {}, "the number of steps behind it is 0 on rank 0; 1 on rank 1."),
    ],
)
def test_what_differs_is_refused_by_name(pair, tmp_path, mine, others, message):
    for each in pair.run(refused, tmp_path, mine=mine, others=others):
        assert each.startswith(f"the first step: {message}")
        assert each.endswith("It must be the same on all ranks [rank]")
    assert not list(tmp_path.glob("storage/*"))


@pytest.mark.parametrize("schedule", ["horizontal", "lifetime"])
def test_orders_that_follow_micro_batches_are_refused_where_these_differ(pair, tmp_path, schedule):
    given = {"schedule": schedule}
    for each in pair.run(refused, tmp_path, mine=given, others=given, rows=8):
        assert each.startswith(
            f'expert.schedule "{schedule}": the number of micro-batches is 2 on rank 0; 4 on rank 1.'
        )


ALONE = {  # what comes on one rank alone, and what the ranks then ask for
    "a call": "rank 0: the forward in step 2, rank 1: an evaluation in step 2)",
    "a value": "rank 0: the forward in step 2, rank 1: a new value of shape (32,) in unit h at ",
    "another value": "rank 0: a new value of shape (32,) in unit h at ",
    "a state": "rank 0: the forward in step 2, rank 1: a state of shape ",
    "a rate": "rank 0: the backward in step 2, lr 0.01, all settings ",
    "a commit": "rank 0: the forward in step 2, rank 1: a commit in step 2)",
    "a parameter": "rank 0: which of 1 parameters up to parameter ",
    "a late rate": "rank 0: the forward in step 3, rank 1: new settings in step 2, lr 0.001, all settings ",
    "a dropped step": "rank 0: the forward in step 3, rank 1: dropped gradients in step 2, lr 0.01, all settings ",
    "a dropped backward": "rank 0: one more backward in step 2, lr 0.01, all settings ",
}
AMID = ("a late rate", "a dropped step", "a dropped backward")  # between the first backward of a step and `step()`


def differs(info, tmp_path):
    """Something comes on one rank alone between two steps, or is another there: the refusal of each."""
    return {what: differs_in(what, info, tmp_path) for what in ALONE}


def differs_in(what, info, tmp_path):
    beside = [torch.nn.Parameter(torch.zeros(1))] if what == "a parameter" else []
    changes = {"durability": 2} if what == "a commit" else {"accumulate": True} if what in AMID else {}
    folder = tmp_path / what  # of its own: a commit may be prepared by the time that it is refused, and that stays
    with begun(folder, groups=lambda model: [*model.parameters(), *beside], **changes) as (model, optimizer):
        step(model, optimizer, tokens(0, 4))
        ways = {
            "a call": partial(model, input_ids=tokens(0, 4), labels=tokens(0, 4)),
            "a value": lambda: model.transformer.ln_f.bias.copy_(torch.ones(32)),
            "a state": lambda: optimizer.load_state_dict(states()),
            "a rate": lambda: optimizer.param_groups[0].update(lr=1e-3),
            "a parameter": lambda: beside[0].requires_grad_(False),
            "another value": lambda: model.transformer.ln_f.weight.copy_(torch.ones(32)),
            "a late rate": lambda: optimizer.param_groups[0].update(lr=1e-3),
            "a dropped step": optimizer.zero_grad,
            "a dropped backward": optimizer.zero_grad,
            "a commit": optimizer.commit,
        }
        try:
            if what in AMID:
                loss_of(model, tokens(1, 4)).backward()
            with torch.set_grad_enabled(what == "a state"):
                _ = info.rank == 1 and ways[what]()
                _ = info.rank == 0 and what == "another value" and ways["a value"]()
            if what == "a dropped backward":
                loss_of(model, tokens(2, 4)).backward()
            if what in AMID:
                optimizer.step()
                optimizer.zero_grad()
            steps(model, optimizer, 4)
        except RankError as error:
            return str(error)


def test_what_comes_on_one_rank_alone_is_refused_on_all(pair, tmp_path):
    """It would meet what comes next on the others, and both go on with what is neither."""
    for each in pair.run(differs, tmp_path):
        for what, words in ALONE.items():
            assert f"the ranks ask for different things ({words}" in each[what], each[what]


def freezes(info, tmp_path):
    """Blocks are frozen between two steps."""
    with begun(tmp_path) as (model, optimizer):
        step(model, optimizer, tokens(0, 4))
        model.transformer.h.requires_grad_(False)
        with pytest.raises(OptimizerError) as caught:
            step(model, optimizer, tokens(1, 4))
        model.transformer.h.requires_grad_(True)
    return str(caught.value)


def test_what_is_trained_is_not_changed_after_the_first_step(pair, tmp_path):
    for each in pair.run(freezes, tmp_path):
        assert "which settles what is trained on several ranks. Save the model" in each


def empty(info, tmp_path):
    with begun(tmp_path) as (model, optimizer):
        step(model, optimizer, tokens(0, 4))
        with pytest.raises(RankError) as caught:
            steps(model, optimizer, 4 * (1 - info.rank))
    return str(caught.value)


def test_a_rank_without_a_batch_is_refused_on_all(pair, tmp_path):
    for each in pair.run(empty, tmp_path):
        assert "the batch of rank 1 has no rows, and all ranks take part in each step" in each


def test_a_rank_without_a_first_batch_is_refused_on_all(pair, tmp_path):
    for each in pair.run(refused, tmp_path, mine={}, others={}, rows=0):
        assert "the batch of rank 1 has no rows" in each


def breaks(info, tmp_path):
    """The drive of one rank fails in a later step."""

    def broken(*args):
        raise StorageError(5, "the drive is gone")

    with begun(tmp_path) as (model, optimizer), pytest.MonkeyPatch.context() as patched:
        step(model, optimizer, tokens(0, 4))
        dist.barrier()  # else the drive may fail while another rank is within this step
        if info.rank == 1:
            patched.setattr(ssd, "move_block", broken)
        with pytest.raises((RankError, LaneError)) as caught:
            steps(model, optimizer, 4)
    return type(caught.value).__name__, str(caught.value)


def test_a_lane_that_fails_on_one_rank_ends_all(pair, tmp_path):
    (kind, told), (own, reason) = pair.run(breaks, tmp_path)
    assert kind == "RankError"
    assert "rank 1 has failed: " in told
    assert "the drive is gone" in told
    assert own == "LaneError"
    assert "the drive is gone" in reason


def trains(info, tmp_path):
    with begun(tmp_path) as (model, optimizer):
        step(model, optimizer, tokens(0, 4))
        (tmp_path / f"ready{info.rank}").touch()
        while True:
            steps(model, optimizer, 4)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("times", [1, pytest.param(20, marks=pytest.mark.slow)])
def test_a_rank_that_is_killed_while_it_trains(times, tmp_path):
    draw = random.Random(0)
    for index in range(times):
        with Fleet(2) as fleet:
            place = tmp_path / str(index)
            place.mkdir()
            fleet.begin(trains, place)
            fleet.wait_for(place, "ready*")
            time.sleep(draw.random() / 2)  # some steps
            killed = draw.randrange(2)
            fleet.processes[killed].kill()
            at = time.monotonic()
            found = fleet.end(place, LIMIT + 30)
            assert time.monotonic() - at < LIMIT
        assert f"rank {killed} has failed: it was killed, or its machine is gone" in found[1 - killed].failure
        folders = sorted((place / "storage").iterdir())
        assert folders[-1].name == f"greedysnake-run{'-1' * killed}"  # the other has removed its own
        for folder in folders:
            Folder.take(folder).release()  # free for the next run


SCRIPT = """
import sys, torch, gs_compile
from tiered import Harness, gpt2, options, tokens

model = gpt2()
optimizer = gs_compile.AdamW(model.parameters(), lr=1e-2)
model.compile(backend="greedysnake", options=options(sys.argv[1]))
for index in range(1000):
    ids = tokens(index, 4)
    if index == 2 and torch.distributed.get_rank() == 1:
        raise ValueError("this sample is broken")
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.slow
def test_a_script_that_raises_on_one_rank(tmp_path):
    """Outside of any call of ours, and without a launcher that ends the others."""
    held = held_port()
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(held.getsockname()[1])}
    folders = [str(Path(__file__).parents[1]), *filter(None, sys.path)]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(tmp_path)],
            env={**os.environ, **shared, "RANK": str(rank), "PYTHONPATH": os.pathsep.join(folders)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    (_, told), (_, own) = (process.communicate(timeout=240) for process in processes)
    held.close()
    assert [process.returncode for process in processes] == [1, 1]
    assert own.endswith("ValueError: this sample is broken\n")
    assert "RankError: " in told
    assert "rank 1 has failed: ValueError: this sample is broken" in told
    assert not list(tmp_path.iterdir())
