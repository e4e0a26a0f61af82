"""GreedySnake: train models larger than the accelerator, as a torch.compile backend.

    model.compile(backend="greedysnake", options={"micro_batch_size": 2})

runs the training step layer by layer for all micro-batches (vertical scheduling, arXiv 2512.17570), with the loss and
gradients of plain PyTorch.
"""

from __future__ import annotations

from gs_compile.config import Expert, Options
from gs_compile.errors import GreedySnakeError

__version__ = "0.1.0"

__all__ = ["Expert", "GreedySnakeError", "Options", "__version__"]
