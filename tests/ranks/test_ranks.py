"""Ranks: what they move and agree on, and that one rank's end is the end of all."""

from __future__ import annotations

import importlib.util
import io
import multiprocessing.util
import os
import re
import sys
import threading
import time
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from launch import Fleet
from tiny import Tiny, TinyConfig
from torch.distributed.device_mesh import init_device_mesh

from gs_compile.codegen import codes
from gs_compile.errors import OptionError, RankError
from gs_compile.options import Options
from gs_compile.runtime import ranks as module
from gs_compile.runtime.groups import gathered, team_of
from gs_compile.runtime.ranks import ranks_of
from gs_compile.runtime.storage.folder import folder_in

KEEPS_CAPTURES = True  # each process captures its own
SECONDS = 60  # for what ends by itself


def moves(info, tmp_path):
    module.CHUNK = 4  # two elements of each rank
    ranks, groups = ranks_of(Options()), []
    assert ranks.num_here == 2
    found = {"place": (ranks.rank, ranks.number, ranks.total)}
    for dtype in (torch.float32, torch.bfloat16):
        shard = torch.full((3,), info.rank + 1, dtype=dtype)
        whole = torch.empty(6, dtype=dtype)
        ranks.all_gather(whole, shard)
        found[dtype] = whole.clone()
        ranks.reduce_scatter(shard, whole * (info.rank + 1))
        found[dtype, "sum"] = shard
    for dtype in (torch.int16, torch.float8_e4m3fn):  # which gloo does not know
        ranks.all_gather(whole := torch.empty(6, dtype=dtype), torch.full((3,), info.rank + 1.0).to(dtype))
        found[dtype] = whole.float()
    numbers = torch.tensor([1.0, info.rank], dtype=torch.float64)
    ranks.all_reduce(numbers)
    values = torch.full((2, 2), info.rank, dtype=torch.int16)  # which gloo does not know
    ranks.broadcast(values, 1)
    found |= {"numbers": numbers, "broadcast": values}
    with torch.device("meta"):  # a default of the script's
        found["agree"] = ranks.agree("letters", {"letter": "ab"[info.rank] * (1 + info.rank)})
        found["made"] = ranks.from_first("a plan", lambda: {"made by": info.rank})
    ranks.close()
    on_devices = replace(team_of(Options()), backend="nccl")  # this group would take tensors on them alone
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(dist, "all_gather_object", lambda given, value, group: groups.append(group))
        gathered(on_devices, None)
    assert groups[0] not in on_devices.groups
    dist.destroy_process_group(groups[0])
    return found


def test_what_ranks_move(pair, tmp_path):
    found = pair.run(moves, tmp_path)
    for rank, each in enumerate(found):
        assert each["place"] == (rank, 2, 2)
        for dtype in (torch.float32, torch.bfloat16, torch.int16, torch.float8_e4m3fn):
            assert each[dtype].tolist() == [1, 1, 1, 2, 2, 2]
        for dtype in (torch.float32, torch.bfloat16):
            assert each[dtype, "sum"].tolist() == [3 * (rank + 1)] * 3
        assert each["numbers"].tolist() == [2, 1]
        assert each["broadcast"].tolist() == [[1, 1], [1, 1]]
        assert each["agree"] == [{"letter": "a"}, {"letter": "bb"}]
        assert each["made"] == {"made by": 0}


def differs(info, tmp_path):
    ranks = ranks_of(Options())
    ranks.require_same("a run", {"precision": "bf16"})
    with pytest.raises(RankError) as facts:
        ranks.require_same("a run", {"precision": "bf16", "micro_batch_size": info.rank + 1})
    with pytest.raises(RankError) as order:
        ranks.agree(f"what rank {info.rank} wants", 1)
    with pytest.raises(RankError, match="rank 0: taking a state dict, rank 1: a step"):  # before it is made
        ranks.agree_on("a step") if info.rank else ranks.mesh
    ranks.agree_on(long := "a name " * 40)
    with pytest.raises(RankError, match="different things"):  # which their beginnings do not tell
        ranks.agree_on(f"{long}{info.rank}")
    ranks.close()
    return str(facts.value), str(order.value)


def test_ranks_that_differ(pair, tmp_path):
    first, second = pair.run(differs, tmp_path)
    assert first == second
    assert first[0] == "a run: micro_batch_size is 1 on rank 0; 2 on rank 1. It must be the same on all ranks [rank]"
    assert "rank 0: what rank 0 wants, rank 1: what rank 1 wants" in first[1]


def takes_a_state_dict_alone(info, tmp_path):
    """Others compute first, and are then where they wait for the rank that waits for them."""
    ranks = ranks_of(Options())
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, "GRACE", 0.2)
        patched.setattr(module, "ASKING", 0.2)
        if info.rank == 0:
            ranks.agree_on("what comes late on another rank")
            with pytest.raises(RankError) as found:
                ranks.mesh  # noqa: B018
        else:
            time.sleep(1)
            ranks.agree_on("what comes late on another rank")
        dist.barrier()
    ranks.close()
    return str(found.value) if info.rank == 0 else ""


def test_a_state_dict_of_one_rank_while_the_others_wait_for_it(pair, tmp_path):
    """It waited for 30 minutes."""
    found, _ = pair.run(takes_a_state_dict_alone, tmp_path)
    here = re.escape(__file__)
    words = (
        f"taking a state dict: rank 0 waits for all ranks, and rank 1 waits for it in torch.distributed.barrier .{here}"
    )
    assert re.match(words, found), found


