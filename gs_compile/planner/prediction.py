"""prediction: what a step of a placed model will take, by running its own program through the simulator."""

from __future__ import annotations

from dataclasses import dataclass

from gs_compile.placement.placement import Placement
from gs_compile.placement.slab import packed
from gs_compile.placement.workload import Workload
from gs_compile.planner.measure.profile import Profile
from gs_compile.planner.simulate.event_loop import Rule
from gs_compile.planner.simulate.prices import Price, measure
from gs_compile.planner.simulate.simulator import Simulation, simulate
from gs_compile.program.ir import Program

NUM_STEPS = (2, 4, 8)  # the first step finds all lanes idle; more where lanes are further behind from step to step


@dataclass(frozen=True)
class Prediction:
    """A step in its steady state: the program that runs, what each operation costs, and when it runs."""

    program: Program
    prices: tuple[Price, ...]
    simulation: Simulation


def predict(
    program: Program, placement: Placement, workload: Workload, profile: Profile, *, host_nbytes: int | None = None
) -> Prediction:
    """A step of `program` that follows on others like it.

    host_nbytes: the budget of host memory; None: there is always enough. The less there is, the sooner its ranges are
        used anew, and the longer they are waited for.
    """
    program = packed(program, placement, host_nbytes)
    prices = measure(program, placement, workload, profile)
    seconds = [price.seconds for price in prices]
    rule = Rule(
        speeds=profile.speeds(),
        inline=not profile.separate,
        op_seconds=profile.op_seconds,
    )
    for number in NUM_STEPS:
        simulation = simulate([program] * number, [seconds] * number, placement=placement, rule=rule)
        if simulation.is_steady:
            break
    return Prediction(program, prices, simulation)
