"""Collectives in a model's forward: those of losses over the samples of all ranks, where each rank's batch is one
micro-batch, and of counts of labels: against DistributedDataParallel.
"""

from __future__ import annotations

import copy
import warnings
from functools import partial

import figures
import pytest
import torch
import torch.distributed as dist
import zoo
from launch import Fleet
from learner import distance
from tiered import Block, options
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import gs_compile
from gs_compile.errors import UniformityWarning
from gs_compile.planner.cost import timing

KEEPS_CAPTURES = True  # each process captures its own
CHOSEN = dict.fromkeys(("parameter", "checkpoint", "optimizer"))


def gathered(x_BD):
    """Those of all ranks, through which plain PyTorch passes no gradient."""
    parts = [torch.zeros_like(x_BD) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x_BD)
    return torch.cat(parts)


class Gathered(torch.autograd.Function):
    """The same with gradients."""

    @staticmethod
    def forward(ctx, x_BD):
        ctx.num_rows = len(x_BD)
        return gathered(x_BD)

    @staticmethod
    def backward(ctx, gradient):
        whole = gradient.contiguous().clone()
        dist.all_reduce(whole)
        return whole[ctx.num_rows * dist.get_rank() :][: ctx.num_rows]


class GPT(zoo.GPT):
    """With blocks that Dynamo soon has read."""

    def __init__(self):
        super().__init__(partial(Block, zoo.WIDTH, 0.0))


class Contrastive(GPT):
    """Each sample is told from those of all ranks."""

    def __init__(self, gather):
        super().__init__()
        del self.head
        self.gather = gather

    def forward(self, ids):
        x_BTD = self.embedding(ids)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        x_BD = self.norm(x_BTD).mean(1)
        scores = x_BD @ (self.gather(x_BD) * 1.5).T
        return functional.cross_entropy(scores, torch.arange(len(ids)) + len(ids) * dist.get_rank())


class Counting(GPT):
    """Divides by the labels of all ranks, and returns the logits, to which a gradient comes too."""

    def forward(self, ids, labels):
        logits, _ = super().forward(ids)
        count = (labels >= 0).sum()
        dist.all_reduce(count)
        total = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return total / count.clamp(min=1) * dist.get_world_size(), logits


class Watched(GPT):
    """Divides by the labels of all ranks, and returns what its first block makes, too."""

    def forward(self, ids, labels):
        x_BTD, inner = self.embedding(ids), []
        for block in self.blocks:
            x_BTD = block(x_BTD)
            inner.append(x_BTD.square().mean((1, 2)))
        logits = self.head(self.norm(x_BTD))
        count = (labels >= 0).sum()
        dist.all_reduce(count)
        total = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return total / count.clamp(min=1), inner[0]


class Centre(torch.nn.Module):
    def forward(self, x_BTD):
        return x_BTD - x_BTD.mean(0)


class Centred(Counting):
    """Reads all samples of a rank ahead of its head, so that the batch has to be one micro-batch."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Sequential(self.embedding, Centre())


def train(info, model, optimizer):
    kind = type(getattr(model, "module", model))
    counts, uneven = issubclass(kind, Counting), kind is Counting
    for number in range(2):
        ids, labels = zoo.batch(2 + 3 * info.rank * uneven, seed=10 * number + info.rank)
        if counts:
            loss, logits = model(ids, labels)
            (loss + logits.square().mean() if number else loss).backward()
        else:
            model(ids).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name.removeprefix("module."): p.detach().clone() for name, p in model.named_parameters()}


def learns(info, tmp_path):
    """How far from DDP each way is; on the tiers by a plan for which the first rank times the code."""
    found, timed = {}, []
    warnings.filterwarnings("ignore", ".*should not be instantiated", DeprecationWarning)  # by Dynamo
    for plain in (Contrastive(Gathered.apply), Contrastive(gathered), Counting(), Centred()):
        ours, wrapped = copy.deepcopy(plain), DistributedDataParallel(plain)
        wanted = train(info, wrapped, torch.optim.SGD(wrapped.parameters(), lr=0.1))
        if getattr(plain, "gather", gathered) is gathered:
            zoo.compile_model(ours, 2)  # one micro-batch on both ranks, or of labels one and three
            mine = train(info, ours, torch.optim.SGD(ours.parameters(), lr=0.1))
            found[f"{type(ours).__name__} in memory"] = distance(mine, wanted)
            continue
        optimizer = gs_compile.SGD(ours.parameters(), lr=0.1)
        given = options(tmp_path, alpha=0.0, separate_device=True, recompute="auto", ratios=CHOSEN)
        ours.compile(backend="greedysnake", options=given)
        with pytest.MonkeyPatch.context() as patched:
            for owner, name, measured in figures.MEASURED:
                if owner is timing:
                    patched.setattr(owner, name, lambda *args, run=measured: timed.append(run) or run(*args))
            found["on the tiers"] = distance(train(info, ours, optimizer), wanted)
    return found, len(timed)


def repeats_alone(info, tmp_path):
    """One rank alone gives a gradient to what a block makes, and runs its forward again."""
    model = zoo.compile_model(Watched(), 2)
    with pytest.warns(UniformityWarning):
        loss, inner = model(*zoo.batch(2, seed=info.rank))
    (loss + info.rank * inner.sum() if info.rank else loss).backward()


def test_a_forward_that_one_rank_repeats_alone_is_refused_on_all(tmp_path):
    """Fault: that rank waited for the counts of the other, and this one for the gradients of that, without end."""
    with Fleet(2) as fleet:
        for found in fleet.outcomes(repeats_alone, tmp_path, 60):
            assert "RankError" in found.failure
            assert "rank 1: one more forward, for a gradient of another output than the loss" in found.failure


def test_as_distributed_data_parallel(pair, tmp_path):
    (first, timed), (second, others) = pair.run(learns, tmp_path)
    assert timed > 0 == others
    assert max(*first.values(), *second.values()) < 1e-6, (first, second)


class Summed(torch.autograd.Function):
    """As Megatron's losses, which sum over the ranks that share a vocabulary."""

    @staticmethod
    def forward(ctx, x):
        dist.all_reduce(found := x.clone())
        return found

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Reducing(zoo.Block):
    def forward(self, x_BTD):
        found = super().forward(x_BTD)
        dist.all_reduce(most := found.detach().amax(-1, keepdim=True), dist.ReduceOp.MAX)
        return Summed.apply(found - most) + gathered(found)


class OfOneRank(zoo.GPT):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(Reducing() for _ in self.blocks)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by Dynamo
def test_a_group_of_one_rank_exchanges_nothing(tmp_path):
    """Fault: refused in several micro-batches, as Megatron-Core's GPT on one device was."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        models, found = [OfOneRank().double(), OfOneRank().double()], []
        models[1].load_state_dict(models[0].state_dict())
        for kind, model in zip((gs_compile.AdamW, torch.optim.AdamW), models, strict=True):
            optimizer = kind(model.parameters(), lr=0.01, eps=1e-3)
            if kind is gs_compile.AdamW:
                model.compile(backend="greedysnake", options=options(tmp_path))
            losses = []
            for number in range(2):
                torch.manual_seed(number)
                losses.append(loss := model(*zoo.batch())[1])
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            found.append([*map(torch.detach, losses), *(value.clone() for value in model.state_dict().values())])
        torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)
    finally:
        dist.destroy_process_group()
