"""packed: checkpoints with integers of few bits in words of 32 bits, decoded into the model's dtype when they are read.

    gptq                  words along the inputs of a matrix     (q - zero - 1) * scale; of version 2 without the 1
    compressed-tensors    "pack-quantized": the same, its matrix transposed      (q - zero) * scale
    awq                   "gemm": words along its outputs, in an order of their own      the same

Zeros and scales are those of groups of inputs: consecutive ones, or by "g_idx" if inputs were quantized in the order of
their activations. Values are computed in the dtype of the scales, as in the libraries of these formats.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gs_compile.runtime.codecs import CHUNK

WORD = 32  # bits
NAMES = {  # of the tensors that stand for a weight
    "gptq": ("qweight", "qzeros", "scales", "g_idx"),
    "awq": ("qweight", "qzeros", "scales"),
    "compressed-tensors": ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx"),
}
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # the place in a word of each of its 8 outputs


@dataclass(frozen=True)
class Packed:
    """How the weights of a checkpoint are packed.

    group_size: inputs with one scale; None: all have the same. zero: a number that is added to stored zeros. needed:
    the tensors that decoding a weight needs.
    """

    method: str
    bits: int
    group_size: int | None
    zero: int = 0
    needed: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return NAMES[self.method]

    def decode(self, tensors: Mapping[str, Tensor], out: Tensor) -> None:
        """Write the values of a weight, which has all needed tensors, to `out`, of shape [outputs, inputs]."""
        words, zeros, scales, groups = self._in_gptq_order(tensors, *out.shape)
        dim, num_inputs = int(self.method == "awq"), out.shape[1]
        words_per_input = 1 if dim else self.bits / WORD
        step = max(1, CHUNK // out.shape[0] // WORD) * WORD  # a multiple of what is in a word
        for start in range(0, num_inputs, step):
            group = groups[start : start + step]
            some = words[int(start * words_per_input) : int((start + step) * words_per_input)]
            codes = self._unpacked(some, dim)[: len(group)]
            values = (codes - zeros.index_select(0, group)).to(scales.dtype).mul_(scales.index_select(0, group))
            out[:, start : start + step].copy_(values.T)

    def _in_gptq_order(self, tensors: Mapping[str, Tensor], num_outputs: int, num_inputs: int) -> tuple[Tensor, ...]:
        """The words; zeros as integers and scales, each [groups, outputs]; and the group of each input."""
        if self.method == "compressed-tensors":
            words, scales = tensors["weight_packed"].T, tensors["weight_scale"].T
            packed, groups = tensors.get("weight_zero_point"), tensors.get("weight_g_idx")
            packed = None if packed is None else packed.T
        else:
            words, scales = tensors["qweight"], tensors["scales"]
            packed, groups = tensors.get("qzeros"), tensors.get("g_idx")
        zeros = torch.full_like(scales, 1 << (self.bits - 1), dtype=torch.int32)
        if packed is not None:
            zeros = (self._unpacked(packed, 1)[:, :num_outputs] + self.zero).bitwise_and_((1 << self.bits) - 1)
        if groups is None or (groups < 0).any():  # -1: it was never set
            groups = torch.arange(num_inputs) // (self.group_size or num_inputs)
        return words, zeros, scales, groups.long()

    def _unpacked(self, words: Tensor, dim: int) -> Tensor:
        """The integers of words along a dimension, the lowest bits first."""
        shifts = torch.arange(0, WORD, self.bits, dtype=torch.int32)
        found = words.unsqueeze(-1).bitwise_right_shift(shifts).bitwise_and_((1 << self.bits) - 1)
        if self.method == "awq":
            found = found[..., AWQ_ORDER]
        return found.flatten(1) if dim else found.transpose(1, 2).flatten(0, 1)


def packed(config: Mapping[str, Any]) -> Packed | None:
    """How weights are packed by a quantization config of transformers, as a dict; None: in none of these formats."""
    method = config.get("quant_method")
    bits, size = config.get("bits", config.get("w_bit")), config.get("group_size", config.get("q_group_size"))
    size = None if size in (None, -1) else size
    version = config.get("checkpoint_format", "gptq")
    if method == "gptq" and bits in (2, 4, 8) and version in ("gptq", "gptq_v2") and not config.get("dynamic"):
        needed = NAMES["gptq"] if config.get("desc_act") else NAMES["gptq"][:3]
        return Packed("gptq", bits, size, int(version == "gptq"), needed)
    is_gemm = str(config.get("version", "gemm")).lower() == "gemm" and config.get("zero_point", True)
    if method == "awq" and bits == 4 and is_gemm:
        return Packed("awq", bits, size, needed=NAMES["awq"])
    return _compressed(config) if method == "compressed-tensors" else None


def _compressed(config: Mapping[str, Any]) -> Packed | None:
    """The same for a config of compressed-tensors, if all weights are packed in the same way."""
    forms = set()
    for group in (config.get("config_groups") or {}).values():
        weights, form = group.get("weights") or {}, group.get("format") or config.get("format")
        size = weights.get("group_size") if weights.get("strategy") == "group" else None
        is_known = form == "pack-quantized" and weights.get("type") == "int" and weights.get("num_bits") in (4, 8)
        is_known = is_known and weights.get("strategy") in ("group", "channel")
        given = {
            "weight_zero_point": not weights.get("symmetric", True),
            "weight_g_idx": weights.get("actorder") in ("group", "dynamic", True),
        }
        needed = ("weight_packed", "weight_scale", *(name for name, is_there in given.items() if is_there))
        forms.add(Packed("compressed-tensors", weights["num_bits"], size, needed=needed) if is_known else None)
    return forms.pop() if len(forms) == 1 else None
