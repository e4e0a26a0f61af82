"""A run on the card, end to end: its memory, what is read between steps, and how it goes on; values are a CPU's."""

from __future__ import annotations

import gc
from functools import cache, partial

import card
import pytest
import torch
from carded import Card, to
from tiered import BATCH, Harness, adamw, gpt2, loss_of, options, outcome, step, tokens, two_groups

import gs_compile
from gs_compile.errors import DeviceError, MemoryBudgetError
from gs_compile.runtime import stream
from gs_compile.runtime.stream import Accelerator, device_of

KEEPS_CAPTURES = True
MIXED = {"alpha": 0.3, "ratios": {"parameter": 0.3, "checkpoint": 0.5, "optimizer": 0.5}}


@cache
def harness_on(where, **sizes):
    return Harness(lambda: to(gpt2(**sizes), where) if where != "cpu" else gpt2(**sizes))


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
    """What a CPU learns in so many steps, and in the model of given sizes."""

    @cache
    def learned(num_steps, **sizes):
        given = options(tmp_path_factory.mktemp("cpu"), **MIXED)
        return harness_on("cpu", **sizes).train(adamw, given, num_steps)

    return learned


def assert_same(found, expected):
    assert set(found.differences(expected)) <= {"norms"}, "a CPU sums the squares of a norm in another order"
    assert found.norms == pytest.approx(expected.norms, rel=1e-6)


# Devices --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Card, Accelerator])
def test_twenty_steps_where_copies_are_slow(learned, tmp_path, monkeypatch, kind):
    """With host memory that is registered, and with that of torch's own allocator."""
    monkeypatch.setattr(stream, "DEVICES", {**stream.DEVICES, "card": kind})
    card.delays(copy=2e-4)
    before = card.counts()
    assert_same(harness_on("card:0").train(adamw, options(tmp_path, **MIXED), 20), learned(20))
    after = card.counts()
    assert after.asynchronous - before.asynchronous > 20 * 20
    assert after.synchronous - before.synchronous < 20 * 20  # the batches, and values as they come and are looked at
    gc.collect()
    assert card.native().registered_nbytes() == 0


@pytest.mark.parametrize("current", [0, 1])
def test_on_the_second_device(learned, tmp_path, current):
    """Whatever is current; where it is the current one, nothing comes near the first, whose memory is another rank's."""
    harness = harness_on("card:1")
    card.set_device(current)
    torch.accelerator.reset_peak_memory_stats(0)
    card.take_touches(0)
    assert_same(harness.train(adamw, options(tmp_path, **MIXED), 3), learned(3))
    assert torch.accelerator.max_memory_allocated(0) == 0
    assert current == 0 or card.take_touches(0) == 0
    assert card.current_device() == current


def test_a_type_that_no_accelerator_has_is_refused():
    with pytest.raises(DeviceError, match=r"a model on xpu:0 cannot be trained: torch.accelerator knows no such device"):
        device_of(torch.device("xpu", 0))
    with pytest.raises(DeviceError, match=r"a model on mps cannot be trained: its memory is the host's"):
        device_of(torch.device("mps"))


# Memory ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("delay_seconds", [0.0, 1e-3])
def test_a_device_of_what_is_planned_is_enough(learned, tmp_path, delay_seconds):
    """Nothing but ratios is given. What is reserved comes to values and what code computes with, and the batch."""
    sizes = {"num_layers": 6, "width": 128}
    harness, planned = harness_on("card:0", **sizes), []

    def look(number, optimizer):
        if number == 0:
            engine = optimizer.engine
            values = dict(engine.programs[-1].peaks)["device"]
            planned.append(values + engine.planning.run.workload.workspace_nbytes + 2**16)
            torch.accelerator.synchronize()
            torch.accelerator.empty_cache()
            torch.accelerator.reset_peak_memory_stats(0)
            resident = torch.accelerator.memory_allocated(0)
            assert resident < 2**16 + values
            card.set_limit(planned[0])

    card.delays(copy=delay_seconds)
    held = sum(values.nbytes for values in harness.initial)
    for values in range(len(harness.initial)):
        harness.initial[values] = harness.initial[values].cpu()
    assert held > 2**20
    found = harness.train(adamw, options(tmp_path, **MIXED), 4, look=look)
    assert_same(found, learned(4, **sizes))
    stats = torch.accelerator.memory_stats(0)
    assert stats["num_ooms"] == 0
    assert 0 < stats["reserved_bytes.all.peak"] <= planned[0]


