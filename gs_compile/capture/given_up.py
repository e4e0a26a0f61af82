"""given_up: forwards that Dynamo gives up before it asks a backend for anything, which then run as plain PyTorch.

No code of this package runs in such a forward. So each compilation of Dynamo is looked at as it ends, and the next step
of an optimizer warns of what was given up, unless the backend was asked for something meanwhile: then a part of the
forward was captured, and either works or is refused.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from gs_compile.capture.dynamo import Unsupported
from gs_compile.capture.frame_settings import callback_handler, compiled_frame, is_ours, set_from_the_start
from gs_compile.capture.graph_breaks import last_over_limit, over_limit, remedy
from gs_compile.errors import UncapturedWarning


def watch() -> Watch:
    """The watch among Dynamo's callbacks, where it stays until a reset. The backend may be asked from now on."""
    set_from_the_start()
    owners = (getattr(callback, "__self__", None) for callback in callback_handler.end_callbacks)
    found = next((each for each in owners if isinstance(each, Watch)), None)
    if found is None:
        found = Watch()
        callback_handler.register_end_callback(found.end)
    return found


class Watch:
    """What the user is to be told of the forward that was given up last."""

    def __init__(self) -> None:
        self.words = ""
        self.hook: RemovableHandle | None = None  # of the next step of any optimizer

    def end(self, _: object) -> None:
        """A compilation ends, well or badly."""
        error = sys.exc_info()[1]
        if not isinstance(error, Unsupported) or not is_ours(compiled_frame()["compiler_fn"]):
            return
        stack = getattr(error, "real_stack", None)
        where = f"{stack[-1].filename}:{stack[-1].lineno}: {stack[-1].line}" if stack else "an unknown line"
        self.words = (
            f"Dynamo gave the model's forward up at {where}, and captured nothing of it: it runs as plain PyTorch "
            f"does, without greedysnake.\nDynamo's reason: {str(error).strip()}\n"
            f"For greedysnake, {remedy(error, where)}"
        )
        if self.hook is None:
            self.hook = register_optimizer_step_pre_hook(self.warn)

    def forget(self) -> None:
        """The backend is asked for something."""
        self.words = ""
        if self.hook is not None:
            self.hook.remove()
            self.hook = None

    def tell_of_limit(self) -> None:
        """Dynamo compiles a frame for the last time: warn at a step after it would have had to once more."""
        before = last_over_limit()

        def look(*_: Any) -> None:
            if (found := last_over_limit()) is not before:
                hook.remove()
                warnings.warn(over_limit(found), UncapturedWarning, stacklevel=3)

        hook = register_optimizer_step_pre_hook(look)

    def warn(self, optimizer: object, *_: Any) -> None:
        """An optimizer steps; one of this package finds no backward, and says why itself."""
        words = self.words
        self.forget()
        if words and not getattr(optimizer, "tells_of_given_up", False):
            warnings.warn(words, UncapturedWarning, stacklevel=3)
