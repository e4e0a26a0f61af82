"""step: the report of one step, from which metrics, bar, status file and page take their numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from gs_compile.runtime.trace import Total

BINDS = 0.5  # of a step: a lane that is busy for less does not limit the step by itself


class NullIsNan:
    """Reads JSON's null as nan, for which JSON has no number."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        from pydantic_core import core_schema

        return core_schema.no_info_before_validator_function(_finite, handler(source))


Number = Annotated[float, NullIsNan()]


def _finite(value: Any) -> Any:
    return math.nan if value is None else value


@dataclass(frozen=True)
class StepInfo:
    """A report of the last step."""

    number: int  # of steps taken so far, this one included if it was not skipped
    grad_norm: Number  # of all gradients together, before clipping
    skipped: bool  # a gradient was not finite: nothing was changed
    rolled_back: bool  # speculative updates were rolled back: they run again, if at all, in the next forward
    num_skipped: int  # steps skipped so far
    lanes: Mapping[str, Total]  # seconds busy, and bytes by kind, of every lane since the step before
    seconds: Number  # since the step before was closed; nan for the first
    num_tokens: int = 0  # of this rank's batch, including padding
    loss: Number = math.nan  # of the whole batch, over all ranks; nan if the step has no loss
    predicted_seconds: Number = math.nan  # by the plan; nan if it was not simulated, or was for another step

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of this rank; nan for the first step."""
        return self.num_tokens / self.seconds

    @property
    def busy(self) -> dict[str, float]:
        """The part of the step for which each lane worked; empty for the first step."""
        known = {} if math.isnan(self.seconds) else self.lanes
        return {lane: total.seconds / self.seconds for lane, total in known.items()}

    @property
    def binds(self) -> str:
        """The lane that limits the step: the busiest one, if it is busy for most of the step; otherwise ""."""
        lane, busy = max(self.busy.items(), key=lambda each: each[1], default=("", 0.0))
        return lane if busy >= BINDS else ""

    def metrics(self) -> dict[str, float]:
        """The report as numbers by name, for loggers: ``{"seconds": 1.2, "ssd_read_bytes": 3e9, ...}``."""
        found = {
            "step": float(self.number),
            "grad_norm": self.grad_norm,
            "skipped": float(self.skipped),
            "rolled_back": float(self.rolled_back),
            "num_skipped": float(self.num_skipped),
            "tokens": float(self.num_tokens),
        }
        others = ("loss", "seconds", "tokens_per_second", "predicted_seconds")
        found |= {name: value for name in others if not math.isnan(value := getattr(self, name))}
        for lane, total in self.lanes.items():
            found[f"{lane}_seconds"] = total.seconds
            if total.nbytes:
                found[f"{lane}_bytes"] = float(total.nbytes)
        return found | {f"{lane}_busy": busy for lane, busy in self.busy.items()}
