"""Operations, and what every verb reads, defines and changes: one table, from which programs are built and checked.

`passes/vertical.py` fills in the rows of the compute verbs for a model; `verify` checks each operation by its row.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from gs_compile.program.values import (
    COPIES,
    EPILOGUE,
    PROLOGUE,
    SHADOWS,
    TIED,
    Stage,
    Tier,
    Unit,
    Value,
    beginning,
    homed,
    whole_kind,
)

Role = Literal["reads", "results", "into"]

VERBS = {  # what each does: also a table of docs/step.md
    "count": "counts what the loss is divided by, over the whole batch",
    "embed": "runs the prologue",
    "forward": "runs a layer",
    "join": "runs a joint: the end of a stack and the beginning of the next one",
    "head": "runs the epilogue; with into= also its backward, from the loss",
    "head_backward": "runs the epilogue again, and its backward, for gradients from outside",
    "backward": "runs again what a layer's forward has not saved, and the layer's backward",
    "join_backward": "runs a joint again, and its backward",
    "embed_backward": "runs the prologue again, and its backward",
    "norm": "completes a gradient in place, and sums its squares; with into= it is added to those of former backwards",
    "clip": "makes the scale of all gradients of all their norms",
    "commit": "exchanges each shadow copy with what it is a copy of, if the scale is one",
    "update": "runs the optimizer on some parts of a unit",
    "prefetch": "moves a value towards the device",
    "offload": "moves a value away from the device; with into= to where it is stored",
    "gather": "puts a unit's parameters together from their parts or pieces",
    "decode": "dequantizes a unit's matrices",
    "all_gather": "gathers a piece of a unit's parameters, of which each rank has a share",
    "reduce_scatter": "gives this rank its share of the sum of a gradient over all ranks, and the norm of the whole",
    "alias": "gives a value another name, or another tier, without a copy where possible",
    "empty": "takes memory that is about to be filled",
    "zeros": "makes the sum of a gradient, which begins at zero",
    "seal": "commits the step before: from here on, a restart resumes from it",
    "free": "ends a value",
}

# These take no time on any resource of the machine: they are done when they are issued.
MEMORY_VERBS = frozenset({"gather", "alias", "empty", "zeros", "free", "commit"})
# These may define a value that was defined before.
MOVEMENTS = frozenset({"prefetch", "offload", "alias", "gather", "all_gather", "empty"})

# The lane of each transfer, by source and target. A lane is first-in-first-out; lanes run in parallel.
TRANSFER_LANES = {
    ("host", "device"): "h2d",
    ("device", "host"): "d2h",
    ("ssd", "host"): "ssd_read",
    ("host", "ssd"): "ssd_write",
}
COLLECTIVES = frozenset({"all_gather", "reduce_scatter"})  # all ranks take part, in the same order
TRANSFERS = COLLECTIVES | {"prefetch", "offload"}  # move data: between ranks, or between tiers
_LANES = {  # of all other verbs that do not compute; `seal` is behind what was written before it
    **dict.fromkeys(MEMORY_VERBS, "memory"),
    **dict.fromkeys(COLLECTIVES, "net"),
    "seal": "ssd_write",
    "update": "cpu",
}
NORMS = frozenset({"norm", "reduce_scatter"})  # complete a gradient, in place
LANES = ("compute", "h2d", "d2h", "ssd_read", "ssd_write", "cpu", "net")

JOINING = frozenset({"join", "join_backward"})  # run a joint
SHARED_KINDS = frozenset({"total", "w", "dw"})  # one value for all micro-batches of a step
ACCUMULATED = (" > dw > ", " > dside > ")  # the shapes of `zeros`: all that `into` of a computation may name
CHANGED_KINDS = frozenset({"w", "s"})  # changed in place by an update, and stored by an offload


@dataclass(frozen=True)
class Op:
    """One line of a program: ``results = verb(*reads, into=...)``, issued in `stage`.

    What follows from its fields is cached: it is read whenever the operation is planned, simulated or issued.
    """

    verb: str
    reads: tuple[Value, ...]
    stage: Stage
    results: tuple[Value, ...] = ()
    into: tuple[Value, ...] = ()
    micro_batch: int | None = None  # of a compute verb; None for verbs that serve the whole unit

    @property
    def unit(self) -> Unit:
        """The unit whose code a compute verb runs: the stage's."""
        assert self.stage.unit is not None, f"{self.verb} in {self.stage}"
        return self.stage.unit

    @cached_property
    def name(self) -> str:
        """In traces and errors: its verb, and its unit and micro-batch or what it makes."""
        if self.micro_batch is not None:
            return f"{self.verb} {self.unit}_{self.micro_batch}"
        return " ".join([self.verb, *map(str, self.values[:1])])

    def moved(self, stage: Stage) -> Op:
        """The operation in another stage."""
        return Op(self.verb, self.reads, stage, self.results, self.into, self.micro_batch)

    @cached_property
    def keywords(self) -> tuple[str, ...]:
        """The names under which a unit's code gets what the operation reads and changes: their kinds.

        Values of the unit "t" are `wt` and `dwt`. A side inputs' gradient that is added to is `dsides`: a joint also
        reads another one, `dside`.
        """
        tied = {True: "t", False: ""}
        reads = (value.kind + tied[value.unit == TIED] for value in self.reads)
        into = ("dsides" if value.kind == "dside" else value.kind + tied[value.unit == TIED] for value in self.into)
        return (*reads, *into)

    @property
    def values(self) -> tuple[Value, ...]:
        """All that it names: results first, reads last."""
        return (*self.results, *self.into, *self.reads)

    @property
    def changes(self) -> tuple[Value, ...]:
        """All that it changes in place: `into`, and the gradient that it completes, if it does."""
        return (*self.reads, *self.into) if self.verb in NORMS else self.into

    @cached_property
    def lane(self) -> str:
        """The lane that runs it: it follows from the verb and, for a transfer, from the tiers."""
        if self.verb in ("prefetch", "offload"):
            return TRANSFER_LANES[self.reads[0].tier or "", (self.results or self.into)[0].tier or ""]
        return _LANES.get(self.verb, "compute")

    @cached_property
    def kind(self) -> str:
        """The kind by which its bytes are counted; of a shadow copy or a rank's share it is that of the part."""
        if self.verb == "seal" or (self.into and self.into[0].kind in COPIES.values()):
            return "seal"
        return whole_kind(homed(self.values[0]))

    def __str__(self) -> str:
        """One line: ``x2_0.device = forward(x1_0.device, w1.device)``."""
        arguments = [value.name for value in self.reads]
        if self.into:
            names = ", ".join(value.name for value in self.into)
            arguments.append(f"into={names}" if len(self.into) == 1 else f"into=({names})")
        call = f"{self.verb}({', '.join(arguments)})"
        return f"{', '.join(value.name for value in self.results)} = {call}" if self.results else call


