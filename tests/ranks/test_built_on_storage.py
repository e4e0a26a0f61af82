"""Models that ranks build on storage, and what each rank has of them there and in memory."""

from __future__ import annotations

import itertools
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from launch import Fleet
from learner import same_tensors
from rank_learner import compiled
from tiered import gpt2, options
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

import gs_compile
from gs_compile import init_on_storage
from gs_compile.errors import LaneError, RankError
from gs_compile.model import storage_init
from gs_compile.model.files import SMALL_NBYTES
from gs_compile.model.materialize import on_first_rank
from gs_compile.runtime.optimizer import OptimizerStep

KEEPS_CAPTURES = True  # each process captures its own


def mapped_nbytes(folder):
    """Of files without a name under a folder, which this process has in its address space: of each once."""
    found = Counter()
    for line in Path("/proc/self/maps").read_text().splitlines():
        if f" {folder}/#" in line:
            place, _, offset, _, inode, *_ = line.split()
            start, end = (int(each, 16) for each in place.split("-"))
            found[inode] = max(found[inode], int(offset, 16) + end - start)
    return found.total()


def builds(info, tmp_path):
    """A model that is built on storage by ranks with different seeds is the first rank's, and each keeps its rows."""
    make = partial(gpt2, width=128)
    (folder := tmp_path / str(info.rank)).mkdir()
    stored = compiled(info, folder, lambda seed: init_on_storage(lambda: make(seed=info.rank), storage=folder))
    large = {name for name, p in stored.model.named_parameters() if p.nbytes >= SMALL_NBYTES}
    nbytes = sum(p.nbytes for name, p in stored.model.named_parameters() if name in large)
    found = {"share": mapped_nbytes(folder) / nbytes}
    plain = make(seed=0)
    state = stored.model.state_dict()
    for name, parameter in plain.named_parameters() if large else ():
        if name in large:
            assert torch.equal(state[name].full_tensor(), parameter)
            assert torch.equal(stored.model.get_parameter(name).data, parameter)
    assert all(isinstance(state[name], DTensor) for name in large)
    with pytest.raises(RankError, match=r"pickle would have the rows of rank . of 2"):
        torch.save({name: state[name].half() for name in large}, folder / "half.pt")
    states = stored.optimizer.state_dict()["state"].values()
    zeros = max((each["exp_avg"] for each in states), key=torch.Tensor.numel)
    assert isinstance(zeros, DTensor)
    assert not zeros.to_local().any()
    name = min(large)
    stored.model.get_parameter(name).data.mul_(2)  # a change before the first call
    assert torch.equal(stored.model.state_dict()[name].full_tensor(), 2 * plain.get_parameter(name))
    stored.model.load_state_dict(state | {name: plain.get_parameter(name)})
    (beside := folder / "beside").mkdir()
    ordinary = compiled(info, beside, lambda seed: make(seed=10 * info.rank))
    for each in (ordinary, stored):
        each.train(0, 1)
    same_tensors(stored.values(), ordinary.values())
    narrow = init_on_storage(lambda: make(seed=info.rank), storage=folder).bfloat16()
    assert torch.equal(narrow.state_dict()[name].full_tensor(), plain.get_parameter(name).bfloat16())
    with on_first_rank(narrow) as is_first:
        if is_first:
            same_tensors(narrow.state_dict(), {name: value.bfloat16() for name, value in plain.state_dict().items()})
    early = compiled(info, folder, lambda seed: init_on_storage(lambda: make(seed=5), storage=folder))
    model, optimizer = get_state_dict(ordinary.model, ordinary.optimizer)
    checkpoint.save({"model": model, "optimizer": optimizer}, checkpoint_id=tmp_path / "saved")
    model, optimizer = get_state_dict(early.model, early.optimizer)  # before the first call
    checkpoint.load(state := {"model": model, "optimizer": optimizer}, checkpoint_id=tmp_path / "saved")
    set_state_dict(early.model, early.optimizer, model_state_dict=model, optim_state_dict=state["optimizer"])
    same_tensors(early.values(), ordinary.values())
    for each in (ordinary, early):
        each.train(2)
    same_tensors(early.values(), ordinary.values())
    group = [dist.new_group([rank]) for rank in range(info.number)][info.rank]  # of this rank alone
    mine = init_on_storage(lambda: make(seed=info.rank), storage=folder, group=group)
    same_tensors(mine.state_dict(), make(seed=info.rank).state_dict())
    with pytest.raises(RankError, match=r"built different models: .* differ"):
        init_on_storage(lambda: gpt2(width=128 + 64 * info.rank), storage=folder)
    return found


