"""Checkpoints of transformers to storage and back."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from learner import Learner, distance, inside, same_tensors
from safetensors.torch import load_file, load_model, save_model
from test_adapters import adapted, trained
from test_trainer import EAGER, curve
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import Chunk, WeightConverter
from zoo import batch, configuration, huggingface, small

import gs_compile
from gs_compile.errors import GraphBreakError, OptimizerError, OptionError
from gs_compile.hf.weights import options_of
from gs_compile.model import storage_init
from gs_compile.model.residency import is_offloaded
from gs_compile.runtime.formats import narrow as rounded


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


@pytest.mark.parametrize(
    ("name", "saved", "dtype", "shard"),
    [
        ("gpt2", torch.bfloat16, torch.float32, "20KB"),
        ("llama", torch.float32, None, "50GB"),
        ("mixtral", torch.bfloat16, None, "20KB"),
        ("mixtral", torch.float32, torch.bfloat16, "50GB"),
    ],
)
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
    assert float(found.model.layers[2].mlp.up_proj.weight.detach().std()) == pytest.approx(0.02, rel=0.1)


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


@pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6:FutureWarning")  # in PEFT
def test_a_trainer_takes_up_the_options(tmp_path):
    """With adapters in front of the model; and so does a loop. One trains so in test_frozen_weights.py."""
    small("llama").save_pretrained(tmp_path / "saved")
    load = partial(gs_compile.from_pretrained, AutoModelForCausalLM, tmp_path / "saved")
    model = adapted(model=load(storage=tmp_path / "storage", host_memory="1GiB"))
    known = {"storage": (tmp_path / "storage",), "host_memory": 1 << 30}
    assert options_of(model, {}) == known
    assert options_of(model, {"host_memory": "2GiB"}) == known | {"host_memory": "2GiB"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6:FutureWarning")  # in PEFT
def test_a_trainer_trains_adapters_with_the_options(tmp_path):
    small("llama").save_pretrained(tmp_path / "saved")
    model = gs_compile.from_pretrained(AutoModelForCausalLM, tmp_path / "saved", storage=tmp_path / "storage")
    theirs = trained(adapted(model=AutoModelForCausalLM.from_pretrained(tmp_path / "saved")), tmp_path)
    mine = trained(adapted(model=model), tmp_path, expert=EAGER)
    assert curve(mine, "loss") == pytest.approx(curve(theirs, "loss"), rel=1e-5)


def test_a_model_that_is_placed_elsewhere_is_refused(tmp_path):
    huggingface("llama").save_pretrained(tmp_path / "saved")
    places = {"model": "cpu", "lm_head": "disk"}
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", device_map=places, offload_folder=tmp_path)
    refusal = r"device_map= has left .*: load it with gs_compile.from_pretrained"
    with pytest.raises(OptionError, match=refusal):
        options_of(model, {})
    with pytest.raises(OptimizerError, match=refusal):
        gs_compile.AdamW(model.parameters())
    torch._dynamo.reset()
    model.compile(backend="greedysnake", options={"micro_batch_size": 2})
    with pytest.raises(GraphBreakError, match=refusal):
        model(input_ids=batch()[0])


# Back again -----------------------------------------------------------------------------------------------------------


def run(model, folder, *, steps=2, **options):
    """After some steps on the tiers: the optimizer."""
    torch._dynamo.reset()
    optimizer = gs_compile.AdamW(model.parameters(), lr=1e-2)
    model.train().compile(backend="greedysnake", options={"storage": folder, "expert": EAGER, **options})
    for number in range(steps):
        ids = torch.arange(number, number + 8).view(2, 4)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def saved_values(folder):
    """Of all files of a folder, by name."""
    return {name: value for path in Path(folder).glob("*.safetensors") for name, value in load_file(path).items()}


@pytest.mark.parametrize("name", ["gpt2", "mixtral"])
def test_files_go_round(name, tmp_path):
    """Bit for bit; the experts of mixtral are parted again."""
    huggingface(name).save_pretrained(tmp_path / "saved", max_shard_size="20KB")
    model = gs_compile.from_pretrained(AutoModelForCausalLM, tmp_path / "saved", storage=tmp_path)
    gs_compile.save_pretrained(model, tmp_path / "again", max_shard_size="20KB")
    assert len(list((tmp_path / "again").glob("*.safetensors"))) > 3
    same_tensors(saved_values(tmp_path / "again"), saved_values(tmp_path / "saved"))
    assert not hasattr(model, "hf_device_map")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_all_formats_have_the_values(tmp_path, monkeypatch):
    """As transformers writes them of a model in memory; and they come back to the tiers."""
    small("gpt2").save_pretrained(tmp_path / "begun")
    model = gs_compile.from_pretrained(AutoModelForCausalLM, tmp_path / "begun", storage=tmp_path)
    optimizer = run(model, tmp_path)
    wanted = inside(Learner(model, optimizer))
    with gs_compile.materialize(model):
        model.save_pretrained(tmp_path / "wanted")
    model.save_pretrained(tmp_path / "habit")
    sent = {}
    hub = SimpleNamespace(create_repo=lambda name, **_: SimpleNamespace(repo_id=name))
    monkeypatch.setattr(transformers.modeling_utils, "hf_api", lambda: hub)
    monkeypatch.setattr(model, "_upload_modified_files", lambda folder, *_, **__: sent.update(saved_values(folder)))
    gs_compile.save_pretrained(model, tmp_path / "shards", max_shard_size="20KB", push_to_hub=True, repo_id="me/it")
    for found in (sent, saved_values(tmp_path / "shards"), saved_values(tmp_path / "habit")):
        same_tensors(found, saved_values(tmp_path / "wanted"))
    assert distance(saved_values(tmp_path / "shards"), saved_values(tmp_path / "begun")) > 1e-3
    save_model(model, str(tmp_path / "model.safetensors"))
    torch.save(model.state_dict(), tmp_path / "model.pt")
    checkpoint.save(get_model_state_dict(model), checkpoint_id=tmp_path / "dcp")

    def from_dcp():
        state = get_model_state_dict(model)
        checkpoint.load(state, checkpoint_id=tmp_path / "dcp")
        set_model_state_dict(model, state)

    for back in (
        from_dcp,
        lambda: load_model(model, str(tmp_path / "model.safetensors")),
        lambda: model.load_state_dict(torch.load(tmp_path / "model.pt", mmap=True)),
        lambda: model.load_state_dict(AutoModelForCausalLM.from_pretrained(tmp_path / "shards").state_dict()),
    ):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        back()
        same_tensors(inside(Learner(model, optimizer)), wanted)


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path):
    """transformers logs it, and writes nothing."""
    (tmp_path / "saved").touch()
    with pytest.raises(OptionError, match="saved is a file, and a checkpoint is a folder"):
        gs_compile.save_pretrained(huggingface("gpt2"), tmp_path / "saved")


def test_masters_are_saved_on_request(tmp_path):
    model = small("llama")
    optimizer = run(model, tmp_path, precision="bf16")
    gs_compile.save_pretrained(model, tmp_path / "narrow")
    gs_compile.save_pretrained(model, tmp_path / "wide", master=True)
    assert optimizer.engine is not None
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    narrow, wide = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("narrow", "wide"))
    assert (narrow.dtype, wide.dtype) == (torch.bfloat16, torch.float32)
    with gs_compile.materialize(model, master=True):
        for name, parameter in model.named_parameters():
            assert torch.equal(wide.get_parameter(name), parameter)
            assert torch.equal(narrow.get_parameter(name), rounded(parameter, torch.bfloat16))
    parts = ["mlp.gate_proj.weight", "mlp.up_proj.weight"]  # which a checkpoint may have as one
    model._weight_conversions = [WeightConverter("mlp.gate_up.weight", parts, operations=[Chunk(dim=0)])]
    gs_compile.save_pretrained(model, tmp_path / "merged", master=True, max_shard_size="2KB")
    whole = torch.cat([wide.get_parameter(f"model.layers.1.{part}") for part in parts])
    assert torch.equal(saved_values(tmp_path / "merged")["model.layers.1.mlp.gate_up.weight"], whole)
