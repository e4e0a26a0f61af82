"""The end of one rank is the end of all, within 10 s, with its reason on each."""

from __future__ import annotations

import io
import os
import random
import signal
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from launch import Fleet

import gs_compile
from gs_compile.errors import RankError
from gs_compile.options import Options
from gs_compile.runtime import alarm
from gs_compile.runtime import ranks as module
from gs_compile.runtime.ranks import ranks_of

KEEPS_CAPTURES = True  # captures nothing
LIMIT = 60  # seconds: the others end at once; what is more is a loaded machine, or a wait without the alarm

# multiprocessing has forgotten the error by the time at which it says that a process ends.
ELSEWHERE = "KeyboardInterrupt: its user is tired"
if sys.version_info >= (3, 13):
    ELSEWHERE = "ChildProcessError: exit code 1, which its own output explains"


def ends(info, tmp_path, how, last=1):
    """Steps without end; the last rank ends after some of them."""
    ranks = ranks_of(Options())
    if how == "is killed" and info.rank == 0:
        alarm.LIMIT = 1  # of the 8 that a user's thread has to notice, which this one does not
    shard, whole = torch.ones(1000), torch.empty(1000 * info.number)
    for step in range(10**6):
        ranks.all_gather(whole, shard, f"all_gather of step {min(step, 3)}")
        if step == 3 and info.rank == last:
            if how == "raises":
                ranks.fail(ValueError("its loss is negative"))
                raise ValueError("its loss is negative")
            if how == "raises elsewhere":
                raise KeyboardInterrupt("its user is tired")  # what the harness does not catch
            if how == "is killed beside a worker" and os.fork() == 0:  # a DataLoader's, which lives on
                time.sleep(2 * LIMIT)
                os._exit(0)
            if how.startswith("is killed"):
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "returns":
                return
        if step == 3 and how == "is killed" and info.rank == 0 != last:
            time.sleep(10 * LIMIT)  # a user's thread that notices nothing


@pytest.mark.parametrize(
    ("number", "how", "reason"),
    [
        (3, "raises", "rank 2 has failed: ValueError: its loss is negative; rank {} was in all_gather of step 3"),
        (2, "raises elsewhere", f"rank 1 has failed: {ELSEWHERE}; rank {{}} was in all_gather"),
        (3, "is killed", "rank 2 has failed: it was killed, or its machine is gone"),
        (2, "is killed beside a worker", "rank 1 has failed: it was killed"),
    ],
)
def test_one_ends_and_so_do_all(number, how, reason, tmp_path):
    with Fleet(number) as fleet:
        found = fleet.outcomes(ends, tmp_path, LIMIT + 30, how=how, last=number - 1)
    for rank, each in enumerate(found[:-1]):
        assert each.seconds < LIMIT
        assert "RankError" in each.failure or "has failed, so rank 0 is ended" in each.failure
        assert reason.format(rank) in each.failure.replace("so rank 0 is ended: ", "").replace("failed, ", "failed: ")


def ends_early(info, tmp_path):
    module.GRACE = 0.5  # of the seconds for what the other has sent before its end
    ranks = ranks_of(Options())
    if info.rank == 1:
        raise SystemExit
    ranks.agree("the next step", None)


def test_a_script_that_ends_before_the_others(tmp_path):
    with Fleet(2) as fleet:
        first, _ = fleet.outcomes(ends_early, tmp_path, LIMIT + 10)
    assert "the next step: rank 0 waits for rank 1, whose script has ended" in first.failure
    assert first.seconds < LIMIT


def ends_before_the_first_call(info, tmp_path):
    if info.rank == 1:
        raise SystemExit
    ranks_of(Options())


