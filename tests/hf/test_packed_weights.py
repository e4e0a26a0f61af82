"""Checkpoints of integers in words of 32 bits: decoded as their own libraries do, and read to storage."""

from __future__ import annotations

import hashlib

import pytest
import torch
import transformers
from packed_checkpoints import AWQ, GPTQ, GROUP, of_matrix, saved, write
from safetensors.torch import load_file, save_file
from test_trainer import EAGER
from transformers import AutoModelForCausalLM

import gs_compile
from gs_compile.errors import OptionError
from gs_compile.hf.completeness import refuse_partial
from gs_compile.hf.packed import packed
from gs_compile.model.residency import residency_of
from gs_compile.runtime.codecs import CODECS

OUTPUTS, INPUTS = 64, 96


def compressed(bits=4, *, symmetric=True, group_size=GROUP, **given):
    strategy = "group" if group_size else "channel"
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": strategy, "group_size": group_size}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights | given}}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}


FORMS = {
    "gptq": GPTQ,
    "gptq 2": GPTQ | {"bits": 2},
    "gptq 8": GPTQ | {"bits": 8},
    "awq": AWQ,
    "compressed": compressed(),
    "compressed 8": compressed(8, group_size=None),
    "compressed zeros": compressed(symmetric=False),
    "compressed order": compressed(symmetric=False, actorder="group"),
}


def drawn(shape, salt):
    """Words of 32 bits that no generator of random numbers has to make again."""
    numbers = torch.arange(torch.Size(shape).numel()) * 2654435761 + salt * 40503
    return ((numbers ^ (numbers >> 13)) * 1103515245 % 2**32 - 2**31).to(torch.int32).view(shape)


