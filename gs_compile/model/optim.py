"""Optimizers whose parameters and states live on the tiers: ``gs_compile.AdamW(model.parameters(), lr=3e-4)``.

state_dtype: of the moments there. torch.bfloat16 moves and stores half of what float32 does, which is the default, and
"8bit" a quarter; an update rounds them at random, the same way in every run, so it does not learn the very same
numbers. Parameters in float64 have all moments in float64.

of_torch: `foreach`, `fused` and `capturable` of the optimizer of torch, which say how it computes, are passed over.
"""

from __future__ import annotations

from typing import Any

from gs_compile.model.settings import check_torch_settings
from gs_compile.model.tiered_optimizer import TieredOptimizer
from gs_compile.runtime import kernels
from gs_compile.runtime.formats import StateType
from gs_compile.runtime.kernels import ADAM, ADAMW, LION


class AdamW(TieredOptimizer):
    """AdamW, as torch.optim.AdamW(fused=True) computes it."""

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
    """Adam with L2 decay, as torch.optim.Adam(fused=True) computes it."""

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
    """SGD with momentum, as torch.optim.SGD(fused=True) computes it."""

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
        super().__init__(params, {**numbers, **rest}, max_grad_norm, state_dtype)


class Lion(TieredOptimizer):
    """Lion (arXiv 2302.06675): the sign of an interpolated momentum, with decoupled decay."""

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
