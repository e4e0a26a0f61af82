"""What the pages show comes from results, and each file of results has the command that makes it."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks import again
from benchmarks.common import RESULTS
from benchmarks.race import tables


def test_every_result_has_its_command():
    made = {*again.COMMANDS, *again.IN_OTHER_ENVIRONMENTS}
    assert {path.stem for path in RESULTS.glob("*.json")} <= made
    for name in again.COMMANDS:
        for _, module, *_ in again.commands_of(name):
            assert find_spec(module), f"{name}: there is no {module}"


@pytest.mark.parametrize("page", tables.PAGES, ids=lambda page: page.name)
def test_tables_are_those_of_the_results(page: Path):
    assert tables.filled(page.read_text()) == page.read_text(), "python -m benchmarks.again --write"


def test_a_result_that_fails_is_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(again, "RESULTS", tmp_path)
    monkeypatch.setattr(again, "ROOT", tmp_path)
    monkeypatch.setattr(again, "COMMANDS", {"paper": ["no_such_benchmark"]})
    (tmp_path / "paper.json").write_text("{}")
    assert not again.measure("paper")
    assert (tmp_path / "paper.json").read_text() == "{}"
