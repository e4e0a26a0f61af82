"""form: the contents of a status file, in format 1. It is JSON, and numbers that are not finite are null.

Readers may rely on the names here; a format that changes or drops one has another number.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from gs_compile.runtime.trace import Total
from gs_compile.status.step import Number, StepInfo

FORMAT = 1
State = Literal["running", "ended", "failed"]


@dataclass(frozen=True, kw_only=True)
class About:
    """What does not change during a run.

    process_start: when the process began, in clock ticks since the machine's start, which distinguishes it from others
        with the same pid; 0: not known. process_space: its pid namespace; 0: not known.
    began: seconds since 1970. rank, num_ranks: among the ranks that share the model.
    plan: the plan in a paragraph, and its reasons; binding: what more of each resource would bring.
    predicted, predicted_seconds: the work of each lane in a step, and the step's length, by the plan; empty and nan if
        it was not simulated.
    homes: bytes of what lives on, by kind and tier. budgets: the bytes that each tier may have.
    drives: the directories of storage, each with its share of the bytes. rated_nbytes: the bytes that may be written to
        the drives in their life; 0: not known.
    """

    pid: int
    process_start: int
    began: float
    rank: int
    num_ranks: int
    versions: Mapping[str, str]
    machine: str
    device: str
    num_cores: int
    memory_nbytes: int
    num_parameters: int
    num_layers: int
    plan: str
    binding: tuple[str, ...]
    predicted: Mapping[str, Total]
    predicted_seconds: Number
    homes: Mapping[str, Mapping[str, int]]
    budgets: Mapping[str, int]
    drives: Mapping[str, float]
    rated_nbytes: int
    process_space: int


@dataclass(frozen=True, kw_only=True)
class UnderWay:
    """The running step: its call, its stage in words, the operations issued so far, and the work of lanes so far."""

    number: int
    call: int
    stage: str
    done: int
    total: int
    seconds: float
    expected_seconds: Number  # those of the step before, or as planned
    lanes: Mapping[str, Total]

    @property
    def part(self) -> float:
        """The part of its operations that has been issued."""
        return self.done / max(self.total, 1)

    @property
    def left_seconds(self) -> float:
        """The estimated seconds until its end; nan: not known."""
        if self.expected_seconds > self.seconds:
            return self.expected_seconds - self.seconds
        return self.seconds * (1 / self.part - 1) if self.part else math.nan


class PastStep(NamedTuple):
    """A step of the history."""

    step: int
    seconds: Number
    loss: Number
    num_tokens: int


@dataclass(frozen=True, kw_only=True)
class Status:
    """A run at one moment.

    reason: why it failed. written: when, in seconds since 1970.
    history: every step, or, after many, every second, fourth and so on.
    num_steps, seconds, lanes, num_tokens: sums over the steps of this process, except its first, whose length is not
        known.
    used: bytes in use on each tier; on SSD those of its files. free: bytes that are free on each drive.
    """

    format: int
    state: State
    reason: str
    written: float
    about: About
    step: UnderWay | None
    last: StepInfo | None
    history: tuple[PastStep, ...]
    num_steps: int
    seconds: float
    num_tokens: int
    lanes: Mapping[str, Total]
    used: Mapping[str, int]
    free: Mapping[str, int]
