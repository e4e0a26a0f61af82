"""check: one look at a machine: what was found, and what to do about it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple, TypeAlias

State: TypeAlias = Literal["ok", "warn", "bad"]


class Check(NamedTuple):
    """What a look has found, and what to do where something is wrong: a warning, if a run will not fail of it."""

    found: str
    advice: str = ""
    is_bad: bool = False
    name: str = ""

    @property
    def state(self) -> State:
        """warn: it works, but slower or less than it could; bad: a run will fail."""
        return "bad" if self.is_bad else "warn" if self.advice else "ok"

    def as_dict(self) -> dict[str, str]:
        """For people and for JSON."""
        return {"name": self.name, "state": self.state, "found": self.found, "advice": self.advice}


def checked(name: str, look: Callable[..., Check], *args: object) -> Check:
    """What a look at something has found, under its name; what the system does not tell is a warning."""
    try:
        return look(*args)._replace(name=name)
    except (OSError, ValueError, IndexError) as error:
        return Check(f"not told by the system: {error}", "a sandbox may hide /proc and /sys: run outside it", name=name)
