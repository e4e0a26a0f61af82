"""frozen: checkpoints of transformers are read to storage in a codec, matrix by matrix.

In transformers, a quantizer encodes each parameter after it is read, or takes the tensors that a quantized checkpoint
has of it. This one keeps the bytes in a file, and gives transformers a placeholder of the parameter's shape. When
everything is read, the two become a stashed parameter, and transformers' model is an ordinary one again.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import Concatenate, ConversionOps, MergeModulelist, WeightConverter
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from gs_compile.codegen.layout import may_be_encoded
from gs_compile.errors import GreedySnakeError, OptionError
from gs_compile.hf.completeness import DECODE, missing_of, refuse_partial
from gs_compile.hf.encoded import EncodedFolder
from gs_compile.hf.packed import Packed
from gs_compile.model.files import leave_memory
from gs_compile.model.offloaded import placeholder
from gs_compile.model.residency import residency_of, stash
from gs_compile.model.storage_init import NewTensorsInFiles
from gs_compile.options import Frozen, Options
from gs_compile.runtime.codecs import BLOCK, CODECS, TILE

METHOD = "greedysnake"  # the name of this quantization in transformers
SCALES = "_scale_inv"  # follows the name of a weight in FP8
OF_4_BITS: Mapping[Any, Frozen] = {  # by bitsandbytes' type, and whether its scales are quantized, too
    ("nf4", True): "nf4",
    ("nf4", False): "nf4_single",
    ("fp4", True): "fp4",
    ("fp4", False): "fp4_single",
}
NAMES = {  # of the tensors that quantized checkpoints have of a weight; of mxfp4 what follows its name
    "int8": ["SCB", "weight_format", "weight"],
    "fp8": ["weight_scale_inv", "weight"],
    "mxfp4": ["_blocks", "_scales"],
} | {
    codec: [
        "weight.absmax",
        "weight.quant_map",
        *(["weight.nested_absmax", "weight.nested_quant_map"] if nested else []),
        f"weight.quant_state.bitsandbytes__{of_bits}",
        "weight",
    ]
    for (of_bits, nested), codec in OF_4_BITS.items()
}
UNREAD = ("weight_format", "weight.quant_map", "weight.nested_quant_map")  # of these, not needed: the codec has them


@register_quantization_config(METHOD)
class FrozenConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """The quantization config that `from_pretrained` gives transformers."""

    def __init__(self, options: Options, files: NewTensorsInFiles, packed: Packed | None, kept: EncodedFolder) -> None:
        """packed: the format of the checkpoint's weights, if they are decoded while they are read."""
        self.quant_method = METHOD
        self.options, self.files, self.packed, self.kept = options, files, packed, kept
        self.stored: dict[str, Tensor] = {}  # by name of a parameter

    def get(self, name: str, default: Any = None) -> Any:
        """As of a dict, which transformers expects in the config of a quantized checkpoint."""
        return getattr(self, name, default)

    def keep(self, name: str, stored: Tensor, like: Tensor) -> Tensor:
        """Keep the bytes of a parameter, which are in a file. Returns a placeholder for transformers."""
        self.stored[name] = stored
        return placeholder(like.shape, like.dtype, torch.device("cpu"))

    def __deepcopy__(self, memo: Any) -> FrozenConfig:
        return self


