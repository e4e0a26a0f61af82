"""GreedySnake: train models larger than the accelerator, as a torch.compile backend.

    model.compile(backend="greedysnake", options={"micro_batch_size": 2})

runs the training step layer by layer for all micro-batches (vertical scheduling, arXiv 2512.17570), with the loss and
gradients of plain PyTorch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gs_compile.config import Expert, Options
from gs_compile.errors import GreedySnakeError

if TYPE_CHECKING:
    from gs_compile.inspection import Inspection, inspect

__version__ = "0.1.0"

__all__ = ["Expert", "GreedySnakeError", "Inspection", "Options", "__version__", "inspect"]


def __getattr__(name: str) -> Any:
    """Names that need torch come when they are first used: importing this package takes no time."""
    if name in ("Inspection", "inspect"):
        from gs_compile import inspection

        return getattr(inspection, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
