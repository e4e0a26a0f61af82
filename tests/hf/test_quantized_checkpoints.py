"""Checkpoints in MXFP4 and in FP8, of experts too: as gpt-oss, DeepSeek and Qwen have them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import transformers
from learner import distance
from packed_checkpoints import write
from quantized_checkpoints import EXPERTS, is_encoded, learned, of_fp8, of_mxfp4, read, wide
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from zoo import small

import gs_compile
from gs_compile.errors import OptionError
from gs_compile.hf import frozen
from gs_compile.hf.completeness import refuse_partial
from gs_compile.hf.frozen import NAMES
from gs_compile.model.residency import residency_of
from gs_compile.runtime.codecs import CODECS

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6:FutureWarning")  # in PEFT


def experts_in_fp8(folder, **sizes):
    """Experts one by one; transformers puts them together."""
    of_fp8(small("mixtral", **{"hidden_size": 128, "intermediate_size": 128} | sizes).bfloat16(), folder)


def test_experts_that_are_put_together_stay_in_fp8(tmp_path):
    """Their scales are put together as they are; a checkpoint that is saved later has each by itself again."""
    experts_in_fp8(tmp_path / "saved")
    config = transformers.FineGrainedFP8Config(dequantize=True)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", quantization_config=config)
    model = read(tmp_path / "saved", tmp_path / "storage")
    for name, parameter in model.named_parameters():
        assert residency_of(parameter).codec == ("fp8" if is_encoded(name, parameter) else ""), name
        assert torch.equal(parameter.detach().clone(), theirs.get_parameter(name)), name
    stored = residency_of(model.model.layers[0].mlp.experts.gate_up_proj).stash
    assert stored.nbytes == CODECS["fp8"].nbytes((4, 256, 128)) == 4 * 2 * 128 * 128 + 64
    gs_compile.save_pretrained(model, tmp_path / "decoded")
    names = load_file(tmp_path / "decoded" / "model.safetensors").keys()
    assert names == {each for each in load_file(tmp_path / "saved" / "model.safetensors") if "scale" not in each}


@pytest.mark.parametrize("dtype", [torch.float8_e8m0fnu, torch.uint8], ids=str)
def test_scales_that_are_exponents(dtype, tmp_path):
    """As of DeepSeek-V3.1, in 8 bits."""
    of_fp8(wide().bfloat16(), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_scale_inv")]:
        tensors[name] = tensors[name].to(torch.float8_e8m0fnu).view(dtype)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    form = {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"}
    write(form, tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path)
    model = read(tmp_path, tmp_path / "storage")
    for name, parameter in model.named_parameters():
        assert residency_of(parameter).codec == ("fp8" if is_encoded(name, parameter) else ""), name
        assert torch.equal(parameter.detach().clone(), theirs.get_parameter(name)), name
    write(form | {"expert_dtype": "fp4"}, tmp_path)
    with pytest.raises(OptionError, match=r"quantized \(fp8\) in a form that is not read"):
        read(tmp_path, tmp_path / "storage")


@pytest.mark.parametrize("number", [1, 14], ids=["one", "all"])
def test_scales_that_are_not_there_are_named_before_anything_is_read(number, tmp_path, monkeypatch):
    """Also where another name has them. One alone ended in a KeyError, once all before it was read and written."""
    of_fp8(wide().bfloat16(), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    lost = [name for name in tensors if name.endswith("_scale_inv")][-number:]
    for name in lost:
        tensors[name.replace("weight_scale_inv", "scale")] = tensors.pop(name)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    monkeypatch.setattr(frozen._Read, "convert", lambda *_, **__: pytest.fail("it was read"))
    words = rf"model.safetensors has {lost[0][:-10]}, and no file .* has {lost[0]}, without .* \({number} such matrices"
    with pytest.raises(OptionError, match=words):
        read(tmp_path, tmp_path / "storage")


@pytest.mark.parametrize("codec", NAMES)
def test_each_tensor_of_a_matrix_is_asked_for(codec, tmp_path):
    """By files that have a matrix, and one tensor of it less; and what is not quantized beside."""
    options = SimpleNamespace(frozen=codec)
    needed = frozen.FrozenQuantizer(SimpleNamespace(packed=None, options=options)).needed
    name_of = {end: f"layers.0.up{'' if end[0] == '_' else '.'}{end}" for end in needed}
    path, plain = str(tmp_path / "model.safetensors"), {"norm.weight": torch.ones(2)}
    whole = {name: torch.ones(2, dtype=torch.uint8) for name in name_of.values()}
    for tensors in (plain, plain | whole):
        save_file(tensors, path)
        refuse_partial([path], needed)
    for end in needed:
        save_file({name: each for name, each in (plain | whole).items() if name != name_of[end]}, path)
        with pytest.raises(OptionError, match=f"no file of the checkpoint has {name_of[end]}, without"):
            refuse_partial([path], needed)


def test_tiles_of_two_experts_are_refused(tmp_path):
    experts_in_fp8(tmp_path / "saved", intermediate_size=192)
    with pytest.raises(OptionError, match=r"gate_up_proj is put together of matrices of 192 rows.*dequantize=True"):
        read(tmp_path / "saved", tmp_path / "storage")


def test_scales_without_a_matrix_of_their_own_are_refused(tmp_path, monkeypatch):
    """As where transformers does more to matrices than to put them together."""
    monkeypatch.setattr(frozen, "_keeps_tiles", lambda _: False)
    experts_in_fp8(tmp_path / "saved")
    with pytest.raises(OptionError, match=r"of model.layers.0.*w1.weight and 23 more the model has no parameter alone"):
        read(tmp_path / "saved", tmp_path / "storage")


MXFP4 = transformers.Mxfp4Config(dequantize=True)


def both_of_mxfp4(folder):
    """A model with experts in MXFP4, as read here and by transformers."""
    of_mxfp4(folder / "saved")
    given = {"dtype": torch.float32, "attn_implementation": "eager"}
    theirs = AutoModelForCausalLM.from_pretrained(folder / "saved", quantization_config=MXFP4, **given)
    return read(folder / "saved", folder / "storage", frozen="mxfp4", **given), theirs


def test_experts_in_mxfp4_stay_so(tmp_path):
    """In 4.25 bits an element, beside what the checkpoint has not quantized."""
    model, theirs = both_of_mxfp4(tmp_path)
    values = dict(theirs.named_parameters())
    tensors = load_file(tmp_path / "saved" / "model.safetensors")
    for name, parameter in model.named_parameters():
        place = residency_of(parameter)
        assert place.codec == ("mxfp4" if name.endswith(EXPERTS) else ""), name
        assert torch.equal(parameter.detach().clone(), values[name]), name
        if place.codec:
            assert place.stash.nbytes * 8 == 4.25 * parameter.numel()
            assert torch.equal(place.stash[: parameter.numel() // 2], tensors[f"{name}_blocks"].view(-1))
    read_as_decoded = read(tmp_path / "saved", tmp_path / "storage", quantization_config=MXFP4)
    assert not any(residency_of(each).codec for each in read_as_decoded.parameters())


@pytest.mark.slow
def test_adapters_learn_over_experts_in_mxfp4(tmp_path):
    """What they learn over the values that transformers makes of them; over nf4 test_frozen_weights.py has it, and that
    mxfp4 is trained over as its values end_to_end/test_frozen.py.
    """
    model, theirs = both_of_mxfp4(tmp_path)
    model, losses, found = learned(model, storage=model.greedysnake_options, targets=["q_proj"])
    places = {name: residency_of(each).home.span.codec for name, each in model.named_parameters()}
    assert all(codec == ("mxfp4" if name.endswith(EXPERTS) else "") for name, codec in places.items())
    _, wanted_losses, wanted = learned(theirs, targets=["q_proj"])
    assert losses == pytest.approx(wanted_losses, rel=1e-6)
    assert distance(found, wanted) < 1e-5


def test_experts_are_encoded_and_their_biases_are_not(tmp_path):
    source, codec = small("gpt_oss").bfloat16(), CODECS["mxfp4"]
    source.save_pretrained(tmp_path / "saved")
    model = read(tmp_path / "saved", tmp_path / "storage", frozen="mxfp4")
    for name, parameter in model.named_parameters():
        values = source.get_parameter(name).detach()
        is_meant = is_encoded(name, values) and not name.endswith("bias")
        assert residency_of(parameter).codec == ("mxfp4" if is_meant else ""), name
        wanted = codec.decode(codec.encode(values), values.shape, values.dtype) if is_meant else values
        assert torch.equal(parameter.detach().clone(), wanted), name