@register_quantizer(METHOD)
class FrozenQuantizer(HfQuantizer):  # type: ignore[misc]
    """Encodes matrices of layers, or reads encoded ones."""

    def param_needs_quantization(self, model: nn.Module, param_name: str, **given: Any) -> bool:
        owner, _, name = param_name.rpartition(".")
        parameter = getattr(model.get_submodule(owner), name, None)
        skip = self.quantization_config.options.frozen_skip
        if not isinstance(parameter, nn.Parameter) or not _is_of_layer(param_name):
            return False
        return may_be_encoded(param_name, parameter, skip)

    def get_quantize_ops(self) -> ConversionOps:
        return _Encode(self.quantization_config)

    @property
    def needed(self) -> list[str]:
        """The ends of the names of the tensors that decoding a quantized matrix needs."""
        config: FrozenConfig = self.quantization_config
        if config.packed:
            return [*config.packed.needed]
        return [name for name in NAMES[str(config.options.frozen)] if name not in UNREAD]

    def _process_model_before_weight_loading(
        self, model: nn.Module, checkpoint_files: Sequence[str] | None = None, **given: Any
    ) -> nn.Module:
        """Raises OptionError for a quantized checkpoint that lacks `needed` tensors, before anything is read."""
        if self.pre_quantized:
            refuse_partial(checkpoint_files or (), self.needed)
        return model

    def get_weight_conversions(self) -> list[WeightConverter]:
        config: FrozenConfig = self.quantization_config
        if not self.pre_quantized:
            return []
        names = [*config.packed.names, "weight"] if config.packed else NAMES[str(config.options.frozen)]
        return [WeightConverter([*names], "weight" if "weight" in names else "", [_Read(self)])]

    def update_weight_conversions(self, weight_conversions: list[Any], model: nn.Module) -> list[Any]:
        """The conversions above, and the model's own, some of which then take scales, too."""
        is_fp8 = self.pre_quantized and self.quantization_config.options.frozen == "fp8"
        found = [self._with_scales(each) if is_fp8 and _keeps_tiles(each) else each for each in weight_conversions]
        return found + self.get_weight_conversions()

    def _with_scales(self, own: WeightConverter) -> WeightConverter:
        sources = [f"{name}{end}" for end in ("", SCALES) for name in own._original_source_patterns]
        return own.copy(sources, own._original_target_patterns, operations=[_Read(self, own)])

    def is_serializable(self) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return True


class Ended(BaseException):
    """Carries an error through transformers, which would otherwise read all other parameters and raise its own."""

    def __init__(self, error: GreedySnakeError) -> None:
        self.error = error


@contextmanager
def ending() -> Iterator[None]:
    """Inside the block, an `Ended` error is raised as the error that it carries."""
    try:
        yield
    except Ended as ended:
        raise ended.error from None


@contextmanager
def _ends() -> Iterator[None]:
    """Inside the block, an error of this package ends the reading at once."""
    try:
        yield
    except GreedySnakeError as error:
        raise Ended(error) from error


class _Encode(ConversionOps):  # type: ignore[misc]
    """Encodes the values of a parameter into a file, and returns a placeholder."""

    def __init__(self, config: FrozenConfig) -> None:
        self.config = config

    @_ends()
    def convert(self, input_dict: Mapping[str, Any], **_: Any) -> dict[str, Tensor]:
        found, config = {}, self.config
        for name, given in input_dict.items():
            values = given[0] if isinstance(given, list) else given
            if (stored := config.kept.find(name)) is None:
                with config.files.aside():
                    encoded = CODECS[str(config.options.frozen)].encode(values)
                leave_memory(values.untyped_storage())
                stored = config.kept.put(name, encoded)
            found[name] = config.keep(name, stored, values)
        return found


