"""Evaluations of a Trainer with the backend attached make what Trainer asks for, and nothing else."""

from __future__ import annotations

import pytest
from test_trainer import attached, trainer
from zoo import VOCAB


def test_of_an_evaluation_of_the_loss_there_are_no_logits(tmp_path):
    mine, theirs, seen = attached(tmp_path / "mine"), trainer(tmp_path / "theirs"), []
    compute = mine.compute_loss

    def compute_loss(*args, **kwargs):
        seen.append(compute(*args, **kwargs))
        return seen[-1]

    mine.compute_loss = compute_loss
    found, wanted = (each.evaluate()["eval_loss"] for each in (mine, theirs))
    assert found == pytest.approx(wanted, rel=1e-5)
    assert [outputs.logits for _, outputs in seen] == [None] * 3
    mine.compute_metrics = lambda prediction: {"width": prediction.predictions.shape[-1]}
    assert mine.evaluate()["eval_width"] == VOCAB
