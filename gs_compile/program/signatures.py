"""What each compute verb reads, defines and changes in place: one table, from which programs are built and checked.

`passes/vertical.py` fills it in for a model, `verify.py` holds every operation against it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gs_compile.program.ir import EPILOGUE, PROLOGUE, TIED, Tier, Unit, Value

Role = Literal["reads", "results", "into"]


@dataclass(frozen=True, slots=True)
class Slot:
    """One place in an operation. Given unit and micro-batch, exactly one value fits it."""

    kind: str
    role: Role
    optional: bool
    tied: bool = False  # of the unit "t", whatever unit the operation is of

    def value(self, unit: Unit, micro_batch: int, num_layers: int) -> Value:
        shared = self.kind in SHARED_KINDS
        tier: Tier | None = None if self.kind == "batch" else "device"
        return Value(self.kind, self._unit(unit, num_layers), None if shared else micro_batch, tier)

    def _unit(self, unit: Unit, num_layers: int) -> Unit | None:
        """A unit stands between two boundaries: it takes x from below and hands x on above; gradients come back."""
        if self.tied:
            return TIED
        match self.kind, self.role:
            case ("x", "reads") | ("dx", "results"):
                return num_layers if unit == EPILOGUE else unit
            case ("x", "results") | ("dx", "reads") | ("dy", _):
                return _above(unit)
            case (("w" | "dw" | "y"), _):
                return unit
            case _:
                return None


@dataclass(frozen=True, slots=True)
class Signature:
    """The slots of one verb, in order, and the stages it may stand in: phase, and "e", "h" or "layer"."""

    stages: frozenset[tuple[str, str]]
    reads: tuple[Slot, ...]
    results: tuple[Slot, ...]
    into: tuple[Slot, ...]


# One value for all micro-batches of a step.
SHARED_KINDS = frozenset({"total", "w", "dw"})

# The boundaries' x and dx are read and defined by neighbours; a question mark: only if the model has it.
# verb            stages                    reads                                results          into
_TABLE = """
  embed          | forward e               | batch w wt?                        | x side? y?     |
  forward        | forward layer           | x side? w wt?                      | x y?           |
  head           | forward h, backward h   | x side? batch total? w wt?         | loss? dx? y?   | dw? dwt? dside?
  head_backward  | backward h              | x side? batch total? dy w wt?      | dx?            | dw? dwt? dside?
  backward       | backward layer          | x dx? dy? side? w wt?              | dx?            | dw? dwt? dside?
  embed_backward | backward e              | batch dx? dy? dside? w wt?         |                | dw? dwt?
"""


def stage_class(unit: Unit | None) -> str:
    """The word of the table for a unit: "e", "h" or "layer"."""
    return "" if unit is None else unit if isinstance(unit, str) else "layer"


def _above(unit: Unit) -> Unit:
    """The boundary above a unit, where its output and that output's gradient are; the head's are its own."""
    if isinstance(unit, int):
        return unit + 1
    return 0 if unit == PROLOGUE else EPILOGUE


def _slot(word: str, role: Role, optional: bool) -> Slot:
    tied = word in ("wt", "dwt")
    return Slot(word[:-1] if tied else word, role, optional, tied)


def _signature(stages: str, reads: str, results: str, into: str) -> Signature:
    def slots(words: str, role: Role) -> tuple[Slot, ...]:
        return tuple(_slot(word.rstrip("?"), role, word.endswith("?")) for word in words.split())

    pairs = (stage.split() for stage in stages.split(","))
    return Signature(
        frozenset((phase, units) for phase, units in pairs),
        slots(reads, "reads"),
        slots(results, "results"),
        slots(into, "into"),
    )


# The verbs that work on one micro-batch.
SIGNATURES: dict[str, Signature] = {
    verb.strip(): _signature(*columns) for verb, *columns in (row.split("|") for row in _TABLE.strip().splitlines())
}