@dataclass(frozen=True, slots=True)
class Operand:
    """One place in an operation. Given unit and micro-batch, exactly one value fits it."""

    kind: str
    role: Role
    optional: bool
    tied: bool = False  # of the unit "t", whatever unit the operation is of

    def value(self, unit: Unit, micro_batch: int, num_layers: int, joints: Collection[int] = ()) -> Value:
        tier: Tier | None = None if self.kind == "batch" else "device"
        shared = self.kind in SHARED_KINDS
        return Value(self.kind, self._unit(unit, num_layers, joints), None if shared else micro_batch, tier)

    def _unit(self, unit: Unit, num_layers: int, joints: Collection[int]) -> Unit | None:
        """A unit stands between two boundaries: it takes x from below and hands x on above; gradients come back.

        Side inputs are those of the unit's own stack; what begins a stack makes them, and takes their gradient.
        """
        if self.tied:
            return TIED
        match self.kind, self.role:
            case ("side", "reads") | ("dside", "into"):
                return _maker(beginning(unit, joints))
            case ("side", "results") | ("dside", "reads"):
                return _maker(unit)
            case ("x", "reads") | ("dx", "results"):
                return num_layers if unit == EPILOGUE else unit
            case ("x", "results") | ("dx", "reads") | ("dy", _):
                return _above(unit)
            case (("w" | "dw" | "y" | "a"), _):
                return unit
            case _:
                return None


def _maker(unit: Unit) -> int | None:
    """The unit in the name of side inputs: the joint that makes them, or None for those of the prologue."""
    return unit if isinstance(unit, int) else None


