"""State dicts of several ranks: DTensors, saved on some ranks and loaded on as many others."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import transformers
from launch import Fleet
from learner import same_tensors
from tiered import gpt2, options, step, tokens, two_groups
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor, Shard
from zoo import huggingface

import gs_compile
from gs_compile import init_on_storage
from gs_compile.errors import RankError
from gs_compile.model import storage_init
from gs_compile.model.mapped import SMALL_NBYTES
from gs_compile.model.materialize import on_first_rank
from gs_compile.model.rows import whole

KEEPS_CAPTURES = True  # each process captures its own


@pytest.fixture(scope="module")
def pair():
    with Fleet(2) as fleet:
        yield fleet


class Learner:
    """A model and its optimizer on one rank."""

    def __init__(self, info, folder, seed=0, build=gpt2, **changes):
        self.info = info
        self.model = build(seed=seed)
        self.optimizer = gs_compile.AdamW(two_groups(self.model), lr=1e-3, max_grad_norm=1.0)
        self.model.compile(backend="greedysnake", options=options(folder, alpha=0.5, **changes))

    def train(self, *numbers):
        """A step on each batch, of which every rank has some rows."""
        return [
            step(self.model, self.optimizer, tokens(number, 12).chunk(self.info.number)[self.info.rank])
            for number in numbers
        ]

    def call(self):
        with torch.no_grad():
            self.model(input_ids=tokens(0), labels=tokens(0))

    def values(self):
        """All that state dicts have, whole."""
        found = dict(self.model.state_dict())
        for number, state in self.optimizer.state_dict()["state"].items():
            found |= {f"{number}.{key}": value for key, value in state.items()}
        return {name: whole(value).clone() for name, value in found.items()}


def saves(info, tmp_path, precision):
    one = Learner(info, tmp_path, precision=precision)
    one.train(0, 1)
    model, optimizer = get_state_dict(one.model, one.optimizer)
    checkpoint.save({"model": model, "optimizer": optimizer}, checkpoint_id=tmp_path / "2")
    found = {"saved": one.values()}
    one.train(2)
    return found | {"trained": one.values()}


def loads(info, tmp_path, precision, source, target=None):
    folder = tmp_path / f"on{info.number}"
    folder.mkdir(exist_ok=True)
    one = Learner(info, folder, seed=1 + info.rank, precision=precision)
    one.call()
    model, optimizer = get_state_dict(one.model, one.optimizer)
    checkpoint.load(state := {"model": model, "optimizer": optimizer}, checkpoint_id=tmp_path / source)
    set_state_dict(one.model, one.optimizer, model_state_dict=model, optim_state_dict=state["optimizer"])
    found = {"loaded": one.values()}
    if target:
        model, optimizer = get_state_dict(one.model, one.optimizer)
        checkpoint.save({"model": model, "optimizer": optimizer}, checkpoint_id=tmp_path / target)
    one.train(2)
    return found | {"trained": one.values()}


@pytest.mark.parametrize(
    ("precision", "numbers"), [("bf16", (1, 3)), pytest.param("model", (1, 4), marks=pytest.mark.slow)]
)
def test_from_two_ranks_to_others_and_back(precision, numbers, pair, tmp_path):
    saved, other = pair.run(saves, tmp_path, precision=precision)
    same_tensors(other["trained"], saved["trained"])
    for number in numbers:
        with Fleet(number) as fleet:
            for each in fleet.run(loads, tmp_path, precision=precision, source="2", target=f"{number}"):
                same_tensors(each["loaded"], saved["saved"])
    for each in pair.run(loads, tmp_path, precision=precision, source=f"{number}"):
        same_tensors(each["loaded"], saved["saved"])
        same_tensors(each["trained"], saved["trained"])


def reads(info, tmp_path):
    """Reads of many kinds, and what they give back is the same."""
    one = Learner(info, tmp_path, build=partial(huggingface, "gpt2"))
    one.train(0)
    wanted, optimizer = one.values(), one.optimizer.state_dict()
    model = one.model.state_dict()
    for value in [*model.values(), *optimizer["state"][0].values()][:-1]:
        if value.dim():
            assert value.placements == (Shard(0),)
            assert value.to_local().shape[0] <= -(-value.shape[0] // info.number)
    weight = one.model.transformer.h[1].attn.c_attn.weight
    assert weight.norm() == wanted["transformer.h.1.attn.c_attn.weight"].norm()
    assert type(weight.detach()) is torch.Tensor
    with gs_compile.streaming(one.model):  # each rank its own, and as many tokens as the other
        ids = one.model.generate(tokens(info.rank, 2)[:, :4], max_new_tokens=3, do_sample=False)
    plain = huggingface("gpt2", seed=0).eval()
    plain.load_state_dict({name: wanted[name] for name in model})
    assert torch.equal(ids, plain.generate(tokens(info.rank, 2)[:, :4], max_new_tokens=3, do_sample=False))
    full = StateDictOptions(full_state_dict=True, cpu_offload=True)
    found = (
        get_model_state_dict(one.model, options=full),
        get_optimizer_state_dict(one.model, one.optimizer, options=full),
    )
    if info.rank:
        assert not found[0]
    else:
        same_tensors(found[0], {name: wanted[name] for name in found[0]})
    torch.save(model, tmp_path / f"model{info.rank}.pt")
    torch.save(optimizer, tmp_path / f"optimizer{info.rank}.pt")
    gs_compile.save_pretrained(one.model, tmp_path / "saved", max_shard_size="50KB")
    again = gs_compile.from_pretrained(transformers.GPT2LMHeadModel, tmp_path / "saved", storage=tmp_path)
    same_tensors(
        {name: whole(value) for name, value in again.state_dict().items()}, {name: wanted[name] for name in model}
    )
    one.train(1)
    trained = one.values()
    for again in (False, True):
        if again:  # rank 0 has it all
            everything = dataclasses.replace(full, broadcast_from_rank0=True)
            set_model_state_dict(one.model, found[0], options=everything)
            set_optimizer_state_dict(one.model, one.optimizer, found[1], options=everything)
        else:  # each has its own
            one.model.load_state_dict(torch.load(tmp_path / f"model{info.rank}.pt"))
            one.optimizer.load_state_dict(torch.load(tmp_path / f"optimizer{info.rank}.pt"))
        same_tensors(one.values(), wanted)
        one.train(1)
        same_tensors(one.values(), trained)
    with on_first_rank(one.model) as is_first:
        if is_first:
            same_tensors(one.model.state_dict(), {name: trained[name] for name in model})
            assert torch.equal(one.optimizer.state_dict()["state"][0]["exp_avg"], trained["0.exp_avg"])
    with pytest.raises(RankError, match=r"different things \(rank 0: reading a parameter of unit [eth] .* rank 1: rea"):
        one.model.transformer.h[0].mlp.c_fc.weight.norm() if info.rank else one.model.transformer.wte.weight.norm()
    return {name: wanted[name] for name in model}


def test_reads_and_writes_of_all_kinds(pair, tmp_path):
    wanted, _ = pair.run(reads, tmp_path)
    assert len(list((tmp_path / "saved").glob("model-*.safetensors"))) > 2
    same_tensors(dict(transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "saved").state_dict()), wanted)


def mapped_nbytes(folder):
    """Of files without a name under a folder, which this process has in its address space."""
    found = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if f" {folder}/#" in line]
    return sum(int(end, 16) - int(start, 16) for start, end in (line[0].split("-") for line in found))


def builds(info, tmp_path):
    """A model that is built on storage by ranks with different seeds is the first rank's, and each keeps its rows."""
    make = partial(gpt2, width=128)
    (folder := tmp_path / str(info.rank)).mkdir()
    stored = Learner(info, folder, build=lambda seed: init_on_storage(lambda: make(seed=info.rank), storage=folder))
    large = {name for name, p in stored.model.named_parameters() if p.nbytes >= SMALL_NBYTES}
    nbytes = sum(p.nbytes for name, p in stored.model.named_parameters() if name in large)
    found = {"share": mapped_nbytes(folder) / nbytes}
    plain = make(seed=0)
    state = stored.model.state_dict()
    for name, parameter in plain.named_parameters() if large else ():
        if name in large:
            assert torch.equal(state[name].full_tensor(), parameter)
            assert torch.equal(stored.model.get_parameter(name).data, parameter)
    assert {type(state[name]) for name in large} == {DTensor}
    states = stored.optimizer.state_dict()["state"].values()
    zeros = max((each["exp_avg"] for each in states), key=torch.Tensor.numel)
    assert type(zeros) is DTensor
    assert not zeros.to_local().any()
    name = min(large)
    stored.model.get_parameter(name).data.mul_(2)  # a change before the first call
    assert torch.equal(stored.model.state_dict()[name].full_tensor(), 2 * plain.get_parameter(name))
    stored.model.load_state_dict(state | {name: plain.get_parameter(name)})
    (beside := folder / "beside").mkdir()
    ordinary = Learner(info, beside, build=lambda seed: make(seed=10 * info.rank))
    for each in (ordinary, stored):
        each.train(0, 1)
    same_tensors(stored.values(), ordinary.values())
    group = [dist.new_group([rank]) for rank in range(info.number)][info.rank]  # of this rank alone
    mine = init_on_storage(lambda: make(seed=info.rank), storage=folder, group=group)
    same_tensors(mine.state_dict(), make(seed=info.rank).state_dict())
    with pytest.raises(RankError, match=r"built different models: .* differ"):
        init_on_storage(lambda: gpt2(width=128 + 64 * info.rank), storage=folder)
    return found


