"""check: what one look at a machine has found, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

State: TypeAlias = Literal["ok", "warn", "bad"]


@dataclass(frozen=True, slots=True)
class Check:
    """warn: it works, but slower or less than it could; bad: a run will fail. `advice` is empty where all is well."""

    name: str
    state: State
    found: str
    advice: str = ""
