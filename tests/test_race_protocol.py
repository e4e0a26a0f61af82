"""The case, the batches, how a contestant answers, and when a machine is idle."""

from __future__ import annotations

import io
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.race import measures
from benchmarks.race.protocol import CANNOT, FAILED, PRESETS, Cannot, Case, Contestant, _serve, _timed, batch

TINY = Case(layers=1, hidden=8, heads=2, vocabulary=16, sequence=4, micro_batch_size=2, micro_batches=3)


class Counter(Contestant):
    """Answers with the sum of the tokens."""

    name = "counter"

    def build(self) -> dict[str, Any]:
        if self.settings.get("cannot"):
            raise Cannot("no drive")
        return {"kind": "sum"}

    def step(self, ids: torch.Tensor) -> float:
        if self.settings.get("fail"):
            raise MemoryError("too large")
        return float(ids.sum())

    def weights(self) -> dict[str, torch.Tensor]:
        return {"w": torch.ones(2)}


def talk(*commands: str, **settings: Any) -> tuple[int, list[dict[str, Any]]]:
    answers = io.StringIO()
    status = _serve(Counter(TINY, Path("unused"), settings), io.StringIO("\n".join(commands) + "\n"), answers)
    return status, [json.loads(line) for line in answers.getvalue().splitlines()]


def test_a_case_is_its_json() -> None:
    assert Case.parse(TINY.json()) == TINY
    assert Case.parse("110m") == PRESETS["110m"]
    assert Case.parse('{"preset": "110m", "micro_batches": 4}').micro_batches == 4
    with pytest.raises(ValueError, match="a case has no depth"):
        Case.parse('{"preset": "110m", "depth": 4}')


def test_batches_depend_on_seed_and_step_alone() -> None:
    assert batch(TINY, 3).shape == (6, 4)
    assert torch.equal(batch(TINY, 3), batch(TINY, 3))
    assert not torch.equal(batch(TINY, 3), batch(TINY, 4))


def test_a_contestant_answers_every_command(tmp_path: Path) -> None:
    path = tmp_path / "weights.pt"
    status, (ready, one, two, stats, saved, bye) = talk("step 1", "steps 2 2", "stats", f"weights {path}", "quit")
    assert status == 0
    assert ready["ready"] == "counter"
    assert ready["settings"] == {"kind": "sum"}
    assert one["loss"] == float(batch(TINY, 1).sum())
    assert two["losses"] == [float(batch(TINY, step).sum()) for step in (2, 3)]
    assert stats["peak_rss"] >= ready["idle_rss"] > 0
    assert torch.equal(torch.load(saved["weights"])["w"], torch.ones(2))
    assert bye == {"quit": True}


@pytest.mark.parametrize(("lead", "seconds"), [(0, 4.0), (1, 3.0)])
def test_steps_among_others_are_timed_without_what_they_leave(
    monkeypatch: pytest.MonkeyPatch, lead: int, seconds: float
) -> None:
    """Three steps, each of which takes a second, and what is left to do, which takes another."""
    done: list[str] = []
    monkeypatch.setattr(Counter, "step", lambda _, ids: done.append("step") or 0.0)
    monkeypatch.setattr(Counter, "settle", lambda _: done.append("settle"))
    monkeypatch.setattr(time, "perf_counter", lambda: float(len(done)))
    found, losses = _timed(Counter(TINY, Path("unused"), {}), 0, 3, lead)
    assert found == seconds
    assert len(losses) == lead + 3
    assert done == [*["step"] * (lead + 3), "settle"]


def test_who_cannot_run_or_fails_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert talk(cannot=True) == (CANNOT, [{"cannot": "counter", "why": "no drive"}])
    status, answers = talk("step 7", fail=True)
    assert (status, answers[-1]) == (FAILED, {"error": "MemoryError: too large", "where": "step 7"})
    assert "MemoryError" in capsys.readouterr().err
    assert talk("jump")[1][-1]["error"] == "ValueError: no such command: jump"


@pytest.mark.parametrize(("busy_seconds", "is_idle"), [(2.0, True), (60.0, False)])
def test_a_busy_machine_is_waited_for(monkeypatch: pytest.MonkeyPatch, busy_seconds: float, is_idle: bool) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    monkeypatch.setattr(measures, "_work_done", lambda: (min(now[0], busy_seconds), 0))
    assert measures.wait_until_idle(30.0) is is_idle
    assert now[0] == (5.0 if is_idle else 30.0)
