"""The step program: what one training step does, one operation a line.

A program is a tuple of operations in issue order. Every operation names a verb, the values it reads, the values it
defines and the values it changes in place (`into`). A value has one definition, and its name says what and where it
is: ``x1_0.device`` is the input of layer 1 for micro-batch 0, on the device.

A pass is a pure function from program to program. Text (`text.py`), the checker (`verify.py`), the meaning of the
verbs (`reference.py`), the executor and every drawing read this one object.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from gs_compile.errors import ProgramError

# A unit is what is loaded as a whole: the prologue "e" (embedding), layer 0 ... L-1, the epilogue "h" (head and loss),
# and "t", the parameters that several of these share (tied embeddings), which has code of no one's.
Unit = int | Literal["e", "h", "t"]
Tier = Literal["device", "host", "ssd"]
Order = Literal["vertical", "horizontal"]  # layer by layer, or micro-batch by micro-batch
Schedule = Literal["vertical", "horizontal", "single", "lifetime"]

ORDERS: dict[Schedule, Order] = {
    "vertical": "vertical",
    "horizontal": "horizontal",
    "single": "vertical",  # of one micro-batch
    "lifetime": "horizontal",
}

PROLOGUE: Literal["e"] = "e"
EPILOGUE: Literal["h"] = "h"
TIED: Literal["t"] = "t"

KINDS = {
    "batch": "one micro-batch of the user's inputs",
    "total": "what the loss's means divide by, counted over the whole batch",
    "x": "input of layer i, the checkpoint; x of layer L is the head's input",
    "side": "what the prologue makes and every layer reads: masks, rotary tables",
    "w": "parameters of a unit",
    "loss": "a micro-batch's share of the loss",
    "y": "the model's other outputs made by a unit",
    "dx": "gradient of a layer's input, the inter-layer gradient",
    "dy": "gradient that arrives from outside for a unit's outputs, or for x of that layer",
    "dside": "gradient of the side inputs, summed over layers",
    "dw": "gradient of a unit's parameters, summed over micro-batches in fp32",
    "s": "optimizer state of a unit: fp32 master parameters, where the parameters are narrower, and moments",
    "norm": "sum of squares of a unit's gradient",
    "scale": "what clipping multiplies all gradients of a step by",
    "sw": "shadow copy of parameters: what an update makes that may be rolled back",
    "ss": "shadow copy of optimizer state, for the same",
}

SHADOWS = {"w": "sw", "s": "ss"}  # the kind of a part's shadow copy

VERBS = {
    "count": "total of the loss's denominators",
    "embed": "the prologue",
    "forward": "one layer",
    "head": "the epilogue; with into= also its backward, of the loss",
    "head_backward": "the epilogue again, with its backward for gradients from outside",
    "backward": "one layer again, from its checkpoint, and its backward",
    "embed_backward": "the prologue again, and its backward",
    "norm": "the sum of squares of a complete gradient",
    "clip": "the scale of all gradients, from all their norms",
    "commit": "if the scale is one, each shadow copy and what it is a copy of change places",
    "update": "the optimizer, on some parts of a unit",
    "prefetch": "movement towards the device",
    "offload": "movement away from the device; with into=, back home",
    "gather": "a unit's parameters from their parts or pieces",
    "alias": "the same under another name, for later: no copy where that can be",
    "empty": "memory that is about to be filled",
    "zeros": "a gradient's accumulator",
    "free": "the end of a value",
}

# What takes no time on any resource of the machine: it happens when issued.
MEMORY_VERBS = frozenset({"gather", "alias", "empty", "zeros", "free", "commit"})

# The lanes of transfers, by where from and where to. A lane is first-in-first-out; lanes run side by side.
TRANSFER_LANES = {
    ("host", "device"): "h2d",
    ("device", "host"): "d2h",
    ("ssd", "host"): "ssd_read",
    ("host", "ssd"): "ssd_write",
}
LANES = ("compute", "h2d", "d2h", "ssd_read", "ssd_write", "cpu", "net")


@dataclass(frozen=True, slots=True)
class Value:
    """One tensor or group of tensors of a step; fields carry its identity, `name` is for people."""

    kind: str
    unit: Unit | None = None
    micro_batch: int | None = None
    tier: Tier | None = "device"
    part: str = ""  # the letter of a part that has a home of its own
    piece: int | None = None  # of a transfer that goes in pieces

    @property
    def name(self) -> str:
        unit = "" if self.unit is None else str(self.unit)
        micro_batch = "" if self.micro_batch is None else f"_{self.micro_batch}"
        tier = "" if self.tier is None else f".{self.tier}"
        piece = "" if self.piece is None else f"[{self.piece}]"
        return f"{self.kind}{unit}{self.part}{micro_batch}{tier}{piece}"

    def __str__(self) -> str:
        return self.name


def homed(value: Value) -> Value:
    """The part that a value is a shadow copy of; any other value itself."""
    kind = next((kind for kind, other in SHADOWS.items() if other == value.kind), value.kind)
    return replace(value, kind=kind)


@dataclass(frozen=True, slots=True)
class Stage:
    """The period in which one unit's forward, or recompute and backward, runs for all micro-batches, or for one.

    What comes before the first of these is the stage `FILL`, what comes after the last is `DRAIN`.
    """

    phase: Literal["fill", "forward", "backward", "drain"]
    unit: Unit | None = None
    micro_batch: int | None = None  # None: all of them, as in the vertical order

    def __str__(self) -> str:
        of = "" if self.micro_batch is None else f" of {self.micro_batch}"
        return self.phase if self.unit is None else f"{self.phase} {self.unit}{of}"


FILL = Stage("fill")
DRAIN = Stage("drain")


@dataclass(frozen=True, slots=True)
class Op:
    """One line of a program: ``results = verb(*reads, into=...)``, issued in `stage`."""

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

    @property
    def lane(self) -> str:
        """Where it is carried out: follows from the verb and, of a transfer, from the tiers."""
        if self.verb in MEMORY_VERBS:
            return "memory"
        if self.verb in ("prefetch", "offload"):
            return TRANSFER_LANES[self.reads[0].tier or "", (*self.results, *self.into)[0].tier or ""]
        return "cpu" if self.verb == "update" else "compute"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """What a step of one model consists of, beyond its number of layers: all that `vertical` needs to know."""

    training: bool = True  # False: the forward alone
    has_loss: bool = True  # the head computes a loss
    has_total: bool = False  # the loss divides by what is counted over the whole batch
    has_side: bool = False  # the prologue makes side inputs
    side_gradient: bool = False  # and their gradient flows back into it
    emits: frozenset[Unit] = frozenset()  # units with other outputs
    outside: frozenset[Unit] = frozenset()  # what gradients arrive for from outside: i for x of layer i, "h"
    frozen: frozenset[Unit] = frozenset()  # units without trainable parameters
    tied: frozenset[Unit] = frozenset()  # units that read the parameters of "t"
    first_grad: Unit = PROLOGUE  # the lowest unit that needs a gradient: there the backward ends

    def __post_init__(self) -> None:
        shares = self.first_grad in self.tied and TIED not in self.frozen
        if self.training and self.first_grad in self.frozen and not shares:
            raise ProgramError(f"first_grad is {self.first_grad}, which is frozen: the backward would end at nothing")
        if self.side_gradient and not self.has_side:
            raise ProgramError("side_gradient without has_side: there is nothing to have the gradient")

    def needs_grad_below(self, unit: Unit) -> bool:
        """Whether anything that comes before `unit` needs a gradient."""
        return height(self.first_grad) < height(unit)


def height(unit: Unit) -> float:
    """The place of a unit on the way from the prologue (lowest) to the epilogue (highest)."""
    return {TIED: -2.0, PROLOGUE: -1.0, EPILOGUE: float("inf")}[unit] if isinstance(unit, str) else float(unit)


@dataclass(frozen=True, slots=True)
class Program:
    """A training step (or a forward-only step) of `num_layers` layers over `num_micro_batches` micro-batches."""

    ops: tuple[Op, ...]
    num_layers: int
    num_micro_batches: int
    made_by: str  # the last pass that ran
    peaks: tuple[tuple[str, int], ...] = ()  # the planned peak of each tier in bytes, once `free` has counted it

    @property
    def order(self) -> Order:
        """Which order it is in: its stages say so."""
        return "horizontal" if any(op.stage.micro_batch is not None for op in self.ops) else "vertical"

    def with_ops(self, ops: Iterable[Op], made_by: str) -> Program:
        return replace(self, ops=tuple(ops), made_by=made_by)

    def stages(self) -> Iterator[tuple[Stage, tuple[Op, ...]]]:
        """The operations grouped by stage, in issue order."""
        group: list[Op] = []
        for op in self.ops:
            if group and op.stage != group[0].stage:
                yield group[0].stage, tuple(group)
                group = []
            group.append(op)
        if group:
            yield group[0].stage, tuple(group)

    def __str__(self) -> str:
        from gs_compile.program.text import format_program

        return format_program(self)