def test_a_model_built_on_storage(pair, tmp_path):
    for each in pair.run(builds, tmp_path):
        assert each["share"] < 0.51


def reads_alone(info, tmp_path):
    one = Learner(info, tmp_path)
    one.call()
    if info.rank == 0:
        one.model.lm_head.weight.norm()


@pytest.mark.slow
def test_a_read_of_one_rank_alone(tmp_path):
    with Fleet(2) as fleet:
        first, _ = fleet.outcomes(reads_alone, tmp_path, 60)
    assert "reading a parameter of unit" in first.failure
    assert "rank 0 waits for rank 1, whose script has ended" in first.failure


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
    nn.Sequential(nn.Linear(8, 8))(torch.ones(8)).sum().backward()
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
    optimizer.synchronize()
    trained = status("VmHWM") - before
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    state = model.state_dict(), optimizer.state_dict()
    kept = mapped_nbytes(folder)
    checkpoint.save({"model": state[0], "optimizer": state[1]}, checkpoint_id=tmp_path / f"saved{info.number}")
    saved = status("VmHWM") - before
    planned = {"planned": optimizer.engine.tiers.slab.nbytes, "ssd": optimizer.engine.planning.ssd_nbytes}
    found = {"built": built, "trained": trained, "kept": kept, "saved": saved, **planned}
    return {name: nbytes / 2**20 for name, nbytes in found.items()}


@pytest.mark.slow
@pytest.mark.parametrize("in_host", [0.0, 1.0])
def test_memory_and_storage_of_a_rank(in_host, tmp_path):
    """Of 64 MiB of parameters and 128 MiB of states each rank has its share, wherever that is, and of no more."""
    for number in (1, 2):
        with Fleet(number) as fleet:
            for rank in fleet.run(uses, tmp_path, in_host=in_host):
                share = (64 + 128) / number
                assert rank["built"] < 8 + 16  # a cache of 8 MiB, some tensors of 4
                assert rank["ssd"] < (1 - in_host) * share + 1
                assert (
                    rank["planned"] < in_host * share + 66
                )  # working buffers: some layers, their gradients and states
                assert (
                    rank["trained"] < rank["planned"] + 64
                )  # what a layer computes with, code, messages of 4 MiB each
                assert rank["kept"] < share + 1
                assert rank["saved"] < share + 8
