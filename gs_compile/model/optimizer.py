"""optimizer: what the parts of a run ask of the optimizer that trains in it (`tiered_optimizer.TieredOptimizer`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from gs_compile.model.kept import Kept
from gs_compile.model.step_count import StepCount
from gs_compile.runtime.kernels import Rule
from gs_compile.runtime.muon import Matrices
from gs_compile.runtime.step_record import StepRecord

Group = Mapping[str, Any]  # a param group


class Loop(NamedTuple):
    """What the first step has shown of a script's loop.

    accumulates: steps have several backwards. num_calls: that are between forward and backward at a time.
    """

    accumulates: bool = False
    num_calls: int = 1


class Optimizer(Protocol):
    rule: Rule
    orthogonalizes: bool
    param_groups: list[dict[str, Any]]
    state: Any
    max_grad_norm: float | None
    loss_scale: Callable[[], float]
    turn: AbstractContextManager[Any]
    kept: Kept
    steps: StepCount
    num_skipped: int
    loop: Loop

    @property
    def step(self) -> Callable[..., Any]: ...
    @property
    def num_steps(self) -> int: ...
    @property
    def group_of(self) -> Mapping[Tensor, int]: ...
    @property
    def components(self) -> tuple[str, ...]: ...
    @property
    def moments(self) -> tuple[torch.dtype | None, ...]: ...
    def matrices(
        self, parameter: Tensor, group: Group, path: str = "", *, of_layer: bool = False
    ) -> Matrices | None: ...
    def begin_step(self) -> StepRecord: ...
    def as_set(self) -> StepRecord: ...
