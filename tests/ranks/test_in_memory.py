"""Models whose parameters, or some of them, stay in memory: gradients are the mean of all ranks'."""

from __future__ import annotations

import copy
import re

import pytest
import torch
import zoo
from learner import distance
from tiered import options
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import gs_compile
from gs_compile.errors import OptimizerError, RankError, ReleasedParameterError
from gs_compile.model.residency import residency_of

KEEPS_CAPTURES = True  # each process captures its own
BOUND = 0.5  # of the norm of gradients


class Scaled(zoo.Block):
    """A block with a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("gain", torch.tensor(1.0))

    def forward(self, x_BTD):
        return super().forward(x_BTD) * self.gain


def spread(model, rank):
    """Each rank begins with other values: the first one's count."""
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data.mul_(1 + rank)


class Trunk(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList((Scaled(), Scaled()))

    def forward(self, x_BTD):
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return x_BTD


class Headed(torch.nn.Module):
    """A compiled trunk between an eager embedding and an eager head, which share parameters that stay in memory: their
    gradients come before and after the trunk's backward. Of the scales each rank trains its own.
    """

    def __init__(self, rank):
        super().__init__()
        self.words = torch.nn.Embedding(zoo.VOCAB, zoo.WIDTH)
        self.trunk = Trunk()
        self.scales = torch.nn.ParameterList(torch.tensor([1.5, 0.5 + number]) for number in range(2))
        self.shift = torch.nn.Parameter(torch.tensor([0.3, 0.9]))
        self.rank = rank

    def forward(self, ids, labels):
        scale = self.scales[self.rank].sum() * self.shift[1] + self.shift[0]
        logits = self.trunk(self.words(ids)) @ self.words.weight.T * scale
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Forked(zoo.GPT):
    """Three losses, of a head each: no step trains the last."""

    def __init__(self):
        super().__init__(Scaled, num_layers=2)
        self.heads = torch.nn.ModuleList(torch.nn.Linear(zoo.WIDTH, zoo.VOCAB) for _ in range(3))

    def forward(self, ids, labels):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return [functional.cross_entropy(head(x).flatten(0, 1), labels.flatten()) for head in self.heads]


def train_forked(info, model):
    """Each rank trains the head of its own number, or in every other step all the first."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.5)
    for number in range(4):
        model(*zoo.batch(2 + info.rank, seed=10 * number + info.rank))[info.rank * (number % 2)].backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name.removeprefix("module."): p.detach().clone() for name, p in model.named_parameters()}


class Tasks(Trunk):
    """A head for each task, of which a call reads one."""

    def __init__(self):
        super().__init__()
        self.words = torch.nn.Embedding(zoo.VOCAB, zoo.WIDTH)
        self.heads = torch.nn.ModuleList(torch.nn.Linear(zoo.WIDTH, zoo.VOCAB) for _ in range(2))

    def forward(self, ids, labels, task):
        logits = self.heads[task](super().forward(self.words(ids)))
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def other_tasks(info):
    """What each rank is told where its step is of another task than the others'."""
    model = zoo.compile_model(Tasks())
    model(*zoo.batch(), 0).backward()
    with pytest.raises(RankError) as caught:
        model(*zoo.batch(), info.rank).backward()
    return str(caught.value)


def backward(info, model, number):
    loss = model(*zoo.batch(2 + info.rank, seed=10 * number + info.rank))
    (loss[1] if isinstance(loss, tuple) else loss).backward()


def train(info, model, optimizer, bound=None):
    for number in range(4):
        backward(info, model, number)
        if bound is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), bound)
        optimizer.step()
        optimizer.zero_grad()
    return {name.removeprefix("module."): p.detach().clone() for name, p in model.named_parameters()}


def learns(info, tmp_path):
    """How far each way is from DDP of a plain model."""
    found = {}
    spread(plain := zoo.GPT(Scaled, num_layers=2), info.rank)
    plain.norm.requires_grad_(False)
    ours, inside = copy.deepcopy(plain), zoo.compile_model(copy.deepcopy(plain))
    wrapped = DistributedDataParallel(plain)
    wanted = train(info, wrapped, torch.optim.SGD(wrapped.parameters(), lr=0.1))
    both = DistributedDataParallel(inside)
    with pytest.MonkeyPatch.context() as patched:  # Dynamo cuts a larger model's graph into DDP's buckets
        patched.setattr(torch.distributed, "_DEFAULT_FIRST_BUCKET_BYTES", 1)
        found["inside"] = distance(train(info, both, torch.optim.SGD(both.parameters(), lr=0.1)), wanted)
    known = {residency_of(parameter).ranks for parameter in inside.parameters()}
    assert known == {(None,), None}, "its gradients are not averaged a second time"
    zoo.compile_model(ours)
    found["alone"] = distance(train(info, ours, torch.optim.SGD(ours.parameters(), lr=0.1)), wanted)
    backward(info, ours, 5)
    if info.rank == 1:
        ours.zero_grad()  # its step has one micro-batch, and the first rank's has two
    with pytest.raises(RankError, match=r"rank 0: which of \d+ .* gradients, in one more backward, rank 1: which"):
        backward(info, ours, 6)

    plain = Forked()
    for name in ("norm", "head"):
        delattr(plain, name)
    ours = zoo.compile_model(copy.deepcopy(plain))
    wanted = train_forked(info, DistributedDataParallel(plain, find_unused_parameters=True))
    found["forked"] = distance(train_forked(info, ours), wanted)

    words = r"rank 0: which of \d+ parameters up to heads.0.bias .*, rank 1: which of \d+ parameters up to heads.1.bias"
    assert re.search(words, other_tasks(info))

    spread(model := Headed(info.rank), info.rank)
    clipped, other = copy.deepcopy(model), DistributedDataParallel(copy.deepcopy(model), find_unused_parameters=True)
    wanted = train(info, other, torch.optim.SGD(other.parameters(), lr=0.1), BOUND)
    optimizer = gs_compile.SGD(clipped.parameters(), lr=0.1, max_grad_norm=BOUND)
    clipped.trunk.compile(backend="greedysnake", options=options(tmp_path / "clipped", outputs="all", clip="delayed"))
    found["clipped"] = distance(train(info, clipped, optimizer), wanted)

    reference = DistributedDataParallel(copy.deepcopy(model), find_unused_parameters=True)
    wanted = train(info, reference, torch.optim.SGD(reference.parameters(), lr=0.1))
    in_any_order = list(model.parameters())[:: 1 - 2 * info.rank]
    optimizer = gs_compile.SGD(in_any_order, lr=0.1)
    model.trunk.compile(backend="greedysnake", options=options(tmp_path, outputs="all"))
    found["head"] = distance(train(info, model, optimizer), wanted)
    with pytest.raises(
        ReleasedParameterError, match="DistributedDataParallel: the ranks already share the parameters of this"
    ):
        DistributedDataParallel(model)
    wrapped, optimizer = DistributedDataParallel(inside), gs_compile.SGD(inside.parameters(), lr=0.1)
    with pytest.raises(OptimizerError, match="the model is in a DistributedDataParallel, and the ranks already share"):
        train(info, wrapped, optimizer)
    return found


def test_as_distributed_data_parallel(pair, tmp_path):
    for errors in pair.run(learns, tmp_path):
        assert max(errors.values()) < 1e-6, errors
