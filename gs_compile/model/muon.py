"""Muon: matrices are updated by their momentum, orthogonalized; all else in the model by AdamW.

The matrices are the parameters of two dimensions that layers alone read, so no embedding and no head; a param group
may say otherwise. Their arithmetic is that of torch.optim.Muon, that of the others of torch.optim.AdamW(fused=True).

    gs_compile.Muon(model.parameters(), lr=0.02, adamw_lr=3e-4)
    gs_compile.Muon([{"params": matrices, "use_muon": True}, {"params": others, "use_muon": False}], lr=0.02)
    gs_compile.Muon([{"params": fused, "cut": (0, 4096, 1024, 1024)}, ...])    rows of queries, keys and values
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from gs_compile.errors import OptimizerError
from gs_compile.model.optimizer import Group
from gs_compile.model.settings import check_settings
from gs_compile.model.tiered_optimizer import TieredOptimizer
from gs_compile.runtime.formats import StateType
from gs_compile.runtime.kernels import ADAMW
from gs_compile.runtime.muon import COEFFICIENTS, NS_STEPS, STATES, Matrices, matrices_of

MOST_STEPS = 99  # as of torch.optim.Muon
OF_MATRICES = ("lr", "weight_decay", "momentum", "nesterov", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn")
NUMBERS = ("lr", "weight_decay", "momentum", "eps")
OF_OTHERS = ("lr", "betas", "eps", "weight_decay")


class Muon(TieredOptimizer):
    """Muon for matrices, as torch.optim.Muon computes it, and AdamW for the rest.

    use_muon: of a param group. True: its parameters are matrices or stacks of them, wherever they are. False: none is.
        None: those of layers are.
    cut: of a param group: the dimension, 0 or 1, along which each of its matrices is cut into several, and their sizes;
        (): by the names (`matrices_of`).
    adamw_lr: changes in proportion to `lr`, which schedulers change.
    max_grad_norm: as in `AdamW`.
    state_dtype: of momentum and moments: None, torch.float32 or torch.bfloat16.

    Raises OptimizerError for a setting out of range.
    """

    rule = ADAMW
    orthogonalizes = True

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = COEFFICIENTS,
        eps: float = 1e-7,
        ns_steps: int = NS_STEPS,
        adjust_lr_fn: str | None = None,
        *,
        adamw_lr: float = 3e-4,
        adamw_betas: tuple[float, float] = (0.9, 0.999),
        adamw_eps: float = 1e-8,
        adamw_weight_decay: float = 1e-2,
        max_grad_norm: float | None = None,
        state_dtype: StateType = None,
    ) -> None:
        if state_dtype == "8bit":
            raise OptimizerError("Muon: state_dtype must be None, torch.float32 or torch.bfloat16, not 8 bits")
        given = lr, weight_decay, momentum, nesterov, ns_coefficients, eps, ns_steps, adjust_lr_fn
        others = {"lr": adamw_lr, "betas": adamw_betas, "eps": adamw_eps, "weight_decay": adamw_weight_decay}
        own: dict[str, Any] = {**dict(zip(OF_MATRICES, given, strict=True)), "use_muon": None, "cut": ()}
        own |= {f"adamw_{key}": each for key, each in others.items()}
        super().__init__(params, own, max_grad_norm, state_dtype)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, before the first step."""
        if isinstance(param_group, dict):  # torch raises for others
            param_group.setdefault("first_lr", param_group.get("lr", self.defaults["lr"]))
        super().add_param_group(param_group)

    def settings(self, group: Group) -> dict[str, Any]:
        """AdamW's settings, and in addition those of matrices."""
        others = {key: group[f"adamw_{key}"] for key in OF_OTHERS}
        others["lr"] *= group["lr"] / group["first_lr"] if group["first_lr"] else 1.0
        return {**others, "matrices": {key: group[key] for key in OF_MATRICES}}

    @property
    def components(self) -> tuple[str, ...]:
        """Names of the tensors of a state, except those of matrices."""
        return ADAMW.states

    def components_of(self, parameter: Tensor, group: Group | None = None) -> tuple[str, ...]:
        """The components of one parameter. Before the model's first call, any of two dimensions counts as a matrix."""
        if group is not None:
            return STATES if self.matrices(parameter, group, of_layer=True) else ADAMW.states
        span = self.trained_span(parameter)
        assert self.engine is not None, "before the first call there is a group"
        assert span is not None, "only what is trained on the tiers is asked for"
        return tuple(self.engine.moments_of(span))

    def matrices(self, parameter: Tensor, group: Group, path: str = "", *, of_layer: bool = False) -> Matrices | None:
        """The matrices of a parameter that Muon updates: by its group; if that says nothing, those of layers."""
        if group["use_muon"] is False or not (group["use_muon"] or of_layer):
            return None
        if group["use_muon"] and parameter.dim() == 3 and not group["cut"]:
            return Matrices(tuple(parameter.shape), num_steps=group["ns_steps"])
        return matrices_of(path, parameter.shape, group["cut"], group["ns_steps"])

    def _check(self, group: Mapping[str, Any]) -> None:
        check_settings("Muon", NUMBERS, {key: group[key] for key in NUMBERS})
        others = {key: group[f"adamw_{key}"] for key in OF_OTHERS}
        check_settings("AdamW in Muon", OF_OTHERS, {**others, "amsgrad": group.get("amsgrad")})
        if unknown := [key for key in ("betas", "dampening", "maximize") if key in group]:
            raise OptimizerError(f"Muon: a group has {unknown[0]}; settings of AdamW are adamw_lr, adamw_betas ...")
        factors, number = group["ns_coefficients"], group["ns_steps"]
        if len(factors) != 3 or not all(isinstance(each, int | float) and math.isfinite(each) for each in factors):
            raise OptimizerError(f"Muon: ns_coefficients must be three numbers; got {factors}")
        if not isinstance(number, int) or not 0 <= number <= MOST_STEPS:
            raise OptimizerError(f"Muon: ns_steps must be a whole number up to {MOST_STEPS}; got {number!r}")
        if group["adjust_lr_fn"] not in (None, "original", "match_rms_adamw"):
            raise OptimizerError(
                f'Muon: adjust_lr_fn must be None, "original" or "match_rms_adamw"; got {group["adjust_lr_fn"]!r}'
            )
        if group["use_muon"] not in (None, True, False):
            raise OptimizerError(f"Muon: use_muon must be True, False or None; got {group['use_muon']!r}")
        for parameter in group.get("params", ()):
            _check_shape(tuple(parameter.shape), group)


def _check_shape(shape: tuple[int, ...], group: Mapping[str, Any]) -> None:
    """Raise OptimizerError for a parameter that cannot be what its group says."""
    is_matrix, cut = len(shape) in (2, 3), group["cut"]
    if group["use_muon"] and not is_matrix:
        raise OptimizerError(
            f"Muon: a parameter of shape {shape} is neither a matrix nor a stack of matrices: leave it out of the "
            "group with use_muon=True, or reshape it"
        )
    if not cut or not is_matrix:
        return
    is_whole = isinstance(cut, Sequence) and all(isinstance(each, int) for each in cut) and len(cut) > 1
    if not is_whole or cut[0] not in (0, 1) or min(cut[1:]) < 1:
        raise OptimizerError(f"Muon: cut must be the dimension, 0 or 1, and the sizes along it; got {cut!r}")
    if sum(cut[1:]) != shape[len(shape) - 2 + cut[0]]:
        raise OptimizerError(f"Muon: a parameter of shape {shape} cannot be cut along {cut[0]} into {tuple(cut[1:])}")
