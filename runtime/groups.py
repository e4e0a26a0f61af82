"""groups: which of torch's ranks train together, and the process groups that they do it in."""

from __future__ import annotations

import multiprocessing.util
import os
import pickle
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from gs_compile.errors import OptionError, RankError
from gs_compile.options import Options
from gs_compile.runtime.alarm import ending_error
from gs_compile.runtime.stream import default_store, network_backend, num_groups

ON_DEVICES = "nccl"  # a backend that takes no tensors in host memory
POLL = 0.2  # seconds between two looks at torch's store
_END = "greedysnake: the end of {}"

TIMEOUT = 1800.0  # seconds: a rank may evaluate or save alone for that long
LIMIT = timedelta(seconds=TIMEOUT + 60)  # of groups: waits of `Ranks` end earlier, and their errors say more


@dataclass(frozen=True)
class Team:
    """Which of torch's ranks train together, and where this one is among them.

    replicas: rows of ranks; each row has the whole model, a shard on each rank. One row without HSDP.
    """

    replicas: tuple[tuple[int, ...], ...]
    rank: int  # in its row
    backend: str  # of `groups`
    groups: tuple[Any, ...]  # given by the user: one of everyone, or those of this rank's row and column

    @property
    def number(self) -> int:
        return len(self.replicas[0])

    @property
    def is_world(self) -> bool:
        return len(self.everyone) == dist.get_world_size()

    @property
    def everyone(self) -> tuple[int, ...]:
        return tuple(sorted(name for row in self.replicas for name in row))

    @property
    def in_host_memory(self) -> tuple[Any, ...]:
        """The user's groups, if they take tensors in host memory."""
        return () if self.backend == ON_DEVICES else self.groups

    def new_group(self, rows: Sequence[Sequence[int]], backend: str) -> Any:
        """The group of the row that has this rank; all ranks call this with the same rows."""
        mine, me = None, dist.get_rank()
        if not self.is_world:
            self._even_out(me)
        for row in rows:
            if self.is_world or me in row:
                local = not self.is_world  # without the ranks outside
                group = dist.new_group(list(row), LIMIT, backend, use_local_synchronization=local)
                mine = group if me in row else mine
        return mine

    def _even_out(self, me: int) -> None:
        """Bring all ranks to the same number of groups, by further groups of one rank.

        torch names a group that ranks outside do not know of by this number, and ranks meet by the name.
        """
        number = num_groups()
        most = torch.tensor(number, device="cpu")
        for group in self.in_host_memory:
            dist.all_reduce(most, dist.ReduceOp.MAX, group)
        for _ in range(int(most) - number):
            dist.new_group([me], LIMIT, "gloo", use_local_synchronization=True)


def team_of(options: Options) -> Team | None:
    """The ranks that this process trains with; None: it trains alone. Initialises torch.distributed under torchrun.

    Raises `OptionError` where this process is not in the group or mesh of the options.
    """
    if options.mesh is None and options.group is None and not dist.is_initialized():
        _initialize()
    if not dist.is_initialized():
        return None
    name = dist.get_rank()
    if options.mesh is not None:
        mesh = options.mesh
        ranks = mesh.mesh if mesh.mesh_dim_names[-1] == "shard" else mesh.mesh.transpose(0, 1)
        replicas = tuple(tuple(row) for row in ranks.reshape(-1, ranks.shape[-1]).tolist())
        groups = tuple(mesh.get_group(dimension) for dimension in ("shard", "replicate")[: len(replicas)])
    else:
        groups = (options.group or dist.group.WORLD,)
        replicas = (tuple(dist.get_process_group_ranks(groups[0])),)
    mine = next((row for row in replicas if name in row), None)
    if mine is None:
        raise OptionError(f"rank {name} is not in the group of the options, which has {replicas}: leave it out there")
    if any(list(row) != sorted(row) for row in replicas):
        raise OptionError(f"the ranks of a group that shards have to ascend; got {replicas}")
    team = Team(replicas, mine.index(name), dist.get_backend(groups[0]), groups)
    return team if len(team.everyone) > 1 else None


