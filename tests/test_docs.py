"""The documents name files that exist, are short enough to be read, and have code that runs."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from tiny import Tiny, tiny
from zoo import VOCAB

import gs_compile
from gs_compile.passes.vertical import vertical
from gs_compile.program.ir import KINDS, VERBS

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("**/*.md")])
ON_SSD = """"expert": {"compiler": "eager", "recompute": "all", "alpha": 0, "ratios":
    {"parameter": 0, "checkpoint": 0, "optimizer": 0}}, """  # so that nothing is planned
FILE = re.compile(r"`((?:[a-z_]+/)+[a-z_]+\.(?:py|md|json|html))`")
LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)[^)]*\)")


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_files_and_links_exist(path):
    text = path.read_text()
    missing = [
        name for name in FILE.findall(text) if not any((each / name).exists() for each in (ROOT, ROOT / "gs_compile"))
    ]
    missing += [link for link in LINK.findall(text) if not (path.parent / link).exists()]
    assert missing == []


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
