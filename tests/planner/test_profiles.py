from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from test_profile import LAPTOP

from gs_compile.errors import ProfileError
from gs_compile.planner.measure import machines as profiles
from gs_compile.planner.measure.machines import code_file, profile
from gs_compile.planner.measure.profile import Profile
from gs_compile.planner.measure.shipped import ENVIRONMENT, SHIPPED, known, named

MEASURED = Profile.of(LAPTOP | {"name": "measured", "host_nbytes": 1000, "ssd_nbytes": 2000})


class FakedProbe:
    """Counts its calls, and tells what it is given to tell."""

    def __init__(self) -> None:
        self.calls: list[tuple[Path, ...]] = []
        self.free = {"host_nbytes": 1000, "ssd_nbytes": 2000}

    def __call__(self, storage, device):
        self.calls.append(storage)
        return MEASURED


@pytest.fixture
def probe(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    faked = FakedProbe()
    monkeypatch.setattr(profiles, "probe", faked)
    monkeypatch.setattr(profiles, "free_nbytes", lambda *_: faked.free)
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    return faked


def remembered(tmp_path) -> list[Path]:
    return sorted((tmp_path / "cache" / "greedysnake" / "machines").iterdir())


# Machines that ship ----------------------------------------------------------------------------------------------------


def test_the_machines_that_ship():
    assert known() == ("a100", "a5000", "h200", "laptop", "rtx4090")


@pytest.mark.parametrize("name", known())
def test_a_shipped_machine_leaves_nothing_to_defaults_and_every_number_has_its_source(name):
    given = json.loads((SHIPPED / f"{name}.json").read_text())
    link = {entry.name for entry in fields(Profile) if entry.name.startswith(("h2d", "d2h", "device_nbytes"))}
    ranks = {"net_bytes_per_second", "net_hop_seconds"} - given.keys()  # one has no others
    expected = {entry.name for entry in fields(Profile)} - (link if given["device"] == "cpu" else set()) - ranks
    assert given.keys() - {"format"} == expected
    assert given["sources"].keys() == expected - {"name", "device", "sources"}
    assert all(len(source) > 3 for source in given["sources"].values())


def test_the_papers_micro_batch_takes_the_papers_time():
    """arXiv 2512.17570, section 5: 65B, one micro-batch, 16.4 s of forward, recomputation and backward."""
    tokens, layers, hidden = 2048, 80, 8192
    flops = 4 * layers * tokens * (24 * hidden**2 + 4 * tokens * hidden)
    for name, samples in (("a5000", 1), ("a100", 2)):
        assert samples * flops / profile(name).matmul_flops_per_second["fp16"] == pytest.approx(16.4, rel=0.02)


# Names and paths -------------------------------------------------------------------------------------------------------


def test_a_path_is_read(tmp_path, probe):
    MEASURED.save(tmp_path / "mine.json")
    assert profile(tmp_path / "mine.json") == profile(str(tmp_path / "mine.json")) == MEASURED


def test_a_machine_that_ranks_have_measured_is_whole_for_a_process_alone(tmp_path, probe):
    """Fault: it had the share of one of them."""
    replace(MEASURED, num_ranks=2).save(tmp_path / "of_two.json")
    found = profile(tmp_path / "of_two.json")
    assert (found.num_ranks, found.host_nbytes) == (1, 2 * MEASURED.host_nbytes)
    assert found.ssd_read_bytes_per_second == 2 * MEASURED.ssd_read_bytes_per_second


def test_a_file_here_comes_before_a_name(tmp_path, probe, monkeypatch):
    """But not a folder, as of results of that machine."""
    monkeypatch.chdir(tmp_path)
    MEASURED.save("a100.json")
    assert profile("a100.json") == MEASURED
    (tmp_path / "a100").mkdir()
    assert profile("a100") != MEASURED


def test_times_of_code_are_beside_the_figures_and_go_with_them(tmp_path, probe):
    """A file of figures is never that of its own times, whatever it is called."""
    here = [tmp_path], 1, torch.device("cpu")
    (own := tmp_path / "mine.code").write_text(MEASURED.text)
    assert code_file(own, *here) == tmp_path / "mine.code.code"
    assert [code_file(each, *here) for each in ("a100", MEASURED)] == [None, None]
    profile(None, tmp_path)
    (times := code_file(None, *here)).write_text("{}")
    profile(None, tmp_path)
    assert times.exists()
    profile(None, tmp_path, refresh=True)
    assert not times.exists()


def test_an_unknown_name_says_what_is_known_and_close():
    with pytest.raises(ProfileError) as caught:
        profile("A1000")
    assert caught.value.message == (
        "unknown machine A1000; did you mean a100? known: a100, a5000, h200, laptop, rtx4090, or the path of a profile"
    )


def test_a_file_that_is_missing_is_refused(tmp_path):
    with pytest.raises(ProfileError, match=r"mine\.json: there is no such file; machines that ship: a100"):
        profile(tmp_path / "mine.json")


def test_the_environment_takes_the_place_of_none(tmp_path, probe, monkeypatch):
    monkeypatch.setenv(ENVIRONMENT, "a100")
    assert profile(None, tmp_path) == profile("a100")
    assert profile("h200", tmp_path) != profile("a100")
    assert (named(None), named("h200")) == ("a100", "h200")
    assert not probe.calls
    assert profile(None, tmp_path, refresh=True) == MEASURED


# This machine ----------------------------------------------------------------------------------------------------------


def test_this_machine_is_measured_once(tmp_path, probe):
    assert profile(None, tmp_path) == MEASURED
    assert profile(None, [tmp_path]) == MEASURED
    assert probe.calls == [(tmp_path,)]
    assert [path.suffix for path in remembered(tmp_path)] == [".json"]


def test_a_busy_machine_is_measured_again_once_it_is_idle(tmp_path, probe, monkeypatch):
    """And not while it is busy; what was measured idle is taken whatever else the machine does."""
    for load, number in ((900.0, 1), (900.0, 1), (0.0, 2), (0.0, 2), (900.0, 2)):
        monkeypatch.setattr(os, "getloadavg", lambda load=load: (load, 0.0, 0.0))
        assert profile(None, tmp_path) == MEASURED
        assert len(probe.calls) == number


ANOTHER = """
import sys
from gs_compile.planner.measure import machines
machines.probe = None
print(machines.profile(None, sys.argv[1]).name)
"""


def test_another_process_knows_what_was_measured(tmp_path, probe):
    profile(None, tmp_path)
    command, root = [sys.executable, "-c", ANOTHER, str(tmp_path)], Path(__file__).resolve().parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "measured\n"), done.stderr


