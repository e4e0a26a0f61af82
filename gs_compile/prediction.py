"""prediction: what a step of a placed model will take, by running its own program through the simulator."""

from __future__ import annotations

from dataclasses import dataclass

from gs_compile.passes.lower import lower
from gs_compile.passes.measure import Price, measure
from gs_compile.placement import Placement
from gs_compile.profile import Profile
from gs_compile.program import Program, StepShape
from gs_compile.runtime.simulator import Simulation, simulate
from gs_compile.workload import Workload


@dataclass(frozen=True)
class Prediction:
    """A step in its steady state: the program that runs, what each operation costs, and when it runs."""

    program: Program
    prices: tuple[Price, ...]
    simulation: Simulation


def predict(
    placement: Placement,
    shape: StepShape,
    workload: Workload,
    profile: Profile,
    *,
    snake: bool = True,
) -> Prediction:
    """The step that follows on others: a first one without late updates, then two with those of the step before."""
    programs = [
        lower(
            placement.num_layers,
            len(placement.x_nbytes),
            shape=shape,
            snake=snake,
            placement=placement,
            late=late,
        )[-1]
        for late in ((False, True) if placement.has_late else (False,))
    ]
    steps = [programs[0], programs[-1], programs[-1]]
    prices = {id(program): measure(program, placement, workload, profile) for program in programs}
    seconds = [[price.seconds for price in prices[id(program)]] for program in steps]
    simulation = simulate(
        steps,
        seconds,
        placement=placement,
        speeds=profile.speeds(),
        inline=not profile.separate,
        op_seconds=profile.op_seconds,
    )
    return Prediction(programs[-1], prices[id(programs[-1])], simulation)
