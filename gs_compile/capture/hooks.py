"""hooks: hooks of the compiled module itself, which are called outside its forward.

Dynamo traces hooks of inner modules with the forward. It compiles those of the outermost module separately and calls
the backend for them. They are not a model, so they run as plain PyTorch, outside the step.
"""

from __future__ import annotations

import functools
import sys
from types import CodeType, FrameType
from typing import Any

from torch.nn.modules import module as torch_module

from gs_compile.capture.frame_settings import compiled_frame


def is_in_hook() -> bool:
    """Whether Dynamo is compiling a hook on a module's forward, or a function called by one."""
    found, frame = sys._getframe(), sys._getframe().f_back
    while frame is not None and not _calls_hooks(frame):
        found, frame = frame, frame.f_back
    if frame is None:
        return False
    is_dynamos = "torch/_dynamo/" in found.f_code.co_filename  # of the compile: nothing is between
    called = compiled_frame("code")["code"] if is_dynamos else found.f_code
    return called in map(_code_of, _hooks(frame.f_locals["self"]))


def _calls_hooks(frame: FrameType) -> bool:
    """Whether a frame runs the function by which a module calls its forward and its hooks."""
    return frame.f_code.co_filename == torch_module.__file__ and frame.f_code.co_name in ("_call_impl", "inner")


def _hooks(module: Any) -> list[Any]:
    own = module._forward_pre_hooks, module._forward_hooks
    of_all = torch_module._global_forward_pre_hooks, torch_module._global_forward_hooks
    return [hook for hooks in (*own, *of_all) for hook in hooks.values()]


def _code_of(hook: Any) -> CodeType | None:
    """The code of the function that a hook runs."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    function = getattr(hook, "__func__", hook)
    return getattr(function, "__code__", None) or getattr(type(hook).__call__, "__code__", None)
