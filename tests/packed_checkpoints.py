"""Checkpoints of tiny models whose matrices are integers of 4 bits in words of 32, in several forms."""

from __future__ import annotations

import json
from contextlib import contextmanager

import torch
import transformers
from safetensors.torch import load_file, save_file

from gs_compile.hf.packed import AWQ_ORDER

GROUP = 32
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}


def in_words(codes, dim):
    """Integers of 4 bits, 8 in a word, along a dimension."""
    parts = codes.unflatten(dim, (-1, 8)).movedim(dim + 1, -1)
    found = sum(parts[..., place] << (4 * place) for place in range(8))
    return (found - (found >> 31 << 32)).to(torch.int32)


def of_matrix(form, values):
    """The tensors of a matrix in 4 bits, its zeros 8, and the values that they have."""
    tiles = values.float().unflatten(1, (-1, GROUP))
    scales = (tiles.abs().amax(-1) / 7).to(values.dtype)
    codes = ((tiles / scales.unsqueeze(-1).float()).round() + 8).clamp(0, 15).long()
    exact = ((codes - 8).to(values.dtype) * scales.unsqueeze(-1)).flatten(1)
    codes, zeros = codes.flatten(1).T, torch.full_like(scales.T, 8, dtype=torch.int64)
    if form["quant_method"] == "compressed-tensors":
        shape = torch.tensor(values.shape)
        return {"weight_packed": in_words(codes.T, 1), "weight_scale": scales, "weight_shape": shape}, exact
    if form["quant_method"] == "gptq":
        order = (torch.arange(len(codes)) // GROUP).int()
        return {
            "qweight": in_words(codes, 0),
            "qzeros": in_words(zeros - 1, 1),
            "scales": scales.T,
            "g_idx": order,
        }, exact
    place = torch.tensor(AWQ_ORDER).argsort()
    found = [each.unflatten(1, (-1, 8))[..., place].flatten(1) for each in (codes, zeros)]
    return {"qweight": in_words(found[0], 1), "qzeros": in_words(found[1], 1), "scales": scales.T}, exact


def llama(width=64, **sizes):
    """Two layers, whose values a seed draws."""
    config = transformers.LlamaConfig(
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=96,
        **sizes,
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config)


def saved(form, folder, **sizes):
    """A checkpoint, and the values that its weights have."""
    wanted = {}
    with rewritten(llama(**sizes).bfloat16(), folder, form) as tensors:
        for name in list(tensors):
            wanted[name] = tensors[name]
            if ".layers." in name and tensors[name].ndim == 2:
                found, wanted[name] = of_matrix(form, tensors.pop(name))
                tensors.update({name.removesuffix("weight") + key: each.contiguous() for key, each in found.items()})
    return wanted


@contextmanager
def rewritten(model, folder, form):
    """The tensors of a model's checkpoint, which is in a form once the block has changed them."""
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    yield tensors
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    write(form, folder)


def write(form, folder):
    known = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(known | {"quantization_config": form}))
