"""The values of a step program: tensors or groups of tensors, and the stages in which operations use them.

A value's name says what and where it is: ``x1_0.device`` is the input of layer 1 for micro-batch 0, on the device.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal, NamedTuple, get_args

# A unit is what is loaded as a whole: the prologue "e" (embedding), layer 0 ... L-1, the epilogue "h" (head and loss),
# and "t", the parameters that several of these share (tied embeddings), which no code belongs to. Layers are of one
# stack or of several; the one between two stacks, which ends the first and begins the second, is a joint.
Unit = int | Literal["e", "h", "t"]
Tier = Literal["device", "host", "ssd"]
Phase = Literal["fill", "forward", "backward", "drain"]
TIERS: tuple[Tier, ...] = get_args(Tier)  # the nearest to the computation first

PROLOGUE: Literal["e"] = "e"
EPILOGUE: Literal["h"] = "h"
TIED: Literal["t"] = "t"

KINDS = {  # also a table of docs/step.md
    "batch": "a micro-batch of the model's inputs",
    "total": "what the loss is divided by, counted over the whole batch",
    "x": "the input of a layer: its checkpoint; after the last layer, the head's input",
    "a": "what a layer's forward saves for its backward, beside its input or in its place",
    "side": "what the beginning of a stack makes for its layers: masks, rotary tables, an encoder's output",
    "w": "parameters",
    "loss": "a micro-batch's share of the loss",
    "y": "the model's other outputs that a unit makes",
    "dx": "the gradient of a layer's input",
    "dy": "a gradient that arrives from outside for a unit's outputs, or for a layer's input",
    "dside": "the gradient of side inputs, summed over the layers of their stack",
    "dw": "the gradient of parameters, summed over micro-batches in fp32",
    "s": "optimizer state: moments, and fp32 masters where the parameters are narrower",
    "shard": "a rank's part of the parameters, on its way to all ranks",
    "dshard": "a rank's part of the gradient, summed over all ranks",
    "norm": "the sum of squares of a unit's gradient",
    "scale": "what clipping multiplies all gradients of a step by",
    "sw": "a shadow copy of parameters: what an update makes that may be rolled back",
    "ss": "a shadow copy of optimizer state, for the same",
    "cw": "a copy on SSD of parameters that live in memory, for a commit",
    "cs": "a copy on SSD of optimizer state that lives in memory, for a commit",
}
WORDS = {  # what reports call the bytes of each kind; "seal" is what a commit writes and keeps
    "w": "parameters",
    "s": "optimizer states",
    "x": "checkpoints",
    "a": "saved activations",
    "dx": "gradients of layer inputs",
    "dw": "gradients",
    "sw": "shadow copies of parameters",
    "ss": "shadow copies of states",
    "seal": "commits",
}

SHADOWS = {"w": "sw", "s": "ss"}  # the kind of a part's shadow copy
COPIES = {"w": "cw", "s": "cs"}  # the kind of the copy of a part in memory that a commit keeps
SHADOWED = {shadow: kind for kind, shadow in SHADOWS.items()}
_COPIED = SHADOWED | {copy: kind for kind, copy in COPIES.items()}
SHARDS = {"shard": "w", "dshard": "dw"}  # the kind of what each is a rank's share of


class Value(NamedTuple):
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
    """The part that a value is a copy of, on whatever tier the copy is; any other value itself."""
    return value._replace(kind=_COPIED[value.kind]) if value.kind in _COPIED else value


def whole_kind(value: Value) -> str:
    """The kind of what a value is a rank's share of; of any other value its own."""
    return SHARDS.get(value.kind, value.kind)


class Stage(NamedTuple):
    """The period in which one unit's forward, or recompute and backward, runs for all micro-batches, or for one.

    What comes before the first of these is the stage `FILL`, what comes after the last is `DRAIN`.
    """

    phase: Phase
    unit: Unit | None = None
    micro_batch: int | None = None  # None: all of them, as in the vertical order

    @property
    def unit_class(self) -> str:
        """Its unit as the table of signatures writes it: "e", "h" or "layer"."""
        return "" if self.unit is None else self.unit if isinstance(self.unit, str) else "layer"

    def __str__(self) -> str:
        of = "" if self.micro_batch is None else f" of {self.micro_batch}"
        return self.phase if self.unit is None else f"{self.phase} {self.unit}{of}"


FILL = Stage("fill")
DRAIN = Stage("drain")


def height(unit: Unit) -> float:
    """The place of a unit on the way from the prologue (lowest) to the epilogue (highest)."""
    return {TIED: -2.0, PROLOGUE: -1.0, EPILOGUE: float("inf")}[unit] if isinstance(unit, str) else float(unit)


def beginning(unit: Unit, joints: Collection[int]) -> Unit:
    """What begins the stack that a unit takes its input from: the prologue, or the last joint below."""
    return max((joint for joint in joints if joint < height(unit)), default=PROLOGUE)
