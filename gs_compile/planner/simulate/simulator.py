"""simulator: when everything in a step program happens, given how long each operation takes alone.

The executor (`tiered`, `lanes`) and the simulator share one rule, so that a prediction and a run differ only in how
long operations take:

1. The walk issues the operations in the order of the program, each once everything before it is issued.
2. A lane is first-in-first-out, and lanes run side by side. An operation starts when it is issued, its lane is free,
   what it reads is ready, and what it changes in place has no user left.
3. Memory verbs happen as they are issued, on no lane. Readers of what they define wait for what those verbs read.
4. Where the walk computes itself (`inline`: the device is the CPU), a computation holds it until it is over. Where a
   stream computes, the walk issues a computation once the one before has begun: it is never further ahead than one.

5. Where host memory has a budget, the walk waits for the memory of what an operation defines: for those who still work
   on what was freed before.

The fourth keeps transfers from running ahead without bound: a prefetch is issued when the computation it stands beside
is near. Between steps nothing waits: the walk goes on with the next program, and lanes with what they have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gs_compile.placement.placement import Placement
from gs_compile.placement.traffic import op_nbytes
from gs_compile.planner.simulate.bubbles import WALK, Chains, bubbles
from gs_compile.planner.simulate.dependencies import COMPUTE, MEMORY, Waits, waits
from gs_compile.planner.simulate.event_loop import Budget, Times, run
from gs_compile.planner.simulate.memory_timeline import START, Curve, Lease, leases, occupancy
from gs_compile.program.ir import LANES, Op, Program, homed
from gs_compile.runtime.trace import Trace


@dataclass(frozen=True, slots=True)
class Span:
    """One operation on its lane, in seconds from the start of the step; `index` is its place in its program.

    It may begin before the step, if it was issued before the computation of the step before was over, and end after it.
    waited_for: what let it start: a lane and what that moved, "compute", "cpu", or "issue": it was not issued before.
    """

    op: Op
    index: int
    lane: str
    start_seconds: float
    stop_seconds: float
    waited_for: str
    nbytes: int = 0  # that a transfer moves


@dataclass(frozen=True)
class Simulation:
    """One step among its like.

    seconds: from when the program before was walked through and computed to when this one is.
    spans: of the step's operations on lanes, in the order of their starts.
    busy: the share of the step in which each lane works, on its own step's operations or another's.
    bubbles: seconds in which nothing computes, by cause; with the busy seconds of "compute" they are the step.
    memory: by tier, the bytes alive from each moment on; empty without a placement.
    critical_path: from the start of the step, or before, to its end; each span started when the one before was over
        (or, where a stream computes, when the walk was let go on).
    """

    seconds: float
    spans: tuple[Span, ...]
    busy: Mapping[str, float]
    bubbles: Mapping[str, float]
    memory: Mapping[str, Curve]
    critical_path: tuple[Span, ...]

    @property
    def peaks(self) -> dict[str, int]:
        """The most bytes alive at a time on each tier. Above the planned ones where lanes lag behind the walk."""
        return {tier: max(nbytes for _, nbytes in curve) for tier, curve in self.memory.items()}

    def trace(self) -> Trace:
        """The spans as the events of a run."""
        trace = Trace(events=True)
        for span in self.spans:
            first = (*span.op.results, *span.op.into, *span.op.reads)[0]
            kind = span.op.verb if span.lane == "compute" else homed(first).kind
            where = span.lane, _name(span.op), span.start_seconds, span.stop_seconds
            trace.add(*where, span.nbytes, kind, str(span.op.stage))
        return trace

    def chrome(self) -> dict[str, Any]:
        """In Chrome's Trace Event Format, as that of a run."""
        return self.trace().chrome()

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "seconds": self.seconds,
            "busy": dict(self.busy),
            "bubbles": dict(self.bubbles),
            "peaks": self.peaks,
            "memory": {tier: [list(point) for point in curve] for tier, curve in self.memory.items()},
            "critical_path": [_as_dict(span) for span in self.critical_path],
            "spans": [_as_dict(span) for span in self.spans],
        }


