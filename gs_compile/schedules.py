"""schedules: the schedules' names, and what options and placements, which import no pass, need to know of them.

Everything else about a schedule is in its row of `passes/baselines/registry.py`.
"""

from __future__ import annotations

from typing import Literal

Schedule = Literal["vertical", "horizontal", "single", "lifetime"]

# These run a micro-batch through all layers and back before the next one. The others run a layer for all micro-batches.
BY_MICRO_BATCH: frozenset[Schedule] = frozenset({"horizontal", "lifetime"})
BASELINE: Schedule = "horizontal"  # plain gradient accumulation, which the vertical order is compared with
