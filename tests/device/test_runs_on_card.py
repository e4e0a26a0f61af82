"""A run on the card, end to end: its memory, what is read between steps, and how it goes on; values are a CPU's."""

from __future__ import annotations

import gc
import time
import weakref
from contextlib import contextmanager, nullcontext, suppress
from functools import cache, partial

import card
import inductor
import pytest
import torch
from carded import Card, in_place, on_storage, to
from frozen_models import gpt2_with_frozen
from lines import without
from tiered import (
    Harness,
    adamw,
    gpt2,
    muon,
    options,
    outcome,
    step,
    tokens,
    two_groups,
    used_between_steps,
)
from zoo import small

import gs_compile
from gs_compile.errors import (
    DeviceError,
    GreedySnakeError,
    MemoryBudgetError,
    MixedDeviceError,
    NonFiniteWarning,
    UncapturedWarning,
)
from gs_compile.model.first_call import where_of
from gs_compile.planner import in_pieces
from gs_compile.planner.measure.machines import Where, free_nbytes
from gs_compile.runtime import issue, lanes, stream
from gs_compile.runtime.issue import TieredExecutor
from gs_compile.runtime.lanes import Lane, Ticket
from gs_compile.runtime.muon import Orthogonalizer
from gs_compile.runtime.slab import map_memory
from gs_compile.runtime.stream import Accelerator, _Arrival, device_of
from gs_compile.runtime.values import Held, ValueTable

KEEPS_CAPTURES = True
MIXED = {"alpha": 0.3, "ratios": {"parameter": 0.3, "checkpoint": 0.5, "optimizer": 0.5}}
BATCH_NBYTES = 2**16  # what a call brings, on the device while it lasts
MANY = 8  # steps


@cache
def harness_on(where, **sizes):
    return Harness(lambda: to(gpt2(**sizes), where) if where != "cpu" else gpt2(**sizes))


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
    """What a CPU learns in so many steps, and in the model of given sizes."""

    @cache
    def learned(num_steps, make=adamw, **sizes):
        given = options(tmp_path_factory.mktemp("cpu"), **MIXED)
        return harness_on("cpu", **sizes).train(make, given, num_steps)

    return learned


def assert_same(found, expected):
    assert set(found.differences(expected)) <= {"norms"}, "a CPU sums the squares of a norm in another order"
    assert found.norms == pytest.approx(expected.norms, rel=1e-6)


# Devices --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [pytest.param(Card, marks=pytest.mark.slow), Accelerator])
def test_many_steps_where_copies_are_slow(learned, tmp_path, monkeypatch, kind):
    """With host memory that is registered, and with that of torch's own allocator. Each half of a step sets its clock."""
    clocks, set_clock = [], Accelerator.set_clock
    monkeypatch.setattr(Accelerator, "set_clock", lambda device: clocks.append(device) or set_clock(device))
    monkeypatch.setattr(stream, "DEVICES", {**stream.DEVICES, "card": kind})
    card.delays(copy=2e-4)
    before, pinned = card.counts(), card.native().registered_nbytes()
    assert_same(harness_on("card:0").train(adamw, options(tmp_path, **MIXED), MANY), learned(MANY))
    after = card.counts()
    assert len(clocks) >= 2 * MANY
    assert after.asynchronous - before.asynchronous > 20 * MANY
    assert after.synchronous - before.synchronous < 20 * MANY  # the batches, and values as they come and are looked at
    gc.collect()
    assert card.native().registered_nbytes() == pinned


def test_deterministic_algorithms_alone(learned, tmp_path, monkeypatch):
    """While the model runs, in both halves of a step; not after it."""
    expected, found, results = learned(3), set(), TieredExecutor._results

    def looked(executor, op):
        found.add((op.stage.phase, torch.are_deterministic_algorithms_enabled()))
        return results(executor, op)

    monkeypatch.setattr(TieredExecutor, "_results", looked)
    with model_on("card:0", options(tmp_path, **MIXED, deterministic=True)) as (model, optimizer):
        losses = [step(model, optimizer, tokens(number)) for number in range(3)]
        assert not torch.are_deterministic_algorithms_enabled()
    assert losses == expected.losses
    assert len(found) > 1
    assert all(is_on for _, is_on in found)


