"""given_up: forwards that Dynamo gives up before it calls a backend, and that then run as plain PyTorch.

No code of this package runs in such a forward. So every compilation of Dynamo is inspected as it ends, and the next
step of an optimizer warns of what was given up, unless the backend was called meanwhile: then a part of the forward was
captured, and either works or is refused. Errors of a model end with what is known about that model's forwards.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Container, Iterable, MutableMapping
from itertools import chain, takewhile
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch._dynamo.callback import CallbackArgs, CallbackTrigger
from torch.optim.optimizer import _global_optimizer_pre_hooks, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from gs_compile.capture.dynamo import Unsupported, current_compile_id
from gs_compile.capture.frame_settings import (
    callback_handler,
    compiled_frame,
    is_ours,
    modules_in,
    set_from_the_start,
)
from gs_compile.capture.graph_breaks import (
    RAISES,
    REASONS,
    TRACE_ANEW,
    get_compilation_metrics,
    is_raise,
    over_limit,
    remedy,
)
from gs_compile.errors import UncapturedWarning

GIVEN_UP = "Dynamo gave the model's forward up at"


def watch() -> Watch:
    """The watch among torch's hooks, created at the first call. The backend may be called from now on."""
    owners = (getattr(hook, "__self__", None) for hook in _global_optimizer_pre_hooks.values())
    return next((each for each in owners if isinstance(each, Watch)), None) or Watch()


class _Callbacks(list[Any]):
    """What Dynamo calls when compilations end. Dynamo's reset clears it, after those that it calls at their start."""

    def clear(self) -> None:
        super().clear()
        watch().begin()


class Watch:
    """The modules whose forwards Dynamo was to compile, and what to tell the user about those that were given up."""

    def __init__(self) -> None:
        self.words = ""  # about the last one, until the next step of any optimizer
        self._own = set[str]()  # Dynamo's numbers of the frames that were for this package
        # For each module, by Dynamo's number of the frame, why that was given up; empty: it was not.
        self._frames: MutableMapping[nn.Module, dict[str, str]] = WeakKeyDictionary()
        # Of Dynamo's records of its compilations: the last before its reset, and the last that `warn` has seen.
        self._first: object = None
        self._seen: object = None
        register_optimizer_step_pre_hook(self.warn)  # never removed: torch iterates over its hooks while it calls them
        callback_handler.end_callbacks = _Callbacks(callback_handler.end_callbacks)
        self.begin()

    def begin(self) -> None:
        """Called after a reset of Dynamo, or at first: frames are numbered from the first one on."""
        set_from_the_start()
        self._own.clear()
        self._frames.clear()
        REASONS.new()
        self._first = self._seen = _latest()
        callback_handler.register_end_callback(self.end)

    def end(self, ended: CallbackArgs) -> None:
        """Called when a compilation ends, with or without an error."""
        if ended.callback_trigger is not CallbackTrigger.DYNAMO:
            return
        REASONS.new()
        compiled = compiled_frame()
        if not is_ours(compiled["compiler_fn"]):
            return
        error = sys.exc_info()[1]
        if isinstance(error, Unsupported) and str(error).startswith(RAISES):
            # The next call may have a valid batch, but by default Dynamo would never capture the frame again.
            error.frame_exec_strategy = TRACE_ANEW
        words, frame = _given_up(error) if isinstance(error, Unsupported) else "", _frame_of(current_compile_id())
        self._own.add(frame)
        for module in modules_in(compiled["locals"]).values():
            self._frames.setdefault(module, {})[frame] = words
        self.words = words or self.words

    def forget(self) -> None:
        """Called when the backend is called."""
        self.words = ""

    def why(self, parameters: Iterable[Tensor]) -> str:
        """A sentence on why Dynamo captures nothing of the model with these parameters; empty: not known."""
        modes = [
            type(mode).__name__.lstrip("_") for mode in _get_current_dispatch_mode_stack() if not mode.is_infra_mode()
        ]
        if modes:
            return (
                f". Inside of {modes[-1]} Dynamo captures nothing, and the model runs as plain PyTorch does: train "
                "outside of it. Operations can be counted with it on a model that is not compiled"
            )
        theirs = set(parameters)
        own = [frames for module, frames in self._frames.items() if not theirs.isdisjoint(module.parameters())]
        reasons = [reason for frames in own for reason in frames.values() if reason]
        words = _over_limit({*chain.from_iterable(own)}, self._first) or "".join(reasons[-1:])
        return words and f". {words}"

    def warn(self, optimizer: object, *_: Any) -> None:
        """Called when an optimizer steps. One of this package finds no backward, and reports that itself."""
        told = [] if getattr(optimizer, "tells_of_given_up", False) else [self.words]
        self.forget()
        told.append(_over_limit(self._own, self._seen))
        self._seen = _latest()
        for words in filter(None, told):
            warnings.warn(words, UncapturedWarning, stacklevel=3)


def _given_up(error: Unsupported) -> str:
    """The warning; empty if the forward raises an exception, which the user gets."""
    stack = getattr(error, "real_stack", None)
    where = f"{stack[-1].filename}:{stack[-1].lineno}: {stack[-1].line}" if stack else "an unknown line"
    if is_raise(error, where):
        return ""
    return (
        f"{GIVEN_UP} {where}, and captured nothing of it: it runs as plain PyTorch does, without greedysnake."
        f"\nDynamo's reason: {str(error).strip()}\nFor greedysnake, {remedy(error, where)}"
    )


def _over_limit(frames: Container[str], since: object) -> str:
    """Words on the last of these frames that Dynamo did not compile because of its limit; empty: there is none.

    since: a record of Dynamo's compilations; only later ones count.
    """
    lately = takewhile(lambda each: each is not since, reversed(get_compilation_metrics()))
    return next(filter(None, (over_limit(each) for each in lately if _frame_of(each.compile_id) in frames)), "")


def _latest() -> object:
    """Dynamo's record of its last compilation."""
    return next(reversed(get_compilation_metrics()), None)


def _frame_of(compile_id: object) -> str:
    """The number of the frame that was compiled: ``3`` of ``3/0``."""
    return str(compile_id).partition("/")[0]
