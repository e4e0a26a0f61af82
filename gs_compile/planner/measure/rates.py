"""rates: how fast pieces of work are done, alone and in parallel, as medians of short rounds.

A piece of work is a call that returns its amount when it is done: bytes, elements, or floating-point operations. Each
kind of work has a lane, as in a run; work on the lane None runs on the calling thread.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch

from gs_compile.planner.measure.profile import MIXED
from gs_compile.runtime.lanes import Failure, Lane
from gs_compile.runtime.trace import Trace

Work: TypeAlias = Callable[[], float]
Load: TypeAlias = Mapping[Lane | None, Work]  # work that runs in parallel
Rates: TypeAlias = dict[Lane | None, float]  # amounts a second
Placed: TypeAlias = tuple[Lane | None, Work]

OVERRUN_SECONDS = 0.5


class Figure(NamedTuple):
    """An entry of the profile, and how it was measured."""

    value: Any
    how: str


def pair(name: str, alone: float, both: float, how: str) -> dict[str, Figure]:
    """The entries of a lane's rate, alone and beside another lane; the second is at most the first."""
    return {name: Figure(alone, how), MIXED[name]: Figure(min(both, alone), how)}


def own_generator(device: torch.device | None = None) -> torch.Generator:
    """A generator of random numbers, so that a run draws the same numbers from torch's, whether it measures or not."""
    return torch.Generator(device or "cpu").manual_seed(0)


def new_lane(name: str, **settings: Any) -> Lane:
    """A new lane, as in a run."""
    return Lane(name, Failure(), Trace(), **({"num_threads": 1} | settings))


def medians(loads: Sequence[Load], seconds: float, num_rounds: int) -> list[Rates]:
    """The rate of every work of every load.

    Rounds go through all loads in turn, so that other work of the machine disturbs all of them equally; together they
    take about `seconds`. If single pieces take longer than a round should, there are fewer rounds.
    """
    begin = time.perf_counter()
    share = seconds / (num_rounds * len(loads))
    rounds: list[list[Rates]] = []
    while len(rounds) < num_rounds and (not rounds or time.perf_counter() < begin + seconds + OVERRUN_SECONDS):
        rounds.append([at_once(load, share) for load in loads])
    return [
        {lane: statistics.median(each[index][lane] for each in rounds) for lane in load}
        for index, load in enumerate(loads)
    ]


def at_once(load: Load, seconds: float) -> Rates:
    """The rate of each work while all of them run, piece after piece, for that long; at least one piece of each.

    A lane goes on until the calling thread is done with its last piece, so that none of these runs alone.
    """
    rates: Rates = {}
    deadline, is_over = time.perf_counter() + seconds, threading.Event()

    def go_on(lane: Lane | None, work: Work) -> None:
        begin = time.perf_counter()
        amount = work()
        while (now := time.perf_counter()) < deadline or (lane and not is_over.is_set()):
            amount += work()
        rates[lane] = amount / (now - begin)

    tickets = [lane.submit("probe", partial(go_on, lane, work)) for lane, work in load.items() if lane is not None]
    try:
        if None in load:
            go_on(None, load[None])
    finally:  # also where the user interrupts it
        is_over.set()
    for ticket in tickets:
        ticket.wait()
    return rates