def test_layers_that_do_not_fit_run_in_pieces(tmp_path, monkeypatch):
    """Planned by what there is for what code computes with; the bits are those of pieces that are asked for, on a CPU.

    On the other device, while the first is current.
    """
    monkeypatch.setattr(in_pieces, "SIZES", (7,))
    sizes, head, number = {"num_layers": 2, "width": 16}, {"piece_tokens": 5}, 40
    asked = {**options(tmp_path / "cpu", layer_tokens=7, **head), "micro_batch_size": 20}
    expected = harness_on("cpu", **sizes).train(adamw, asked, 3, batch_size=number)
    given = options(tmp_path / "card", device_memory=400_000, alpha=None, **head)
    with model_on("card:1", {**given, "machine": "rtx4090", "micro_batch_size": 20}, **sizes) as (model, optimizer):
        losses = [step(model, optimizer, tokens(each, number)) for each in range(3)]
        plan, choice = optimizer.engine.planning.planned.plan, optimizer.engine.placement.decision.layer_tokens
        found = outcome(model, optimizer, losses, expected.norms)
        assert "runs on 7 tokens at a time" in str(gs_compile.inspect(model))
    assert (choice, plan.layer_tokens) == (7, 7)
    assert plan.peaks["device"] + plan.workload.workspace_nbytes <= 400_000
    assert_same(found, expected)


@pytest.mark.parametrize("current", [0, 1])
def test_on_the_second_device(learned, tmp_path, current):
    """Whatever is current; where it is the current one, nothing comes near the first, whose memory is another rank's."""
    harness = harness_on("card:1")
    card.set_device(current)
    in_use = torch.accelerator.memory_allocated(0)
    torch.accelerator.reset_peak_memory_stats(0)
    card.take_touches(0)
    assert_same(harness.train(adamw, options(tmp_path, **MIXED), 3), learned(3))
    assert torch.accelerator.max_memory_allocated(0) == in_use, "what other tests keep"
    assert current == 0 or card.take_touches(0) == 0
    assert card.current_device() == current


def test_pinned_memory_is_made_for_its_own_device():
    """Whatever is current: on CUDA it would make a context there."""
    device, number = Accelerator(torch.device("card", 1)), torch.ones((), device="card:1")
    card.take_touches(0)
    assert device.read(number)() == 1.0
    assert map_memory(64, device).is_pinned()
    assert card.take_touches(0) == 0


def nothing(*_, **__):
    pass


def unpin(self, address):
    """Of memory that was not pinned too, and where copies that nobody has waited for are under way."""
    self.synchronize()
    with suppress(RuntimeError):
        card.unregister(address)


