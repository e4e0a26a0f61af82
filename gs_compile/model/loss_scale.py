"""loss_scale: the loss scale of fp16, for updates that run in the backward.

As with torch's GradScaler the loss is multiplied by the scale before its backward, so that gradients do not vanish in
fp16. Here the updates, and the norm that clips, divide the gradients by it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from gs_compile.errors import OptimizerError
from gs_compile.model.tiered_optimizer import TieredOptimizer


class LossScaler:
    """Replaces `torch.amp.GradScaler`, with its methods, settings and state dict; for one optimizer.

    A step whose gradients are not finite is skipped as a whole, and the scale is reduced. So an optimizer that clips
    nothing gets ``max_grad_norm=inf``, with which all updates wait for the norm. Settings are powers of two, so that
    division is exact.
    """

    def __init__(
        self,
        optimizer: TieredOptimizer | None = None,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
    ) -> None:
        self._scale = init_scale
        self._settings = {
            "growth_factor": growth_factor,
            "backoff_factor": backoff_factor,
            "growth_interval": growth_interval,
        }
        self._growth_tracker = 0  # steps since the scale has changed
        self._skipped = False
        if optimizer is not None:
            self.serve(optimizer)

    @classmethod
    def like(cls, scaler: torch.amp.GradScaler) -> LossScaler:
        """One with a GradScaler's scale and settings, for an optimizer that is made later: see `serve`."""
        growth, backoff = scaler.get_growth_factor(), scaler.get_backoff_factor()
        return cls(None, scaler.get_scale(), growth, backoff, scaler.get_growth_interval())

    def serve(self, optimizer: TieredOptimizer) -> None:
        """Have the optimizer divide by the scale; before the model's first call. Commits keep the scale's state."""
        optimizer.loss_scale = self.get_scale
        optimizer.kept.states["loss_scale"] = self
        if optimizer.max_grad_norm is None:
            optimizer.max_grad_norm = math.inf

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss times the scale; call its `backward`."""
        return loss * self._scale

    def unscale_(self, optimizer: TieredOptimizer) -> None:
        """Do nothing: gradients are not in p.grad."""

    def step(self, optimizer: TieredOptimizer, *args: Any, **kwargs: Any) -> Any:
        """Call ``optimizer.step()``, if the step is not skipped: else no hook and no scheduler learns of it."""
        if optimizer.loss_scale != self.get_scale:
            raise OptimizerError("this LossScaler belongs to another optimizer: make it with LossScaler(optimizer)")
        optimizer.count_late()
        self._skipped = optimizer.will_skip
        return optimizer.close_step() if self._skipped else optimizer.step(*args, **kwargs)

    def update(self) -> None:
        """Set the scale of the next step: lower after a skipped step, higher after many steps that were not skipped."""
        self._growth_tracker = 0 if self._skipped else self._growth_tracker + 1
        if self._skipped:
            self._scale *= self._settings["backoff_factor"]
        elif self._growth_tracker == self._settings["growth_interval"]:
            self._growth_tracker = 0
            grown = self._scale * self._settings["growth_factor"]
            self._scale = grown if torch.tensor(grown, dtype=torch.float32).isfinite() else self._scale

    def get_scale(self) -> float:
        """The scale as it is now."""
        return self._scale

    def is_enabled(self) -> bool:
        """True."""
        return True

    def state_dict(self) -> dict[str, Any]:
        """As torch's."""
        return {"scale": self._scale, **self._settings, "_growth_tracker": self._growth_tracker}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`; takes a GradScaler's, too."""
        self._scale, self._growth_tracker = state_dict["scale"], state_dict["_growth_tracker"]
        self._settings = {name: state_dict[name] for name in self._settings}
