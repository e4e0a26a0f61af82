"""docs/what_fits.md has a figure for each way of training each model on each machine, and its command makes them."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import zoo

from benchmarks import what_fits
from gs_compile.planner import fit
from gs_compile.planner.measure.shipped import known

PAGE = (Path(__file__).resolve().parent.parent / "docs/what_fits.md").read_text()
FIGURE = r"(?:-|[\d,.]+)"


def table(text: str) -> dict[str, dict[str, str]]:
    """Cells, by model and machine."""
    heading, _, *rows = ([each.strip() for each in line.split("|")[1:-1]] for line in text.splitlines() if "|" in line)
    return {name: dict(zip(heading[1:], cells, strict=True)) for name, *cells in rows}


def test_the_page_has_every_model_and_machine():
    found = table(PAGE)
    assert list(found) == list(what_fits.models())
    for cells in found.values():
        assert tuple(cells) == known()
        assert all(re.fullmatch(f"{FIGURE} / {FIGURE} / {FIGURE}", cell) for cell in cells.values())
    assert re.search(r"Made on \d{4}-\d{2}-\d{2} by `python -m benchmarks.what_fits", PAGE)


def test_its_command_makes_a_cell(tmp_path, monkeypatch):
    """Of a small model that is put there, in full alone."""
    zoo.configuration("llama", num_hidden_layers=4, use_cache=False).to_json_file(tmp_path / "small.json")
    monkeypatch.setattr(what_fits, "FOLDER", tmp_path)
    monkeypatch.setattr(what_fits, "SEQUENCE", 64)
    asked = {"micro_batch_size": 2, "alpha": 0.0, "recompute": "all"}  # so that little is searched
    monkeypatch.setattr(fit, "ways", lambda request: [("in full", replace(request, **asked))])
    what_fits.main(["--models", "small", "--machines", "laptop", "--output", str(tmp_path / "page.md")])
    assert re.fullmatch(r"[\d,]+", table((tmp_path / "page.md").read_text())["small"]["laptop"])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # in PEFT
def test_its_command_makes_a_cell_of_the_page(tmp_path):
    what_fits.main(["--models", "gpt2-xl", "--machines", "laptop", "--output", str(tmp_path / "page.md")])
    assert table((tmp_path / "page.md").read_text()) == {"gpt2-xl": {"laptop": table(PAGE)["gpt2-xl"]["laptop"]}}
