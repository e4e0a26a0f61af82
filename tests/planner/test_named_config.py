"""Names of models, and what is said where there is none."""

from __future__ import annotations

import json

import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError

from gs_compile.errors import PlanError
from gs_compile.planner.cost.model import built, check_length, named_config


@pytest.mark.parametrize(
    ("name", "layers", "heads", "width"),
    [("gpt-30b", 48, 56, 7168), ("gpt-65b", 80, 64, 8192), ("gpt-175b", 96, 96, 12288)],
)
def test_the_models_of_the_paper(name, layers, heads, width):
    config = named_config(name)
    assert (config.num_hidden_layers, config.num_attention_heads, config.hidden_size) == (layers, heads, width)
    assert config.max_position_embeddings == 2048
    assert not config.use_cache
    assert config.name_or_path == name
    billions = layers * (12 * width**2 + 13 * width) / 1e9
    assert billions == pytest.approx(float(name[4:-1]), rel=0.02)


def test_a_model_type():
    assert named_config("qwen3").model_type == "qwen3"


def test_a_file_and_its_directory(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 96}))
    for path in (tmp_path, tmp_path / "config.json"):
        config = named_config(str(path))
        assert (config.model_type, config.hidden_size) == ("llama", 96)


def test_a_model_of_the_hub(tmp_path, monkeypatch):
    """From its cache; else from the network; else in words."""
    asked, answers = [], {(True, "me/cached"), (False, "me/new")}

    def download(model, file, local_files_only=False):
        asked.append((local_files_only, model))
        if (local_files_only, model) in answers:
            (tmp_path / file).write_text(json.dumps({"model_type": "llama", "hidden_size": 96}))
            return str(tmp_path / file)
        raise LocalEntryNotFoundError("no connection")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    assert named_config("me/cached").hidden_size == named_config("me/new").hidden_size == 96
    assert asked == [(True, "me/cached"), (True, "me/new"), (False, "me/new")]
    with pytest.raises(PlanError, match=r"^me/none is not a path here, .* no connection Give a model type"):
        named_config("me/none")


def test_a_folder_without_a_config(tmp_path):
    with pytest.raises(PlanError, match=r"config\.json: no config can be read there \(.*No such file.*: give a"):
        named_config(str(tmp_path))


def test_a_model_without_weights():
    config = named_config("gpt2")
    config.n_layer = 1
    model = built(config)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gpt-64b", r"^gpt-64b is neither the name of a model nor the path of a config\.json; did you mean gpt-65b"),
        ("qwen3-14b", r"did you mean qwen3.*, or an id of the hub, such as Qwen/Qwen3-14B\?"),
        (
            "#",
            r"known are gpt-30b, .*, llama-405b, gpt-oss-20b, gpt-oss-120b, HuggingFace's types, and an id of the hub",
        ),
        (300 * "x", r"^x+ is neither the name of a model nor the path of a config\.json"),  # longer than a file's
    ],
)
def test_a_name_that_nothing_has(name, message):
    with pytest.raises(PlanError, match=message):
        named_config(name)


def test_a_file_that_is_no_config(tmp_path):
    path = tmp_path / "config.json"
    for text in ("{", "[" * 100_000):  # fault: the second was a traceback
        path.write_text(text)
        with pytest.raises(PlanError, match="no config can be read there"):
            named_config(str(path))
    path.write_text(json.dumps({"model_type": "llama", "num_attention_heads": 0}))
    with pytest.raises(PlanError, match="llama: integer division"):  # fault: a traceback
        named_config(str(path))
    path.write_text("{}")
    with pytest.raises(PlanError, match="which names its model_type: give the config"):
        named_config(str(path))


def test_a_model_that_is_no_language_model():
    with pytest.raises(PlanError, match=r"^vit: .*AutoModelForCausalLM"):
        built(named_config("vit"))


def test_a_sample_longer_than_the_model_has_positions():
    check_length(named_config("gpt2"), 1024)
    check_length(torch.nn.Linear(1, 1), 10**6)
    with pytest.raises(
        PlanError, match=r"^gpt2 has 1024 positions, fewer .* 1025 tokens: ask for a sequence of 1024 or less \[plan\]$"
    ):
        check_length(named_config("gpt2"), 1025)


def test_without_transformers(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(PlanError, match="pip install 'greedysnake"):
        named_config("gpt2")


def test_models_have_their_published_sizes():
    """In billions: arXiv 2407.21783, table 3, and 2508.10925, table 1."""
    wanted = {"llama-8b": 8.03, "llama-70b": 70.55, "llama-405b": 405.85, "gpt-oss-20b": 20.91, "gpt-oss-120b": 116.83}
    found = {name: sum(each.numel() for each in built(named_config(name)).parameters()) / 1e9 for name in wanted}
    assert found == pytest.approx(wanted, rel=1e-3)
