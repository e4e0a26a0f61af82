"""tiers: what a run keeps from step to step: homes, host memory and lanes."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any

from gs_compile.errors import LaneError, RankError, StepOrderError, StorageError
from gs_compile.placement.kinds import is_of_units, nbytes_of, slot_of
from gs_compile.placement.placement import Placement
from gs_compile.placement.ranges import ResultRange, result_ranges
from gs_compile.program.ir import LANES, Op, Program, Value
from gs_compile.runtime.ahead import Ahead
from gs_compile.runtime.alarm import OF_US
from gs_compile.runtime.commits import Commits
from gs_compile.runtime.coordinators import Activations, Parameters, Setting
from gs_compile.runtime.homes import Homes
from gs_compile.runtime.lanes import Failure, Lane, Ticket, join_all, without_frames
from gs_compile.runtime.optimizer import OptimizerStep
from gs_compile.runtime.ranks import Ranks
from gs_compile.runtime.slab import Segment, Slab
from gs_compile.runtime.spans import Slice
from gs_compile.runtime.step_record import StepRecord
from gs_compile.runtime.storage.store import Store
from gs_compile.runtime.threads import refuse_without_threads
from gs_compile.runtime.trace import Trace
from gs_compile.runtime.updates import UpdateRules
from gs_compile.runtime.values import Held, ValueTable

MOST_PLACES = 16  # programs whose places are known: training and evaluation at a few lengths


class Tiers(Homes):
    """The homes of a model's parameters and optimizer states, and everything that moves them.

    host_nbytes: the most host memory that is mapped; None: without a bound. num_calls: see `Slab`. alike: see
    `Commits`.
    """

    _is_closing = False  # a step

    def __init__(
        self,
        setting: Setting,
        rules: UpdateRules,
        *,
        trace: Trace,
        host_nbytes: int | None,
        num_calls: int,
        num_threads: int | None,
        alike: Set[str],
    ) -> None:
        super().__init__(setting)
        placement, ranks = setting.placement, setting.ranks
        self.trace = trace
        self.failure = Failure(ranks)
        setting.device.check = self.failure.check
        self.parameters = Parameters(setting)
        self.activations = Activations(setting)
        self.optimizer = OptimizerStep(setting, rules)
        self.held = Held()
        self.values = ValueTable(self.held)
        self.commits = Commits(setting, self.values, alike) if placement.durability else None
        self.homes = placement.homes(late=False) | placement.homes(late=True)
        self.ahead = Ahead()
        self.ended_on_device: list[tuple[int, Sequence[Ticket]]] = []  # bytes of values, and who still uses them
        self.pending: StepRecord | None = None  # of the step whose late updates have not been issued
        self._lanes: dict[str, Lane] = {}
        self._places: dict[int, tuple[Program, list[list[ResultRange]]]] = {}  # by identity; the latest last
        self._num_threads, self._pid = num_threads, os.getpid()
        self.followers: list[Callable[[], None]] = []  # called when the run ends, before anything else
        self._finalizer = weakref.finalize(self, _close, self._pid, self._lanes, setting.store, ranks, self.followers)
        self.slab = Slab(placement, setting.device, host_nbytes, num_calls)
        try:
            self.slab.map()
            for value in sorted(placement.homes(late=False), key=str):
                if value.tier != "device":
                    self._define(value)
        except BaseException:
            self.close()
            raise

    def _define(self, home: Value) -> None:
        """A part of parameters or of state where it lives, or one of its copies."""
        if self.commits is not None and home.tier == "ssd" and home.kind != "dw":
            self.values.define(home, self.commits.define(home))
            return
        allocation = self.slab.home(slot_of(self.placement, home))
        content = self.parameters.home(home, allocation.memory if allocation else None)
        self.values.define(home, content, allocation=allocation)

    # Values in and out -----------------------------------------------------------------------------------------------

    def fill_up(self) -> None:
        """Define the parts that hold no parameter's elements, but only padding, once all parameters are filled."""
        for value in sorted(self.placement.homes(late=False) - self.values.contents.keys(), key=str):
            self._define(value)

    def at_home(self, value: Value) -> Any:
        """The content of a part, once no operation uses it any more."""
        self.check()
        assert not self.closed, f"{value}: the tiers are closed"
        if value not in self.values.contents:  # on the device: allocated after the model's own memory is freed
            self._define(value)
        join_all(self.values.users.idle(value), None)
        return self.values.contents[value]

    def to_change(self, value: Value) -> Any:
        self.let_carried_go()
        content = self.at_home(value)
        return content if self.commits is None else self.commits.to_change(value)

    def is_changed(self, span: Slice, component: int | None) -> bool:
        """Whether a write of it would change any part: the file of a former run may have the same already."""
        return self.commits is None or not all(map(self.commits.has, self.parts_of(span, component)))

    # Running ---------------------------------------------------------------------------------------------------------

    def segment(self, program: Program) -> Segment:
        """Host memory for a step of `program`. Before more is mapped, the lanes finish, so that old memory can go."""
        if not self.slab.has_segment(program):
            self.synchronize()
        return self.slab.segment(program)

    def make_files(self, program: Program, placement: Placement, number: int) -> None:
        """Reserve room on SSD for all files of a step, before it begins; number: see `TieredExecutor`.

        Raises StorageFullError if there is none. The run goes on, unless there are other ranks, which would wait.
        """
        try:
            for value in (value for op in program.ops if op.lane == "ssd_write" for value in op.results):
                if is_of_units(value):
                    self.optimizer.gradient("offload", value, None, None, ())
                else:
                    self.activations.file(value, nbytes_of(placement, value), number)
        except StorageError as error:
            if self.setting.ranks:
                self.fail(error)
            raise

    def places(self, program: Program, placement: Placement) -> Sequence[Sequence[ResultRange]]:
        """Where the results of each operation of a program are: found once, for the latest `MOST_PLACES` programs."""
        known, found = self._places.pop(id(program), (program, None))
        self._places[id(program)] = known, found or result_ranges(program, placement)
        while len(self._places) > MOST_PLACES:
            del self._places[next(iter(self._places))]
        return self._places[id(program)][1]

    def lane(self, name: str) -> Lane:
        """The lane of that name; its thread starts with its first operation."""
        assert name in LANES, name
        if name not in self._lanes:
            stream = self.setting.device.new_stream() if name in ("h2d", "d2h", "net") else None
            threads = self._num_threads if name == "cpu" else 1  # a copy's team of threads would spin beside compute
            self._lanes[name] = Lane(
                name,
                self.failure,
                self.trace,
                device=self.setting.device,
                stream=stream,
                num_threads=threads,
                copies=name in ("h2d", "d2h"),
            )
        return self._lanes[name]

    def submit(self, op: Op, work: Callable[[], object], after: Sequence[Ticket], nbytes: int) -> Ticket:
        """Give an operation of a program to its lane. nbytes: that it moves."""
        told = {"nbytes": nbytes, "kind": op.kind, "stage": str(op.stage), "number": self.trace.number}
        return self.lane(op.lane).submit(op.name, work, after, **told)

    def leave(self, record: StepRecord) -> None:
        """Close a step: only what its late updates need is kept, until they have run."""
        placement = self.placement
        waits = placement.homes(late=True, redo=placement.rolls_back(confirmed=record.confirmed))
        is_over = all(value.kind != "dw" for value in waits)
        for value in placement.homes(late=True) - (placement.homes(late=False) if is_over else waits):
            self.values.free(value)
        self.pending = None if is_over else record
        if placement.rolls_back(confirmed=record.confirmed):  # carried parameters are those that were rolled back
            self.let_carried_go()

    def finds_carried(self, placement: Placement) -> bool:
        """Whether the step before has carried over everything that a step with this placement expects. If not, what it
        has carried over is freed.
        """
        carried = self.placement.carried_values
        if placement.carried_values != carried or not carried <= self.values.contents.keys():
            self.let_carried_go()
            return False
        return bool(carried)

    def let_carried_go(self) -> None:
        """Free what the step before has carried over: the next one reads it from SSD."""
        for value in sorted(self.placement.carried_values & self.values.contents.keys(), key=str):
            self._refuse_within_step()
            self.values.free(value)

    def check_late(self) -> None:
        """Raise as `check`, and `StepOrderError` if a program under way makes the pending late updates, or a step is
        being closed.
        """
        self.check()
        if self._is_closing:
            raise used_within_step()
        if self.pending is not None:
            self._refuse_within_step()

    def _refuse_within_step(self) -> None:
        if self.failure.is_issuing:
            raise used_within_step()

    def wait_for_commit(self) -> None:
        """Return when the commit that was issued last is made; raises as `check`."""
        commit = self.commits.under_way if self.commits is not None else None
        self._wait([] if commit is None else [commit])

    def synchronize(self) -> None:
        """Wait until all lanes are idle; raises as `check`."""
        self.check()
        self._wait([lane.submit("synchronize", lambda: None) for lane in self._lanes.values()])

    def _wait(self, tickets: Sequence[Ticket]) -> None:
        """Wait until operations are done; raises what failed first, as `check`."""
        for ticket in tickets:
            with contextlib.suppress(LaneError, RankError):
                ticket.wait()
        self.check()

    def check(self) -> None:
        """Raise what has failed on a lane or on another rank, if anything, after closing the run; also raises as
        `refuse_without_threads`.
        """
        refuse_without_threads(self._pid, uses_storage=self.setting.store is not None)
        try:
            self.failure.check()
        except (LaneError, RankError):
            self.close()
            raise

    @property
    def closed(self) -> bool:
        return not self._finalizer.alive

    def close(self) -> None:
        """End all threads, remove all files, free all memory; further calls do nothing."""
        try:
            self._finalizer()
        finally:  # also if the user has interrupted it
            self.values.close()
            self.held.let_go()
            self.parameters.close()
            self.optimizer.close()
            self.slab.close()

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """The block makes all of its changes, or the run ends: so does an interruption by the user."""
        try:
            yield
        except BaseException as error:
            self.fail(error)
            raise

    @contextlib.contextmanager
    def closing(self) -> Iterator[None]:
        """A step is closed in the block, as a whole. Only a signal's handler can use the model meanwhile."""
        self._is_closing = True
        try:
            with self.whole():
                yield
        finally:
            self._is_closing = False

    def fail(self, error: BaseException) -> None:
        """End the run after an error. Raises what failed first, if `error` is of a lane or of another rank."""
        ticket = Ticket("the step that has ended this run (to train again, make the model and its optimizer anew)")
        ticket.finish(without_frames(error))
        self.failure.note(ticket, error)
        self.close()
        if isinstance(error, LaneError | RankError):
            self.failure.check()


def used_within_step() -> StepOrderError:
    """The error of a signal's handler that uses a model within a step that makes late updates."""
    return StepOrderError(
        "a signal's handler reads, saves or changes the model within a step, whose updates are under way: let the "
        "handler note the signal, and save behind optimizer.step()"
    )


def _close(
    pid: int, lanes: dict[str, Lane], store: Store | None, ranks: Ranks | None, followers: list[Callable[[], None]]
) -> None:
    """End what moves data. On a thread of this package, where garbage may be collected, a new thread does so: a thread
    cannot wait for itself.
    """
    if os.getpid() != pid:
        return  # a forked child's copy
    if threading.current_thread().name.startswith(OF_US):
        given = pid, lanes, store, ranks, followers
        threading.Thread(target=_close, args=given, name="closing greedysnake").start()
        return
    closes = [*followers, *(lane.close for lane in lanes.values())]
    closes += [each.close for each in (store, ranks) if each is not None]
    with contextlib.ExitStack() as ended:  # each twice: the user may interrupt the first call before it has begun
        for close in reversed(closes * 2):
            ended.callback(close)
    lanes.clear()
    followers.clear()
