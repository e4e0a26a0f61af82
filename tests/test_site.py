"""The site has every page and every public name; the build itself is slow, and needs mkdocs."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from xml.etree import ElementTree

import pytest
import yaml

from benchmarks import picture
from docs.site import pages

SETTINGS = yaml.safe_load((pages.ROOT / "mkdocs.yml").read_text())
NAVIGATION = [
    uri for section in SETTINGS["nav"] for entries in section.values() for each in entries for uri in each.values()
]
LEAST_EXAMPLES = 5


def test_every_page_is_in_the_navigation_once():
    written = [path.relative_to(pages.DOCS).as_posix() for path in pages.DOCS.glob("**/*.md")]
    assert sorted(NAVIGATION) == sorted([*written, *pages.made()])


def test_every_public_name_has_a_docstring_and_stands_in_the_reference():
    assert pages.undocumented() == []


def test_a_public_name_that_is_not_in_the_reference_is_found(monkeypatch):
    monkeypatch.setattr(pages.gs_compile, "__all__", [*pages.gs_compile.__all__, "import_module"])
    assert pages.undocumented() == ["gs_compile.import_module"]


def test_links_of_the_repository_lead_to_pages_of_the_site():
    for page, text, there in (
        ("index.md", "[a](docs/step.md#print-it)", "[a](step.md#print-it)"),
        ("index.md", "[a](LICENSE) [b](CHANGELOG.md)", "[a](licence.md) [b](changelog.md)"),
        ("loops.md", "[a](ranks.md) [b](../README.md)", "[a](ranks.md) [b](index.md)"),
        ("loops.md", "[a](../examples/train.yaml)", "[a](examples.md#trainyaml)"),
        ("reference/hf.md", "[a](../huggingface.md)", "[a](../huggingface.md)"),
        ("loops.md", "[a](../benchmarks/results) [b](https://arxiv.org) [c](#d)", "a [b](https://arxiv.org) [c](#d)"),
        ("index.md", "[docs/what_fits.md](docs/what_fits.md)", "[What fits](what_fits.md)"),
        ("loops.md", "![a](figures/step.svg)", "![a](figures/step.svg)"),
        ("loops.md", "[a](nowhere.py)", "[a](nowhere.py)"),  # the build fails there
    ):
        assert pages.linked(text, page) == there


def test_the_pages_that_are_made_have_every_example_and_every_command():
    made = pages.made()
    examples = re.findall(r"^## (\S+)$", made["examples.md"], re.M)
    assert len(examples) >= LEAST_EXAMPLES
    assert all((pages.ROOT / "examples" / name).exists() for name in examples)
    commands = re.findall(r"^## (greedysnake.*)$", made["command_line.md"], re.M)
    assert {"greedysnake plan", "greedysnake store gc", "greedysnake fit"} < set(commands)
    assert re.search(r"^\| `--host-memory` \S+ \| \S", made["command_line.md"], re.M)


def test_a_notebook_is_shown_by_its_cells(tmp_path, monkeypatch):
    cells = [{"cell_type": "markdown", "source": ["# Proof"]}, {"cell_type": "code", "source": ["a = 1\n", "a"]}]
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "proof.ipynb").write_text(json.dumps({"cells": cells}))
    made = pages.made()["examples.md"]
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    monkeypatch.setattr(pages, "AT_THE_ROOT", {})
    (tmp_path / "LICENSE").touch()
    assert pages.made()["examples.md"] == made.partition("\n## ")[0] + (
        "\n## proof.ipynb\n\n# Proof\n\n```python\na = 1\na\n```\n"
    )


def test_the_picture_of_the_readme_is_small_and_well_formed():
    assert picture.TARGET.stat().st_size < 100 * 1024
    assert ElementTree.parse(picture.TARGET).getroot().tag.endswith("svg")


@pytest.mark.slow
def test_the_picture_of_the_readme_is_what_its_command_draws():
    assert picture.TARGET.read_text() == picture.svg(picture.simulated())


@pytest.mark.slow
def test_the_site_builds_and_loads_nothing_from_elsewhere(tmp_path):
    if importlib.util.find_spec("material") is None:
        pytest.skip("mkdocs-material is not installed: pip install '.[docs]', or make site")
    run = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(tmp_path)],
        cwd=pages.ROOT, capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    listed = re.findall(r"\]\((\S+\.md)\): \S", (tmp_path / "llms.txt").read_text())
    assert listed == NAVIGATION
    assert all((tmp_path / uri).read_text() for uri in listed)
    for page in tmp_path.glob("**/*.html"):
        loaded = re.findall(r"<(?:script|img|link)\b[^>]*?(?:src|href)=\"?(https?:[^\s\">]+)", page.read_text())
        assert loaded == [], page
    assert "<strong>micro_batch_size</strong>" in (tmp_path / "reference/gs_compile.html").read_text()
