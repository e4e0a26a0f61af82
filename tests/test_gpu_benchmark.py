"""`make gpu` on a CPU: every part on a tiny model, its sums on events made up, and what it leaves when it cannot go on."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest
import torch
from tiny import Tiny, TinyConfig

from benchmarks import gpu
from benchmarks.gpu_page import page
from gs_compile.runtime.trace import Label, TraceEvent


@pytest.fixture
def setting(tmp_path, request):
    return gpu.Setting(
        case=gpu.SIZES["tiny"],
        micro_batches=(1, 2),
        steps=2,
        host_share=3.0,
        storage=tmp_path,
        machine=str(request.path.parent / "machine.json"),
        compiler="eager",
        peers_python=Path("missing"),
        deadline_seconds=time.monotonic() + 600,
    )


def event(lane, start, end, nbytes=0):
    return TraceEvent(start, end, Label(lane, "", nbytes))


def test_rates_and_overlap():
    found = gpu.lane_rates(
        [event("compute", 0, 4), event("h2d", 3, 5, 10), event("h2d", 4, 7, 10), event("ssd_read", 1, 2, 8)]
    )
    assert found["h2d"] == {"seconds": 4, "nbytes": 20, "bytes_per_second": 5.0, "beside_compute": 0.25}
    assert found["ssd_read"]["beside_compute"] == 1.0
    assert found["compute"]["bytes_per_second"] == 0.0


@pytest.mark.slow
def test_a_smoke_row_of_all_placements(setting, tmp_path):
    found = gpu.measure(setting, ["smoke"], tmp_path / "gpu.json")
    assert found["parts"]["smoke"]["placements"] == list(gpu.PLACEMENTS)
    assert "4 steps learn the same bits: on SSD, in host memory, in parts" in (tmp_path / "gpu.md").read_text()


def of_few_operations(case):
    torch.manual_seed(0)
    return Tiny(TinyConfig(vocab_size=case.vocabulary)).train()


def test_a_smoke_row_finds_a_placement_that_learns_other_bits(setting, tmp_path, monkeypatch, capsys):
    two = {name: {**gpu.PLACEMENTS[name], "recompute": "all"} for name in ("on SSD", "in parts")}  # no plan
    monkeypatch.setattr(gpu, "PLACEMENTS", two)
    monkeypatch.setattr(gpu, "build_model", of_few_operations)
    timed, runs = gpu.Run.timed, []

    def spoiled(run, first, count):
        runs.append(run)
        seconds = timed(run, first, count)
        if len(runs) == 4:  # the second placement's last steps
            with torch.no_grad():
                next(run.model.parameters()).mul_(2)
        return seconds

    monkeypatch.setattr(gpu.Run, "timed", spoiled)
    found = gpu.measure(setting, ["smoke"], tmp_path / "gpu.json")
    assert found["parts"]["smoke"]["error"] == "RuntimeError: in parts: other bits than on SSD"
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.slow
def test_lanes_and_steps_of_a_tiny_model(setting, tmp_path):
    found = gpu.measure(setting, ["lanes", "steps"], tmp_path / "gpu.json")
    assert json.loads((tmp_path / "gpu.json").read_text()) == json.loads(json.dumps(found))
    parts = found["parts"]
    assert {"compute", "h2d", "d2h", "ssd_read", "ssd_write"} <= parts["lanes"]["lanes"].keys()
    assert all(each["nbytes"] > 0 for lane, each in parts["lanes"]["lanes"].items() if lane.startswith("ssd"))
    assert [row["micro_batches"] for row in parts["steps"]["rows"] if row["seconds"] > 0] == [1, 1, 2, 2]
    text = (tmp_path / "gpu.md").read_text()
    assert "| ssd_read |" in text
    assert "| 2 | planned, host capped |" in text


def test_what_fails_or_has_no_time_is_on_the_page(setting, tmp_path, monkeypatch):
    monkeypatch.setitem(gpu.PARTS, "lanes", lambda _: 1 / 0)
    gpu.measure(setting, ["lanes"], tmp_path / "gpu.json")
    assert "ZeroDivisionError" in (tmp_path / "gpu.md").read_text()
    late = gpu.replace(setting, deadline_seconds=time.monotonic())
    gpu.measure(late, ["race", "tests"], tmp_path / "gpu.json")
    assert (tmp_path / "gpu.md").read_text().count("the time is up") == 2


def test_the_tests_are_counted(setting, monkeypatch):
    report = '<testsuite><testcase classname="a" name="b"/><testcase classname="a" name="c"><failure/></testcase>'
    report += '<testcase name="d"><skipped/></testcase></testsuite>'
    monkeypatch.setattr(gpu.subprocess, "run", lambda *_, **__: (setting.storage / "tests.xml").write_text(report))
    assert gpu.tests(setting) == {"passed": 1, "skipped": 1, "failed": ["a.c"]}


def test_the_race_is_asked_for_the_same_case(setting, monkeypatch):
    asked = []

    def run(command, **_):
        asked.extend(command)
        contestants = {"plain": {"median_seconds": 3.0, "verdict": "right"}}
        run_of_one = {"micro_batches": 1, "tokens": 9, "contestants": contestants}
        (setting.storage / "race.json").write_text(json.dumps({"heats": [run_of_one]}))

    monkeypatch.setattr(gpu.subprocess, "run", run)
    found = {"machine": gpu.machine_facts(), "torch": "2", "case": vars(setting.case)}
    found["parts"] = {"race": {**gpu.race(setting), "part_seconds": 1.0}}
    assert {"--layers=3", "--device=cpu", "--precision=bf16"} <= set(asked)
    assert "| 1 | plain | 3 | 3 | right |" in page(found)


@pytest.mark.skipif(gpu.torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_it_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu", "--output", str(tmp_path / "gpu.json")])
    with pytest.raises(SystemExit) as ended:
        gpu.main()
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("no CUDA device")
    assert not (tmp_path / "gpu.json").exists()
