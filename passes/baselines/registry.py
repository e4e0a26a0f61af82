"""registry: every schedule by name: the paper's own and those it is compared with.

A new one is a row here, and a file of its own beside this one. Nothing else asks for a schedule by its name: what the
rest has to know of one is a field of its `ScheduleSpec`.
"""

from __future__ import annotations

from gs_compile.passes.baselines.halve import HALVES
from gs_compile.passes.baselines.horizontal import horizontal
from gs_compile.passes.baselines.lifetime import Rooms, lifetime
from gs_compile.passes.baselines.single import single
from gs_compile.passes.baselines.spec import ScheduleSpec
from gs_compile.passes.vertical import vertical
from gs_compile.program.ir import ORDERS, Schedule

SCHEDULES: dict[Schedule, ScheduleSpec] = {
    "vertical": ScheduleSpec(order=ORDERS["vertical"], build=vertical, turns=True),
    "horizontal": ScheduleSpec(order=ORDERS["horizontal"], build=horizontal),
    "single": ScheduleSpec(
        order=ORDERS["single"],
        build=single,
        block_cut=HALVES,
        whole_batch=True,
        heading="What to know:",
    ),
    "lifetime": ScheduleSpec(
        order=ORDERS["lifetime"],
        build=horizontal,
        own_pass=lifetime,
        variants=Rooms(),
        heading="What is inactive between two uses:",
    ),
}