def simulate(
    programs: Sequence[Program],
    seconds: Sequence[Sequence[float]],
    *,
    placement: Placement | None = None,
    speeds: Mapping[tuple[str, str], float] = {},
    inline: bool = False,
    op_seconds: float = 0.0,
    host_nbytes: int | None = None,
) -> Simulation:
    """The last of `programs`, which run one after the other: more of the same before it make it steady.

    seconds: of each program, what each operation takes alone on its lane; what a memory verb takes holds the walk.
    speeds: how fast the first lane runs while the second does, as a fraction of alone; several multiply.
    op_seconds: what issuing an operation costs the walk.
    host_nbytes: the budget of host memory that the walk waits for (5), for which a placement is needed.
    """
    assert programs, "nothing to simulate"
    order = waits(programs)
    durations = [each for program in seconds for each in program]
    assert len(durations) == len(order.ops), "seconds are not one an operation"
    memory = leases(order, placement) if placement else []
    budget = None if host_nbytes is None else _budget(memory, order, host_nbytes)
    times = run(order, durations, speeds, inline=inline, op_seconds=op_seconds, budget=budget)
    since, until = (_over(order, times, number) for number in (len(programs) - 1, len(programs)))
    chains = Chains(order, times)
    spans = _Spans(order, chains, programs, placement, since)
    return Simulation(
        seconds=until - since,
        spans=spans.all(),
        busy=_busy(order, times, since, until),
        bubbles=bubbles(chains, since, until),
        memory=occupancy(memory, order, times, since, until) if placement else {},
        critical_path=spans.critical_path(),
    )


def _budget(memory: Sequence[Lease], order: Waits, nbytes: int) -> Budget:
    takes: dict[int, int] = {}
    gives: dict[int, list[tuple[int, tuple[int, ...]]]] = {}
    for lease in memory:
        if lease.tier == "host" and lease.nbytes:
            takes[lease.taken] = takes.get(lease.taken, 0) + lease.nbytes
            if lease.is_over:
                users = tuple(user for free in lease.frees for user in order.users[free])
                gives.setdefault(lease.frees[-1], []).append((lease.nbytes, users))
    return Budget(nbytes - takes.pop(START, 0), takes, gives)


def _over(order: Waits, times: Times, number: int) -> float:
    """When so many programs were walked through and computed."""
    stop = order.starts[number] if number < len(order.starts) else len(order.ops)
    if not stop:
        return 0.0
    last = stop - 1
    walked = times.stopped[last] if order.lanes[last] == MEMORY else times.issued[last]
    computation = last if order.lanes[last] == COMPUTE else order.computed[last]
    return max(walked, times.stopped[computation] if computation >= 0 else 0.0)


def _busy(order: Waits, times: Times, since: float, until: float) -> dict[str, float]:
    sums = [0.0] * len(LANES)
    for lane, start, stop in zip(order.lanes, times.started, times.stopped, strict=True):
        if lane != MEMORY and stop > since and start < until:
            sums[lane] += min(stop, until) - max(start, since)
    used = sorted(set(order.lanes) - {MEMORY})
    return {LANES[lane]: sums[lane] / (until - since) if until > since else 0.0 for lane in used}


class _Spans:
    """Operations as people read them."""

    def __init__(
        self, order: Waits, chains: Chains, programs: Sequence[Program], placement: Placement | None, since: float
    ) -> None:
        self.order = order
        self.chains = chains
        self.programs = programs
        self.placement = placement
        self.since = since

    def all(self) -> tuple[Span, ...]:
        """Of the last program."""
        own = range(self.order.starts[-1], len(self.order.ops))
        found = [self._span(index) for index in own if self.order.lanes[index] != MEMORY]
        return tuple(sorted(found, key=lambda span: span.start_seconds))

    def critical_path(self) -> tuple[Span, ...]:
        last = len(self.order.ops) - 1
        end = last if self.order.lanes[last] == COMPUTE else self.order.computed[last]
        if end < self.order.starts[-1]:
            return ()
        path, reached = [end], self.chains.times.started[end]
        for link in self.chains.back(end):
            if reached <= self.since:
                break
            if link.op_index != WALK:
                path.append(link.op_index)
            reached = link.start
        return tuple(self._span(index) for index in reversed(path))

    def _span(self, index: int) -> Span:
        op, times = self.order.ops[index], self.chains.times
        number = max(k for k, start in enumerate(self.order.starts) if start <= index)
        return Span(
            op,
            index - self.order.starts[number],
            op.lane,
            times.started[index] - self.since,
            times.stopped[index] - self.since,
            self.chains.label(self.chains.cause(index)),
            self._nbytes(op, self.programs[number]),
        )

    def _nbytes(self, op: Op, program: Program) -> int:
        if self.placement is None or op.verb not in ("prefetch", "offload"):
            return 0
        return op_nbytes(op, program, self.placement)


def _name(op: Op) -> str:
    """As the executor calls it in its trace."""
    first = (*op.results, *op.into, *op.reads)[0]
    return f"{op.verb} {op.unit}_{op.micro_batch}" if op.micro_batch is not None else f"{op.verb} {first}"


def _as_dict(span: Span) -> dict[str, Any]:
    return {
        "op": str(span.op),
        "index": span.index,
        "lane": span.lane,
        "start_seconds": span.start_seconds,
        "stop_seconds": span.stop_seconds,
        "waited_for": span.waited_for,
        "nbytes": span.nbytes,
    }
