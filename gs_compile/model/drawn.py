"""drawn: what a script does with random numbers between a step and the next call of the model, which commits tell.

A resumed run begins that call with the random numbers of the commit. What is drawn ahead of it each process draws anew,
and it is the same only if the script gives torch a seed there.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Literal, TypeAlias

import torch

from gs_compile.runtime.random_state import random_state
from gs_compile.runtime.storage.stored import Manifest

log = logging.getLogger(__name__)

Told: TypeAlias = Literal["", "draws", "seeds"]

OF_OTHERS = frozenset(("python", "numpy"))  # the names of random states that are not torch's
AHEAD = (
    "random numbers that the script has drawn between step %d and the next call of the model, such as noise, the order "
    "of an epoch, or dropout of an encoder ahead of the model, are others in this process: this first step is not that "
    "of an undisturbed run. Where each step begins with torch.manual_seed(seed + step), they are the same"
)


class Drawn:
    """What the script has done. is_between_calls: the commit that is due is made between two calls."""

    is_between_calls = False
    _ended: tuple[int, Mapping[str, str]] | None = None  # seed and random state at the end of a step, until a call
    _latest: Told = ""  # ahead of the first call of the latest step

    def end_step(self) -> None:
        self._ended = torch.initial_seed(), random_state()

    def end_call(self, random: Mapping[str, str] | None) -> None:
        """A training call ends, which has begun with a random state."""
        if self._ended is not None:
            self._latest, self._ended = self._since(random), None

    def told(self, random: Mapping[str, str] | None) -> Told:
        """The entry of a commit: see `Manifest`. random: as above, of the call under way."""
        return self._latest if self.is_between_calls else self._since(random) and "draws"

    def _since(self, random: Mapping[str, str] | None) -> Told:
        if self._ended is None or random == self._ended[1]:
            return ""
        return "draws" if torch.initial_seed() == self._ended[0] else "seeds"


def first_state(former: Manifest, now: Mapping[str, str] | None) -> Mapping[str, str]:
    """The random state of the first call that goes on from a commit. now: as the call has found it."""
    if now is not None and former.drawn == "draws" and now != former.random:
        log.warning(AHEAD, former.step)
    if now is not None and former.drawn == "seeds":
        return {**now, **{name: former.random[name] for name in OF_OTHERS & former.random.keys()}}
    return former.random
