"""remedies: what to do about a graph break."""

from __future__ import annotations

import sys

from gs_compile.errors import GROUPED

# What Dynamo says where a size that depends on values decides what the code does.
_UNSIZED = ("Dynamic shape operator", "data-dependent expression", "Data-dependent branching")


_LIGER = (
    "leave the kernels of Liger out that stand in layers (rope=False, rms_norm=False, swiglu=False and their like), as "
    "inductor fuses these operations itself; its losses may stay"
)
_HOOKS = (
    "remove the hooks on the backward of modules inside the model (register_full_backward_hook), which would never be "
    "called, as a layer's backward runs without its modules. A hook on the whole model and forward hooks may stay"
)


def remedy(reason: object, where: str = "") -> str:
    """What to do about a graph break, in a line."""
    if "liger_kernel/" in where or ("/triton/" in where and "liger_kernel" in sys.modules):
        return _LIGER
    if "backwards hooks" in str(reason):
        return _HOOKS
    if any(sign in str(reason) for sign in _UNSIZED):
        return f"here the number of elements depends on values. {GROUPED[0].upper()}{GROUPED[1:]}"
    return (
        "remove the construct, or move it out of forward (print, .item(), control flow on tensor values are the usual "
        "causes)"
    )
