"""GreedySnake: train models larger than the accelerator and than host memory, as a torch.compile backend.

    model.compile(backend="greedysnake", options={"micro_batch_size": 2})

runs the training step layer by layer for all micro-batches (vertical scheduling, arXiv 2512.17570), with the loss and
gradients of plain PyTorch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from gs_compile.config import Expert, Options, Ratios
from gs_compile.errors import GreedySnakeError

if TYPE_CHECKING:
    from gs_compile.initialise import init_on_storage
    from gs_compile.inspection import Inspection, inspect
    from gs_compile.materialized import materialize
    from gs_compile.optim import SGD, Adam, AdamW, Lion
    from gs_compile.planner import plan
    from gs_compile.profile import Profile
    from gs_compile.step_plan import StepPlan

__version__ = "0.2.0"

__all__ = [
    "SGD",
    "Adam",
    "AdamW",
    "Expert",
    "GreedySnakeError",
    "Inspection",
    "Lion",
    "Options",
    "Profile",
    "Ratios",
    "StepPlan",
    "__version__",
    "init_on_storage",
    "inspect",
    "materialize",
    "plan",
]

# Names that need torch come when they are first used: importing this package takes no time.
_MODULES = {
    "Inspection": "inspection",
    "inspect": "inspection",
    "init_on_storage": "initialise",
    "materialize": "materialized",
    "Profile": "profile",
    "StepPlan": "step_plan",
    "plan": "planner",
    "AdamW": "optim",
    "Adam": "optim",
    "SGD": "optim",
    "Lion": "optim",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(f"gs_compile.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
