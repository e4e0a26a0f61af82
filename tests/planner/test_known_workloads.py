"""What captures have come to is kept, and taken where nothing that it follows from has changed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import zoo
from planned import gpt

from gs_compile.errors import PlanError
from gs_compile.planner.cost import known_workloads
from gs_compile.planner.cost.known_workloads import KnownWorkloads
from gs_compile.planner.cost.workload import ModelSpec
from gs_compile.planner.plan import planner_of
from gs_compile.planner.request import Request

SIZES = {"n_embd": 64, "n_head": 2, "n_layer": 3, "n_positions": 64}
ASKED = Request(machine="a100", sequence=16)


class CapturedError(Exception):
    """A model was about to be captured."""


@pytest.fixture
def model(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "config.json"
    zoo.configuration("gpt2", **SIZES).to_json_file(path, use_diff=False)
    return path


@pytest.fixture
def workload():
    return gpt(2, 64)


def files(model):
    return sorted(model.parent.glob("cache/greedysnake/workloads/*.json"))


def known(model, request=ASKED, keeps=True):
    """Without a capture."""

    def refused(*_, **__):
        raise CapturedError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModelSpec, "of", refused)
        planner = planner_of(model, request, keeps=keeps)
        return planner.problem(2).workload, planner.workloads.levelled(planner.problem(2).workload)


def test_a_config_that_is_no_text_is_refused_in_words(model):
    model.write_bytes(b"\xff\xfe{}")
    with pytest.raises(PlanError, match=r"config\.json: no config can be read there"):
        planner_of(model, ASKED, keeps=True).problem(1)


def test_a_workload_is_taken_from_where_it_was_kept(model, monkeypatch):
    planner = planner_of(model, ASKED, keeps=True)
    made = planner.problem(2).workload, planner.workloads.levelled(planner.problem(2).workload)
    (kept,) = files(model)
    assert known(model) == made
    light(model)
    assert made[1].num_levels
    for changed in ({"sequence": 32}, {"states": "8bit"}, {"frozen": "nf4"}, {"optimizer": "muon"}):
        with pytest.raises(CapturedError):
            known(model, Request(machine="a100", **{"sequence": 16} | changed))
    with pytest.raises(CapturedError):
        known(model, keeps=False)
    monkeypatch.setattr(known_workloads, "_versions", lambda: {"torch": "another"})
    with pytest.raises(CapturedError):
        known(model)
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(model.parent / "cache"))
    text = kept.read_text()
    kept.write_text(text[: len(text) // 2])
    with pytest.raises(CapturedError):
        known(model)


LIGHT = """
import sys
from pathlib import Path
import gs_compile.planner.fit
from gs_compile.planner.plan import planner_of
from gs_compile.planner.request import Request
planner = planner_of(Path(sys.argv[1]), Request(machine="a100", sequence=16), keeps=True)
assert planner.problem(2).at(2).best
heavy = {"torch", "transformers", "rich"} & set(sys.modules)
assert not heavy, heavy
"""


def light(model):
    """Another machine is planned for without torch: to import it would take longer than the plan."""
    command, root = [sys.executable, "-c", LIGHT, str(model)], Path(__file__).resolve().parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_latest_files_stay(model, workload, monkeypatch):
    monkeypatch.setattr(known_workloads, "MOST", 2)
    for number in range(4):
        KnownWorkloads.of(model, {"number": number}).get_or((1,), lambda: workload)
    assert len(files(model)) == 2
    assert KnownWorkloads.of(model, {"number": 3}).get_or((1,), lambda: None) == workload


def test_what_the_hub_may_change_is_not_kept(model, workload):
    KnownWorkloads.of("somebody/model", {}).get_or((1,), lambda: workload)
    assert not files(model)


def test_where_nothing_can_be_kept_the_answer_is_there(model, workload, monkeypatch, caplog):
    monkeypatch.setenv("XDG_CACHE_HOME", str(model))  # a file
    assert KnownWorkloads.of(model, {}).get_or((1,), lambda: workload) is workload
    assert "could not be stored" in caplog.text
