"""boundary: between two steps nothing waits for drives, as far as there is room in host memory.

A step's last updates are of what the next one reads first: the embedding, tied to the head or not, and the first
layers. Read again from where they have just been written, they are what the next step waits for. Kept in memory they
take little that was not free: the peak of a step is elsewhere, or the update that makes them is in it already.

The embedding is as large as several layers, and its gradient is the last to be complete. Its state is read a layer's
worth at a time while it is updated, and nothing else computes; or it is all there before, beside the last backward.
"""

from __future__ import annotations

from dataclasses import replace

from gs_compile.passes.baselines.registry import SCHEDULES
from gs_compile.placement.kinds import nbytes_of
from gs_compile.placement.placement import Placement
from gs_compile.planner.builder import StepBuilder, peak
from gs_compile.planner.candidates import Ladder, highest
from gs_compile.program.ir import PROLOGUE, TIED, Unit

FIRST: tuple[Unit, ...] = (TIED, PROLOGUE, 0, 1)  # read before the first layers have hidden anything


def kept(builder: StepBuilder, plain: Placement) -> Ladder:
    """More and more kept. What is as it is published is not: what it is compared with moves what is said of it."""
    if SCHEDULES[plain.schedule].as_published or not builder.shape.training:
        return ()
    every = (replace(plain, kept=FIRST[:number]) for number in range(1, len(FIRST) + 1))
    return list({each.kept_values: each for each in every if each.kept_values}.values())


def earlier(builder: StepBuilder, plain: Placement) -> Ladder:
    """With states of the updates after the last backward read earlier and earlier, one layer's worth in each stage."""
    if SCHEDULES[plain.schedule].as_published or not builder.shape.training or plain.layer_updates > 1:
        return ()
    most = max(len(unit.trained("early")) for unit in plain.units)
    return [replace(plain, ahead=ahead) for ahead in range(1, most + 1)]


def kept_for_free(builder: StepBuilder, plain: Placement) -> Placement:
    """With as much kept as takes no more host memory, and no plan is needed for: less is moved, and nothing waits."""
    if not (every := kept(builder, plain)):
        return plain
    most = peak(builder.program(plain), "host")

    def fits(placement: Placement) -> bool:
        return all(peak(program, "host") <= most for program in builder.programs(placement))

    return next(highest([every], fits), plain)


def without(planned: Placement, home_nbytes: int) -> Ladder:
    """Less and less of both, for a step whose batch is larger than the one that they were chosen for.

    States that are read later cost this step alone; what is not kept is read again by this step and by the next one.
    home_nbytes: of what lives on in the run, which stays mapped.
    """
    none = replace(planned, kept=(), home_nbytes=home_nbytes) if planned.kept else planned
    return list(dict.fromkeys((planned, replace(planned, ahead=0), none, replace(none, ahead=0))))


def kept_nbytes(placement: Placement) -> int:
    """The parameters that stay in memory from one step to the next."""
    return sum(nbytes_of(placement, value) for value in placement.kept_values)
