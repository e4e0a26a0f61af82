"""Every example runs in small, with its own command line, and learns; the page of recipes has what their heads say."""

from __future__ import annotations

import gc
import importlib.util
import re
import runpy
import sys
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from gs_compile.codegen import codes

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
RECIPES = sorted(path for path in EXAMPLES.glob("*.py") if path.stem != "inspect_program")
MEASURED = re.compile(r"^    ((?:python|torchrun) .*?)  +([^#\s].*)$", re.MULTILINE)
LOSS = re.compile(r"(?:loss'?:? '?|at the first step, )(\d+\.\d+)")

SHORT = {"SEQUENCE": 16, "BATCH": 4}
SHALLOW = {"LlamaConfig": lambda **given: LlamaConfig(**{**given, "num_hidden_layers": 2})}  # Dynamo reads each layer
SMALL = {
    "finetune_lora_sft": (["--steps", "6", "--frozen", "nf4"], {"PROMPT": 8, "COMPLETION": 8} | SHALLOW),
    "bigger_than_memory": (["--size", "gpt2", "--host-memory", "256MiB", "--compiler", "eager"], {"SIZES": {"gpt2": (2, 64, 2)}}),
    "encoder_decoder": (["--steps", "4"], {"LENGTH": 16, "BATCH": 4}),
    "finetune_accelerate": (["--steps", "4"], {"SEQUENCE": 16}),
    "finetune_trainer": (["--steps", "10"], {"SEQUENCE": 16}),
    "long_text": (["--steps", "2", "--tokens", "1100"], {}),
    "train_gpt2": (["--steps", "12"], SHORT),
    "own_loop": (["--steps", "4"], SHORT | SHALLOW),
}  # fmt: skip


def main(name, arguments, constants, monkeypatch):
    """What an example does that is started with these arguments; constants: in the place of its own."""
    specification = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(specification)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    specification.loader.exec_module(module)
    for key, value in constants.items():
        monkeypatch.setattr(module, key, value)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, arguments)])
    monkeypatch.setattr(codes, "best_compiler", lambda device_type: "eager")
    monkeypatch.setenv("CI", "1")  # TRL tells nobody that it was used
    module.main()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6:FutureWarning")  # in PEFT
@pytest.mark.parametrize("name", SMALL)
def test_an_example_learns_in_small(name, tmp_path, monkeypatch, capsys):
    """Fast tests have train_gpt2 in ranks/test_ranks.py, and what finetune_lora_sft does in test_frozen_weights.py."""
    arguments, constants = SMALL[name]
    main(name, [*arguments, "--storage", tmp_path], constants, monkeypatch)
    printed = capsys.readouterr().out
    losses = [float(each) for each in LOSS.findall(printed)]
    assert losses[-1] < losses[0], printed
    gc.collect()  # a model ends, and its files with it
    assert list(tmp_path.iterdir()) == [], "an example leaves nothing"


@pytest.mark.slow
def test_a_checkpoint_of_ones_own(tmp_path, monkeypatch, capsys):
    """`--model` takes a folder as transformers writes it, with a tokenizer of its own."""
    own = runpy.run_path(str(EXAMPLES / "finetune_lora_sft.py"))
    own["tokenizer"](None).save_pretrained(tmp_path / "model")
    sizes = {"vocab_size": len(own["LETTERS"]), "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2)).save_pretrained(tmp_path / "model")
    main("own_loop", ["--steps", "1", "--storage", tmp_path, "--model", tmp_path / "model"], SHORT, monkeypatch)
    assert len(LOSS.findall(capsys.readouterr().out)) == 1


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_head_says_what_was_measured_and_takes_a_checkpoint(path):
    source = path.read_text()
    head = source.split('"""')[1]
    assert MEASURED.findall(head), "command, time, memory and result"
    assert '"--model"' in source or path.stem == "train_gpt2", "from nothing, to be compared"


def test_the_page_of_recipes_has_what_the_heads_say():
    page = (ROOT / "docs" / "recipes.md").read_text()
    heads = [found for path in RECIPES for found in MEASURED.findall(path.read_text().split('"""')[1])]
    assert re.findall(r"^\| `((?:python|torchrun) [^`]*)` \| (.*) \|$", page, re.MULTILINE) == heads
