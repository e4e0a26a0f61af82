"""step_info: what an optimizer tells of its last step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gs_compile.runtime.trace import Total


@dataclass(frozen=True)
class StepInfo:
    """A report of the last step."""

    number: int  # of steps taken so far, this one included if it was not skipped
    grad_norm: float  # of all gradients together, before clipping
    skipped: bool  # a gradient was not finite: nothing was changed
    rolled_back: bool  # updates were speculative, and did not hold: they run again, if at all, in the next forward
    num_skipped: int  # steps skipped so far
    lanes: Mapping[str, Total]  # seconds busy, and bytes by kind, of every lane since the step before
