"""`greedysnake train`: a run from a file, and what is said of files that are wrong."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path
from unittest.mock import Mock

import command_line
import pytest
import trl
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from gs_compile.cli import train
from gs_compile.cli.train import _apply, _parsed
from gs_compile.errors import OptionError
from gs_compile.hf.recipe import Recipe

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6:FutureWarning")  # in TRL
EXAMPLE = ROOT / "examples" / "train.yaml"


def run(file, *changes):
    return command_line.run("train", file, *changes, "--json", catch_exceptions=False)


@pytest.fixture
def written(tmp_path):
    """Write a run that has the example's entries, and some of its own; and its path."""

    def write(**entries):
        given = {**yaml.safe_load(EXAMPLE.read_text()), "data": str(ROOT / "README.md"), **entries}
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(given))
        return tmp_path / "run.yaml"

    return write


@pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning"
)  # of libraries
@pytest.mark.parametrize("goes_on", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_example_learns_and_goes_on(tmp_path, monkeypatch, goes_on):
    """From nothing; then with adapters from what was saved, on other data, as test_frozen_weights.py trains them."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "chat.jsonl").write_text(
        "\n".join(json.dumps({"prompt": f"{n} + {n} = ", "completion": str(2 * n)}) for n in range(64))
    )
    expert = ("compiler=eager", "recompute=all", "alpha=0")  # so that nothing is planned
    changes = (
        f"options.storage={tmp_path}/tiers",
        f"data={ROOT}/README.md",
        *(f"options.expert.{each}" for each in expert),
    )
    shallow = "model.num_hidden_layers=2"
    first = run(EXAMPLE, *changes, shallow, f"args.output_dir={tmp_path}/first")
    assert first.exit_code == 0, first.stderr
    done = json.loads(first.stdout)
    assert (done["saved"], done["steps"]) == (f"{tmp_path}/first", 12)
    assert done["loss"] < 5.2
    tokenizer = AutoTokenizer.from_pretrained(done["saved"])
    assert tokenizer.decode(tokenizer("Grüße, snake").input_ids) == "Grüße, snake"
    if not goes_on:
        return
    second = run(
        EXAMPLE, *changes, f"model={tmp_path}/first", "tokenizer=null", f"data={tmp_path}/chat.jsonl",
        f"args.output_dir={tmp_path}/second", "args.max_steps=2", "args.packing=false",
        "lora={r: 2, target_modules: [q_proj, v_proj]}", "options.frozen=nf4",
    )  # fmt: skip
    assert second.exit_code == 0, second.stderr
    assert AutoModelForCausalLM.from_pretrained(f"{tmp_path}/second").peft_config["default"].r == 2


def test_the_run_of_the_page_has_known_entries():
    (text,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "huggingface.md").read_text(), re.DOTALL)
    recipe = Recipe.of(_parsed(text))
    assert recipe.args["learning_rate"] == 1e-5
    assert recipe.args.keys() <= {each.name for each in fields(trl.SFTConfig)}


@pytest.mark.parametrize(
    ("entries", "change", "message"),
    [
        ({"modle": "x"}, "", "unknown option modle; did you mean model?"),
        ({}, "args.learning_rte=1", "unknown option args.learning_rte; did you mean args.learning_rate?"),
        ({}, "options.storag=x", "unknown option storag; did you mean storage?"),
        ({}, "lora.rank=4", "unknown option lora.rank"),
        ({}, "args.max_steps", "'args.max_steps' is no change of the file: write it as args.max_steps=5"),
        ({}, "data.x=1", "has no entries of its own"),
        ({"data": None}, "", "'data' is missing"),
        ({"options": 3}, "", "options must have entries; got 3"),
        ({"args": []}, "", "args must have entries; got []"),
        ({}, "data=7", "data must be a file or a list of files; got 7"),
        ({"options": None, "args": None, "data": "none.txt"}, "args.use_cpu=true", "data: there is no file none.txt"),
        ({"data": "none.txt"}, "args.save_strategy=no", "data: there is no file none.txt"),  # YAML reads no as False
        ({"data": "none.txt"}, "options.durability=off", "data: there is no file none.txt"),
        ({}, "args.max_steps=[", "args.max_steps=[ is no YAML: "),
        ({"tokenizer": None}, "", "a model from scratch has no tokenizer"),
        ({"data": "none.txt"}, "", "data: there is no file none.txt"),
        ({"data": "~/none.txt"}, "", f"data: there is no file {Path.home()}/none.txt"),
        ({"data": __file__}, "", "test_train.py is not known; known: .txt"),
        ({}, "model.model_type=lama", "model: Unrecognized model identifier: lama"),
        ({}, "model.vocab_size=256", "the tokenizer has 257 tokens, more than the model's vocab_size of 256"),
        ({}, "model=./none", "model: "),
        ({}, "model=~/none", f"{Path.home()}/none"),
        ({}, "args.eval_strategy=sometimes", "args: sometimes is not a valid IntervalStrategy"),
    ],
)
def test_what_is_wrong_is_said(entries, change, message, written):
    result = run(written(**entries), *[change] if change else [])
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr


def test_columns_that_no_trainer_knows(written, tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "data.jsonl").write_text('{"question": 1, "answer": 2}')
    assert (
        "has columns ['question', 'answer'], none of text, messages"
        in run(written(data=f"{tmp_path}/data.jsonl")).stderr
    )


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("data.jsonl", b'{"text": "a"}\n{"text": ', "data.jsonl cannot be read: "),
        ("data.jsonl", b"", "data.jsonl cannot be read: nothing is in it"),
        ("data.txt", b"\n\n\n\n", "data.txt cannot be read: "),
        ("data.txt", b"\xff\xfe\x00", "data.txt cannot be read: 'utf-8' codec can't decode"),
    ],
)
def test_data_that_are_damaged_or_empty(name, content, message, written, tmp_path, monkeypatch):
    """Fault: a traceback of the library that reads them."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / name).write_bytes(content)
    result = run(written(data=f"{tmp_path}/{name}"))
    assert (result.exit_code, result.stdout) == (2, "")
    told = result.stderr.splitlines()[-1]  # behind the bar of that library
    assert told.startswith("OptionError: data: ")
    assert message in told


@pytest.mark.parametrize("is_first", [True, False])
def test_the_first_rank_tells_of_a_run(is_first, written, monkeypatch):
    """Fault: each rank printed an object, and all of them together were no JSON."""
    trainer = Mock(is_world_process_zero=lambda: is_first)
    trainer.args.output_dir, trainer.state = "here", Mock(global_step=3, log_history=[{"loss": 0.5}])
    monkeypatch.setattr(train, "trainer_of", lambda _: trainer)
    result = run(written())
    assert (result.exit_code, result.stdout) == (0, '{"saved": "here", "steps": 3, "loss": 0.5}\n' * is_first)


def test_values_of_changes():
    given = {"args": {"lr": 1}}
    for change in ("args.lr=1e-4", "args.layers=[0, 1]", "options.storage=/a=b", "model.tied=false"):
        _apply(given, change)
    assert given == {
        "args": {"lr": 1e-4, "layers": [0, 1]}, "options": {"storage": "/a=b"}, "model": {"tied": False}
    }  # fmt: skip
    assert _parsed("2026-11-30") == "2026-11-30", "a date names a folder"
    for text in ("[", "[" * 100_000):
        with pytest.raises(OptionError, match="this is no YAML"):
            _parsed(text)
    with pytest.raises(OptionError, match="'model' is missing: name the model and the data"):
        Recipe.of({"data": "x.txt"})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: gpt2\n  data: x.txt", "is no YAML: mapping values are not allowed here"),
        ("args: {max_steps: 1}\nmodel: gpt2\nargs: {bf16: false}", "has 'args' twice, and only one of the two would"),
    ],
)
def test_a_file_that_is_no_run_is_named(text, message, tmp_path):
    (tmp_path / "run.yaml").write_text(text)
    result = run(tmp_path / "run.yaml")
    assert result.exit_code == 2
    assert f"{tmp_path}/run.yaml {message}" in result.stderr


def test_a_section_that_others_merge_may_be_changed_there():
    assert _parsed("a: &a {x: 1}\nb: &b {<<: *a, x: 2}\nc: {<<: *b}")["c"] == {"x": 2}