def test_a_model_built_on_storage(pair, tmp_path):
    for each in pair.run(builds, tmp_path):
        assert each["share"] < 0.51


def fails(info, tmp_path, on_storage):
    """The last rank's second update fails; each rank has its rows of the first values, or all of what was in memory."""
    (folder := tmp_path / str(info.rank)).mkdir()
    make = partial(gpt2, width=128, seed=info.rank)
    found = compiled(info, folder, lambda seed: init_on_storage(make, storage=folder) if on_storage else make())
    first = {name: own(value).clone() for name, value in found.model.state_dict().items()}
    if not on_storage:
        first = gpt2(width=128, seed=0).state_dict()  # all have the first rank's
    real, calls = OptimizerStep.update, itertools.count()

    def update(*arguments):
        if info.rank == info.number - 1 and next(calls) == 1:
            raise OSError("broken on purpose")
        real(*arguments)

    OptimizerStep.update = update
    try:
        with pytest.raises((LaneError, RankError), match="broken on purpose"):
            found.train(0, 1)
    finally:
        OptimizerStep.update = real
    same_tensors({name: own(value) for name, value in found.model.state_dict().items()}, first)


def own(value):
    return value.to_local() if isinstance(value, DTensor) else value


def test_a_first_step_that_fails_on_one_rank_costs_no_values(pair, tmp_path):
    for on_storage in (True, False):
        (place := tmp_path / str(on_storage)).mkdir()
        pair.run(fails, place, on_storage=on_storage)


class Wide(nn.Module):
    """64 MiB of blocks, which are all the same."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(8, 1024)
        self.blocks = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(16)))

    def forward(self, ids):
        return self.blocks(self.embedding(ids)).square().mean()


def status(name):
    return next(int(line.split()[1]) << 10 for line in Path("/proc/self/status").open() if line.startswith(name))


def uses(info, tmp_path, in_host):
    """MiB that a rank has in memory and on storage for a model, and that were planned."""
    storage_init.CACHE_NBYTES = 8 << 20
    (folder := tmp_path / f"{info.number}-{info.rank}").mkdir()
    compiled(info, folder, gpt2).train(0)  # loads code
    Path("/proc/self/clear_refs").write_text("5")
    start = status("VmHWM")
    model = init_on_storage(Wide, storage=folder)
    built = status("VmHWM") - start
    optimizer = gs_compile.AdamW(model.parameters())
    ratios = dict.fromkeys(("parameter", "optimizer"), in_host)
    model.compile(backend="greedysnake", options=options(folder, host_memory="400MiB", ratios=ratios))
    before = status("VmRSS")
    for _ in range(2):
        model(torch.arange(4).view(1, 4)).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()
    trained = status("VmHWM") - before
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    state = model.state_dict(), optimizer.state_dict()
    kept = mapped_nbytes(folder)
    checkpoint.save({"model": state[0], "optimizer": state[1]}, checkpoint_id=tmp_path / f"saved{info.number}")
    saved = status("VmHWM") - before
    engine = optimizer.engine
    planned = {"planned": dict(engine.snapshots[-1].peaks)["host"], "ssd": engine.planning.ssd_nbytes}
    given = {"slab": engine.tiers.slab.nbytes}  # of the budget more than is planned as needed
    found = {"built": built, "trained": trained, "kept": kept, "saved": saved, **planned, **given}
    return {name: nbytes / 2**20 for name, nbytes in found.items()}


@pytest.mark.slow
@pytest.mark.parametrize("in_host", [0.0, 1.0])
def test_memory_and_storage_of_a_rank(in_host, tmp_path):
    """Of 64 MiB of parameters and 128 MiB of states each rank has its share, wherever that is, and of no more."""
    for number in (1, 2):
        with Fleet(number) as fleet:
            found = fleet.run(uses, tmp_path, in_host=in_host)
        share = (64 + 128) / number
        for rank in found:
            assert rank["built"] < 8 + 16  # a cache of 8 MiB, some tensors of 4
            assert rank["ssd"] < (1 - in_host) * share + 1
            assert rank["planned"] < in_host * share + 66  # working buffers: some layers, their gradients and states
            assert rank["trained"] < rank["slab"] + 64  # what a layer computes with, messages of 4 MiB each
            assert rank["saved"] < share + 8
        assert sum(rank["kept"] for rank in found) < 64 + 128 + 1  # a state dict, in files of the first rank
