"""registry: every schedule by name: the paper's own and those that it is compared with.

A new one is a row here, a file beside this one, and a name in `gs_compile/schedules.py`. No other code tests for a
schedule by its name: what it needs to know of one is a field of its `ScheduleSpec`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gs_compile.passes.baselines.horizontal import horizontal
from gs_compile.passes.baselines.lifetime import Rooms, lifetime
from gs_compile.passes.baselines.single import single
from gs_compile.passes.baselines.spec import ScheduleSpec
from gs_compile.passes.vertical import vertical
from gs_compile.schedules import Schedule

if TYPE_CHECKING:
    from gs_compile.capture.graph import BlockCut


def _halves() -> BlockCut:
    from gs_compile.passes.baselines.halve import HALVES  # here, because it imports torch, which a plan may not need

    return HALVES


SCHEDULES: dict[Schedule, ScheduleSpec] = {
    "vertical": ScheduleSpec(build=vertical, turns=True),
    "horizontal": ScheduleSpec(build=horizontal, batch_like="vertical", as_published=True),
    "single": ScheduleSpec(
        build=single,
        block_cut=_halves,
        whole_batch=True,
        batch_like="vertical",
        heading="What to know:",
    ),
    "lifetime": ScheduleSpec(
        build=horizontal,
        own_pass=lifetime,
        variants=Rooms(),
        batch_like="vertical",
        as_published=True,
        heading="What is inactive between two uses:",
    ),
}