def new_groups(team: Team) -> tuple[Any, Any, Any, Any]:
    """Four groups: all ranks, for values; all ranks, for commits; the ranks that share the model; the ranks that have
    the same shard, or None.
    """
    backend = "gloo" if team.backend == "gloo" else network_backend()
    everyone, commits = (team.new_group([team.everyone], "gloo") for _ in range(2))
    rows = team.new_group(team.replicas, backend)
    columns = team.new_group(list(zip(*team.replicas, strict=True)), backend) if len(team.replicas) > 1 else None
    return everyone, commits, rows, columns


def mesh_of(team: Team) -> DeviceMesh:
    """Everyone in one dimension, for tensors in host memory; it lasts as long as the user's group."""
    return DeviceMesh.from_group(_in_host_memory(team), "cpu")


def await_everyone(team: Team) -> None:
    """Return when all ranks have called this as often as this one; RuntimeError if the script of one has ended.

    It uses torch's store: these ranks have no group yet that takes tensors in host memory.
    """
    store, names = default_store(), team.everyone
    number = store.add(f"greedysnake {names}: of {dist.get_rank()}", 1)
    store.add(meeting := f"greedysnake {names}: {number}", 1)
    end = time.monotonic() + TIMEOUT
    while store.add(meeting, 0) < len(names):
        if ended := [name for name in names if store.check([_END.format(name)])]:
            raise RuntimeError(f"the script of rank {', '.join(map(str, ended))} has ended")
        if time.monotonic() > end:
            raise RuntimeError(f"rank {dist.get_rank()} has waited {TIMEOUT:.0f} s for the others")
        time.sleep(POLL)


def tell_of_end() -> None:
    """Let the end of this rank's script be known to ranks that wait for it in `await_everyone`."""
    if dist.is_initialized() and dist.get_backend() == ON_DEVICES:
        _tell_of_end(default_store(), dist.get_rank())


@cache
def _tell_of_end(store: dist.Store, name: int) -> None:
    def tell() -> None:
        with suppress(RuntimeError):  # the rank that has the store has ended before
            store.set(_END.format(name), "")

    multiprocessing.util.Finalize(None, tell, exitpriority=60)  # ahead of `_destroy`


def gathered(team: Team, value: Any) -> list[Any]:
    """Each rank's `value`, before the ranks have met as `Ranks`; all call it. No rank needs to know its device yet."""
    given: list[Any] = [None] * len(team.everyone)
    dist.all_gather_object(given, value, _in_host_memory(team))
    return given


def _in_host_memory(team: Team) -> Any:
    """A group of everyone that takes tensors in host memory: the user's, or a new one."""
    if len(team.in_host_memory) == 1:
        return team.in_host_memory[0]
    return team.new_group([team.everyone], "gloo")


def num_processes() -> int:
    """The number of processes that train together by default: torch's ranks, or what torchrun has started.

    Raises `OptionError` if the environment names an impossible rank.
    """
    if dist.is_initialized():
        return dist.get_world_size()
    if not {"RANK", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        return 1
    rank, number = os.environ["RANK"], os.environ.get("WORLD_SIZE", "1")
    if not (rank.isdecimal() and number.isdecimal() and int(rank) < int(number)):
        raise OptionError(
            f"the environment says RANK={rank} of WORLD_SIZE={number}, which is not possible: start the ranks with "
            "torchrun, which sets both, or unset RANK to train alone"
        )
    return int(number)


def _initialize() -> None:
    """Initialise torch.distributed if torchrun's variables name several ranks, and where they meet."""
    if (number := num_processes()) > 1:
        try:
            dist.init_process_group(network_backend())
        except RuntimeError as error:
            raise RankError(f"the {number} ranks that the environment names did not meet: {error}") from error
        multiprocessing.util.Finalize(None, _destroy, exitpriority=50)  # once the others know how this rank ends


def _destroy() -> None:
    if dist.is_initialized() and ending_error() is None:  # after an error it might wait for ever
        dist.destroy_process_group()


def as_bytes(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


def from_bytes(content: torch.Tensor) -> Any:
    return pickle.loads(content.numpy().tobytes())
