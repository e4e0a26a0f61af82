"""What a durable run has committed is sound, and comes out of its files as it was learned."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from command_line import run
from tiered import adamw, options, shared

from gs_compile.cli.stored.export import export
from gs_compile.cli.stored.runs import found_in
from gs_compile.cli.stored.verify import verify

KEEPS_CAPTURES = True
NUM_STEPS = 3


def exported(directory: Path, target: Path, **what: bool) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    done = export(found_in(directory), target, **what)
    assert done["step"] == NUM_STEPS
    return {name: each for file in done["files"] for name, each in load_file(target / file).items()}


PLACES = {
    "on drives": {},
    "in both": {"ratios": {"parameter": 0.5, "optimizer": 0.3}, "alpha": 0.3},
    "in memory": {"ratios": {"parameter": 1.0, "optimizer": 1.0, "checkpoint": 1.0}},
}


@pytest.mark.parametrize(
    ("place", "precision"),
    [
        *(pytest.param(place, "model", marks=[pytest.mark.slow] * (place == "in both")) for place in PLACES),
        *(pytest.param(place, "bf16", marks=[pytest.mark.slow] * (place != "in both")) for place in PLACES),
    ],
)
def test_a_run_is_exported_bit_for_bit(tmp_path, place, precision):
    changes = PLACES[place]
    storage = tmp_path / "one", tmp_path / "other"
    learned = shared(precision).train(adamw, {**options(storage, **changes), "durability": "step"}, NUM_STEPS)
    for directory in storage:
        assert [report["bad"] for report in verify(directory)] == [[]]
        result = run("store", "ls", directory)
        assert (result.exit_code, len(result.stdout.splitlines())) == (0, 2)
    found = exported(storage[0], tmp_path / "out", masters=True, states=True)
    wanted = {name: each for name, each in learned.values.items() if not name.endswith((".step", ".master"))}
    assert found.keys() == wanted.keys()
    assert [name for name, each in wanted.items() if not torch.equal(found[name], each)] == []
