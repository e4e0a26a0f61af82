"""A set-up that trains, for tests that spoil it."""

from __future__ import annotations

import resource
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from learner import same_tensors
from torch import nn
from torch.nn import functional

import gs_compile
from gs_compile.runtime.storage.stored import FOLDER

WORDS, LENGTH, WIDTH, BATCH = 11, 5, 8, 5


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3), nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x):
        return x + (x @ self.weight + self.bias).relu()


class Tiny(nn.Module):
    """Few operations, so that Dynamo is soon done with it."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Parameter(torch.randn(LENGTH, WIDTH))
        self.blocks, self.head = nn.ModuleList([Block(), Block()]), nn.Parameter(torch.randn(WORDS, WIDTH))

    def forward(self, ids):
        x = self.words(ids) + self.places[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy((x @ self.head.T).flatten(0, 1), ids.flatten())


def tiny():
    torch.manual_seed(0)
    return Tiny()


def ids(*shape):
    return torch.randint(0, WORDS, shape or (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))


def adamw(parameters):
    return gs_compile.AdamW(parameters, lr=1e-2)


@dataclass
class SetUp:
    """One that trains, until a case spoils it: what it changes outside is undone when the stack is closed."""

    folder: Path
    model: nn.Module = field(default_factory=tiny)
    options: dict[str, Any] = field(default_factory=dict)
    expert: dict[str, Any] = field(default_factory=dict)
    batch: Any = field(default_factory=ids)
    make: Callable[[list[nn.Parameter]], Any] = adamw
    optimizer: Any = None
    undo: ExitStack = field(default_factory=ExitStack)

    @property
    def storage(self) -> Path:
        return self.folder / "storage"

    def call(self):
        """The loss of a first call."""
        torch._dynamo.reset()
        self.optimizer = self.make(list(self.model.parameters()))
        ratios = {"parameter": 0.0, "checkpoint": 0.0, "optimizer": 0.0}
        expert = {"compiler": "eager", "recompute": "all", "alpha": 0.5, "ratios": ratios, **self.expert}
        given = {"micro_batch_size": 2, "storage": self.storage, "host_memory": "100MiB", "expert": expert}
        self.model.compile(backend="greedysnake", options={**given, **self.options})
        return self.model(self.batch)

    def train(self):
        """What a step makes of the model."""
        return self.end(self.call())

    def end(self, loss):
        loss.backward()
        self.optimizer.step()
        found = values(self.model)
        self.optimizer.engine.tiers.close()
        return found

    def patch(self, owner, name, value):
        patched = self.undo.enter_context(pytest.MonkeyPatch.context())
        patched.setattr(owner, name, value)

    def limit(self, what, number):
        soft, hard = resource.getrlimit(what)
        resource.setrlimit(what, (number, hard))
        self.undo.callback(resource.setrlimit, what, (soft, hard))

    def say(self, **variables):
        patched = self.undo.enter_context(pytest.MonkeyPatch.context())
        for name, value in variables.items():
            patched.setenv(name, value)

    def made(self, name, mode=0o700):
        """A folder where the run's own is to be, and something in it."""
        (found := self.storage / FOLDER).mkdir(parents=True)
        found.chmod(mode)
        (found / name).write_text("not to be lost")


def values(model):
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def same(found, wanted):
    """As `same_tensors`, also of tensors that are sparse."""
    same_tensors(
        *({name: each.to_dense() if each.is_sparse else each for name, each in d.items()} for d in (found, wanted))
    )