MUTATIONS = {
    "what other streams still use is let go of": (Held, "keep", nothing),
    "the computation waits for nothing": (issue, "join_all", nothing),
    "lanes wait for nothing": (lanes, "join_all", nothing),
    "lanes have no stream of their own, and wait for no other": (Ticket, "join", nothing),
    "host memory is not pinned": (Card, "pin", nothing),
    "threads stand on the first device": (Card, "enter", nothing),
    "lanes launch where the computation does": (Card, "on", lambda *_: nullcontext()),
    "what is launched is done": (Ticket, "done", property(lambda ticket: ticket.is_launched)),
}
LINES = [  # each by itself; of what only the computation is behind, which is synchronous here, runtime/test_mutations.py
    (Ticket, "join", "stream.wait_event(self.event)"),
    (Ticket, "join", "wait_for(self.event, self._check)"),
    (Ticket, "join", "self._wait_for_launch()"),
    (Lane, "_enter", "self._device.enter()"),
    (Lane, "_carry_out", "join_all(task.after, self._stream)"),
    (Lane, "_carry_out", "task.ticket.event = self._device.record(self._stream)"),
    (TieredExecutor, "_compute", "join_all(self._awaited(op.reads, op.changes), stream)"),
    (TieredExecutor, "_submit", "self._users(value).use(value, ticket)"),
    (TieredExecutor, "_submit", "self._users(value).change(value, ticket)"),
    (ValueTable, "free", "self._held.keep(content, users)"),
    (Accelerator, "record", "event.record(stream)"),
    (_Arrival, "__call__", "wait_for(self._event, self._check)"),
    (Orthogonalizer, "_on_device", "wait_for(event, device.check)"),
]
MUTATIONS |= {f"{owner.__name__}.{name}: {line}": (owner, name, line) for owner, name, line in LINES}
# What poison, or an event that is not there, may lead to; of a mistake in a mutation there are errors of names, types.
ERRORS = AssertionError, AttributeError, GreedySnakeError, LookupError, NonFiniteWarning, RuntimeError, ValueError
ON_TWIN = {Held, issue, lanes, TieredExecutor}  # what is theirs runtime/test_mutations.py shows too, without a card


@pytest.mark.parametrize(
    "mutation", [pytest.param(name, marks=[pytest.mark.slow] * (of[0] in ON_TWIN)) for name, of in MUTATIONS.items()]
)
def test_without_it_the_card_shows_it(learned, tmp_path, monkeypatch, mutation):
    """As other values, as poison or an error; where values are right, as a copy that is waited for, or as a touch.

    Where other work keeps the host behind copies that are slow, with slower ones.
    """
    owner, name, changed = MUTATIONS[mutation]
    make = muon if owner is Orthogonalizer else adamw
    expected = learned(3, make)  # by the code as it is
    monkeypatch.setattr(owner, name, without(owner, name, changed) if isinstance(changed, str) else changed)
    monkeypatch.setattr(Card, "unpin", unpin)
    assert any(shown(expected, make, tmp_path / f"{delay}", delay) for delay in (2e-3, 2e-2, 1e-1))


def shown(expected, make, storage, delay):
    """Whether a run in which every copy takes so long differs from what is expected."""
    card.set_device(1)
    card.delays(copy=delay)
    card.take_touches(0)
    before, found = card.counts(), None
    with suppress(*ERRORS):
        found = harness_on("card:1").train(make, options(storage, **MIXED), 3)
    after = card.counts()
    waits = after.synchronous - before.synchronous > after.asynchronous - before.asynchronous
    is_right = found is not None and set(found.differences(expected)) <= {"norms"}
    return not (is_right and found.norms == pytest.approx(expected.norms, rel=1e-6)) or waits or card.take_touches(0)


def test_a_type_that_no_accelerator_has_is_refused():
    with pytest.raises(
        DeviceError, match=r"a model on xpu:0 cannot be trained: torch.accelerator knows no such device"
    ):
        device_of(torch.device("xpu", 0))
    with pytest.raises(DeviceError, match=r"a model on mps cannot be trained: its memory is the host's"):
        device_of(torch.device("mps"))


# Memory ---------------------------------------------------------------------------------------------------------------


@contextmanager
def model_on(where, given, **sizes):
    """A model of its own, whose values no test keeps."""
    torch._dynamo.reset()
    model = to(gpt2(**sizes), where)
    optimizer = adamw(two_groups(model))
    model.compile(backend="greedysnake", options=given)
    try:
        yield model, optimizer
    finally:
        if optimizer.engine is not None:
            optimizer.engine.tiers.close()
        torch.accelerator.synchronize()


