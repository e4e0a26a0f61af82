"""frozen: checkpoints of transformers that are read to storage in a codec, matrix after matrix.

transformers has a quantizer of a checkpoint encode what it has read of each parameter. This one keeps the bytes in a
file and gives transformers a placeholder of the parameter's shape; when all is read, both become what the backend knows
as a stashed parameter, and transformers' model is an ordinary one again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers.core_model_loading import ConversionOps
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from gs_compile.errors import OptionError
from gs_compile.model.files import leave_memory
from gs_compile.model.offloaded import placeholder
from gs_compile.model.residency import residency_of, stash
from gs_compile.model.storage_init import NewTensorsInFiles
from gs_compile.options import Options
from gs_compile.runtime.codecs import CODECS

METHOD = "greedysnake"  # what transformers knows this by

Tensor = torch.Tensor


@register_quantization_config(METHOD)
class FrozenConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """What `from_pretrained` gives transformers in the place of a quantization config."""

    def __init__(self, options: Options, files: NewTensorsInFiles) -> None:
        self.quant_method = METHOD
        self.options, self.files = options, files
        self.stored: dict[str, Tensor] = {}  # by name of a parameter

    def __deepcopy__(self, memo: Any) -> FrozenConfig:
        return self


@register_quantizer(METHOD)
class FrozenQuantizer(HfQuantizer):  # type: ignore[misc]
    """Encodes matrices of layers."""

    def param_needs_quantization(self, model: nn.Module, param_name: str, **_: Any) -> bool:
        owner, _, name = param_name.rpartition(".")
        parameter = getattr(model.get_submodule(owner), name, None)
        return isinstance(parameter, nn.Parameter) and is_meant(param_name, parameter, self.quantization_config.options)

    def get_quantize_ops(self) -> ConversionOps:
        return _Encode(self.quantization_config)

    def is_serializable(self) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return True


class _Encode(ConversionOps):  # type: ignore[misc]
    """Puts the values of a parameter to a file, encoded, and gives a placeholder for them."""

    def __init__(self, config: FrozenConfig) -> None:
        self.config = config

    def convert(self, input_dict: Mapping[str, Any], **_: Any) -> dict[str, Tensor]:
        found = {}
        for name, given in input_dict.items():
            values = given[0] if isinstance(given, list) else given
            with self.config.files.aside():
                stored = CODECS[str(self.config.options.frozen)].encode(values)
            leave_memory(values.untyped_storage())
            self.config.stored[name] = stored.clone()
            found[name] = placeholder(values.dtype, values.device).expand(values.shape)
        return found


def is_meant(name: str, parameter: Tensor, options: Options) -> bool:
    """Whether a parameter of that name is one of the matrices of layers that `options.frozen` means."""
    path = name.split(".")
    is_matrix = parameter.ndim in (2, 3) and parameter.is_floating_point()
    return is_matrix and any(map(str.isdecimal, path)) and set(options.frozen_skip).isdisjoint(path)


def finish(model: Any, config: FrozenConfig) -> None:
    """Stash what was encoded, frozen; transformers' model is an ordinary one from here on."""
    for name, stored in config.stored.items():
        parameter = model.get_parameter(name).requires_grad_(False)
        stash(parameter, values=stored, folder=config.files.folder)
        residency_of(parameter).codec = str(config.options.frozen)
    model.hf_quantizer.remove_quantization_config(model)
    for module in model.modules():
        if hasattr(getattr(module, "config", None), "_is_quantized"):
            del module.config._is_quantized


def asked(frozen: str | None, skip: Any, config: Any) -> tuple[str | None, Any]:
    """The codec that is asked for, and the modules that it skips: by name, or by a quantization config of transformers.

    Raises OptionError for a config that means no codec.
    """
    if config is None:
        return frozen, skip
    if frozen is not None:
        raise OptionError("frozen and quantization_config both say how matrices are stored: leave one of the two out")
    given = config if isinstance(config, Mapping) else config.to_dict()
    skip = [*(given.get("llm_int8_skip_modules") or ()), *(given.get("modules_to_not_convert") or ()), *skip]
    if given.get("load_in_4bit") and given.get("bnb_4bit_quant_type") == "nf4" and given.get("bnb_4bit_use_double_quant"):
        return "nf4", skip
    if given.get("load_in_8bit"):
        return "int8", skip
    if given.get("quant_method") == "fp8" and tuple(given.get("weight_block_size") or ()) == (128, 128):
        return "fp8", skip
    raise OptionError(
        f"quantization_config asks for {given.get('quant_method')}, of a form that is not stored here. These are: "
        'BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True), which is '
        'frozen="nf4"; BitsAndBytesConfig(load_in_8bit=True), frozen="int8"; and FineGrainedFP8Config(), frozen="fp8"'
    )