def _above(unit: Unit) -> Unit:
    """The boundary above a unit, where its output and that output's gradient are; the head's are its own."""
    if isinstance(unit, int):
        return unit + 1
    return 0 if unit == PROLOGUE else EPILOGUE


@dataclass(frozen=True, slots=True)
class Signature:
    """The operands of a verb that works on one micro-batch, in order, and the stages it may stand in."""

    stages: frozenset[tuple[str, str]]  # phase, and "e", "h" or "layer"
    reads: tuple[Operand, ...]
    results: tuple[Operand, ...]
    into: tuple[Operand, ...]


# The boundaries' x and dx are read and defined by neighbours; a question mark: only if the model has it.
# verb            stages                    reads                                results          into
_TABLE = """
  embed          | forward e               | batch w wt?                        | x side? y?     |
  forward        | forward layer           | x side? w wt?                      | x y? a?        |
  join           | forward layer            | x side? batch w wt?                | x side? y?     |
  head           | forward h, backward h   | x side? batch total? w wt?         | loss? dx? y?   | dw? dwt? dside?
  head_backward  | backward h              | x side? batch total? dy w wt?      | dx?            | dw? dwt? dside?
  backward       | backward layer          | x? a? dx? dy? side? w wt?          | dx?            | dw? dwt? dside?
  join_backward  | backward layer           | x side? batch dx? dy? dside? w wt? | dx?            | dw? dwt? dside?
  embed_backward | backward e              | batch dx? dy? dside? w wt?         |                | dw? dwt?
"""


def _signature(stages: str, reads: str, results: str, into: str) -> Signature:
    pairs = frozenset((phase, units) for phase, units in (stage.split() for stage in stages.split(",")))
    return Signature(pairs, _operands(reads, "reads"), _operands(results, "results"), _operands(into, "into"))


def _operands(words: str, role: Role) -> tuple[Operand, ...]:
    found = []
    for word in words.split():
        kind = word.rstrip("?")
        tied = kind in ("wt", "dwt")
        found.append(Operand(kind[:-1] if tied else kind, role, word.endswith("?"), tied))
    return tuple(found)


SIGNATURES: dict[str, Signature] = {
    verb.strip(): _signature(*columns) for verb, *columns in (row.split("|") for row in _TABLE.strip().splitlines())
}

# The verbs of `SIGNATURES` run the code of a unit: its forward (`head` perhaps with the backward), or its backward.
FORWARDS = frozenset(verb for verb, each in SIGNATURES.items() if any(phase == "forward" for phase, _ in each.stages))
BACKWARDS = SIGNATURES.keys() - FORWARDS


def forward_end(ops: Sequence[Op]) -> int:
    """The index of the first operation of the backward half: after the last head and what is freed there."""
    verbs = FORWARDS | {"count"}
    last = max((index for index, op in enumerate(ops) if op.verb in verbs), default=-1) + 1
    while last < len(ops) and ops[last].verb == "free":
        last += 1
    return last


def _shape(op: Op) -> str:
    """The kinds of value that an operation reads, defines and changes: "dw > norm > "."""
    return " > ".join(" ".join(value.kind for value in values) for values in (op.reads, op.results, op.into))


def _is_count(op: Op) -> bool:
    batches = tuple(Value("batch", micro_batch=j, tier=None) for j in range(len(op.reads)))
    return (op.reads, op.results, op.into) == (batches, (Value("total"),), ())


def _is_transfer(op: Op) -> bool:
    """All from one tier to the next, towards the device or away from it; of one kind."""
    to = (*op.results, *op.into)
    tiers = {value.tier for value in op.reads}, {value.tier for value in to}
    if not (op.reads and to) or bool(op.results) == bool(op.into) or any(len(side) != 1 for side in tiers):
        return False
    if len({(whole_kind(homed(value)), value.unit) for value in (*op.reads, *to)}) != 1:
        return False
    route = (op.reads[0].tier or "", to[0].tier or "")
    return route in TRANSFER_LANES and (op.verb == "prefetch") == (route in (("ssd", "host"), ("host", "device")))