class _Read(ConversionOps):  # type: ignore[misc]
    """Takes the tensors of an encoded parameter as they are; decodes those of a packed one, into a file.

    own: the model's converter that combines several parameters of the checkpoint into one, such as those of experts.
    """

    def __init__(self, hf_quantizer: FrozenQuantizer, own: WeightConverter | None = None) -> None:
        self.hf_quantizer, self.own = hf_quantizer, own

    @_ends()
    def convert(self, input_dict: Mapping[str, Any], *, model: Any, full_layer_name: str, **given: Any) -> Any:
        config: FrozenConfig = self.hf_quantizer.quantization_config
        like, owner = model.get_parameter(full_layer_name), model.get_submodule(full_layer_name.rpartition(".")[0])
        if (stored := config.kept.find(full_layer_name)) is not None:
            return {full_layer_name: config.keep(full_layer_name, stored, like)}
        found = _put_together(self.own, input_dict, full_layer_name, given) if self.own else input_dict
        tensors = {name: each[0] if isinstance(each, list) else each for name, each in found.items()}
        of_a_byte = {name: each.dtype.itemsize == 1 for name, each in tensors.items()}
        if missing := missing_of(of_a_byte, self.hf_quantizer.needed):
            raise OptionError(f"of {full_layer_name} the checkpoint has no {missing[0]} by that name. {DECODE}")
        if len(tensors) == 1:  # it is not quantized
            values = tensors["weight"].to(like.dtype)
        elif config.packed:
            values = torch.empty(like.shape, dtype=like.dtype)
            with config.files.aside():
                config.packed.decode(tensors, values.T if isinstance(owner, Conv1D) else values)
        else:
            stored = CODECS[str(config.options.frozen)].packed(in_codec(tensors), like.shape)
            for each in tensors.values():
                leave_memory(each.untyped_storage())
            return {full_layer_name: config.keep(full_layer_name, stored, like)}
        found = {full_layer_name: values}
        is_meant = config.packed and config.options.frozen
        if is_meant and self.hf_quantizer.param_needs_quantization(model, full_layer_name):
            return _Encode(config).convert(found)
        return found


def _keeps_tiles(conversion: Any) -> bool:
    """Whether a model's converter only concatenates whole weights, so that it can do the same with their scales."""
    if not isinstance(conversion, WeightConverter) or len(conversion.target_patterns) > 1:
        return False
    first, *others = conversion.operations
    does = type(first) is MergeModulelist and first.dim == 0 and {Concatenate}.issuperset(map(type, others))
    return does and all(each.endswith(".weight") for each in conversion.source_patterns)


def _put_together(
    own: WeightConverter, tensors: Mapping[str, list[Tensor]], path: str, given: Mapping[str, Any]
) -> dict[str, Tensor]:
    """The weight and its scales that a model's converter makes from those of several matrices.

    Raises OptionError if a tile with one scale would belong to two of them.
    """
    dims = [operation.dim % 3 - 1 for operation in own.operations if isinstance(operation, Concatenate)]  # of a matrix
    has_scales = any(name + SCALES in tensors for name in own.source_patterns)
    sizes = {each.shape[dim] for name in own.source_patterns for each in tensors[name] for dim in dims if dim >= 0}
    if has_scales and (cut := sorted(size for size in sizes if size % TILE)):
        raise OptionError(
            f"{path} is put together of matrices of {cut[0]} rows or columns, and each {TILE} of these have a scale: "
            f"as some would be of two matrices, it cannot be read as it is. {DECODE}"
        )
    found = {}
    for end in ("", SCALES) if has_scales else ("",):
        some: dict[str, Any] = {name: tensors[name + end] for name in own.source_patterns}
        for operation in own.operations:
            some = operation.convert(some, **{**given, "source_patterns": own.source_patterns})
        (found[f"weight{end}"],) = some.values()
    return found


