"""preload: what every case's process begins with; imported for its effect.

A torchvision that was built for another device than torch brings no operators, and then cannot be imported, nor what
imports it. No model here uses these operators: where they are missing they are declared, without code.
"""

from __future__ import annotations

import sys
import warnings

import torch

MISSING = ("nms", "qnms")  # for which torchvision registers shapes


def declare_operators() -> list[torch.library.Library]:
    """Declares torchvision's operators where it has none itself."""
    try:
        import torchvision  # noqa: F401
    except ImportError:
        return []
    except RuntimeError:
        for name in [each for each in sys.modules if each.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        library = torch.library.Library("torchvision", "DEF")
        for name in MISSING:
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return [library]
    return []


warnings.simplefilter("ignore")
torch.set_num_threads(1)
DECLARED = declare_operators()
import transformers  # noqa: E402

import gs_compile.model.backend  # noqa: E402, F401

transformers.logging.set_verbosity_error()