def _is_gather(op: Op) -> bool:
    whole = Value("w", op.values[0].unit if op.values else None)
    are_parts = all((value.kind, value.unit) == ("w", whole.unit) and value != whole for value in op.reads)
    return op.results == (whole,) and not op.into and bool(op.reads) and are_parts


def _is_decode(op: Op) -> bool:
    return not op.reads and not op.results and op.into == (Value("w", op.into[0].unit if op.into else None),)


def _is_all_gather(op: Op) -> bool:
    whole = Value("w", op.values[0].unit if op.values else None)
    are_shares = all(value.unit == whole.unit and (value.kind == "shard" or value.part) for value in op.reads)
    is_of_one_kind = {value.kind for value in op.reads} in ({"shard"}, {"w"})
    is_piece = [result._replace(piece=None) for result in op.results] == [whole]
    return is_piece and not op.into and are_shares and is_of_one_kind


def _is_alias(op: Op) -> bool:
    same = {(whole_kind(value), value.unit, value.micro_batch) for value in (*op.reads, *op.results)}
    return len(op.reads) == 1 and bool(op.results) and not op.into and len(same) == 1


def _completes(op: Op, made: str) -> bool:
    """Whether it takes a gradient, makes these of its unit, and changes parts of the unit's sums alone."""
    if not _shape(op).startswith(f"dw > {made} > "):
        return False
    unit = op.reads[0].unit
    adds_to_sums = all((value.kind, value.unit) == ("dw", unit) and value.part for value in op.into)
    return adds_to_sums and op.results == tuple(Value(kind, unit) for kind in made.split())


def _is_update(op: Op) -> bool:
    """Speculative, it also reads what stays as it is."""
    units = {value.unit for value in op.reads + op.into if value.kind != "scale"}
    changed = {homed(value).kind for value in op.into}
    is_known = re.match("(dw|dshard)( scale|( w| s)*) >  > ", _shape(op)) is not None
    return is_known and len(units) == 1 and {"w"} <= changed <= CHANGED_KINDS


def _is_commit(op: Op) -> bool:
    homes, shadows = op.into[::2], op.into[1::2]
    pairs = len(homes) == len(shadows) and all(
        shadow.kind == SHADOWS.get(home.kind) and homed(shadow) == home
        for home, shadow in zip(homes, shadows, strict=True)
    )
    return _shape(op).startswith("scale >  > ") and bool(homes) and pairs


# The laws of the verbs without a signature, in words and as a function.
LAWS: dict[str, tuple[str, Callable[[Op], bool]]] = {
    "count": ("reads every batch in order and defines total.device", _is_count),
    "zeros": ("reads nothing and defines one accumulator, dw or dside", lambda op: _shape(op) in ACCUMULATED),
    "free": ("takes one value and defines nothing", lambda op: len(op.reads) == len(op.values) == 1),
    "prefetch": ("takes values of one kind and unit from ssd to host, or from host to device", _is_transfer),
    "offload": ("takes values of one kind and unit from device to host, or from host to ssd", _is_transfer),
    "gather": ("takes all parts or pieces of one unit's parameters, and defines the whole on the device", _is_gather),
    "decode": ("takes nothing; changes a unit's whole parameters", _is_decode),
    "all_gather": ("takes a unit's shard or parts of it, and defines a piece of the whole", _is_all_gather),
    "reduce_scatter": (
        "takes a complete gradient, and defines this rank's share of it, and its norm; may change the unit's sums",
        lambda op: _completes(op, "dshard norm"),
    ),
    "alias": ("takes one value, and defines it under another name", _is_alias),
    "empty": ("takes nothing, and defines a part of a unit's parameters", lambda op: _shape(op) == " > w > "),
    "norm": (
        "takes one gradient, and defines its norm; may change sums of the same unit",
        lambda op: _completes(op, "norm"),
    ),
    "clip": (
        "takes the norms, and defines the scale",
        lambda op: re.fullmatch("norm( norm)* > scale > ", _shape(op)) is not None,
    ),
    "update": (
        "takes a gradient and, where gradients are clipped, the scale; changes parameters and state of the same unit",
        _is_update,
    ),
    "seal": ("takes nothing and defines nothing", lambda op: not op.values),
    "commit": ("takes the scale; changes parts and their shadow copies, in pairs", _is_commit),
}
