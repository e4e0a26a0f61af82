"""loaded: a model that transformers loaded with matrices quantized by bitsandbytes becomes an ordinary one.

The bytes of its matrices go to files unchanged, like those of a quantized checkpoint that `from_pretrained` reads.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from gs_compile.hf.frozen import NAMES, become_ordinary, in_codec
from gs_compile.model.files import directory
from gs_compile.model.offloaded import placeholder
from gs_compile.model.residency import residency_of, stash
from gs_compile.model.storage_init import NewTensorsInFiles
from gs_compile.options import Options
from gs_compile.planner.cost.model import base_model
from gs_compile.runtime.codecs import CODECS


class Linear(nn.Linear):
    """Computes in the dtype that bitsandbytes computes in."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dtype = getattr(self, "compute_dtype", None) or x.dtype  # int8 has none
        bias = None if self.bias is None else self.bias.to(dtype)
        return functional.linear(x.to(dtype), self.weight.to(dtype), bias).to(x.dtype)


def take_over(model: Any, options: Options) -> None:
    """Replace the linear layers of bitsandbytes in a model by torch's, with the same matrices, frozen and encoded.

    Raises OptionError for blocks of another size than a codec has.
    """
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    found = [module for module in linear if type(module).__module__.startswith("bitsandbytes.nn")]
    if not found:
        return
    base = base_model(model)
    dtype = next(each.dtype for each in base.parameters() if each.is_floating_point())
    files = NewTensorsInFiles(directory(options.storage[0]))
    for module in found:
        _encode(module, dtype, files)
    files.drop_pages(down_to_nbytes=0)
    for module in model.modules():
        if type(module).__module__ == "peft.tuners.lora.bnb":  # it can merge only into bitsandbytes' matrices
            module.__class__, module.is_target_conv_1d_layer = sys.modules["peft.tuners.lora.layer"].Linear, False
    if hasattr(base, "hf_quantizer"):
        become_ordinary(base)
    for each in (model, base):
        each.is_loaded_in_4bit = each.is_loaded_in_8bit = False


def _encode(module: Any, dtype: torch.dtype, files: NewTensorsInFiles) -> None:
    """Encode a module's matrix. dtype: for a matrix without one of its own."""
    tensors: dict[str, torch.Tensor] = {}
    module._save_to_state_dict(tensors, "", keep_vars=False)
    tensors.pop("bias", None)
    codec = next((each for each, names in NAMES.items() if tensors.keys() == set(names)), None)
    if codec is None:  # it has no values, or is not quantized
        return
    state = getattr(module.weight, "quant_state", None)
    shape, dtype = (state.shape, state.dtype) if state is not None else (module.weight.shape, dtype)
    stored = CODECS[codec].packed(in_codec(tensors), shape).cpu()
    with files:
        stored = stored.clone()
    weight = nn.Parameter(placeholder(shape, dtype, module.weight.device), requires_grad=False)
    stash(weight, values=stored, folder=files.folder)
    residency_of(weight).codec = codec
    module.__class__, module.weight = Linear, weight
    for name in ("state", "quant_state"):
        vars(module).pop(name, None)