def ends_before_a_call(info, tmp_path):
    """Of a second model; torch.distributed has a backend that takes no tensors in host memory."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(dist, "get_backend", lambda group=None: "nccl")
        gs_compile.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
        ranks_of(Options()).close()
        if info.rank == 1:
            raise SystemExit
        ranks_of(Options())


def test_a_script_that_ends_before_a_meeting_by_torchs_store(tmp_path):
    with Fleet(2) as fleet:
        first, _ = fleet.outcomes(ends_before_a_call, tmp_path, LIMIT)
    assert "RankError: the ranks 0, 1 did not meet: all of them must call the model, and none end " in first.failure
    assert "(the script of rank 1 has ended)" in first.failure


def test_ranks_end_while_another_looks_who_has():
    """Their connections end on threads of their own: the next rank to end was an error where a rank waits."""
    first = alarm.Alarm(0, [0], lambda value: [value])
    first._hear(1, "ended", "")
    looks = iter(first.ended.items())
    first._hear(2, "ended", "")
    assert [name for name, _ in looks] == [1]
    assert sorted(first.ended) == [1, 2]
    first.close()


class Connection:
    """Of a rank that says its place; `breaks` as it is welcomed."""

    def __init__(self, place, *, breaks):
        self.said, self.breaks = io.BytesIO(f"secret {place}\n".encode()), breaks

    def recv(self, number):
        return self.said.read(number)

    def sendall(self, _):
        if self.breaks:
            raise ConnectionResetError

    def __getattr__(self, name):  # options, limits, its end
        return lambda *_: None


def test_a_rank_whose_connection_breaks_as_it_is_welcomed_is_not_there():
    coming = [Connection(1, breaks=True), second := Connection(1, breaks=False)]
    server = SimpleNamespace(settimeout=lambda _: None, accept=lambda: (coming.pop(0), "address"))
    assert alarm.Alarm._accept(SimpleNamespace(names=[0, 1]), server, "secret") == {1: second}


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6 here")
def test_machines_that_reach_each_other_by_ipv6_alone(monkeypatch):
    monkeypatch.setattr(alarm, "MEETING", 5.0)
    monkeypatch.setattr(alarm, "_addresses", lambda: ["::1"])
    monkeypatch.setattr(alarm, "_boot", lambda: threading.current_thread().name)
    both, values = threading.Barrier(2), [None, None]

    def meet(place):
        def exchange(value):
            values[place] = value
            both.wait(10)
            found = list(values)
            both.wait(10)
            return found

        return alarm.Alarm(place, [0, 1], exchange)

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(meet, range(2))
    assert first.num_here == 1
    second.close()
    first.close()


def waits(info, tmp_path):
    ranks, told = ranks_of(Options()), tmp_path / "told"
    ranks.timeout = 0.5  # from now on: until here they may come late
    if info.rank == 0:
        with pytest.raises(RankError, match=r"^all_gather of w1: rank 0 has waited \d+ s for the others"):
            ranks.all_gather(torch.empty(2), torch.ones(1), "all_gather of w1")
        told.touch()
    while not told.exists():
        time.sleep(0.01)


def refuses(info, tmp_path):
    ranks = ranks_of(Options())

    def plan():
        raise MemoryError("the model fits nowhere")

    with pytest.raises(RankError if info.rank else MemoryError) as caught:
        ranks.from_first("the plan", plan)
    return str(caught.value)


def test_waits_end_and_refusals_are_told(tmp_path):
    with Fleet(2) as fleet:
        fleet.run(waits, tmp_path)
        own, told = fleet.run(refuses, tmp_path)
        first, _ = fleet.outcomes(ends_before_the_first_call, tmp_path, LIMIT)
    assert own == "the model fits nowhere"
    assert told == "rank 0 has failed: MemoryError: the model fits nowhere; rank 1 was in the plan [rank]"
    assert (
        "RankError: the ranks 0, 1 did not meet: all of them must call the model, and none end before" in first.failure
    )


def steps(info, tmp_path):
    ranks = ranks_of(Options())
    shard, whole = torch.ones(100_000), torch.empty(100_000 * info.number)
    (tmp_path / f"ready{info.rank}").touch()
    while True:
        ranks.all_gather(whole, shard)
        ranks.reduce_scatter(shard, whole)


@pytest.mark.parametrize("times", [1, pytest.param(20, marks=pytest.mark.slow)])
def test_a_rank_that_is_killed_at_any_moment(times, tmp_path):
    draw = random.Random(0)
    for index in range(times):
        place = tmp_path / str(index)
        place.mkdir()
        with Fleet(3) as fleet:
            fleet.begin(steps, place)
            fleet.wait_for(place, "ready*")
            time.sleep(draw.random() / 5)  # many steps
            killed = draw.randrange(3)
            at = time.monotonic()
            fleet.processes[killed].kill()
            found = fleet.end(place, LIMIT + 30)
            assert time.monotonic() - at < LIMIT
        for rank, each in enumerate(found):
            if rank != killed:
                assert f"RankError: rank {killed} has failed: it was killed, or its machine is gone" in each.failure
