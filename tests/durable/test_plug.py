"""`make plug` kills processes, and finds a run that differs."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks import plug

ALONE = plug.Run({1: ["0x1.8p+2"], 2: ["0x1.4p+2"]}, {"parameter w": "ab", "exp_avg of parameter 0": "cd"})


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({}, []),
        ({"losses": {1: ["0x1.8p+2"] * 2, 2: ["0x1.4p+2"]}}, []),
        ({"losses": {1: ["0x1.8p+2", "0x1.9p+2"], 2: ["0x1.4p+2"]}}, ["the loss of step 1"]),
        ({"losses": {1: ["0x1.8p+2"]}}, ["the loss of step 2"]),
        ({"digests": {**ALONE.digests, "parameter w": "ac"}}, ["parameter w"]),
        ({"digests": {"parameter w": "ab"}}, ["exp_avg of parameter 0"]),
    ],
)
def test_what_differs_is_named(changes, wrong):
    assert list(plug.differences(ALONE, dataclasses.replace(ALONE, **changes))) == wrong


@pytest.mark.slow
def test_a_run_is_killed_and_goes_on(tmp_path, capfd):
    assert plug.pull(tmp_path, kills=3, num_steps=4, seed=1, compiler="eager") == 0
    said = capfd.readouterr().out.splitlines()
    assert [line.split(" after ")[0] for line in said[1:4]] == ["kill 1", "kill 2", "kill 3"]
    assert said[-1].startswith("3 kills of ")
    assert said[-1].endswith("tensors are the same bits")
