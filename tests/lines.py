"""Functions without one of their lines: what a test is for that is to fail without it."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from typing import Any

JOIN = "join_all(self.values.users.idle(value), None)"  # where the user's thread waits for who uses a value


def without(owner: Any, name: str, line: str) -> Callable[..., Any]:
    """A function of a class or module in which `line`, which is there once, does nothing."""
    function = inspect.unwrap(getattr(owner, name))
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(f"{line}\n") == 1, f"{name} has no one line {line}"
    found: dict[str, Any] = {}
    exec(compile(source.replace(f"{line}\n", "pass\n"), f"<{name}>", "exec"), function.__globals__, found)
    made: Callable[..., Any] = found[name]
    return made
