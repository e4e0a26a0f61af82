"""Optimizers whose parameters and states live on the tiers: ``gs_compile.AdamW(model.parameters(), lr=3e-4)``.

They are torch optimizers to everyone else: param groups, schedulers, hooks and state dicts work. The difference is
when and where they work: the backend updates each unit's parameters as soon as its gradient is complete, or in the next
forward, on the CPU. `step()` closes the step and returns at once.

Settings are those of the moment the backward begins: a learning rate that a scheduler sets after `step()` counts for
the next one.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from gs_compile.errors import NonFiniteWarning, OptimizerError, ReleasedParameterError
from gs_compile.runtime import kernels
from gs_compile.runtime.kernels import ADAM, ADAMW, LION, Rule

if TYPE_CHECKING:
    from gs_compile.engine import Engine
    from gs_compile.runtime.trace import Total

_owners: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # parameter -> its optimizer


def optimizer_of(parameter: torch.Tensor) -> TieredOptimizer | None:
    """The gs_compile optimizer that was made for a parameter."""
    found = _owners.get(parameter)
    assert found is None or isinstance(found, TieredOptimizer)
    return found


@dataclass(frozen=True)
class StepInfo:
    """What the last step did."""

    number: int  # of steps taken so far, this one included if it was not skipped
    grad_norm: float  # of all gradients together, before clipping
    skipped: bool  # a gradient was not finite: nothing was changed
    num_skipped: int  # steps skipped so far
    lanes: Mapping[str, Total]  # seconds busy, and bytes by kind, of every lane since the step before


class TieredOptimizer(torch.optim.Optimizer):
    """The base of the optimizers of this package; `max_grad_norm` clips the norm of all gradients together.

    With `max_grad_norm` updates wait for that norm and run in the next forward, and a step whose gradients are not
    finite is skipped as a whole, its state untouched; infinity clips nothing, but skips.
    """

    rule: Rule

    def __init__(self, params: Any, defaults: dict[str, Any], max_grad_norm: float | None) -> None:
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise OptimizerError(f"max_grad_norm must be more than 0; got {max_grad_norm}")
        self.engine: Engine | None = None
        self.max_grad_norm = max_grad_norm
        self.num_steps = 0
        self.num_skipped = 0
        self.last_step: StepInfo | None = None
        self._loaded: Mapping[str, Any] | None = None  # a state dict that waits for the model's first call
        super().__init__(params, defaults)
        self.components = self.rule.components(defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, before the first step."""
        if self.engine is not None:
            raise OptimizerError("parameters cannot be added once the model has run: add_param_group before that")
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            known = optimizer_of(parameter)
            if known is not None and known is not self and known.engine is not None:
                raise OptimizerError("another gs_compile optimizer trains this parameter already")
            _owners[parameter] = self
        for key, value in self.param_groups[-1].items():
            if isinstance(value, torch.Tensor):
                raise OptimizerError(f"{key} must be a number, not a tensor")

    @property
    def group_of(self) -> Mapping[torch.Tensor, int]:
        """The number of each parameter's param group."""
        found: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        for number, group in enumerate(self.param_groups):
            for parameter in group["params"]:
                found[parameter] = number
        return found

    @torch._disable_dynamo
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Close the step whose backward has run; without one since the last step, do nothing."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.engine is None:
            self._refuse_gradients()
            return loss
        record = self.engine.finish()
        if record is not None:
            self.num_skipped += record.skipped
            self.num_steps += not record.skipped
            if record.skipped:
                self._warn(record.updated)
            lanes = self.engine.tiers.trace.totals()
            self.engine.tiers.trace.reset()
            self.last_step = StepInfo(self.num_steps, record.grad_norm, record.skipped, self.num_skipped, lanes)
        return loss

    def synchronize(self) -> None:
        """Return when all updates are done and written; `step` alone leaves some to the next forward."""
        if self.engine is not None:
            self.engine.synchronize()

    def _refuse_gradients(self) -> None:
        if any(parameter.grad is not None for group in self.param_groups for parameter in group["params"]):
            raise OptimizerError(
                "gradients have arrived in p.grad: the model did not run with the greedysnake backend. Compile it, "
                'model.compile(backend="greedysnake"), or use a torch.optim optimizer'
            )

    def _warn(self, updated: list[Any]) -> None:
        done = f"; units {', '.join(map(str, updated))} were updated before it showed" if updated else ""
        warnings.warn(
            f"a gradient is not finite: step {self.num_steps + 1} was skipped{done}"
            + (". With max_grad_norm= (inf to clip nothing) such a step is skipped as a whole" if done else ""),
            NonFiniteWarning,
            stacklevel=4,
        )

    # State -----------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """As torch's optimizers have it; tensors are mapped from files, so they take no memory until they are used."""
        packed = super().state_dict()
        packed["state"] = {}
        if self.engine is None:
            return dict(self._loaded) if self._loaded is not None else packed
        self.engine.synchronize()
        number = 0
        for group in self.param_groups:
            for parameter in group["params"]:
                if self.num_steps and id(parameter) in self.engine.slices and parameter.requires_grad:
                    packed["state"][number] = self.engine.state_of(parameter)
                number += 1
        return packed

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take up the state of one of these or of a torch optimizer of the same kind; masters are not part of it."""
        groups = state_dict["param_groups"]
        if [len(group["params"]) for group in groups] != [len(group["params"]) for group in self.param_groups]:
            raise OptimizerError("the state dict has other param groups than this optimizer")
        for mine, theirs in zip(self.param_groups, groups, strict=True):
            mine.update({key: value for key, value in theirs.items() if key in mine and key != "params"})
        self._loaded = state_dict
        steps = [int(entry["step"]) for entry in state_dict["state"].values() if "step" in entry]
        self.num_steps = max(steps, default=0)
        if self.engine is not None:
            self.load_into(self.engine)

    def load_into(self, engine: Engine) -> None:
        """Bring a loaded state home."""
        if self._loaded is None:
            return
        engine.synchronize()
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        numbers = [number for group in self._loaded["param_groups"] for number in group["params"]]
        for parameter, number in zip(parameters, numbers, strict=True):
            if number in self._loaded["state"]:
                engine.load_state(parameter, self._loaded["state"][number])
        self._loaded = None

    def __getstate__(self) -> dict[str, Any]:
        raise ReleasedParameterError("a gs_compile optimizer cannot be pickled; use its state_dict()")


def _checked(name: str, **numbers: Any) -> dict[str, Any]:
    for key, value in numbers.items():
        values: Iterable[Any] = value if isinstance(value, tuple | list) else (value,)
        for number in values:
            if isinstance(number, torch.Tensor):
                raise OptimizerError(f"{name}: {key} must be a number, not a tensor")
            if number is not None and not isinstance(number, bool) and not number >= 0:
                raise OptimizerError(f"{name}: {key} must not be negative; got {value}")
        if key == "betas" and not all(0 <= beta < 1 for beta in values):
            raise OptimizerError(f"{name}: betas must be in [0, 1); got {value}")
    return numbers


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
    ) -> None:
        numbers = _checked("AdamW", lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        super().__init__(params, {**numbers, "maximize": maximize}, max_grad_norm)


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
    ) -> None:
        numbers = _checked("Adam", lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        super().__init__(params, {**numbers, "maximize": maximize}, max_grad_norm)


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
    ) -> None:
        numbers = _checked("SGD", lr=lr, momentum=momentum, weight_decay=weight_decay)
        if nesterov and (momentum <= 0 or dampening != 0):
            raise OptimizerError("SGD: nesterov needs momentum, and no dampening")
        rest = {"dampening": dampening, "nesterov": nesterov, "maximize": maximize}
        super().__init__(params, {**numbers, **rest}, max_grad_norm)


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
    ) -> None:
        numbers = _checked("Lion", lr=lr, betas=betas, weight_decay=weight_decay)
        super().__init__(params, {**numbers, "maximize": maximize}, max_grad_norm)
