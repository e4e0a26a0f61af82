"""The page of models is what the results say of those that are tried; a trial tells right from wrong."""

from __future__ import annotations

import json
import re
import sys
from importlib import import_module

import pytest
import torch

from benchmarks.common import ROOT
from benchmarks.zoo.page import PAGE, RESULTS, page
from benchmarks.zoo.refusal import MOST, PACKAGES, refusal
from benchmarks.zoo.registry import CASES
from benchmarks.zoo.trial import Ours, verdict
from gs_compile.errors import GraphBreakError


@pytest.fixture(scope="module")
def found():
    return json.loads(RESULTS.read_text())


def test_the_page_is_what_the_results_say(found):
    assert PAGE.read_text() == page(found), "python -m benchmarks.zoo --page writes it"


@pytest.mark.parametrize("name", ["README.md", "CHANGELOG.md", "docs/limits.md"])
def test_what_others_say_of_it_is_what_it_says(name):
    """Fault: the changelog had the number of models that trained before."""
    ((every, trained),) = re.findall(r"Of (\d+) models (\d+) train", PAGE.read_text())
    text = (ROOT / name).read_text()
    assert set(re.findall(r"(\d+) \[?models\b", text)) == {every}
    assert set(re.findall(r"(\d\d+) train\b", text)) <= {trained}


def test_all_models_were_tried(found):
    assert list(found["cases"]) == list(CASES)


def test_what_is_learned_is_right(found):
    assert {name for name, each in found["cases"].items() if each["result"] not in ("trains", "refused")} == set()
    assert [name for name, case in CASES.items() if found["cases"][name].get("streamed", 0) > case.num_blocks] == []


def test_the_registry_imports_no_package(monkeypatch):
    for name in [each for each in sys.modules if each.startswith("benchmarks.zoo.")]:
        monkeypatch.delitem(sys.modules, name)
    for package in ("timm", "transformers", "litgpt", "torchtune"):
        monkeypatch.setitem(sys.modules, package, None)  # to import it fails
    assert import_module("benchmarks.zoo.registry").CASES.keys() == CASES.keys()


def test_a_refusal_names_files_as_all_machines_have_them():
    error = GraphBreakError(
        f"the model's forward is not one graph: Dynamo breaks it at {PACKAGES}/some/model.py:3: x.item()\n"
        "Dynamo's reason: Unsupported\n  Explanation: it reads a tensor\n  Hint: do not"
    )
    assert refusal(error) == (
        "GraphBreakError: the model's forward is not one graph: Dynamo breaks it at some/model.py:3: x.item(); "
        "Dynamo's reason: Unsupported. Explanation: it reads a tensor"
    )
    given_up = f"it did not run. Do this. Dynamo gave the model's forward up at {ROOT}/models.py:3: x\nDynamo's reason: so\nmore"
    assert refusal(ValueError(given_up)) == (
        "ValueError: it did not run. Dynamo gave the model's forward up at models.py:3: x; Dynamo's reason: so"
    )
    assert refusal(ValueError()) == "ValueError: without words"
    assert len(refusal(ValueError("x" * 2 * MOST))) == MOST


def test_a_verdict():
    def values(*numbers):
        return {name: torch.tensor([number]) for name, number in zip(("loss", "w"), numbers, strict=True)}

    def of(plain, on_ssd, in_memory):
        return verdict(plain, {"SSD": on_ssd, "memory": in_memory})

    assert of(values(2.0, 3.0), values(2.0, 3.0), values(2.0, 3.0)) == {"result": "trains", "difference": 0.0}
    assert (
        of(values(2.0, 3.0), values(2.0, 3.1), values(2.0, 3.1))["why"] == "w differs from plain PyTorch's by 3.3e-02"
    )
    assert (
        of(values(2.0, 3.0), values(2.0, 3.000001), values(2.0, 3.0))["why"] == "w has other bits on SSD than in memory"
    )
    assert of(values(2.0, float("nan")), values(2.0, 3.0), values(2.0, 3.0))["result"] == "wrong"
    assert (
        of(values(2.0, 3.0), {"loss": torch.tensor([2.0])}, {"loss": torch.tensor([2.0])})["why"] == "w was not learned"
    )


def test_a_model_of_torch_trains_in_both_placements():
    case = CASES["torch/nn.TransformerEncoder"]
    ours = Ours(case.make())
    on_ssd, in_memory = ours.train(0.0), ours.train(1.0)
    assert verdict(on_ssd, {"SSD": on_ssd, "memory": in_memory}) == {"result": "trains", "difference": 0.0}
    assert ours.facts() == {"streamed": case.num_blocks, "kinds": 1, "kept": []}
