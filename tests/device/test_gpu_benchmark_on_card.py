"""What `make gpu` runs, on the card: the smoke row and the rates and steps of a tiny model, and what they report."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import card
import pytest
import torch

from benchmarks import gpu
from benchmarks.gpu_page import page
from gs_compile.errors import MemoryBudgetError


@pytest.fixture
def setting(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "WARM_STEPS", 1)
    monkeypatch.setitem(gpu.SIZES, "tiny", replace(gpu.SIZES["tiny"], layers=2, sequence=8))
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)  # a model on the card keeps its parameters, and ties
    yield gpu.Setting(
        case=replace(gpu.SIZES["tiny"], device="card:0"),
        micro_batches=(2,),
        steps=1,
        host_share=3.0,
        storage=tmp_path,
        machine=None,
        compiler="eager",
        peers_python=Path("missing"),
        deadline_seconds=time.monotonic() + 600,
    )
    torch.__future__.set_swap_module_params_on_conversion(before)


@pytest.mark.slow
def test_its_parts_on_a_device(setting, tmp_path, monkeypatch):
    """Each row finds the device as the first one did, and tells what the allocator has reserved."""
    found_by_rows, timed = [], gpu.Run.__enter__

    def enter(run):
        found_by_rows.append(torch.accelerator.memory_reserved())
        return timed(run)

    monkeypatch.setattr(gpu.Run, "__enter__", enter)
    monkeypatch.setattr(gpu, "PLACEMENTS", {name: gpu.PLACEMENTS[name] for name in ("in parts", "on the device")})
    before = card.counts()
    found = gpu.measure(setting, ["smoke", "lanes", "steps"], tmp_path / "gpu.json")
    parts = found["parts"]
    assert [part.get("error") for part in parts.values()] == [None, None, None]
    assert parts["smoke"]["placements"] == ["in parts", "on the device"]
    assert card.counts().asynchronous - before.asynchronous > 100
    assert all(parts["lanes"]["lanes"][lane]["nbytes"] > 0 for lane in ("h2d", "d2h", "ssd_read", "ssd_write"))
    rows = parts["steps"]["rows"]
    assert [row.get("refused") for row in rows] == [None, None]
    for row in rows:
        assert 0 < row["allocated_nbytes"] <= row["reserved_nbytes"]
        assert row["planned_nbytes"]["device"] <= row["reserved_nbytes"]
        assert (row["retries"], row["out_of_memory"]) == (0, 0)
    assert "reserved, 0 retries" in page(found)
    of_one_model = found_by_rows[len(gpu.PLACEMENTS) :]
    assert len(of_one_model) == 3
    assert max(of_one_model) - min(of_one_model) < 2**14


def test_a_row_that_has_no_memory_says_so(setting, tmp_path, monkeypatch):
    """And the next ones are tried; what a device without memory raises: test_runs_on_card.py."""

    def timed(*_):
        raise MemoryBudgetError("a card in host memory has no memory left")

    monkeypatch.setattr(gpu.Run, "timed", timed)
    pinned = card.native().registered_nbytes()  # of models that tests before keep
    found = gpu.measure(setting, ["steps"], tmp_path / "gpu.json")
    rows = found["parts"]["steps"]["rows"]
    assert len(rows) == 2
    assert all("a card in host memory has no memory left" in row["refused"] for row in rows)
    assert card.native().registered_nbytes() == pinned
