"""check: one look at a machine: what was found, and what to do about it.

    @check("swap")
    def swap() -> Finding: ...

A function that returns words has found nothing wrong. What the system does not tell, as a sandbox may hide /proc and
/sys, is a warning.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Literal, ParamSpec, TypeAlias

State: TypeAlias = Literal["ok", "warn", "bad"]
P = ParamSpec("P")


@dataclass(frozen=True, slots=True)
class Check:
    """warn: it works, but slower or less than it could; bad: a run will fail. `advice` is empty where all is well."""

    name: str
    state: State
    found: str
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that is wrong, and what to do about it."""

    found: str
    advice: str
    state: State = "warn"


Finding: TypeAlias = str | Problem


def check(name: str) -> Callable[[Callable[P, Finding]], Callable[P, Check]]:
    """Make a `Check` of what a function returns; `name` may hold {0}, its first argument."""

    def decorate(look: Callable[P, Finding]) -> Callable[P, Check]:
        @wraps(look)
        def looked(*args: P.args, **kwargs: P.kwargs) -> Check:
            title = name.format(*args)
            try:
                found = look(*args, **kwargs)
            except (OSError, ValueError, IndexError) as error:
                return Check(title, "warn", f"not told by the system: {error}")
            if isinstance(found, str):
                return Check(title, "ok", found)
            return Check(title, found.state, found.found, found.advice)

        return looked

    return decorate
