"""ranks: the processes that train one model together, and all of their communication.

    lane "net"       all_gather, reduce_scatter, all_reduce   of the program, each rank the same ones in the same order
                     what `announce` returns                  before these: do all ranks make the same call
    lane "ssd_write" commit_together                          when all ranks have written what a commit needs
    lane "cpu"       spread                                   in updates, of what they need whole
    user's thread    broadcast, agree, from_first             before the first step, and for reads and writes between
    any thread       fail, check                              what ends one rank ends all of them

Lanes and the user's thread issue independently of each other, so each has process groups of its own. A wait ends when a
rank that is waited for ends.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import cached_property, partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from gs_compile.errors import RankError
from gs_compile.options import Options
from gs_compile.progress import stage
from gs_compile.runtime import host_collectives
from gs_compile.runtime.alarm import Alarm, in_words
from gs_compile.runtime.groups import TIMEOUT, Team, as_bytes, await_everyone, from_bytes, mesh_of, new_groups, team_of
from gs_compile.runtime.standing import collective_of, is_in
from gs_compile.runtime.stream import is_in_host_memory

log = logging.getLogger(__name__)

T = TypeVar("T")

POLL = timedelta(seconds=0.2)  # between two checks of the other ranks
CHUNK = 1 << 22  # elements of a sum that are sent at a time: what arrives takes additional memory
TOGETHER = "a wait of this package"
ALSO_STATE = "also to take a state dict, which the first may then save alone"
LABEL = 128  # bytes that tell which call of the user's thread it is
PATIENCE = 60.0  # seconds until a wait is logged: others may wait for something else
GRACE = 5.0  # seconds for the reason of a broken connection, or for what a rank has sent before its end, to arrive
ASKING = 2.0  # seconds between two questions what the other ranks wait for: one that moves data is further by then

_CLOSED = object()  # in place of a group: None would be the default one

# Their names since torch 2.13, which warns of the older ones
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def ranks_of(options: Options) -> Ranks | None:
    """The ranks that train one model with these options; None: one rank. Every rank calls it, in the same order."""
    team = team_of(options)
    if team is None:
        return None
    try:
        with stage("meeting the other ranks"):
            return Ranks(team)
    except (RuntimeError, OSError) as error:
        raise RankError(
            f"the ranks {', '.join(map(str, team.everyone))} did not meet: all of them must call the model, and none "
            f"end before, with an optimizer of gs_compile on all or on none ({error})"
        ) from error


@contextlib.contextmanager
def failing_together(ranks: Ranks | None) -> Iterator[None]:
    """Tell the other ranks of an error inside: it ends them, too."""
    try:
        yield
    except BaseException as error:
        if ranks is not None:
            ranks.fail(error)
        raise


class Ranks:
    """All ranks of a run.

    rank, number: this rank, and how many there are, in the group that shards.
    total: all of them, replicas too: losses are averaged over these. replicas: how many have the same shard.
    place: this one's among all; name: torch's number of it, by which messages call it.
    num_here: how many of all are on this machine, and share its memory and drives.
    timeout: seconds that a wait takes at most.
    """

    def __init__(self, team: Team) -> None:
        self.rank, self.number, self.total = team.rank, team.number, len(team.everyone)
        self.replicas = len(team.replicas)
        self.name = dist.get_rank()
        self.names = team.everyone
        self.timeout = TIMEOUT
        self._team = team
        self.place = self.names.index(self.name)
        self._alarm: Alarm | None = None
        if not team.in_host_memory:
            await_everyone(team)
        for group in team.in_host_memory:  # a rank that has ended has closed its connections, and this fails at once
            here = torch.zeros(1, device="cpu")
            self._finish("the meeting", here, partial(dist.all_reduce, here, group=group, async_op=True))
        self._all, self._commits, self._row, self._column = groups = new_groups(team)
        self._updates: Any = None
        self._groups = list(groups) if team.is_world else []
        self._alarm = alarm = Alarm(self.place, self.names, lambda value: self.agree("addresses", value))
        self.num_here = alarm.num_here
        alarm.where = _waits_for
        if team.backend != "gloo":
            alarm.on_failure = partial(_abort, [group for group in (self._row, self._column) if group is not None])
        self._close = weakref.finalize(self, _close, self._alarm, self._groups)
        self._close.atexit = False

    @cached_property
    def mesh(self) -> DeviceMesh:
        """All ranks in one dimension, by which state dicts share tensors out. All ranks ask for it together."""
        if not dist.is_initialized():
            raise RankError(
                "torch.distributed.destroy_process_group() has ended the groups that state dicts of several ranks are "
                "shared by: take state dicts before it"
            )
        self.agree_on("taking a state dict")
        return mesh_of(self._team)

    # On the lane -----------------------------------------------------------------------------------------------------

    def all_gather(self, whole: Tensor, shard: Tensor, what: str = "all_gather") -> None:
        """Every rank's `shard`, one after the other, into `whole`; both are contiguous, `what` names it in an error."""
        if is_in_host_memory(whole):
            self._finish(what, whole, *host_collectives.shares(whole, shard, self.rank, self._row))
        else:
            self._finish(what, whole, lambda: _all_gather(whole, shard, group=self._row, async_op=True))

    def reduce_scatter(self, shard: Tensor, whole: Tensor, what: str = "reduce_scatter") -> None:
        """This rank's part of the sum of every rank's `whole`, replicas too, into `shard`."""
        if is_in_host_memory(whole):
            stretches = whole.view(self.number, -1).split(max(1, CHUNK // self.number), 1)
            for rows, part in zip(stretches, shard.split(stretches[0].shape[1]), strict=True):
                begin, terms = host_collectives.terms(list(rows), self.rank, self._row)
                self._finish(what, whole, begin)
                host_collectives.add(terms, part)
        else:
            self._finish(what, shard, lambda: _reduce_scatter(shard, whole, group=self._row, async_op=True))
        if self._column is not None:
            self._finish(what, shard, lambda: dist.all_reduce(shard, group=self._column, async_op=True))

    def all_reduce(self, numbers: Tensor, what: str = "all_reduce") -> None:
        """The sum over all ranks, replicas too, in place."""
        for group in (self._row, self._column):
            if group is not None:
                self._finish(what, numbers, partial(dist.all_reduce, numbers, group=group, async_op=True))

    def open_updates(self) -> None:
        """Let `spread` be used; all ranks call it, before the first step."""
        if self._updates is None:
            self._updates = self._team.new_group(self._team.replicas, "gloo")
            self._groups += [self._updates] * bool(self._groups)

    def spread(self, tensor: Tensor, source: int) -> None:
        """All ranks of the group that shards get the values of its rank `source`, in place; host memory, contiguous."""
        content = tensor.view(torch.uint8)
        begin = partial(dist.broadcast, content, group=self._updates, group_src=source, async_op=True)
        self._finish("an update", content, begin)

    def commit_together(self, step: int) -> None:
        """Return when all ranks have come to commit this step."""
        steps, what = torch.tensor([step, -step]), f"the commit of step {step}"
        self._finish(what, steps, lambda: dist.all_reduce(steps, dist.ReduceOp.MAX, self._commits, async_op=True))
        if int(steps.sum()):
            raise RankError(f"{what}: the ranks commit steps {-int(steps[1])} to {int(steps[0])}")

    # On the user's thread --------------------------------------------------------------------------------------------

    def broadcast(self, tensor: Tensor, source: int = 0, what: str = "broadcast") -> None:
        """All ranks get the values of rank `source` (of the group that shards), in place; host memory, contiguous."""
        name = self._team.replicas[0][source]
        self.agree_on(f"{what} of {tuple(tensor.shape)}, {tensor.dtype}, from rank {name}")
        self._send(tensor.view(-1).view(torch.uint8), name, what)  # gloo knows no int16

    def agree_on(self, what: str) -> None:
        """Raise `RankError` on all ranks if one of them calls this with another `what`."""
        self.announce(what)()

    def announce(self, what: str) -> Callable[[], None]:
        """Tell the other ranks what this one does now. The function returned checks as `agree_on`, on any thread."""
        mine = torch.zeros(LABEL, dtype=torch.uint8, device="cpu")
        text = _label(what)
        mine[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        labels = torch.zeros(self.total * LABEL, dtype=torch.uint8, device="cpu")
        self.check(what)
        work = _all_gather(labels, mine, group=self._all, async_op=True)

        def compare() -> None:
            self._finish(what, mine, lambda: work)
            found = [
                bytes(label.tolist()).rstrip(b"\0").decode(errors="replace") for label in labels.view(self.total, LABEL)
            ]
            if len(set(found)) > 1:
                words = ", ".join(f"rank {name}: {label}" for name, label in zip(self.names, found, strict=True))
                raise RankError(
                    f"the ranks ask for different things ({words}); all must make the same calls in the same order, "
                    f"{ALSO_STATE}"
                )

        return compare

    def sum(self, numbers: Tensor, what: str = "sum") -> None:
        """The sum over all ranks, replicas too, in place; the same shape on all."""
        self._finish(what, numbers, lambda: dist.all_reduce(numbers, group=self._all, async_op=True))

    def agree(self, what: str, value: Any) -> list[Any]:
        """Every rank's value, by rank, replicas one after the other; `what` names it in an error."""
        self.agree_on(what)
        content = as_bytes(value)
        lengths = torch.zeros(self.total, dtype=torch.int64, device="cpu")
        self._gather(lengths, lengths.new_tensor([len(content)]), what)
        longest = int(lengths.max())
        whole = content.new_zeros(self.total * longest)
        self._gather(whole, torch.cat([content, content.new_zeros(longest - len(content))]), what)
        parts = whole.view(self.total, longest)
        return [from_bytes(part[:length]) for part, length in zip(parts, lengths.tolist(), strict=True)]

    def from_first(self, what: str, make: Callable[[], T]) -> T:
        """The result of `make` on the first rank, for all ranks; if it fails there, all fail with its reason."""
        self.agree_on(what)
        content = torch.zeros(0, dtype=torch.uint8, device="cpu")
        if self.place == 0:
            with failing_together(self):
                value = make()
            content = as_bytes(value)
        length = torch.tensor([len(content)], device="cpu")
        self._send(length, self.names[0], what)
        content = content if self.place == 0 else content.new_zeros(int(length))
        self._send(content, self.names[0], what)
        return value if self.place == 0 else from_bytes(content)

    def require_same(self, what: str, facts: dict[str, Any]) -> None:
        """Raise `RankError` on all ranks if a fact is not the same on all; it names the ranks and their values."""
        given = self.agree(what, facts)
        for fact in dict.fromkeys(key for each in given for key in each):
            values: dict[str, list[int]] = {}
            for name, each in zip(self.names, given, strict=True):
                values.setdefault(str(each.get(fact, "absent")), []).append(name)
            if len(values) > 1:
                words = "; ".join(f"{value} on {_rank_words(names)}" for value, names in values.items())
                raise RankError(f"{what}: {fact} is {words}. It must be the same on all ranks")

    # Failure ---------------------------------------------------------------------------------------------------------

    def fail(self, error: BaseException) -> None:
        """Tell all ranks that this one ends with `error`; the first failure counts, on any rank."""
        if self._alarm is not None:
            self._alarm.fail(in_words(error))

    def check(self, what: str = "") -> None:
        """Raise `RankError` if a rank has failed: which one, and why. what: the operation that cannot go on."""
        failed = self._alarm.notice() if self._alarm is not None else None
        if failed is not None:
            doing = f"; rank {self.name} was in {what}" if what else ""
            raise RankError(f"rank {failed[0]} has failed: {failed[1]}{doing}")

    def close(self) -> None:
        """Tell the others that this rank has ended, and give the groups back; further calls do nothing.

        Objects that keep a closed `Ranks`, such as a plan's report, keep no connections and threads.
        """
        self._close()
        self._all = self._commits = self._row = self._column = self._updates = _CLOSED
        self._groups = []

    # Waits -----------------------------------------------------------------------------------------------------------

    def _finish(self, what: str, tensor: Tensor, *begin: Callable[[], Any]) -> None:
        """Begin collectives, and wait for all of them; on a device, the current stream waits."""
        self.check(what)
        try:
            for work in [each() for each in begin]:
                self._poll(what, work) if is_in_host_memory(tensor) else work.wait()
            return
        except RankError:
            raise
        except RuntimeError as error:
            broken = error
        if self._alarm is not None:
            self._alarm.wait(GRACE)  # a connection has closed: the reason is on its way
        self.check(what)
        self._check_ended(what, time.monotonic())
        raise RankError(f"{what} failed on rank {self.name}: {broken}") from broken

    def _poll(self, what: str, work: Any) -> None:
        """Wait for a collective for as long as all ranks take part in it."""
        start = time.monotonic()
        patience, asking, before = start + PATIENCE, start + GRACE, dict[int, str]()
        while True:
            try:
                work.wait(POLL)
                return
            except RuntimeError:  # the time is over, unless the collective has failed, or has ended just now
                if work.is_completed():
                    work.wait()  # raises its own error, if it has one
                    return
            self.check(what)
            now = time.monotonic()
            if now > patience:
                patience = math.inf
                words = f"and waits on: all ranks must make the same calls, {ALSO_STATE}"
                log.warning("%s: rank %d has waited %.0f s for others, %s", what, self.name, PATIENCE, words)
            if now - start > GRACE:
                self._check_ended(what, now - GRACE)
            if now > asking and self._alarm is not None and threading.current_thread() is threading.main_thread():
                asking, before = now + ASKING, self._check_standing(what, self._alarm, before)
            if now - start > self.timeout:
                raise RankError(
                    f"{what}: rank {self.name} has waited {self.timeout:.0f} s for the others. All ranks must make the "
                    "same steps, and between steps read the same parameters in the same order"
                )

    def _check_ended(self, what: str, before: float) -> None:
        """Raise `RankError` if a rank's script has ended before that moment."""
        ended = self._alarm.ended if self._alarm is not None else {}
        if gone := sorted(name for name, since in ended.items() if since < before):
            raise RankError(
                f"{what}: rank {self.name} waits for {_rank_words(gone)}, whose script has ended. All ranks must make "
                "the same number of steps, and read the same parameters between steps"
            )

    def _check_standing(self, what: str, alarm: Alarm, before: dict[int, str]) -> dict[int, str]:
        """Raise `RankError` if all others wait for this rank, and their answers are those of the question before.

        before: these answers. Returns the latest ones, and asks again.
        """
        found = alarm.standing
        is_stuck = len(found) == self.total - 1 and all(found.values()) and found == before
        if is_stuck and (away := {name: place for name, place in found.items() if place != TOGETHER}):
            words = ", ".join(f"rank {name} waits for it in {place}" for name, place in sorted(away.items()))
            raise RankError(
                f"{what}: rank {self.name} waits for all ranks, and {words}. All must make the same calls, {ALSO_STATE}"
            )
        alarm.ask()
        return found

    def _gather(self, whole: Tensor, own: Tensor, what: str) -> None:
        self._finish(what, whole, lambda: _all_gather(whole, own, group=self._all, async_op=True))

    def _send(self, tensor: Tensor, source: int, what: str) -> None:
        at = self.names.index(source)  # torch does not know a rank's name in a group that the script has destroyed
        self._finish(what, tensor, lambda: dist.broadcast(tensor, group=self._all, group_src=at, async_op=True))


def _waits_for(name: int) -> str:
    """What this process's main thread waits for together with rank `name`; "": nothing that is known."""
    return TOGETHER if is_in(Ranks._poll.__code__) else collective_of(name)


def _label(what: str) -> bytes:
    """At most `LABEL` bytes that identify a text: a long one is cut, and ends with its checksum."""
    text = what.encode()
    return text if len(text) <= LABEL else text[: LABEL - 11] + f"...{zlib.crc32(text):08x}".encode()


def _rank_words(names: Sequence[int]) -> str:
    return f"rank {names[0]}" if len(names) == 1 else f"ranks {', '.join(map(str, names))}"


def _abort(groups: Sequence[Any]) -> None:
    """Abort a device's collectives with a rank that is gone: its streams would wait for ever, and the host for them."""
    for group in groups:
        with contextlib.suppress(RuntimeError):  # a backend that has nothing to end
            group.abort()


def _close(alarm: Alarm, groups: Sequence[Any]) -> None:
    """groups: to give back; empty if they are of a part of torch's ranks: torch would use their names again."""
    alarm.close()
    if alarm.failed is None and dist.is_initialized():  # to destroy one that waits for a rank that is gone would block
        for group in filter(None, groups):
            with contextlib.suppress(ValueError):  # the user has destroyed it
                dist.destroy_process_group(group)