def words(form):
    """The tensors of a matrix of OUTPUTS and INPUTS in a form, of any bits."""
    bits, config = packed(form).bits, packed(form)
    groups = INPUTS // (config.group_size or INPUTS)
    scales = ((drawn((groups, OUTPUTS), 1) % 97 + 1) / 64).half()
    if config.method == "compressed-tensors":
        found = {"weight_packed": drawn((OUTPUTS, INPUTS * bits // 32), 2), "weight_scale": scales.T.contiguous()}
        if "weight_zero_point" in config.needed:
            found["weight_zero_point"] = drawn((OUTPUTS * bits // 32, groups), 3)
        if "weight_g_idx" in config.needed:
            found["weight_g_idx"] = (torch.arange(INPUTS) * 37 % INPUTS // GROUP).int()
        return found | {"weight_shape": torch.tensor([OUTPUTS, INPUTS])}
    zeros = drawn((groups, OUTPUTS * bits // 32), 3)
    if config.method == "awq":
        return {"qweight": drawn((INPUTS, OUTPUTS * bits // 32), 2), "qzeros": zeros, "scales": scales}
    zeros &= 0x55555555  # AutoGPTQ knows no zero that is stored as the largest
    order = drawn((INPUTS,), 4) % groups
    return {"qweight": drawn((INPUTS * bits // 32, OUTPUTS), 2), "qzeros": zeros, "scales": scales, "g_idx": order}


# Of float16 values, by AutoGPTQ 0.7.1, AutoAWQ 0.2.9 (`dequantize_gemm`) and compressed-tensors 0.20; with an order by
# compressed-tensors 0.12.2 (`dequantize`), as later releases have none.
DECODED = {
    "gptq": "a2432f0d7c905d96",
    "gptq 2": "194f3d13c4e6fc0c",
    "gptq 8": "9d38c03af0dfa320",
    "awq": "da4c75aa8cc7349e",
    "compressed": "d68e341b94f59cb1",
    "compressed 8": "f4895352fddc5400",
    "compressed zeros": "74e44eaac9707c65",
    "compressed order": "eab3b275324bab9a",
}


def decoded(form, tensors):
    out = torch.empty(OUTPUTS, INPUTS, dtype=torch.float16)
    packed(form).decode(tensors, out)
    return out


@pytest.mark.parametrize("name", FORMS)
def test_values_are_those_of_the_libraries(name):
    found = decoded(FORMS[name], words(FORMS[name]))
    assert hashlib.sha256(found.numpy().tobytes()).hexdigest().startswith(DECODED[name])


def test_zeros_of_the_second_version_are_stored_as_they_are():
    tensors = words(GPTQ)
    moved = tensors | {"qzeros": tensors["qzeros"] + 0x11111111}
    assert torch.equal(decoded(GPTQ | {"checkpoint_format": "gptq_v2"}, moved), decoded(GPTQ, tensors))


def test_an_order_that_was_never_set_is_none():
    """compressed-tensors makes "weight_g_idx" of -1, and takes it so."""
    tensors = words(FORMS["compressed order"])
    unset = tensors | {"weight_g_idx": torch.full((INPUTS,), -1, dtype=torch.int32)}
    plain = {name: each for name, each in tensors.items() if name != "weight_g_idx"}
    assert torch.equal(decoded(FORMS["compressed order"], unset), decoded(FORMS["compressed zeros"], plain))


def test_without_desc_act_the_order_may_be_left_out():
    tensors, form = words(GPTQ), GPTQ | {"desc_act": False}
    tensors["g_idx"] = (torch.arange(INPUTS) // GROUP).int()
    found = decoded(form, tensors)
    assert torch.equal(found, decoded(GPTQ, tensors))
    del tensors["g_idx"]
    assert torch.equal(found, decoded(form, tensors))


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("gptq", "g_idx"),
        ("gptq", "qzeros"),
        ("awq", "qzeros"),
        ("compressed zeros", "weight_zero_point"),
        ("compressed order", "weight_g_idx"),
        ("compressed", "weight_scale"),
        ("awq", "qweight"),
    ],
)
def test_without_what_the_config_says_is_there_it_is_refused(name, missing, tmp_path):
    tensors = {f"layers.0.up.{end}": each for end, each in words(FORMS[name]).items() if end != missing}
    save_file(tensors | {"gate.scales": torch.ones(1)}, path := str(tmp_path / "model.safetensors"))
    with pytest.raises(OptionError, match=f"no file of the checkpoint has layers.0.up.{missing}, without"):
        refuse_partial([path], packed(FORMS[name]).needed)


# Checkpoints ----------------------------------------------------------------------------------------------------------


def read(folder, storage, **given):
    return gs_compile.from_pretrained(AutoModelForCausalLM, folder, storage=storage, **given)


@pytest.mark.parametrize(  # what is encoded then has no form
    ("form", "frozen"),
    [
        *((form, None) for form in (GPTQ, AWQ, compressed())),
        (GPTQ, "nf4"),
        *(pytest.param(form, "nf4", marks=pytest.mark.slow) for form in (AWQ, compressed())),
    ],
    ids=lambda each: each["quant_method"] if isinstance(each, dict) else each,
)
def test_weights_are_decoded_as_they_are_read(form, frozen, tmp_path):
    """And encoded then, where that is asked for."""
    wanted = saved(form, tmp_path / "saved")
    model = read(tmp_path / "saved", tmp_path / "storage", frozen=frozen)
    for name, parameter in model.named_parameters():
        values, is_of_layer = wanted[name], ".layers." in name and wanted[name].ndim == 2
        codec = frozen if is_of_layer and frozen else ""
        if codec:
            values = CODECS[codec].decode(CODECS[codec].encode(values), values.shape, values.dtype)
        assert residency_of(parameter).codec == codec, name
        assert parameter.dtype == torch.bfloat16
        assert torch.equal(parameter.detach().clone(), values), name
    assert not hasattr(model.config, "quantization_config")


@pytest.mark.parametrize("frozen", [pytest.param(None, marks=pytest.mark.slow), "nf4"])  # None: as any bf16 on storage
def test_what_was_decoded_is_trained(frozen, tmp_path):
    saved(GPTQ, tmp_path / "saved")
    model = read(tmp_path / "saved", tmp_path / "storage", frozen=frozen)
    ids = torch.arange(16).view(2, 8)
    model.requires_grad_(False).lm_head.requires_grad_(True)
    optimizer = gs_compile.SGD(model.lm_head.parameters(), lr=0.1)
    model.compile(backend="greedysnake", options={**model.greedysnake_options, "expert": EAGER})
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    assert loss.isfinite()


def test_other_dtypes_and_linears_that_are_transposed(tmp_path):
    wanted = saved(GPTQ, tmp_path / "saved")
    model = read(tmp_path / "saved", tmp_path / "storage", dtype=torch.float32)
    assert all(torch.equal(each.detach(), wanted[name].float()) for name, each in model.named_parameters())
    source = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=64, n_layer=1, n_head=2, vocab_size=96))
    source.save_pretrained(tmp_path / "gpt2")
    tensors, name = load_file(tmp_path / "gpt2" / "model.safetensors"), "transformer.h.0.attn.c_proj."
    found, values = of_matrix(GPTQ, tensors.pop(name + "weight").T)
    tensors |= {name + key: each.contiguous() for key, each in found.items()}
    save_file(tensors, tmp_path / "gpt2" / "model.safetensors", {"format": "pt"})
    write(GPTQ, tmp_path / "gpt2")
    model = read(tmp_path / "gpt2", tmp_path / "storage")
    assert torch.equal(model.get_parameter(name + "weight").detach(), values.T)


@pytest.mark.parametrize(
    ("form", "words"),
    [
        (GPTQ | {"bits": 3}, "gptq"),
        (GPTQ | {"dynamic": {"-:lm_head": {}}}, "gptq"),
        (AWQ | {"version": "gemv"}, "awq"),
        (AWQ | {"zero_point": False}, "awq"),
        (compressed(2), "compressed-tensors"),
        (compressed() | {"format": "nvfp4-pack-quantized"}, "compressed-tensors"),
        ({"quant_method": "hqq"}, "hqq"),
    ],
    ids=str,
)
def test_others_are_refused_by_name(form, words, tmp_path):
    transformers.LlamaConfig(num_hidden_layers=1).save_pretrained(tmp_path)
    write(form, tmp_path)
    with pytest.raises(
        OptionError, match=rf"quantized \({words}\) in a form that is not read here.*GPTQ in 2, 4 or 8 bits"
    ):
        read(tmp_path, tmp_path)
