"""Checkpoints of transformers to storage and back."""

from __future__ import annotations

import json

import pytest
import torch
from learner import values
from transformers import AutoModelForCausalLM
from zoo import configuration, huggingface

import gs_compile
from gs_compile.errors import OptionError
from gs_compile.model import storage_init
from gs_compile.model.residency import is_offloaded


@pytest.fixture
def all_to_files(monkeypatch):
    """Small tensors go to files too, and leave memory at once."""
    monkeypatch.setattr(storage_init, "SMALL_NBYTES", 1)
    monkeypatch.setattr(storage_init, "CACHE_NBYTES", 0)


def assert_same(found, wanted):
    theirs = dict(wanted.named_parameters(remove_duplicate=False))
    ours = dict(found.named_parameters(remove_duplicate=False))
    assert list(ours) == list(theirs)
    for name, parameter in ours.items():
        assert is_offloaded(parameter), name
        assert (parameter.dtype, parameter.requires_grad) == (theirs[name].dtype, theirs[name].requires_grad)
        assert torch.equal(parameter.detach(), theirs[name]), name
        assert [n for n in ours if ours[n] is parameter] == [n for n in theirs if theirs[n] is theirs[name]]
    for (name, buffer), (_, other) in zip(found.named_buffers(), wanted.named_buffers(), strict=True):
        assert torch.equal(buffer, other), name
    assert found.training == wanted.training


@pytest.mark.parametrize("shard", ["50GB", "20KB"], ids=["one file", "sharded"])
@pytest.mark.parametrize("saved", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("dtype", [None, torch.float32], ids=["as saved", "to fp32"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "mixtral"])
def test_values_are_those_of_transformers(name, dtype, saved, shard, tmp_path, all_to_files):
    """Tied weights (gpt2) and experts, which are merged when they are read (mixtral), too."""
    huggingface(name).to(saved).save_pretrained(tmp_path / "saved", max_shard_size=shard)
    settings = {} if dtype is None else {"dtype": dtype}
    wanted = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", **settings)
    found = gs_compile.from_pretrained(AutoModelForCausalLM, tmp_path / "saved", storage=tmp_path, **settings)
    assert_same(found, wanted)


def test_keys_that_do_not_match_are_named(tmp_path, caplog):
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(configuration("llama", num_hidden_layers=2)).save_pretrained(tmp_path / "saved")
    config = configuration("llama", num_hidden_layers=3)
    torch.manual_seed(0)
    _, wanted = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", config=config, output_loading_info=True)
    found, told = gs_compile.from_pretrained(
        AutoModelForCausalLM, tmp_path / "saved", storage=tmp_path, config=config, output_loading_info=True
    )
    assert told == wanted
    assert "model.layers.2.mlp.up_proj.weight" in told["missing_keys"]
    assert float(found.model.layers[2].mlp.up_proj.weight.std()) == pytest.approx(0.02, rel=0.1)


def test_what_cannot_be_trained_is_refused(tmp_path):
    huggingface("llama").save_pretrained(tmp_path)
    with pytest.raises(OptionError, match="device_map: parameters go to storage"):
        gs_compile.from_pretrained(AutoModelForCausalLM, tmp_path, device_map="auto")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(OptionError, match=r"the weights are quantized \(gptq\)"):
        gs_compile.from_pretrained(AutoModelForCausalLM, tmp_path)
    with pytest.raises(OptionError, match="host_memory"):
        gs_compile.from_pretrained(AutoModelForCausalLM, tmp_path, host_memory="much")
