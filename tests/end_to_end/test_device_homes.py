"""Checkpoints and parameters that live on a device with memory of its own, which tests on a CPU copy to and from."""

from __future__ import annotations

import threading
import time
import weakref
from dataclasses import replace

import pytest
import torch
from planned import A100
from tiered import adamw, options, outcome, shared, step, tokens

import gs_compile
from gs_compile.errors import OptionError
from gs_compile.planner.programs import StepPrograms
from gs_compile.runtime.handlers import Handlers

KEEPS_CAPTURES = True
LINK = ["h2d_bytes_per_second", "d2h_bytes_per_second", "h2d_mixed_bytes_per_second", "d2h_mixed_bytes_per_second"]
ON_DEVICE = {"device_parameter": 0.5, "device_checkpoint": 0.5}


MODEL = {"precision": "bf16", "num_layers": 3}


def separate(storage, **changes):
    return options(storage, **{"separate_device": True, "alpha": 0.5} | changes)


def sequence(harness, given, sizes):
    """What steps with batches of these sizes come to, and the placements they ran with."""
    placements = []
    found = harness.train(adamw, given, sizes=sizes, look=lambda _, one: placements.append(one.engine.latest[0]))
    return found, placements


def test_a_larger_batch_keeps_no_more_on_the_device_than_was_planned(harness, tmp_path):
    sizes = (3, 7, 2)
    found, placements = sequence(harness, separate(tmp_path, ratios=ON_DEVICE), sizes)
    assert [placement.activations.checkpoints("device") for placement in placements] == [0.5, 0.0, 0.5]
    assert not found.differences(sequence(harness, separate(tmp_path), sizes)[0])


def test_all_parameters_on_the_device_and_nothing_said_of_the_rest(harness, tmp_path):
    given = options(tmp_path, separate_device=True, alpha=0.5, ratios={"device_parameter": 1.0})
    given["expert"]["ratios"] = {"device_parameter": 1.0}
    assert not harness.train(adamw, given, 2).differences(harness.train(adamw, separate(tmp_path), 2))


def test_a_slow_way_from_the_device_fills_no_more_of_it_than_it_may(tmp_path, monkeypatch):
    """Gradients wait for their way to the host; as many come beside them as the device has room for."""
    harness, alive, most, planned = shared(num_layers=8), [0], [0], 0
    allocate, move, are_many = Handlers.allocate, Handlers.move, threading.Event()

    def counted(handlers, verb, value, source, memory):
        made = allocate(handlers, verb, value, source, memory)
        if value.kind == "dw" and value.tier == "device":
            nbytes = made.flat.nbytes
            alive[0] += nbytes
            most[0] = max(most[0], alive[0])
            weakref.finalize(made.flat, lambda: alive.__setitem__(0, alive[0] - nbytes))
            if most[0] > planned:
                are_many.set()
        return made

    def slow(handlers, op, *args):
        if op.lane == "d2h" and op.reads[0].kind == "dw":
            are_many.wait(60)  # however slow the computation is
            time.sleep(0.02)
        return move(handlers, op, *args)

    chosen = separate(tmp_path, alpha=0.0)
    with harness.fresh(adamw, chosen) as optimizer:
        step(harness.model, optimizer, tokens(0, 1))
        planned = dict(optimizer.engine.snapshots[-1].peaks)["device"]
    monkeypatch.setattr(Handlers, "allocate", counted)
    monkeypatch.setattr(Handlers, "move", slow)
    with monkeypatch.context() as unbounded:
        unbounded.setattr(StepPrograms, "device_nbytes", None)
        plain = harness.train(adamw, chosen, 1, 1)
    assert most[0] > planned
    for said in ({}, {"device_memory": planned}):
        most[0] = 0
        assert not harness.train(adamw, {**chosen, **said}, 1, 1).differences(plain)
        assert most[0] < planned


def test_without_storage_they_go_to_host_memory(harness, tmp_path):
    ratios = {"parameter": 1.0, "optimizer": 1.0, "checkpoint": 0.25, "device_checkpoint": 0.75}
    _, placements = sequence(harness, separate(tmp_path, ratios=ratios), (3, 7))
    assert [placement.activations.checkpoints("host") for placement in placements] == [0.25, 1.0]


def test_values_are_read_and_written_where_they_live(harness, tmp_path):
    """Parameters, masters and states, in the middle of a run."""

    def changed(ratios):
        with harness.fresh(adamw, separate(tmp_path, ratios=ratios)) as optimizer:
            losses = [step(harness.model, optimizer, tokens(0))]
            before = {name: values.clone() for name, values in harness.model.state_dict().items()}
            kept = optimizer.state_dict()
            with gs_compile.materialize(harness.model, write=True), torch.no_grad():
                for parameter in harness.model.parameters():
                    parameter.mul_(1.25)
            losses.append(step(harness.model, optimizer, tokens(1)))
            harness.model.load_state_dict(before)
            optimizer.load_state_dict(kept)
            losses.append(step(harness.model, optimizer, tokens(2)))
            return before, outcome(harness.model, optimizer, losses, [])

    (before, found), (expected_before, expected) = changed(ON_DEVICE), changed({})
    assert all(torch.equal(values, expected_before[name]) for name, values in before.items())
    assert not found.differences(expected)


def test_spare_device_memory_is_used_by_itself(harness, tmp_path):
    """Where a linear program places data, on a machine whose device has memory of its own, and a slow link."""
    given = separate(tmp_path, host_memory="30MiB", alpha=0.0)
    given["expert"]["ratios"] = {"optimizer": 0.0}
    given["machine"] = replace(A100, name="small", device_nbytes=8 << 20, **dict.fromkeys(LINK, 1e6))

    def look(_, optimizer):
        engine = optimizer.engine
        assert sum(unit.num_resident for unit in engine.placement.units) > 0
        assert "on the device" in engine.planning.describe(engine.snapshots[-1])

    found = harness.train(adamw, given, num_steps=3, look=look)
    assert not found.differences(sequence(harness, separate(tmp_path), (5, 5, 5))[0])


def test_one_memory_refuses_it_by_name(harness, tmp_path):
    assert refused(harness, tmp_path, separate_device=False, ratios={"device_checkpoint": 0.5}).endswith(
        "the ratio device_checkpoint is 0.5, but this device has no memory of its own: it reads the host's, so give "
        "checkpoint"
    )


def test_parameters_without_masters_are_refused(tmp_path):
    assert refused(shared(), tmp_path, ratios={"device_parameter": 0.5}).endswith(
        "the ratio device_parameter is 0.5, but parameters that are updated in the type they are computed in go to "
        'host memory for that: leave it out, or choose precision="bf16"'
    )


def refused(harness, storage, **changes):
    with pytest.raises(OptionError) as caught, harness.fresh(adamw, separate(storage, **changes)) as optimizer:
        step(harness.model, optimizer, tokens(0))
    return caught.value.message
