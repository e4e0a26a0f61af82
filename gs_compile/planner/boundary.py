"""boundary: where a step begins, turns and ends drives do not read again what has just been in host memory.

A step's last updates are of what the next one reads first: the embedding, tied to the head or not, and the first
layers. Read again from where they have just been written, they are what the next step waits for. Carried in memory they
take little that was not free: the peak of a step is elsewhere, or the update that makes them is in it already. More
layers are carried where the drive goes on to write for much of the next forward, as reads of these wait for that.

The last layers of the forward are the first ones of the backward. Their parameters are retained in memory that
gradients and states take later: the topmost are free again when the backward has begun.

Their checkpoints are read again at once. On SSD they are written behind all that updates of the step before have left
to write, and reads behind them wait: the backward begins when the drive is through with all that. So those of the upper
half are held in memory.

The head and its loss compute for as long as several layers. Reads that are issued a layer ahead pause meanwhile; issued
some stages ahead they do not, and their values are in memory for as much longer.

The embedding is as large as several layers, and its gradient is the last to be complete. Its state is read a layer's
worth at a time while it is updated, and nothing else computes; or it is all there before, beside the last backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gs_compile.machine import format_bytes
from gs_compile.placement.kinds import nbytes_of
from gs_compile.placement.placement import UNITS, Placement
from gs_compile.program.ir import PROLOGUE, TIED, Unit, Value

Ladder = Sequence[Placement]

FIRST: tuple[Unit, ...] = (TIED, PROLOGUE, 0, 1)  # read before the first layers have hidden anything
BOUNDARY: Mapping[str, Any] = {**dict.fromkeys(UNITS, ()), "ahead": 0, "lookahead": 0}  # of a decision: none


def carrying(plain: Placement) -> Ladder:
    """More and more carried, of the units that there are: who goes on by a commit takes no other for its plan's."""
    return _ladder(plain, "carried", [unit for unit in FIRST if unit in plain.by_unit])


def further(plain: Placement) -> Ladder:
    """More of the first layers carried than the plan's, where it carries any: the first 4, 8, up to all of them."""
    num_layers, carried = plain.layout.num_layers, plain.decision.carried
    more = (range(min(1 << power, num_layers)) for power in range(2, max(num_layers - 1, 0).bit_length() + 1))
    wanted = (dict.fromkeys((*carried, *filter(plain.by_unit.__contains__, layers))) for layers in more)
    return [plain.decided(carried=tuple(units)) for units in wanted if len(units) > len(carried) > 0]


def retaining(plain: Placement) -> Ladder:
    """More and more of the topmost layers retained, and after them what the head shares with the embedding."""
    topmost: list[Unit] = [*reversed(range(plain.layout.num_layers)), TIED]
    return _ladder(plain, "retained", [unit for unit in topmost if unit in plain.by_unit])


def earlier(plain: Placement) -> Ladder:
    """With states of the updates after the last backward read earlier and earlier, one layer's worth in each stage."""
    if plain.decision.layer_updates > 1:
        return ()
    most = min(max(len(unit.trained("early")) for unit in plain.units), 2 * len(plain.units))  # stages of a step
    return [plain.decided(ahead=ahead) for ahead in range(1, most + 1)]


def deeper(plain: Placement) -> Ladder:
    """With all that is read from SSD read earlier and earlier: 1, 2, 4 stages, up to those of a step."""
    if plain.decision.layer_updates > 1:
        return ()
    most = 2 * plain.layout.num_layers  # a forward and a backward
    return [plain.decided(lookahead=1 << power) for power in range(most.bit_length())]


def holding(plain: Placement) -> Ladder:
    """More and more checkpoints of the upper half held, from the top."""
    return _ladder(plain, "held", range(plain.layout.num_layers)[::-1][: plain.layout.num_layers // 2])


def _ladder(plain: Placement, name: str, units: Sequence[Unit]) -> Ladder:
    """With the first unit, the first two, and so on, as a field of the decision: each has other values in memory."""
    every = (plain.decided(**{name: tuple(units[:number])}) for number in range(1, len(units) + 1))
    return list({values: each for each in every if (values := getattr(each, f"{name}_values"))}.values())


def without(planned: Placement, home_nbytes: int = 0) -> Sequence[Placement]:
    """Less and less of both, where there is no room for all: the batch is larger than the one that they were chosen
    for, or a run goes on with less memory.

    States that are read later cost this step alone; what is not carried is read again by this step and by the next one.
    home_nbytes: of what lives on in a run that has begun, which stays mapped.
    """
    none = planned.decided(carried=()).laid_out(home_nbytes=home_nbytes) if planned.decision.carried else planned
    alone = {name: default for name, default in BOUNDARY.items() if name != "carried"}
    return list(dict.fromkeys((planned, planned.decided(**alone), none, none.decided(**alone))))


def carried_nbytes(placement: Placement) -> int:
    """The parameters that stay in memory from one step to the next."""
    return _nbytes(placement, placement.carried_values)


def retained_text(placement: Placement) -> str:
    """For people: what stays in memory from the forward to the backward; empty where nothing does."""
    kinds = {"parameters": placement.retained_values, "checkpoints": placement.held_values}
    return " and ".join(
        f"{format_bytes(_nbytes(placement, values))} of {kind}" for kind, values in kinds.items() if values
    )


def _nbytes(placement: Placement, values: Iterable[Value]) -> int:
    return sum(nbytes_of(placement, value) for value in values)
