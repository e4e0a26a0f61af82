"""boundary: data that stays in host memory between two uses, and reads that are made earlier, at the beginning, the
middle and the end of a step.

    carried     parameters of the first units stay from their last update to the next forward, which would wait for them
    retained    parameters of the topmost layers stay from the forward to the backward, which begins with them
    held        checkpoints of the upper half, too: their writes to SSD would queue behind those of the updates
    lookahead   all reads from SSD are issued this many stages earlier: a head computes for as long as several layers,
                and reads that are issued one layer ahead pause meanwhile
    ahead       states of the last updates are read this many stages earlier: no backward hides them, and an embedding
                is as large as several layers

These are fields of a `Decision`. The peak of a step is elsewhere, so they take little memory that was not free. If a
drive is the bottleneck, each step of a ladder helps; of a large step, whose simulation takes long, only the first and
the last are tried.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

from gs_compile.machine import format_bytes
from gs_compile.placement.kinds import nbytes_of
from gs_compile.placement.placement import Placement
from gs_compile.planner.ladders import FASTER, Ladder, each_of, fastest
from gs_compile.planner.problem import Problem
from gs_compile.planner.request import several
from gs_compile.planner.simulate.simulator import Simulation
from gs_compile.program.ir import PROLOGUE, TIED, Unit, Value

FIRST: tuple[Unit, ...] = (TIED, PROLOGUE, 0, 1)  # read before the first layers have hidden anything


def with_boundary(steps: Problem, plain: Simulation, *, is_small: bool) -> Simulation:
    """A step with the improvements of this module that make it faster. A schedule that is as others publish it stays as
    it is, as it is compared with their figures.

    `ahead` is tried after everything else is chosen: before, the step may not wait for these states.
    """
    if steps.request.spec.as_published:
        return plain
    found = fastest(steps, plain, each_of(carrying(plain.placement)))
    if not (is_small and _waits_for_drives(found)):
        return fastest(steps, found, [earlier(found.placement)])
    found = fastest(steps, found, [retaining(found.placement)])
    placed, deep = found.placement, deeper(found.placement)
    found = fastest(steps, found, [*each_of(deep), *map(holding, (placed, *deep))], FASTER)
    more = chain.from_iterable(map(further, (found.placement, *deep[-1:])))
    found = fastest(steps, found, each_of(list(more)), FASTER)
    return fastest(steps, found, each_of(earlier(found.placement)))


def _waits_for_drives(step: Simulation) -> bool:
    waits = sum(seconds for cause, seconds in step.bubbles.items() if cause.startswith("ssd"))
    return waits > (1 - FASTER) * step.seconds


def carrying(plain: Placement) -> Ladder:
    """More and more carried, of the units that the model has: a resumed run accepts no others in a commit's plan."""
    return _ladder(plain, "carried", [unit for unit in FIRST if unit in plain.by_unit])


def further(plain: Placement) -> Ladder:
    """More of the first layers carried than by the plan, if it carries any: the first 4, 8, up to all of them.

    If the drive still writes for much of the next forward, reads of these layers would wait for it.
    """
    num_layers, carried = plain.layout.num_layers, plain.decision.carried
    more = (range(min(1 << power, num_layers)) for power in range(2, max(num_layers - 1, 0).bit_length() + 1))
    wanted = (dict.fromkeys((*carried, *filter(plain.by_unit.__contains__, layers))) for layers in more)
    return [plain.decided(carried=tuple(units)) for units in wanted if len(units) > len(carried) > 0]


def retaining(plain: Placement) -> Ladder:
    """More and more of the topmost layers retained, and then the parameters that head and embedding share."""
    topmost: list[Unit] = [*reversed(range(plain.layout.num_layers)), TIED]
    return _ladder(plain, "retained", [unit for unit in topmost if unit in plain.by_unit])


def holding(plain: Placement) -> Ladder:
    """More and more checkpoints of the upper half held, from the top."""
    return _ladder(plain, "held", range(plain.layout.num_layers)[::-1][: plain.layout.num_layers // 2])


def earlier(plain: Placement) -> Ladder:
    """States of the updates after the last backward are read earlier and earlier, one layer's worth in each stage."""
    if plain.decision.layer_updates > 1:
        return ()
    most = min(max(len(unit.trained("early")) for unit in plain.units), 2 * len(plain.units))  # stages of a step
    return [plain.decided(ahead=ahead) for ahead in range(1, most + 1)]


def deeper(plain: Placement) -> Ladder:
    """Everything is read from SSD earlier and earlier: by 1, 2, 4 stages, up to all of a step."""
    if plain.decision.layer_updates > 1:
        return ()
    most = 2 * plain.layout.num_layers  # a forward and a backward
    return [plain.decided(lookahead=1 << power) for power in range(most.bit_length())]


def _ladder(plain: Placement, name: str, units: Sequence[Unit]) -> Ladder:
    """The first unit, the first two, and so on, as a field of the decision, if that changes what is in memory."""
    every = (plain.decided(**{name: tuple(units[:number])}) for number in range(1, len(units) + 1))
    return list({values: each for each in every if (values := getattr(each, f"{name}_values"))}.values())


def without(planned: Placement, home_nbytes: int = 0) -> Sequence[Placement]:
    """The placement with less and less kept in memory between two uses, for a batch that is larger than the one that
    was planned for, or a run that is resumed with less memory.

    What is not carried is read again by this step and by the next one; everything else costs only this step.
    home_nbytes: what a run that has begun has mapped for what lives on.
    """
    none = planned.decided(carried=()).laid_out(home_nbytes=home_nbytes) if planned.decision.carried else planned
    plain, bare = (each.decided(retained=(), held=(), ahead=0, lookahead=0) for each in (planned, none))
    return list(dict.fromkeys((planned, plain, none, bare)))


def said(placement: Placement) -> str:
    """For people: what stays in memory between two uses, and what is read earlier; "" if nothing is."""

    def kept(kind: str, values: Iterable[Value]) -> str:
        return f"{format_bytes(sum(nbytes_of(placement, value) for value in values))} of {kind}"

    carried, early, deep = placement.carried_values, placement.decision.ahead, placement.decision.lookahead
    kinds = {"parameters": placement.retained_values, "checkpoints": placement.held_values}
    retained = " and ".join(kept(kind, values) for kind, values in kinds.items() if values)
    words = {
        f"{kept('parameters', carried)} that the next step reads first stay in host memory until then": carried,
        f"{retained} stay in host memory from the forward to the backward": retained,
        f"states of the updates after the last backward are read {several(early, 'layer')} earlier": early,
        f"all that is read from SSD is read {several(deep, 'stage')} earlier": deep,
    }
    return "; ".join(text for text, is_so in words.items() if is_so)
