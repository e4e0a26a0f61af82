"""Models on the tiers come, live side by side and go: each with its threads and files, and nothing is left of any."""

from __future__ import annotations

import gc
import time
import weakref
from functools import partial

import pytest
import torch
from learner import same_tensors
from setups import SetUp, values
from tiered import Harness, adamw, files_in, gpt2, options, our_threads, outcome, step, tokens, two_groups
from torch.overrides import TorchFunctionMode

from gs_compile.errors import OptimizerError
from gs_compile.model.residency import is_offloaded

SECONDS = 60  # what is garbage is gone at once; what is more is a loaded machine


def test_two_models_train_side_by_side(tmp_path):
    def made(seed, directory):
        model = gpt2(seed=seed)
        optimizer = adamw(two_groups(model))
        model.compile(backend="greedysnake", options=options(directory, alpha=0.5))
        return model, optimizer

    def trained(*pairs):
        losses = [[] for _ in pairs]
        for number in range(3):
            for (model, optimizer), found in zip(pairs, losses, strict=True):
                found.append(step(model, optimizer, tokens(number)))
        found = [outcome(*pair, each, []) for pair, each in zip(pairs, losses, strict=True)]
        for _, optimizer in pairs:
            optimizer.engine.tiers.close()
        return found

    alone = [*trained(made(1, tmp_path / "a")), *trained(made(2, tmp_path / "b"))]
    together = trained(made(1, tmp_path / "a"), made(2, tmp_path / "b"))
    assert [a.differences(b) for a, b in zip(alone, together, strict=True)] == [[], []]
    assert alone[0].losses != alone[1].losses


def test_a_model_whose_optimizer_is_gone_is_read(tmp_path):
    """As where a function returns it that has made the optimizer. Fault: an AssertionError ended durable runs."""
    found = []
    for durability in ("off", "step"):
        setup = SetUp(tmp_path / durability, options={"durability": durability})
        setup.call().backward()
        setup.optimizer.step()
        setup.optimizer.zero_grad()
        engine, setup.optimizer = setup.optimizer.engine, None
        gc.collect()
        assert engine.optimizer is None
        found.append(values(setup.model))
        with torch.no_grad():
            setup.model(setup.batch)
        with pytest.raises(OptimizerError, match="the optimizer of this model is gone"):
            setup.model(setup.batch).backward()
    same_tensors(*found)


@pytest.mark.parametrize("when", ["idle", "busy", "between forward and backward"])
def test_what_nobody_refers_to_ends(tmp_path, when):
    def train():  # a frame of its own: Dynamo looks at the locals of its callers, and Python keeps what it has seen
        model = gpt2()
        optimizer = adamw(two_groups(model))
        model.compile(backend="greedysnake", options=options(tmp_path, alpha=0.5))
        step(model, optimizer, tokens(0))
        if when == "idle":
            optimizer.synchronize()
        if when == "between forward and backward":
            ids = tokens(1)
            return model(input_ids=ids, labels=ids).loss
        assert our_threads()
        assert files_in(tmp_path)
        assert all(is_offloaded(parameter) for parameter in model.parameters())
        return None

    loss = train()
    del loss
    deadline = time.monotonic() + SECONDS
    while (our_threads() or files_in(tmp_path)) and time.monotonic() < deadline:
        time.sleep(0.01)  # what a thread of ours held a moment ago was no garbage yet, or is ended by one of no name
    assert our_threads() == []
    assert files_in(tmp_path) == []


class Seen(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.functions = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.functions.append(function)
        return function(*args, **kwargs or {})


def test_the_end_of_what_nobody_refers_to_calls_nothing_of_torch(tmp_path):
    """Garbage is collected in the midst of another model's capture too: what is called there is recorded, or fails."""

    def train():
        model = gpt2()
        model.compile(backend="greedysnake", options=options(tmp_path))
        step(model, optimizer := adamw(two_groups(model)), tokens(0))
        cycle = [model, optimizer]
        cycle.append(cycle)
        return weakref.ref(optimizer)

    gc.collect()  # what tests before have left, whose ends may be of torch
    gc.disable()
    try:
        optimizer = train()
        assert optimizer() is not None
        with Seen() as seen:
            gc.collect()
    finally:
        gc.enable()
    assert optimizer() is None
    assert files_in(tmp_path) == []
    assert seen.functions == []


def test_widths_that_align_with_nothing(tmp_path):
    build = partial(gpt2, width=33, vocab_size=301)
    harness = Harness(build)
    somewhere = harness.train(adamw, options(tmp_path, alpha=0.25, ratios={"parameter": 0.3, "optimizer": 0.3}))
    for chosen in ({"separate_device": True, "alpha": 1.0}, {"ratios": {"parameter": 1.0, "checkpoint": 1.0}}):
        assert not harness.train(adamw, options(tmp_path, **chosen)).differences(somewhere)
    model = build()
    optimizer = torch.optim.AdamW(two_groups(model), lr=1e-2)
    losses = [step(model, optimizer, tokens(number)) for number in range(6)]
    assert losses == pytest.approx(somewhere.losses, rel=1e-4)
