"""step_count: how many steps were taken, and how many of them each parameter missed, for example as it was frozen."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from gs_compile.model.parameter_store import as_step


class StepCount:
    """The steps that an optimizer has taken; parameters with equal counts share one tensor that shows the count."""

    def __init__(self) -> None:
        self.taken = 0
        self.read: int | None = None  # by the user, before the first call, which may resume at another number
        self._missed: Mapping[torch.Tensor, int] = {}
        self._shown: dict[int, torch.Tensor] = {}  # by the steps that were missed

    @property
    def missed(self) -> Mapping[torch.Tensor, int]:
        """The number of steps that each parameter has missed, for those that missed any."""
        return self._missed

    @missed.setter
    def missed(self, missed: Mapping[torch.Tensor, int]) -> None:
        self._missed = {parameter: number for parameter, number in missed.items() if number}
        self._shown = {number: shown for number, shown in self._shown.items() if number in {0, *missed.values()}}

    def become(self, taken: int) -> None:
        """Set the number of steps taken, and show it."""
        self.taken = taken
        for missed, shown in self._shown.items():
            shown.fill_(taken - missed)

    def of(self, parameter: torch.Tensor) -> int:
        """The steps that a parameter has taken part in."""
        return self.taken - self._missed.get(parameter, 0)

    def shown(self, parameter: torch.Tensor) -> torch.Tensor:
        """The same as a tensor for `state`: one for all parameters with the same count."""
        taken = self.of(parameter)
        return self._shown.setdefault(self.taken - taken, as_step(taken))