def in_codec(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a checkpoint as a codec names them."""
    found = {name.removeprefix("weight.").removeprefix("_"): values for name, values in tensors.items()}
    for name in [name for name in found if name.startswith("quant_state.")]:
        state = json.loads(bytes(found.pop(name).tolist()))
        if (block := state.get("blocksize", BLOCK)) != BLOCK:
            raise OptionError(f"the checkpoint has {block} elements in a block with one scale; {BLOCK} are read here")
        found["nested_offset"] = torch.tensor(state.get("nested_offset", 0.0), dtype=torch.float32)
        found["weight"] = found["weight"].view(torch.uint8)  # whatever dtype bnb_4bit_quant_storage asks for
    if (scales := found.get("weight_scale_inv")) is not None and scales.dtype == torch.uint8:
        found["weight_scale_inv"] = scales.view(torch.float8_e8m0fnu)  # exponents
    return found


def _is_of_layer(name: str) -> bool:
    """Whether a parameter is in a numbered module: before a capture, these count as layers."""
    return any(map(str.isdecimal, name.split(".")))


def finish(model: Any, config: FrozenConfig, unexpected: Collection[str]) -> None:
    """Stash what was encoded, frozen; transformers' model is an ordinary one afterwards.

    unexpected: the checkpoint's tensors for which the model has no place. Raises OptionError if a quantized one has
    weights of layers among these: scales, if transformers combines weights, such as those of experts.
    """
    left = [name for name in unexpected if name.endswith(".weight") and _is_of_layer(name)]
    if left and model.hf_quantizer.pre_quantized:
        raise OptionError(
            f"of {min(left)} and {len(left) - 1} more the model has no parameter alone, as transformers puts them "
            f"together (experts), or leaves them out: these are not read as they are. {DECODE}"
        )
    for name, stored in config.stored.items():
        parameter = model.get_parameter(name).requires_grad_(False)
        stash(parameter, values=stored, folder=config.files.folder)
        residency_of(parameter).codec = str(config.options.frozen)
    model._weight_conversions = [each for each in map(_own, model._weight_conversions) if each is not None]
    become_ordinary(model)


def become_ordinary(model: Any) -> None:
    """Make transformers treat the model as one that was never quantized."""
    model.hf_quantizer.remove_quantization_config(model)
    for module in model.modules():
        if hasattr(getattr(module, "config", None), "_is_quantized"):
            del module.config._is_quantized


def _own(conversion: Any) -> Any:
    """The model's own converter, if this package's has replaced it, to save the model; None: there is none."""
    readings = [each for each in getattr(conversion, "operations", ()) if isinstance(each, _Read)]
    return readings[0].own if readings else conversion


def known(config: Mapping[str, Any]) -> Frozen | None:
    """The codec of a quantization config of transformers, as a dict; None: there is none for it."""
    of_4_bits = config.get("bnb_4bit_quant_type"), bool(config.get("bnb_4bit_use_double_quant"))
    if config.get("load_in_4bit"):
        return OF_4_BITS.get(of_4_bits)
    if config.get("load_in_8bit"):
        return "int8"
    if config.get("quant_method") == "mxfp4":
        return "mxfp4"
    is_fp8 = config.get("quant_method") == "fp8" and config.get("expert_dtype") in (None, "fp8")
    is_fp8 = is_fp8 and config.get("scale_fmt") in (None, "float")
    return "fp8" if is_fp8 and tuple(config.get("weight_block_size") or ()) == (TILE, TILE) else None


def decodes(config: Any) -> bool:
    """Whether a quantization config of transformers dequantizes what it reads into the model's dtype."""
    return bool(getattr(config, "dequantize", False)) or getattr(config, "run_compressed", None) is False


def skipped(config: Mapping[str, Any]) -> list[str]:
    """The modules that a quantization config leaves out."""
    return [*(config.get("llm_int8_skip_modules") or ()), *(config.get("modules_to_not_convert") or ())]


def asked(frozen: Frozen | None, skip: Any, config: Any) -> tuple[Frozen | None, Any]:
    """The codec that is asked for, and the modules to skip: by name, or by a quantization config of transformers.

    Raises OptionError for a config for which there is no codec.
    """
    if config is None:
        return frozen, skip
    if frozen is not None:
        raise OptionError("frozen and quantization_config both say how matrices are stored: leave one of the two out")
    given = config if isinstance(config, Mapping) else config.to_dict()
    if (codec := known(given)) is not None:
        return codec, [*skipped(given), *skip]
    method = given.get("quant_method")
    raise OptionError(
        f"quantization_config asks for {getattr(method, 'value', method)}, of a form not stored here. These are: "
        'BitsAndBytesConfig(load_in_4bit=True), which is frozen="fp4_single", with bnb_4bit_use_double_quant=True '
        '"fp4", with bnb_4bit_quant_type="nf4" "nf4_single" or "nf4"; BitsAndBytesConfig(load_in_8bit=True), '
        'frozen="int8"; FineGrainedFP8Config(), frozen="fp8"; and Mxfp4Config(), frozen="mxfp4"'
    )
