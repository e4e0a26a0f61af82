"""optimizer_like: what the engine, and what it is made of, ask of an optimizer, which is made of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor

from gs_compile.model.kept import Kept
from gs_compile.runtime.kernels import Rule
from gs_compile.runtime.muon import Matrices
from gs_compile.runtime.step_record import StepRecord


class OptimizerLike(Protocol):
    """A `TieredOptimizer`, which says what these are."""

    rule: Rule
    orthogonalizes: bool
    param_groups: list[dict[str, Any]]
    state: Any
    engine: Any
    kept: Kept
    turn: AbstractContextManager[Any]
    max_grad_norm: float | None
    loss_scale: Callable[[], float]
    missed: Mapping[Tensor, int]
    num_skipped: int
    num_steps_read: int | None
    accumulates: bool
    num_calls: int

    @property
    def step(self) -> Callable[..., Any]: ...
    @property
    def num_steps(self) -> int: ...
    @property
    def group_of(self) -> Mapping[Tensor, int]: ...
    @property
    def hypers(self) -> list[dict[str, Any]]: ...
    @property
    def components(self) -> tuple[str, ...]: ...
    @property
    def moments(self) -> tuple[Any, ...]: ...
    def matrices(self, parameter: Tensor, path: str = "", *, of_layer: bool = False) -> Matrices | None: ...
    def show_state(self, parameter: Tensor) -> None: ...
    def begin_step(self) -> StepRecord: ...
    def as_set(self) -> StepRecord: ...
