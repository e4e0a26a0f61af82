"""tiers: what lives on from step to step: homes, host memory and lanes.

fill      a parameter's values, into its home on device, host or SSD
read      the values, from there
values    what is where, and who still works on it
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

from gs_compile.errors import LaneError, RankError
from gs_compile.placement.kinds import slot_of
from gs_compile.placement.placement import Placement
from gs_compile.placement.shards import Owned, owned
from gs_compile.program.ir import LANES, Program, Unit, Value
from gs_compile.runtime.coordinators import Activations, Parameters, Setting
from gs_compile.runtime.lanes import Failure, Lane, Ticket
from gs_compile.runtime.optimizer import OptimizerStep, Recipe, StepRecord
from gs_compile.runtime.ranks import Ranks
from gs_compile.runtime.slab import Block, Slab, map_memory
from gs_compile.runtime.store import Extent, Store
from gs_compile.runtime.stream import Event, device_of
from gs_compile.runtime.threads import refuse_without_threads
from gs_compile.runtime.trace import Trace
from gs_compile.runtime.values import ValueTable

Tensor = torch.Tensor


@dataclass(frozen=True)
class Slice:
    """Where a parameter is: a unit, and the offset in its flat space."""

    unit: Unit
    offset: int
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class Tiers:
    """The homes of a model's parameters and optimizer states, and everything that moves them.

    host_nbytes: the most host memory that is mapped; None: without a bound. ranks: that share all units; what is read
        and written are whole parameters, and all ranks read the same ones.
    """

    def __init__(
        self,
        placement: Placement,
        dtypes: Mapping[Unit, torch.dtype],
        recipe: Recipe,
        store: Store | None,
        device: torch.device,
        *,
        trace: Trace,
        host_nbytes: int | None = None,
        num_threads: int | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        setting = Setting(placement, dtypes, store, device_of(device), ranks)
        self.setting = setting
        self.trace = trace
        self.failure = Failure(ranks)
        self.parameters = Parameters(setting)
        self.activations = Activations(setting)
        self.optimizer = OptimizerStep(setting, recipe)
        self.values = ValueTable()
        self.homes = placement.homes(late=False) | placement.homes(late=True)
        self.begun: Event | None = None  # the latest computation has begun, on a device that computes asynchronously
        self.ended_on_device: list[tuple[int, Sequence[Ticket]]] = []  # bytes of values, and who still uses them
        self.before_read: Callable[..., None] | None = None  # tells the other ranks what this one reads alone
        self.pending: StepRecord | None = None  # of the step whose late updates are still to come
        self._lanes: dict[str, Lane] = {}
        self._num_threads = num_threads
        self._pid = os.getpid()
        self._finalizer = weakref.finalize(self, _close, self._pid, self._lanes, store, ranks)
        self.slab = Slab(placement, setting.device, host_nbytes)
        try:
            self.slab.map()
            for value in sorted(placement.homes(late=False), key=str):
                if value.tier != "device":
                    self._define(value)
        except BaseException:
            self.close()
            raise

    @property
    def placement(self) -> Placement:
        return self.setting.placement

    def _define(self, home: Value) -> None:
        """A part of parameters or of state where it lives, or its shadow copy."""
        place = self.slab.home(slot_of(self.placement, home))
        self.values.define(home, self.parameters.home(home, place.memory if place else None), place=place)

    # Values in and out -----------------------------------------------------------------------------------------------

    def fill(self, place: Slice, values: Tensor) -> None:
        """Bring a parameter's values home, to its master as well; waits until they are there."""
        self._write(place, None, values.to(self.dtype(place)))
        if self.has_master(place):
            self.write_state(place, 0, values)

    def fill_up(self) -> None:
        """Define what no parameter has elements of, once all are filled: a part may be padding alone."""
        for value in sorted(self.placement.homes(late=False) - self.values.contents.keys(), key=str):
            self._define(value)

    def has_master(self, place: Slice) -> bool:
        """Whether a parameter is a narrow copy of a master in its state; a frozen one is not."""
        unit = self.placement.by_unit[place.unit]
        return unit.has_master and place.offset < self.placement.world * unit.num_trained

    def dtype(self, place: Slice, *, master: bool = False) -> torch.dtype:
        """Of a parameter at home, or of its master if it has one."""
        wide = master and self.has_master(place)
        return self.setting.state_dtype(place.unit) if wide else self.setting.dtypes[place.unit]

    def read(self, place: Slice, *, master: bool = False) -> Tensor:
        """A parameter's values as they are at home, or its master's if it has one."""
        component = 0 if master and self.has_master(place) else None
        return self.read_any(place, component, self.dtype(place, master=master))

    def here(self, place: Slice) -> Tensor | None:
        """A parameter's values where they live, if that is memory in one piece; they change with the next update."""
        if self.setting.ranks:
            return None
        pieces = list(self._pieces(place, None, torch.empty(place.numel, device="meta")))
        if len(pieces) != 1 or isinstance(pieces[0][0], Extent):
            return None
        content, start, _ = pieces[0]
        found: Tensor = content[start : start + place.numel].view(place.shape)
        return found

    def read_state(self, place: Slice, component: int) -> Tensor:
        """One component of a parameter's optimizer state; the master, where there is one, is the first."""
        return self.read_any(place, component, self.setting.state_dtype(place.unit))

    def write_state(self, place: Slice, component: int, values: Tensor) -> None:
        self._write(place, component, values.to(self.setting.state_dtype(place.unit)))

    def read_any(self, place: Slice, component: int | None, dtype: torch.dtype) -> Tensor:
        """Of a parameter: a component of its state, or None for itself; in the dtype that it is stored in."""
        if self.before_read is not None:
            self.before_read(place, component, dtype)
        flat = map_memory(place.numel * dtype.itemsize).view(dtype)  # the heap would keep it, in pieces
        for content, start, target in self._pieces(place, component, flat):
            if isinstance(content, Extent):
                content.read(target, start * dtype.itemsize).wait()
            else:
                target.copy_(content[start : start + len(target)])
        if ranks := self.setting.ranks:
            what = f"reading a parameter of unit {place.unit}"
            for rank in range(ranks.number):
                for each in self._owned(place, rank):
                    ranks.broadcast(flat[each.whole - place.offset :][: each.numel], rank, what)
        return flat.view(place.shape)

    def _write(self, place: Slice, component: int | None, values: Tensor) -> None:
        for content, start, source in self._pieces(place, component, values.reshape(-1)):
            if isinstance(content, Extent):
                content.write(source.contiguous(), start * values.dtype.itemsize).wait()
            else:
                content[start : start + len(source)].copy_(source)

    def _pieces(self, place: Slice, component: int | None, flat: Tensor) -> Iterator[tuple[Any, int, Tensor]]:
        """Each content that has some of a parameter, or of a component of its state: from where on, and its `flat`.

        Where ranks share the parameter, this rank's.
        """
        unit = self.placement.by_unit[place.unit]
        for group, mine in product(unit.groups, self._owned(place)):
            for each in unit.stretches(group, mine.local, mine.local + mine.numel):
                at = each.unit_start - mine.local + mine.whole - place.offset
                elements = flat[at : at + each.numel]
                if component is None:
                    yield self._home(unit.value("w", each.w)), each.unit_start - each.w.start, elements
                elif each.s is not None:
                    start = component * each.s.numel + each.start - each.s.start
                    yield self._home(unit.value("s", each.s)), start, elements

    def _owned(self, place: Slice, rank: int | None = None) -> list[Owned]:
        """The elements of a parameter that this rank, or another, has."""
        unit, ranks = self.placement.by_unit[place.unit], self.setting.ranks
        mine, number = (ranks.rank, ranks.number) if ranks else (0, 1)
        rank = mine if rank is None else rank
        return list(owned(unit.pieces, rank, number, place.offset, place.offset + place.numel))

    def _home(self, value: Value) -> Any:
        """What is at home, once nobody works on it any more."""
        self.check()
        assert not self.closed, f"{value}: the tiers are closed"
        if value not in self.values.contents:  # on the device, where the model's own memory has just gone
            self._define(value)
        for ticket in self.values.idle(value):
            ticket.wait()
        return self.values.contents[value]

    # Running ---------------------------------------------------------------------------------------------------------

    def block(self, program: Program) -> Block:
        """Host memory for a step of `program`. Where more has to be mapped, what the lanes still work on goes first."""
        if not self.slab.has_block(program):
            self.synchronize()
        return self.slab.block(program)

    def lane(self, name: str) -> Lane:
        """The lane of that name; its thread starts with its first operation."""
        assert name in LANES, name
        if name not in self._lanes:
            stream = self.setting.device.new_stream() if name in ("h2d", "d2h", "net") else None
            threads = self._num_threads if name == "cpu" else 1  # a copy's team of threads would spin beside compute
            self._lanes[name] = Lane(
                name, self.failure, self.trace, device=self.setting.device, stream=stream, num_threads=threads
            )
        return self._lanes[name]

    def leave(self, record: StepRecord) -> None:
        """Close a step: what its late updates need is there until they have run, and nothing else of it."""
        placement = self.placement
        waits = placement.homes(late=True, redo=placement.rolls_back(confirmed=record.confirmed))
        is_over = all(value.kind != "dw" for value in waits)
        for value in placement.homes(late=True) - (placement.homes(late=False) if is_over else waits):
            self.values.free(value)
        self.pending = None if is_over else record

    def synchronize(self) -> None:
        """Wait until all lanes are idle; raises what failed on them, and then it is over."""
        self.check()
        for ticket in [lane.submit("synchronize", lambda: None) for lane in self._lanes.values()]:
            with contextlib.suppress(LaneError, RankError):  # what failed first is raised below
                ticket.wait()
        self.check()

    def check(self) -> None:
        """Raise what has failed on a lane or on another rank, if anything; then it is over.

        Raises also as `refuse_without_threads` does.
        """
        refuse_without_threads(self._pid, uses_pools=self.setting.store is not None)
        try:
            self.failure.check()
        except (LaneError, RankError):
            self.close()
            raise

    @property
    def closed(self) -> bool:
        return not self._finalizer.alive

    def close(self) -> None:
        """End all threads, remove all files, give back all memory; once is enough."""
        try:
            self.values = ValueTable()
            self.parameters.close()
            self.slab.close()
        finally:  # also where the user has interrupted it
            self._finalizer()

    def fail(self, error: BaseException) -> None:
        """After an error nothing goes on: threads end, files go. Raises what failed first, where that is the cause."""
        ticket = Ticket("the step")
        ticket.finish(error)
        self.failure.note(ticket, error)
        self.close()
        if isinstance(error, LaneError | RankError):
            self.failure.check()


def _close(pid: int, lanes: dict[str, Lane], store: Store | None, ranks: Ranks | None) -> None:
    """End what moves data. Garbage is collected on any thread: one of ours cannot wait for itself, so another does."""
    if os.getpid() != pid:
        return  # a forked child's copy
    if threading.current_thread().name.startswith("greedysnake"):
        threading.Thread(target=_close, args=(pid, lanes, store, ranks), name="closing greedysnake").start()
        return
    with contextlib.ExitStack() as ended:  # each of them, last one first, also where the user interrupts a wait
        if ranks is not None:
            ended.callback(ranks.close)
        if store is not None:
            ended.callback(store.close)
        for lane in lanes.values():
            ended.callback(lane.close)
    lanes.clear()
