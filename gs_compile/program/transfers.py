"""forms: what the verbs that move and update take and give: one function a verb that checks it, and the same in words.

What the verbs that compute take is in `signatures`.
"""

from __future__ import annotations

from collections.abc import Callable

from gs_compile.program.ir import SHADOWS, TRANSFER_LANES, Op, Value, homed

CHANGED_KINDS = frozenset({"w", "s"})  # what an update changes in place, and an offload brings home


def _is_transfer(op: Op) -> bool:
    """All from one tier to the next, towards the device or away from it; of one kind."""
    to = (*op.results, *op.into)
    tiers = {value.tier for value in op.reads}, {value.tier for value in to}
    if not (op.reads and to) or bool(op.results) == bool(op.into) or any(len(side) != 1 for side in tiers):
        return False
    if len({(homed(value).kind, value.unit) for value in (*op.reads, *to)}) != 1:
        return False
    route = (op.reads[0].tier or "", to[0].tier or "")
    return route in TRANSFER_LANES and (op.verb == "prefetch") == (route in (("ssd", "host"), ("host", "device")))


def _is_gather(op: Op) -> bool:
    whole = Value("w", op.results[0].unit) if len(op.results) == 1 else None
    parts = all((v.kind, v.unit) == ("w", op.results[0].unit) and v != whole for v in op.reads)
    return op.results == (whole,) and not op.into and bool(op.reads) and parts


def _is_alias(op: Op) -> bool:
    same = {(value.kind, value.unit, value.micro_batch) for value in (*op.reads, *op.results)}
    return len(op.reads) == 1 and bool(op.results) and not op.into and len(same) == 1


def _is_update(op: Op) -> bool:
    """Speculative, it also reads what stays as it is."""
    kinds = [value.kind for value in op.reads]
    units = {value.unit for value in op.reads + op.into if value.kind != "scale"}
    changed = {homed(value).kind for value in op.into}
    known = kinds in (["dw"], ["dw", "scale"]) or (kinds[:1] == ["dw"] and set(kinds[1:]) <= CHANGED_KINDS)
    return known and len(units) == 1 and {"w"} <= changed <= CHANGED_KINDS


def _is_commit(op: Op) -> bool:
    homes, others = op.into[::2], op.into[1::2]
    pairs = len(homes) == len(others) and all(
        other.kind == SHADOWS.get(home.kind) and homed(other) == home for home, other in zip(homes, others, strict=True)
    )
    return [value.kind for value in op.reads] == ["scale"] and not op.results and bool(homes) and pairs


MOVING: dict[str, Callable[[Op], bool]] = {
    "prefetch": _is_transfer,
    "offload": _is_transfer,
    "gather": _is_gather,
    "alias": _is_alias,
    "empty": lambda op: not op.reads and not op.into and [value.kind for value in op.results] == ["w"],
    "norm": lambda op: [v.kind for v in op.reads] == ["dw"] and op.results == (Value("norm", op.reads[0].unit),),
    "clip": lambda op: {v.kind for v in op.reads} == {"norm"} and [v.kind for v in op.results] == ["scale"],
    "update": _is_update,
    "commit": _is_commit,
}
FORMS = {
    "prefetch": "values of one kind and unit from ssd to host, or from host to device",
    "offload": "values of one kind and unit from device to host, or from host to ssd",
    "gather": "all parts or pieces of one unit's parameters, and defines the whole on the device",
    "alias": "one value, and defines it under another name",
    "empty": "nothing, and defines a part of a unit's parameters",
    "norm": "one gradient, and defines its norm",
    "clip": "the norms, and defines the scale",
    "update": "a gradient and, where gradients are clipped, the scale; changes parameters and state of the same unit",
    "commit": "the scale; changes parts and their shadow copies, in pairs",
}