def test_without_memory_it_says_what_to_give(tmp_path):
    harness = harness_on("card:0")
    with (
        pytest.raises(MemoryBudgetError, match=r"a card in host memory has no memory left in .*micro_batch_size.*device_memory") as caught,
        harness.fresh(adamw, options(tmp_path, **MIXED)) as optimizer,
    ):
        step(harness.model, optimizer, tokens(0))
        torch.accelerator.empty_cache()
        card.set_limit(torch.accelerator.memory_reserved(0) + 2048)
        step(harness.model, optimizer, tokens(1))
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)


def test_what_the_model_leaves_and_the_allocator_keeps_is_free(tmp_path):
    """A plan of a model that has filled the device has the room that it had before the model came."""
    card.set_limit(64 << 20)
    planned, limits = [], options(tmp_path, device_memory=None, host_memory="1GiB", machine=None)
    for _ in range(2):
        torch._dynamo.reset()
        model = to(gpt2(num_layers=2, width=256))
        optimizer = adamw(two_groups(model))
        junk = torch.empty(30 << 20, dtype=torch.uint8, device="card")
        del junk
        model.compile(backend="greedysnake", options=limits)
        step(model, optimizer, tokens(0))
        run = optimizer.engine.planning.run
        planned.append(run.model.where.leaving_nbytes)
        optimizer.engine.tiers.close()
    assert planned == [sum(p.nbytes for p in gpt2(num_layers=2, width=256).parameters())] * 2
    free, whole = device_of(torch.device("card", 0)).memory_nbytes()
    assert free > whole - (2 << 20)


# Between steps --------------------------------------------------------------------------------------------------------


def test_evaluation_state_dicts_and_generation(tmp_path):
    """Of a model of transformers', with dropout: as on a CPU that copies to a device of its own."""
    from tiny import tiny

    def run(where):
        torch._dynamo.reset()
        torch.manual_seed(3)
        model = tiny().train()
        if where != "cpu":
            to(model, where)
        optimizer = adamw(two_groups(model))
        model.compile(backend="greedysnake", options=options(tmp_path / where.replace(":", ""), **MIXED))
        losses = [step(model, optimizer, tokens(number)) for number in range(2)]
        with torch.no_grad():
            model.eval()
            losses.append(float(loss_of(model, tokens(7))))
            model.train()
        found = {name: value.cpu().clone() for name, value in model.state_dict().items()}
        model.eval()
        with gs_compile.streaming(model):
            written = model.generate(tokens(9)[:2, :4].to(where), max_new_tokens=4, do_sample=False, pad_token_id=0).cpu()
        model.train()
        model.load_state_dict({name: value * 0.5 for name, value in found.items()})
        losses.append(step(model, optimizer, tokens(3)))
        optimizer.engine.tiers.close()
        return losses, found, written

    (losses, values, written), (found_losses, found, found_written) = run("cpu"), run("card:0")
    assert found_losses == losses
    assert [name for name in values if not torch.equal(values[name], found[name])] == []
    assert torch.equal(written, found_written)


def test_a_durable_run_goes_on(learned, tmp_path):
    """Its second half in an engine of its own, from the commit."""
    harness, given = harness_on("card:0", dropout=0.0), options(tmp_path, **MIXED, durability="step", resume="auto")
    torch.manual_seed(1)
    losses = []
    for numbers in (range(2), range(2, 4)):
        with harness.fresh(adamw, given) as optimizer:
            losses += [step(harness.model, optimizer, tokens(number)) for number in numbers]
            optimizer.commit()
            found = outcome(harness.model, optimizer, losses, [])
    expected = learned(4)
    assert found.losses == expected.losses
    assert [name for name in expected.values if not torch.equal(found.values[name], expected.values[name])] == []


def test_code_of_inductor(tmp_path):
    pass
