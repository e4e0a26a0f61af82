"""GreedySnake: train models larger than the accelerator and than host memory, as a torch.compile backend.

    model.compile(backend="greedysnake", options={"micro_batch_size": 2})

runs the training step layer by layer for all micro-batches (vertical scheduling, arXiv 2512.17570), with the loss and
gradients of plain PyTorch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from gs_compile.errors import GreedySnakeError
from gs_compile.options import Expert, Options, Ratios
from gs_compile.version import __version__

if TYPE_CHECKING:
    from gs_compile import hf
    from gs_compile.hf.weights import from_pretrained, save_pretrained
    from gs_compile.model.inspection import Inspection, inspect
    from gs_compile.model.loss_scale import LossScaler
    from gs_compile.model.materialize import materialize, streaming
    from gs_compile.model.muon import Muon
    from gs_compile.model.optim import SGD, Adam, AdamW, Lion
    from gs_compile.model.outputs import loss_alone
    from gs_compile.model.resume import Resumed, StepSampler, resume
    from gs_compile.model.storage_init import init_on_storage
    from gs_compile.model.tiered_optimizer import metrics
    from gs_compile.planner.measure.profile import Profile
    from gs_compile.planner.plan import plan
    from gs_compile.planner.step_plan import StepPlan

__all__ = [
    "SGD",
    "Adam",
    "AdamW",
    "Expert",
    "GreedySnakeError",
    "Inspection",
    "Lion",
    "LossScaler",
    "Muon",
    "Options",
    "Profile",
    "Ratios",
    "Resumed",
    "StepPlan",
    "StepSampler",
    "__version__",
    "from_pretrained",
    "hf",
    "init_on_storage",
    "inspect",
    "loss_alone",
    "materialize",
    "metrics",
    "plan",
    "resume",
    "save_pretrained",
    "streaming",
]

_LATER = {  # names that need torch come when they are first used: importing this package takes no time
    "hf.weights": ("from_pretrained", "save_pretrained"),
    "model.inspection": ("Inspection", "inspect"),
    "model.loss_scale": ("LossScaler",),
    "model.materialize": ("materialize", "streaming"),
    "model.muon": ("Muon",),
    "model.optim": ("AdamW", "Adam", "SGD", "Lion"),
    "model.outputs": ("loss_alone",),
    "model.resume": ("Resumed", "StepSampler", "resume"),
    "model.storage_init": ("init_on_storage",),
    "model.tiered_optimizer": ("metrics",),
    "planner.measure.profile": ("Profile",),
    "planner.plan": ("plan",),
    "planner.step_plan": ("StepPlan",),
}


def __getattr__(name: str) -> Any:
    if name == "hf":
        return import_module("gs_compile.hf")
    for module, names in _LATER.items():
        if name in names:
            return getattr(import_module(f"gs_compile.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
