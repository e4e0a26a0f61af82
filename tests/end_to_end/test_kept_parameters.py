"""What a step keeps in memory for the next one is read less often, and changes nothing else, whatever comes between."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch
from tiered import Harness, adamw, gpt2, moved, options, outcome, step, tokens

from gs_compile.placement.slab import fixed_offsets
from gs_compile.planner import decide
from gs_compile.planner.boundary import FIRST, without
from gs_compile.planner.builder import peak
from gs_compile.planner.programs import StepPrograms

KEEPS_CAPTURES = True
NUM_STEPS = 5


@pytest.fixture(scope="module")
def harnesses():
    return {precision: Harness(gpt2, precision) for precision in ("model", "bf16")}


def trained(harness, given, kept, monkeypatch, max_grad_norm=None, between=None):
    """What steps come to with these units kept, and the last states read earlier then; whether each step has found what
    the one before it has kept.
    """
    monkeypatch.setattr(decide, "_carried_for_free", lambda _, plain: plain.decided(carried=kept, ahead=len(kept)))
    torch.manual_seed(1)
    losses, norms, warm = [], [], []
    with harness.fresh(partial(adamw, max_grad_norm=max_grad_norm), given) as optimizer:
        for number in range(NUM_STEPS):
            losses.append(step(harness.model, optimizer, tokens(number)))
            norms.append(optimizer.last_step.grad_norm)
            tiers, program = optimizer.engine.tiers, optimizer.engine.programs[-1]
            warm.append(bool(tiers.placement.carried_values & tiers.placement.present(program.ops)))
            assert tiers.slab.nbytes <= max(peak(program, "host"), program.slab_nbytes)
            if between is not None and number in (1, 2):
                between(harness.model, optimizer)
        return outcome(harness.model, optimizer, losses, norms), warm


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize(
    ("precision", "ratio", "alpha", "bound"),
    [("model", 0.0, 0.0, None), ("model", 0.4, 0.3, None), ("bf16", 0.0, 0.3, None), ("bf16", 0.0, 0.0, 1.6)],
)
def test_it_changes_no_bit(harnesses, storage, monkeypatch, precision, ratio, alpha, bound, separate):
    clip = {"clip": "speculative"} if bound else {}
    given = options(storage, alpha=alpha, separate_device=separate, ratios={"parameter": ratio}, **clip)
    run = partial(trained, harnesses[precision], given, monkeypatch=monkeypatch, max_grad_norm=bound)
    (plain, never), (found, warm) = run(kept=()), run(kept=FIRST)
    assert found.differences(plain) == []
    assert not any(never)
    held = [True] * NUM_STEPS if bound is None else [norm <= bound for norm in found.norms]
    assert warm == [False, *held[:-1]]


def evaluate(model, optimizer):
    with torch.no_grad():
        model(input_ids=tokens(7), labels=tokens(7))


def evaluate_within(model, optimizer):
    """While a step is open, which is then given up."""
    loss = model(input_ids=tokens(8), labels=tokens(8)).loss
    evaluate(model, optimizer)
    del loss


def evaluate_and_go_on(model, optimizer):
    loss = model(input_ids=tokens(8), labels=tokens(8)).loss
    evaluate(model, optimizer)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def load(model, optimizer):
    values = {name: value * 0.5 for name, value in model.state_dict().items() if "wte" in name or "wpe" in name}
    model.load_state_dict(values, strict=False)


def train_on_less(model, optimizer):
    step(model, optimizer, tokens(9, 2))


@pytest.mark.parametrize("between", [train_on_less, evaluate, evaluate_within, evaluate_and_go_on, load])
def test_whatever_comes_between_two_steps(harnesses, storage, monkeypatch, between):
    run = partial(trained, harnesses["model"], options(storage, alpha=0.3), monkeypatch=monkeypatch, between=between)
    (plain, _), (found, warm) = run(kept=()), run(kept=FIRST)
    assert found.differences(plain) == []
    assert warm[1]
    assert warm[-1]


def test_it_is_read_once_less(harnesses, storage, monkeypatch):
    """And what the head shares with the embedding twice: from there to the head it stays."""
    harness, found = harnesses["bf16"], {}
    for kept in ((), FIRST):
        monkeypatch.setattr(decide, "_carried_for_free", lambda _, plain, kept=kept: plain.decided(carried=kept))
        with harness.fresh(adamw, options(storage, alpha=0.0)) as optimizer:
            for number in range(2):
                step(harness.model, optimizer, tokens(number))
            found[kept] = moved(harness.model, optimizer, tokens(2))
            units = optimizer.engine.placement.by_unit
        assert found[kept].traced == found[kept].planned
        assert found[kept].traced["ssd_read", "w"] == found[kept].asked["ssd_read", "w"]
    saved = sum(units[unit].numel * units[unit].itemsize for unit in itertools.chain(FIRST, ["t"]) if unit in units)
    more, less = (dict(found[kept].traced) for kept in ((), FIRST))
    assert more.pop(("ssd_read", "w")) - less.pop(("ssd_read", "w")) == saved
    assert more == less


SIZES = (2, 2, 9, 2, 9, 9, 2, 2)


def with_sizes(harness, given, kept, monkeypatch, sizes, max_grad_norm=None, evaluated=()):
    """What steps on batches of these sizes come to; whether each has found parameters in memory, and keeps some."""
    monkeypatch.setattr(decide, "_carried_for_free", lambda _, plain: plain.decided(carried=kept, ahead=len(kept)))
    torch.manual_seed(1)
    losses, norms, warm, keeps = [], [], [], []
    with harness.fresh(partial(adamw, max_grad_norm=max_grad_norm), given) as optimizer:
        for number, size in enumerate(sizes):
            losses.append(step(harness.model, optimizer, tokens(number, size)))
            norms.append(optimizer.last_step.grad_norm)
            tiers, program = optimizer.engine.tiers, optimizer.engine.programs[-1]
            warm.append(bool(tiers.placement.carried_values & tiers.placement.present(program.ops)))
            keeps.append(bool(optimizer.engine._latest[0].carried))
            assert tiers.slab.nbytes <= max(optimizer.engine.planning.host_nbytes, program.slab_nbytes)
            if number in evaluated:
                evaluate(harness.model, optimizer)
        return outcome(harness.model, optimizer, losses, norms), warm, keeps


@pytest.fixture
def larger_ones_keep_nothing(monkeypatch):
    """As if memory had no room for it beside a batch that is larger than the first."""

    def least(planning, planned, shape):
        return without(planned, fixed_offsets(planning.placement).nbytes)[-1]

    monkeypatch.setattr(StepPrograms, "_first_that_fits", least)


@pytest.mark.usefixtures("larger_ones_keep_nothing")
@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize(
    ("precision", "alpha", "bound"),
    [("model", 0.0, None), ("model", 0.3, None), ("bf16", 0.3, None), ("bf16", 0.3, 1.6)],
)
def test_larger_batches_that_keep_nothing(harnesses, storage, monkeypatch, precision, alpha, bound, separate):
    """Each reads again what the step before has kept, and so does the step after it."""
    clip = {"clip": "speculative"} if bound else {}
    given = options(storage, alpha=alpha, separate_device=separate, **clip)
    run = partial(with_sizes, harnesses[precision], given, monkeypatch=monkeypatch, sizes=SIZES, max_grad_norm=bound)
    (plain, never, _), (found, warm, keeps) = run(kept=()), run(kept=FIRST, evaluated=(4, 6))
    assert found.differences(plain) == []
    assert not any(never)
    assert keeps == [size == 2 for size in SIZES]
    held = [bound is None or norm <= bound for norm in found.norms]
    both = [now and before for now, before in zip(keeps[1:], keeps, strict=False)]
    flushed = [bool(alpha or bound) and number in (4, 6) for number in range(len(SIZES))]
    after = zip(both, held, flushed, strict=False)
    assert warm == [False, *(kept and holds and not over for kept, holds, over in after)]


def test_a_larger_batch_fits_where_it_keeps_nothing(storage, monkeypatch):
    """In the memory that the first one takes: checkpoints are all on SSD, and layers save nothing."""
    harness = Harness(partial(gpt2, vocab_size=1000))
    run = partial(with_sizes, harness, monkeypatch=monkeypatch, sizes=(2, 64, 2, 2))
    plain, _, _ = run(options(storage, alpha=0.3), ())
    with harness.fresh(adamw, options(storage, alpha=0.3)) as optimizer:
        monkeypatch.setattr(decide, "_carried_for_free", lambda _, plain: plain.decided(carried=FIRST, ahead=4))
        step(harness.model, optimizer, tokens(0, 2))
        planning = optimizer.engine.planning
        host_nbytes = max(peak(program, "host") for program in planning.builder.programs(planning.placement))
    found, warm, keeps = run(options(storage, alpha=0.3, host_memory=host_nbytes), FIRST)
    assert found.differences(plain) == []
    assert (warm, keeps) == ([False, False, False, True], [True, False, True, True])