@pytest.mark.parametrize("delay_seconds", [pytest.param(0.0, marks=pytest.mark.slow), 1e-3])
def test_a_device_of_what_is_planned_is_enough(learned, tmp_path, delay_seconds):
    """Nothing but ratios is given. What is reserved comes to values and what code computes with, and the batch."""
    card.delays(copy=delay_seconds)
    sizes = {"num_layers": 4, "width": 128}
    torch.accelerator.empty_cache()
    kept = torch.accelerator.memory_reserved(0)  # of models that tests before keep
    with model_on("card:0", options(tmp_path, **MIXED), **sizes) as (model, optimizer):
        losses = [step(model, optimizer, tokens(0))]
        values_nbytes = dict(optimizer.engine.snapshots[-1].peaks)["device"] + kept
        planned = values_nbytes + optimizer.engine.planning.planner.figures.workload.workspace_nbytes + BATCH_NBYTES
        torch.accelerator.synchronize()
        torch.accelerator.empty_cache()
        torch.accelerator.reset_peak_memory_stats(0)
        card.set_limit(planned)
        losses += [step(model, optimizer, tokens(number)) for number in range(1, 4)]
        assert_same(outcome(model, optimizer, losses, learned(4, **sizes).norms), learned(4, **sizes))
    stats = torch.accelerator.memory_stats(0)
    assert stats["num_ooms"] == 0
    assert values_nbytes < stats["reserved_bytes.all.peak"] <= planned


