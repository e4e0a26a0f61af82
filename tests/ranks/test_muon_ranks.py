"""Ranks that train with Muon learn what torch's optimizers learn of all their rows, and go on from a commit.

Each gathers what is to be orthogonalized. test_exact.py has that placements learn the same bits.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from launch import Fleet
from tiered import Block, Harness, gpt2, loss_of, muon, options, outcome, step, tokens
from torch.distributed.device_mesh import init_device_mesh

from gs_compile.errors import RankError

KEEPS_CAPTURES = True  # each process captures its own
NUM_STEPS = 3
TOLERANCE = 1e-11  # the relative distance of a tensor in float64, as in end_to_end/test_muon_runs.py


class Choosing(Block):
    """Has a matrix that only chooses: no gradient comes to it, and torch's optimizers leave it as it is."""

    def forward(self, x_BTD):
        return torch.where(self.score(x_BTD) > 0, super().forward(x_BTD), x_BTD)


def build():
    model = gpt2(tied=False)
    for block in model.transformer["h"]:
        block.__class__, block.score = Choosing, torch.nn.Linear(32, 1, bias=False)
    return model.double()


def by_torch(number_of_ranks):
    """What torch's optimizers make of the rows of all ranks."""
    model = build()
    matrices = [p for name, p in model.named_parameters() if ".h." in name and p.dim() == 2]
    others = [p for p in model.parameters() if all(p is not each for each in matrices)]
    made = [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=1e-2, weight_decay=1e-2)]
    for number in range(NUM_STEPS):
        rows = [tokens(10 * number + rank) for rank in range(number_of_ranks)]
        loss_of(model, torch.cat(rows)).backward()
        for each in made:
            each.step()
            each.zero_grad()
    return dict(model.named_parameters())


def learns(info, tmp_path, places, **more):
    """How far the furthest tensor is from torch's, by place."""
    wanted, harness, found = by_torch(info.number), Harness(build), {}
    for name, given in places.items():
        with harness.fresh(muon, {**options(tmp_path, **given), **more}) as optimizer:
            for number in range(NUM_STEPS):
                step(harness.model, optimizer, tokens(10 * number + info.rank))
            values = outcome(harness.model, optimizer, [], []).values
            whens = {group.when for unit in optimizer.engine.placement.units for group in unit.groups}
        distances = [float((values[key] - each.detach()).norm() / each.detach().norm()) for key, each in wanted.items()]
        found[name] = max(distances), sorted(whens)
    return found


def test_two_ranks_learn_what_torch_does(pair, tmp_path):
    """Some layers are updated early and some late, each as a whole."""
    places = {
        "half": {"alpha": 0.5},
        "two memories": {"alpha": 0.0, "separate_device": True, "ratios": {"parameter": 0.4}},
    }
    for found in pair.run(learns, tmp_path, places=places):
        for distance, _ in found.values():
            assert distance < TOLERANCE
        assert [whens for _, whens in found.values()] == [["early", "late"], ["early"]]


def synchronizes_alone(info, tmp_path):
    harness = Harness(partial(gpt2, tied=False))
    with harness.fresh(muon, options(tmp_path, alpha=1.0)) as optimizer:
        step(harness.model, optimizer, tokens(0))
        with pytest.raises(RankError) as caught:
            step(harness.model, optimizer, tokens(1)) if info.rank else optimizer.synchronize()
    return str(caught.value)


def test_one_rank_alone_does_not_bring_updates_to_an_end(pair, tmp_path):
    for told in pair.run(synchronizes_alone, tmp_path, timeout=60):
        assert "rank 0: updates between steps in step 2, rank 1: the forward in step 2" in told


def goes_on(info, tmp_path):
    """What differs after a commit that another optimizer has gone on from; and the components of each kind's state."""
    harness, make = Harness(gpt2), partial(muon, max_grad_norm=1.0)
    batch = lambda number: tokens(10 * number + info.rank)  # noqa: E731
    given = options(tmp_path, clip="delayed", durability="step", resume="auto")
    with harness.fresh(make, {**options(tmp_path / "whole", clip="delayed")}) as optimizer:
        for number in range(NUM_STEPS):
            step(harness.model, optimizer, batch(number))
        wanted = outcome(harness.model, optimizer, [], [])
    with harness.fresh(make, given) as optimizer:
        for number in range(2):
            step(harness.model, optimizer, batch(number))
        optimizer.commit()
    with harness.fresh(make, {**given, "expert": {**given["expert"], "separate_device": True}}) as optimizer:
        for number in range(2, NUM_STEPS):
            step(harness.model, optimizer, batch(number))
        assert optimizer.num_steps == NUM_STEPS
        found = outcome(harness.model, optimizer, [], [])
    return found.differences(wanted), [name for name in found.values if "up.weight" in name]


@pytest.mark.slow
def test_two_ranks_go_on_from_a_commit(pair, tmp_path):
    for differences, names in pair.run(goes_on, tmp_path):
        assert differences == []
        assert {name.rsplit(".", 1)[1] for name in names} == {"weight", "momentum_buffer", "step"}


def learns_on_a_mesh(info, tmp_path):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return learns(info, tmp_path, {"mesh": {"alpha": 1.0}}, mesh=mesh)


@pytest.mark.slow
def test_two_replicas_of_two_ranks_learn_what_torch_does(tmp_path):
    with Fleet(4) as fleet:
        for found in fleet.run(learns_on_a_mesh, tmp_path):
            assert found["mesh"][0] < TOLERANCE
