"""check: one look at a machine: what was found, and what to do about it.

What the system does not tell, as a sandbox may hide /proc and /sys, is a warning.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

State: TypeAlias = Literal["ok", "warn", "bad"]


class Finding(NamedTuple):
    """What a look has found; `advice` says what to do where something is wrong: a warning, if not worse."""

    found: str
    advice: str = ""
    is_bad: bool = False

    @property
    def state(self) -> State:
        return "bad" if self.is_bad else "warn" if self.advice else "ok"


@dataclass(frozen=True, slots=True)
class Check:
    """warn: it works, but slower or less than it could; bad: a run will fail. `advice` is empty where all is well."""

    name: str
    state: State
    found: str
    advice: str = ""


def checked(name: str, look: Callable[..., Finding], *args: object) -> Check:
    """What a look at something has found, under its name."""
    try:
        finding = look(*args)
    except (OSError, ValueError, IndexError) as error:
        return Check(name, "warn", f"not told by the system: {error}")
    return Check(name, finding.state, finding.found, finding.advice)