def test_without_memory_it_says_what_to_give_and_the_next_try_has_all_of_it(tmp_path):
    words = r"a card in host memory has no memory left in .*micro_batch_size; or device_memory"
    batch_size, registered_nbytes = 40, card.native().registered_nbytes
    others, pinned = torch.accelerator.memory_allocated(0), registered_nbytes()  # of models that tests before keep
    torch.accelerator.reset_peak_memory_stats(0)
    with model_on("card:0", {**options(tmp_path, **MIXED), "micro_batch_size": batch_size}) as (model, optimizer):
        step(model, optimizer, tokens(0, batch_size))
        peak = torch.accelerator.max_memory_allocated(0) - others
        torch.accelerator.empty_cache()
        card.set_limit(others + peak * 3 // 4)
        engine = weakref.ref(optimizer.engine)
        with pytest.raises(MemoryBudgetError, match=words) as caught:
            step(model, optimizer, tokens(1, batch_size))
        assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
        assert registered_nbytes() == pinned  # while the error is there, and all that it has come through
        assert torch.accelerator.memory_allocated(0) - others < peak // 8
    del model, optimizer, caught
    end = time.monotonic() + 20
    while engine() is not None and time.monotonic() < end:  # a thread may still leave what it was at
        gc.collect()
        time.sleep(0.01)
    assert engine() is None
    assert torch.accelerator.memory_allocated(0) == others
    with model_on("card:0", options(tmp_path, **MIXED)) as (model, optimizer):
        losses = [step(model, optimizer, tokens(number, batch_size)) for number in range(2)]
        expected = harness_on("cpu").train(adamw, options(tmp_path / "cpu", **MIXED), 2, batch_size)
        assert_same(outcome(model, optimizer, losses, expected.norms), expected)


def test_a_plan_has_what_the_model_leaves_and_the_allocator_keeps(tmp_path):
    whole_nbytes, found = 64 << 20, []
    others = torch.accelerator.memory_allocated(0)  # that tests before have left there
    card.set_limit(whole_nbytes)
    for _ in range(2):
        with model_on("card:0", options(tmp_path, **MIXED), num_layers=2, width=256) as (model, optimizer):
            in_use = torch.accelerator.memory_allocated(0) - others
            torch.empty(30 << 20, dtype=torch.uint8, device="card:0")  # and gone: the allocator keeps it
            step(model, optimizer, tokens(0))
            found.append(optimizer.engine.planning.planner.model.where)
            assert torch.accelerator.memory_reserved(0) > 30 << 20
        assert 1 << 20 < found[-1].leaving_nbytes <= in_use < found[-1].leaving_nbytes + 2**16
        assert free_nbytes([tmp_path], Where(torch.device("card", 0)))["device_nbytes"] > 0.9 * (
            whole_nbytes - others - 2**20
        )


def test_parameters_in_one_memory_leave_it_once():
    whole = torch.zeros(8, 64, device="card:0")
    halves = [torch.nn.Parameter(half) for half in whole.split(4)]
    assert where_of(halves) == Where(torch.device("card", 0), whole.nbytes)


def test_a_model_built_on_storage_that_the_device_cannot_hold(tmp_path):
    build, losses = partial(gpt2, num_layers=6), []
    nbytes = sum(parameter.nbytes for parameter in build().parameters())
    card.set_limit(nbytes * 3 // 4)
    for where in ("cpu", "card"):
        torch._dynamo.reset()
        model = build() if where == "cpu" else on_storage(build, tmp_path / "values")
        optimizer = adamw(two_groups(model))
        model.compile(backend="greedysnake", options=options(tmp_path / where, alpha=0.0, host_memory=4 * nbytes))
        losses.append([step(model, optimizer, tokens(number, 3)) for number in range(2)])
        values = {name: value.cpu().clone() for name, value in model.state_dict().items()}
        losses[-1].append(values)
        optimizer.engine.tiers.close()
    (*cpu, expected), (*found, values) = losses
    assert found == cpu
    assert [name for name in values if not torch.equal(values[name], expected[name])] == []


# Between steps --------------------------------------------------------------------------------------------------------


def test_a_model_that_is_sent_to_the_cpu_and_back(tmp_path):
    """As Lightning does with it when its training ends."""
    model = to(gpt2())
    optimizer = adamw(two_groups(model))
    model.compile(backend="greedysnake", options=options(tmp_path, **MIXED))
    step(model, optimizer, tokens(0))
    wanted, ids = model.state_dict()["lm_head.weight"], tokens(1)
    with in_place():
        model.cpu()
    assert torch.equal(model.lm_head.weight, wanted)  # on one device
    with pytest.raises(MixedDeviceError, match="moved to cpu after its first call, and trains on card:0"):
        model(input_ids=ids, labels=ids)
    with pytest.warns(UncapturedWarning, match="trains on card:0"), torch.no_grad():
        expected = model(input_ids=ids, labels=ids).loss
    with in_place():
        model.to("card:0")
    loss = model(input_ids=ids.to("card:0"), labels=ids.to("card:0")).loss
    assert float(loss.detach().cpu()) == pytest.approx(float(expected), rel=1e-6)
    optimizer.engine.tiers.close()


def test_evaluation_generation_and_state_dicts(tmp_path):
    """Of transformers' own GPT-2."""
    losses, values, written = used_between_steps(small("gpt2"), options(tmp_path / "cpu", **MIXED))
    found_losses, found, found_written = used_between_steps(to(small("gpt2")), options(tmp_path / "card", **MIXED))
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


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_code_that_inductor_makes_for_a_second_type_of_device(tmp_path):
    losses = {}
    for where in ("cpu", "card"):
        torch._dynamo.reset()
        model = gpt2() if where == "cpu" else to(gpt2())
        optimizer = adamw(two_groups(model))
        given = {**MIXED, "compiler": "inductor"}
        model.compile(backend="greedysnake", options=options(tmp_path / where, **given))
        with inductor.compiling():
            losses[where] = [step(model, optimizer, tokens(number)) for number in range(3)]
        optimizer.engine.tiers.close()
    assert losses["card"] == losses["cpu"]


# Frozen matrices: last, as the memory of its models stays in use --------------------------------------------------------


def test_frozen_matrices_are_decoded_there(tmp_path):
    """On the stream that computes, behind the pieces that come on another."""

    def build(where):
        model = gpt2_with_frozen(width=64)
        return to(model, where) if where != "cpu" else model

    card.delays(copy=2e-4)
    found, expected = (
        Harness(partial(build, where)).train(adamw, options(tmp_path / where[:3], frozen="nf4", **MIXED), 3)
        for where in ("card:0", "cpu")
    )
    assert_same(found, expected)