def meets(info, tmp_path):
    """What Python keeps for the end of this process after each of some meetings that are still known, and new threads."""
    kept, met, known = [], [], set()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "register_at_fork", lambda **_: pytest.fail("one more hook"))
        for _ in range(3):
            met.append(ranks_of(Options()))
            met[-1].close()
            known = known or threads()  # also those that are about to end
            end = time.monotonic() + SECONDS
            while (new := threads() - known) and time.monotonic() < end:  # for the other rank, and the system
                time.sleep(0.01)
            kept.append((len(threading._threading_atexits), len(multiprocessing.util._finalizer_registry), len(new)))
    return kept


def threads():
    """The numbers of this process's threads, as the system lists them: for a moment also those that have ended."""
    return {each.name for each in Path("/proc/self/task").iterdir()}


def test_a_meeting_leaves_nothing_behind(pair, tmp_path):
    for kept in pair.run(meets, tmp_path):
        assert len(set(kept)) == 1, kept


def shares(info, tmp_path):
    """Two rows of two ranks that share a model each, by a mesh and by groups; no launcher's variables are set."""
    del os.environ["RANK"]
    found = {"folder": folder_in(tmp_path).name}
    ranks = ranks_of(Options())
    whole, shard = torch.arange(12.0) * (info.rank + 1), torch.empty(3)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("gs_compile.runtime.ranks.CHUNK", 8)  # two elements of each, then one
        ranks.reduce_scatter(shard, whole)
    ranks.all_gather(whole, shard)
    found["all"] = whole.tolist()
    ranks.close()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    ranks = ranks_of(Options(mesh=mesh))
    shard, values, numbers = torch.empty(1), torch.tensor([info.rank]), torch.tensor([2**info.rank])
    ranks.reduce_scatter(shard, torch.tensor([1.0, 10.0]) * (info.rank + 1))
    ranks.broadcast(values, 1)
    ranks.all_reduce(numbers)
    names = ranks.agree("names", info.rank)
    found["mesh"] = ranks.rank, ranks.number, ranks.total, shard.item(), values.item(), numbers.item(), names
    ranks.close()
    for _ in range(2):  # after the first is closed
        halves = dist.new_group([0, 1]), dist.new_group([2, 3])
        dist.new_group([0, 2])  # so that the ranks of a half are in different numbers of groups
        ranks = ranks_of(Options(group=halves[info.rank // 2]))
        found["group"] = ranks.rank, ranks.number, ranks.total, ranks.agree("names", info.rank)
        ranks.close()
    with pytest.raises(OptionError, match=r"^group must be a torch.distributed.ProcessGroup that this rank is in; got"):
        Options(group=halves[1 - info.rank // 2])
    with pytest.raises(OptionError, match=r'^mesh must be a DeviceMesh with the dimensions "replicate" and "shard"'):
        Options(mesh=init_device_mesh("cpu", (4,), mesh_dim_names=("data",)))
    with pytest.raises(OptionError, match=r'^mesh has one rank in its dimension "shard", and 4 that replicate'):
        Options(mesh=init_device_mesh("cpu", (4, 1), mesh_dim_names=("replicate", "shard")))
    with pytest.raises(OptionError, match=r"^group and mesh both say which ranks train together"):
        Options(group=dist.group.WORLD, mesh=mesh)
    return found


def test_a_mesh_and_groups(tmp_path):
    with Fleet(4) as fleet:
        found = fleet.run(shares, tmp_path)
    for rank, each in enumerate(found):
        row, shard = divmod(rank, 2)
        both = [0, 1] if row == 0 else [2, 3]
        assert each["folder"] == (f"greedysnake-run-{rank}" if rank else "greedysnake-run")
        assert each["all"] == [10.0 * number for number in range(12)]
        assert each["mesh"] == (shard, 2, 4, [10, 100][shard], 1, 15, [0, 1, 2, 3])
        assert each["group"] == (shard, 2, 2, both)


def launched(info, tmp_path):
    """The example that torchrun starts, in small; and what it prints."""
    assert not dist.is_initialized()
    path = Path(__file__).parents[2] / "examples" / "train_gpt2.py"
    specification = importlib.util.spec_from_file_location("train_gpt2", path)
    specification.loader.exec_module(example := importlib.util.module_from_spec(specification))
    with pytest.MonkeyPatch.context() as patched, redirect_stdout(io.StringIO()) as printed:
        patched.setattr(example, "build", lambda: Tiny(TinyConfig(vocab_size=256)))
        for name, number in {"SEQUENCE": 16, "BATCH": 4, "MICRO_BATCH": 2}.items():
            patched.setattr(example, name, number)
        given = example.options(tmp_path / "storage")
        given["expert"]["recompute"] = "all"  # so that nothing is planned
        patched.setattr(example, "options", lambda storage: given)
        patched.setattr(codes, "best_compiler", lambda device_type: "eager")
        patched.setattr(sys, "argv", [path.name, "--steps", "5", "--storage", str(tmp_path / "storage")])
        assert example.main() == 0
    found = (dist.get_rank(), dist.get_world_size(), dist.get_backend()), printed.getvalue()
    ranks = ranks_of(Options())
    dist.destroy_process_group()  # as scripts do that save the model afterwards
    assert ranks.from_first("a value", lambda: "of the first") == "of the first"
    with pytest.raises(RankError, match="take state dicts before it"):
        _ = ranks.mesh
    ranks.close()
    return found


def test_torchruns_variables_are_enough(tmp_path):
    with Fleet(2, initialize=False) as fleet:
        (first, told), (second, nothing) = fleet.run(launched, tmp_path)
    assert (first, second, nothing) == ((0, 2, "gloo"), (1, 2, "gloo"), "")
    at_first, at_last = map(float, re.search(r"loss (.*) at the first step, (.*) over the last", told).groups())
    assert at_last < at_first, told
    assert not list(tmp_path.glob("storage/*")), "an example leaves nothing"
