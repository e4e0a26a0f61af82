"""contest: the case, the batches, and how a contestant answers."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from benchmarks.race.contest import CANNOT, FAILED, PRESETS, Cannot, Case, Contestant, _serve, batch

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


def test_a_case_has_no_other_fields() -> None:
    with pytest.raises(ValueError, match="a case has no depth"):
        Case.parse('{"preset": "110m", "depth": 4}')


def test_batches_depend_on_seed_and_step_alone() -> None:
    assert batch(TINY, 3).shape == (6, 4)
    assert torch.equal(batch(TINY, 3), batch(TINY, 3))
    assert not torch.equal(batch(TINY, 3), batch(TINY, 4))


def test_batches_of_a_text_are_parts_of_it(tmp_path: Path) -> None:
    numpy.save(tmp_path / "text.npy", numpy.arange(100, dtype=numpy.uint16))
    ids = batch(Case.parse(json.dumps({**json.loads(TINY.json()), "tokens": str(tmp_path / "text.npy")})), 0)
    assert torch.equal(ids - ids[:, :1], torch.arange(4).expand(6, 4))


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


def test_who_cannot_run_says_why() -> None:
    assert talk(cannot=True) == (CANNOT, [{"cannot": "counter", "why": "no drive"}])


def test_what_fails_is_told_with_its_command(capsys: pytest.CaptureFixture[str]) -> None:
    status, answers = talk("step 7", fail=True)
    assert status == FAILED
    assert answers[-1] == {"error": "MemoryError: too large", "where": "step 7"}
    assert "MemoryError" in capsys.readouterr().err


def test_an_unknown_command_is_an_error() -> None:
    assert talk("jump")[1][-1]["error"] == "ValueError: no such command: jump"