def test_what_is_free_is_looked_up_every_time(tmp_path, probe):
    profile(None, tmp_path)
    probe.free = {"host_nbytes": 700, "ssd_nbytes": 30}
    assert profile(None, tmp_path) == replace(MEASURED, host_nbytes=700, ssd_nbytes=30)


@pytest.mark.parametrize(
    "fact",
    [
        ("usable_cores", lambda: 77),
        ("usable_memory", lambda: 77),
        ("num_ranks", lambda: 77),
        ("correct_thread_count", lambda: 77),
        ("processor", lambda: "Z80"),
        ("MEASURING", 0),
    ],
    ids=lambda fact: fact[0],
)
def test_another_machine_is_measured(tmp_path, probe, monkeypatch, fact):
    profile(None, tmp_path)
    monkeypatch.setattr(profiles, *fact)
    profile(None, tmp_path)
    assert len(probe.calls) == 2


def test_another_drive_is_measured(tmp_path, probe):
    profile(None, tmp_path)
    profile(None, tmp_path / "a folder on the same drive")
    assert len(probe.calls) == 1
    profile(None, "/dev/shm")
    assert len(probe.calls) == 2


def test_without_storage_it_is_the_default(tmp_path, probe):
    profile()
    assert probe.calls == [(tmp_path / "cache" / "greedysnake",)]


@pytest.mark.parametrize(
    "content",
    ["{", "[]", json.dumps(MEASURED.as_dict() | {"format": 99}), json.dumps(MEASURED.as_dict() | {"num_ranks": -1})],
    ids=["broken", "a list", "newer", "impossible"],
)
def test_what_cannot_be_read_is_measured_again(tmp_path, probe, caplog, content):
    profile(None, tmp_path)
    (path,) = remembered(tmp_path)
    path.write_text(content)
    with caplog.at_level(logging.WARNING):
        assert profile(None, tmp_path) == MEASURED
    assert caplog.messages[0].startswith(f"measuring this machine again: {path}: ")
    assert len(probe.calls) == 2
    assert Profile.load(path) == MEASURED


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path, probe, caplog):
    (tmp_path / "cache").write_text("in the way")
    assert profile(None, tmp_path) == MEASURED
    assert caplog.messages[0].startswith("the measurements of this machine could not be stored: ")


def test_a_write_that_fails_leaves_what_was_there(tmp_path, probe, monkeypatch):
    profile(None, tmp_path)
    before = [(path, path.read_text()) for path in remembered(tmp_path)]

    def fails(self, path):
        Path(path).write_text("half a pro")
        raise OSError("no room")

    monkeypatch.setattr(Profile, "save", fails)
    assert profile(None, tmp_path, refresh=True) == MEASURED
    assert [(path, path.read_text()) for path in remembered(tmp_path)] == before
