"""What is learned on the card is bit for bit what a CPU learns: rows of the table of end_to_end/test_same_bits.py.

Copies take their time: what the runtime does not order shows as other values, or as poison, which is not a number.
"""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

import card
import pytest
import torch
from carded import to
from tiered import Harness, gpt2

from gs_compile.runtime import optimizer

sys.path.append(str(Path(__file__).parent.parent / "end_to_end"))
import test_same_bits as table

KEEPS_CAPTURES = True
EVERY = 24  # of the table's rows on a device of its own
ROWS = [row for row in table.ROWS if row["separate_device"]]


@cache
def harness_on(where, precision, halved, dropout):
    Harness.forget_captures()  # of one model Dynamo has eight at most
    is_mixed = precision == "mixed"
    norms = torch.float32 if is_mixed else None
    return Harness(lambda: to(gpt2(dropout=dropout, norms=norms), where), "model" if is_mixed else precision)


@cache
def expected(task, folder):
    """By a CPU; its norm is summed as a device sums it."""
    first = {axis: several[0] for axis, several in table.PLACE.items()}
    if task.schedule == "lifetime":
        task = task._replace(schedule="horizontal")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(optimizer, "sum_of_squares", lambda flat: float(optimizer._square(flat)))
        return table.train(task, first, folder).outcome


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("expected")


def check(row, folder, tmp_path, monkeypatch, where):
    task = table.task_of(row)
    wanted = expected(task, folder)
    halved = task.schedule == "single"
    monkeypatch.setattr(
        table, "harness_of", lambda _: harness_on(where, task.precision, halved, table.DROPOUT[task.precision])
    )
    before = card.counts()
    found = table.train(task, {**row, "separate_device": False}, tmp_path).outcome
    after = card.counts()
    assert found.differences(wanted) == []
    assert after.asynchronous - before.asynchronous > 50


@pytest.mark.parametrize("row", ROWS[::EVERY], ids=table.named)
def test_a_row_on_the_card_learns_what_a_cpu_does(row, folder, tmp_path, monkeypatch):
    card.delays(copy=3e-4)
    check(row, folder, tmp_path, monkeypatch, "card:0")


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=table.named)
def test_each_row_on_the_other_device_while_the_first_is_current(row, folder, tmp_path, monkeypatch):
    card.delays(copy=3e-4)
    check(row, folder, tmp_path, monkeypatch, "card:1")
