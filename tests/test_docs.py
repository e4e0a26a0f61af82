"""The documents name files that exist, are short enough to be read, and have code that runs."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
import typer
from tiered import options
from tiny import Tiny, tiny
from zoo import VOCAB

import gs_compile
from gs_compile.cli.main import app
from gs_compile.passes.vertical import vertical
from gs_compile.program.ir import KINDS, VERBS

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("**/*.md")])
ON_SSD = """"expert": {"compiler": "eager", "recompute": "all", "alpha": 0, "ratios":
    {"parameter": 0, "checkpoint": 0, "optimizer": 0}}, """  # so that nothing is planned
FILE = re.compile(r"`((?:[a-z_]+/)+[a-z_]+\.(?:py|md|json|html))`")
COMMANDS: Any = typer.main.get_command(app)
COMMAND = re.compile(r"(?:`|^    )greedysnake ([^`#\n]+)", re.MULTILINE)
LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)[^)]*\)")


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_files_and_links_exist(path):
    text = path.read_text()
    missing = [
        name for name in FILE.findall(text) if not any((each / name).exists() for each in (ROOT, ROOT / "gs_compile"))
    ]
    missing += [link for link in LINK.findall(text) if not (path.parent / link).exists()]
    assert missing == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_code_can_be_parsed_and_commands_have_their_flags(path):
    """Fault: three dots stood for further options, which no Python takes there."""
    text, unknown = path.read_text(), set()
    for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        ast.parse(code)
    for words in map(str.split, COMMAND.findall(text)):
        command = COMMANDS
        while words and words[0] in getattr(command, "commands", {}):
            command = command.commands[words.pop(0)]
        unknown |= {words[0]} if hasattr(command, "commands") and words and words[0].isalpha() else set()
        flags = {name for each in command.params for name in each.opts}
        unknown |= {word for word in words if word.startswith("--") and word.partition("=")[0] not in flags}
    assert unknown == set()


@pytest.mark.parametrize(("name", "most"), [("README.md", 150), ("ARCHITECTURE.md", 140)])
def test_what_is_read_first_is_short(name, most):
    assert len((ROOT / name).read_text().splitlines()) <= most


def test_the_words_of_a_program_are_explained():
    section = (ROOT / "docs" / "step.md").read_text().partition("## The words of a program")[2].partition("\n## ")[0]
    rows = [(word, text.replace("`", "")) for word, text in re.findall(r"^\| `(\w+)` \| (.*) \|$", section, re.M)]
    assert rows == [*KINDS.items(), *VERBS.items()]


def test_the_pass_that_contributing_writes_runs(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)
    found: dict[str, Any] = {}
    exec(code, found)
    printed = capsys.readouterr().out
    assert printed.startswith("# gs_compile program")
    assert "after reverse" in printed.splitlines()[0]
    before, after = vertical(num_layers=3, num_micro_batches=2), found["program"]
    assert sorted(map(str, after.ops)) == sorted(map(str, before.ops))
    orders = [[op.micro_batch for op in ops if op.micro_batch is not None] for _, ops in after.stages()]
    assert all(order in ([], [1, 0]) for order in orders)
    assert [1, 0] in orders


def test_the_durable_run_of_its_page_ends_where_it_has_ended(tmp_path):
    """Within an epoch. Fault: the script that was started again after its last step trained another epoch."""
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "durable.md").read_text(), re.DOTALL)
    code = code.replace('"/mnt/nvme0/me"', f'"{tmp_path}"').replace('"storage"', f'{ON_SSD}"storage"')
    rows = torch.randint(VOCAB, (8, 8), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": row, "labels": row} for row in rows]

    def run() -> tuple[int, int, bool]:
        model = tiny()
        optimizer = gs_compile.AdamW(model.parameters())
        given = {"model": model, "optimizer": optimizer, "scheduler": torch.optim.lr_scheduler.ConstantLR(optimizer)}
        given |= {"gs_compile": gs_compile, "data": data, "num_steps": 3, "DataLoader": torch.utils.data.DataLoader}
        exec(code.replace("batch_size=32", "batch_size=4"), given)
        if optimizer.engine is not None:
            optimizer.engine.tiers.close()
        return given["run"].step, given["batches"].step, optimizer.engine is None

    assert [run(), run()] == [(0, 3, False), (3, 3, True)]


def test_parameters_are_read_and_changed_as_their_page_does(tmp_path, monkeypatch):
    """Fault: the one that changes them ended with a RuntimeError, as torch changes no leaf in place."""
    page = (ROOT / "docs" / "larger_than_memory.md").read_text()
    (code,) = (each for each in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "write=True" in each)
    model, tokens = tiny(), torch.randint(VOCAB, (4, 8), generator=torch.Generator().manual_seed(0))
    optimizer = gs_compile.AdamW(model.parameters())
    model.compile(backend="greedysnake", options=options(tmp_path))
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    before = model.state_dict()["head.weight"].clone()
    monkeypatch.chdir(tmp_path)
    model.generate = torch.no_grad()(model.forward)
    given = {"gs_compile": gs_compile, "torch": torch, "model": model, "ids": tokens}
    exec(code.replace("lm_head", "head"), given)
    assert torch.equal(torch.load("masters.pt")["head.weight"], before * 0.5)


@pytest.mark.parametrize("name", ["README.md", "docs/start.md"])
def test_the_loop_that_is_read_first_trains(name, tmp_path):
    code, *others = re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(), re.DOTALL)
    model = tiny()
    tokens = torch.randint(VOCAB, (4, 8), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": tokens, "labels": tokens}
    with torch.no_grad():
        before = model(**batch).loss.item()
    model.save_pretrained(tmp_path / "checkpoint")  # in the place of one of the hub, and of AutoModelForCausalLM
    code = code.replace("from transformers import AutoModelForCausalLM\n", "").replace('.to("cuda")', "")
    code = code.replace('"meta-llama/Llama-3.1-8B"', f'"{tmp_path / "checkpoint"}"')
    code = code.replace('"/mnt/nvme0/me"', f'"{tmp_path}"').replace('"storage"', f'{ON_SSD}"storage"')
    logged: list[dict[str, float]] = []
    given = {"gs_compile": gs_compile, "torch": torch, "model": model, "loader": [batch] * 3, "held_out": batch}
    given |= {"AutoModelForCausalLM": Tiny}
    given |= {"wandb": SimpleNamespace(log=logged.append), "transformers": transformers}
    exec(code, given)
    model = given["model"]
    for more in others:  # it logs, evaluates and saves
        exec(more.replace("% 100", "% 2").replace('"trained"', f'"{tmp_path / "trained"}"'), given)
        assert {"loss", "grad_norm", "tokens_per_second"} <= logged[-1].keys()
        assert (tmp_path / "trained" / "model.safetensors").exists()
    with torch.no_grad():
        assert model(**batch).loss.item() < before
