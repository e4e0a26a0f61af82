"""Optimizers whose parameters and states live on the tiers: ``gs_compile.AdamW(model.parameters(), lr=3e-4)``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gs_compile.capture.internals import untraced
from gs_compile.errors import OptimizerError
from gs_compile.model.settings import check_torch_settings
from gs_compile.model.tiered_optimizer import TieredOptimizer
from gs_compile.runtime import kernels
from gs_compile.runtime.formats import StateType
from gs_compile.runtime.kernels import ADAM, ADAMW, LION
from gs_compile.runtime.step_record import StepRecord
from gs_compile.runtime.storage.stored import Manifest


class AdamW(TieredOptimizer):
    """AdamW (arXiv 1711.05101), as torch.optim.AdamW(fused=True) computes it; made before the model's first call.

    params: all parameters that are trained, or param groups of them.
    max_grad_norm: the bound of the norm of all gradients together, for which they wait, 4 bytes an element. None clips
        nothing; infinity clips nothing, but skips a step whose gradients are not finite as a whole.
    state_dtype: of the stored moments: None or torch.float32, torch.bfloat16, or "8bit". An update rounds the latter
        two at random, the same way in every run. Parameters in float64 have moments in float64.
    of_torch: `foreach`, `fused` and `capturable` of torch's optimizer, which have no effect.

    Raises OptimizerError for a setting out of range, and for one of torch's that is not supported, such as `amsgrad`.
    """

    rule = ADAMW

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
        max_grad_norm: float | None = None,
        state_dtype: StateType = None,
        **of_torch: Any,
    ) -> None:
        check_torch_settings("AdamW", of_torch)
        numbers = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**numbers, "maximize": maximize}, max_grad_norm, state_dtype)


class Adam(TieredOptimizer):
    """Adam (arXiv 1412.6980) with L2 decay, as torch.optim.Adam(fused=True) computes it; see `AdamW` for the rest."""

    rule = ADAM

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        max_grad_norm: float | None = None,
        state_dtype: StateType = None,
        **of_torch: Any,
    ) -> None:
        check_torch_settings("Adam", of_torch)
        numbers = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**numbers, "maximize": maximize}, max_grad_norm, state_dtype)


class SGD(TieredOptimizer):
    """SGD with momentum, as torch.optim.SGD(fused=True) computes it; see `AdamW` for `max_grad_norm` and the rest."""

    rule = kernels.SGD

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        max_grad_norm: float | None = None,
        state_dtype: StateType = None,
        **of_torch: Any,
    ) -> None:
        check_torch_settings("SGD", of_torch)
        numbers = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        rest = {"dampening": dampening, "nesterov": nesterov, "maximize": maximize}
        self._begun: set[int] | None = None  # the numbers of groups that have had a momentum
        super().__init__(params, {**numbers, **rest}, max_grad_norm, state_dtype)

    def as_set(self) -> StepRecord:
        """Raises OptimizerError also where a dampened momentum begins after the first step."""
        record = super().as_set()
        own = self._with_momentum
        begun = self._begun if self.steps.taken and self._begun is not None else own
        if any(self.param_groups[number]["dampening"] for number in own - begun):
            raise OptimizerError(
                "SGD: a param group's momentum was 0 so far, and it has a dampening: torch does not dampen the "
                "gradient that a momentum begins with, which here is that of the first step. Set its dampening to 0, "
                "or its momentum before the first step"
            )
        self._begun = begun | own
        return record

    def go_on(self, former: Manifest) -> None:
        super().go_on(former)
        self._begun = self._with_momentum

    @untraced
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._begun = self._with_momentum

    @property
    def _with_momentum(self) -> set[int]:
        return {number for number, group in enumerate(self.param_groups) if group["momentum"]}


class Lion(TieredOptimizer):
    """Lion (arXiv 2302.06675): the sign of an interpolated momentum, with decoupled decay; see `AdamW` for the rest."""

    rule = LION

    def __init__(
        self,
        params: Any,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        max_grad_norm: float | None = None,
        state_dtype: StateType = None,
    ) -> None:
        numbers = {"lr": lr, "betas": betas, "weight_decay": weight_decay}
        super().__init__(params, {**numbers, "maximize": maximize}, max_grad_norm, state_dtype)
