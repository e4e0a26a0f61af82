"""schedules: the name of each schedule, and what options and placements have to know of it, which know no pass.

All else is its row in `passes/baselines/registry.py`.
"""

from __future__ import annotations

from typing import Literal

Schedule = Literal["vertical", "horizontal", "single", "lifetime"]

# These run one micro-batch through all layers and back before the next; the others a layer for all micro-batches.
BY_MICRO_BATCH: frozenset[Schedule] = frozenset({"horizontal", "lifetime"})
BASELINE: Schedule = "horizontal"  # as others train, which the paper's own is compared with
