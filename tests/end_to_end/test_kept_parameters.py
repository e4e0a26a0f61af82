"""What a step keeps in memory, for the next one or its backward, is read less often, and changes nothing else.

That it changes no bit in any other setting, test_same_bits.py has.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from closed_forms import both, spared
from saving import saving
from tiered import adamw, loss_of, moved, options, shared, step, tokens

from gs_compile.placement.slab import fixed_offsets
from gs_compile.planner.boundary import FIRST, without
from gs_compile.planner.builder import planned_peak
from gs_compile.planner.programs import StepPrograms

KEEPS_CAPTURES = True


class Seen:
    """Of each step, whether it has found parameters in memory, and whether it keeps some."""

    def __init__(self, between=lambda optimizer: None, after=()):
        """between: what comes between steps, `after` those of these numbers."""
        self.warm, self.keeps, self._between, self._after = [], [], between, after

    def __call__(self, number, optimizer):
        engine, program = optimizer.engine, optimizer.engine.snapshots[-1]
        placement = engine.tiers.placement
        self.warm.append(bool(placement.carried_values & placement.present(program.ops)))
        self.keeps.append(bool(engine.latest[0].decision.carried))
        assert engine.tiers.slab.nbytes <= max(engine.planning.host_nbytes, program.slab_nbytes)
        if number in self._after:
            self._between(optimizer)


def trained(harness, given, kept, seen, make=adamw, **how):
    """What steps come to with these units kept, and the last states read earlier then."""
    with saving(carried=kept):
        return harness.train(make, given, **how, look=seen)


def evaluate(model, optimizer):
    with torch.no_grad():
        loss_of(model, tokens(7))


def evaluate_within(model, optimizer):
    """While a step is open, which is then given up."""
    loss = loss_of(model, tokens(8))
    evaluate(model, optimizer)
    del loss


def evaluate_and_go_on(model, optimizer):
    loss = loss_of(model, tokens(8))
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
def test_whatever_comes_between_two_steps(harness, storage, between):
    once = {"between": partial(between, harness.model), "after": (1, 2)}
    plain = trained(harness, options(storage, alpha=0.3), (), Seen(**once), num_steps=5)
    found = trained(harness, options(storage, alpha=0.3), FIRST, seen := Seen(**once), num_steps=5)
    assert found.differences(plain) == []
    assert seen.warm[1]
    assert seen.warm[-1]


@pytest.mark.parametrize(("how", "kept"), [("carried", FIRST), ("retained", (1, 0, "t")), ("held", (1,))])
def test_it_is_read_once_less(how, kept, storage):
    """And what the head shares with the embedding twice: between these it stays, too. A held checkpoint is not written."""
    harness, found = shared("bf16"), {}
    for units in ((), kept):
        with saving(**{how: units}), harness.fresh(adamw, options(storage, alpha=0.0)) as optimizer:
            for number in range(2):
                step(harness.model, optimizer, tokens(number))
            found[units] = moved(harness.model, optimizer, tokens(2))
            placement = optimizer.engine.placement
        assert found[units].traced == found[units].planned
        assert found[units].traced["ssd_read", "w"] == found[units].asked["ssd_read", "w"]
    placed, less = placement.by_unit, spared(placement)
    saved = sum(placed[unit].numel * placed[unit].itemsize for unit in (*kept, "t") if unit in placed)
    assert less.get(("ssd_read", "w"), 0) == (0 if how == "held" else saved)
    assert (("ssd_write", "x") in less) == (how == "held")
    assert found[()].traced == both(found[kept].traced, less)


SIZES = (2, 2, 9, 9, 2, 2)


@pytest.fixture
def larger_ones_keep_nothing(monkeypatch):
    """As if memory had no room for it beside a batch that is larger than the first."""

    def least(planning, planned, shape):
        return without(planned, fixed_offsets(planning.placement).nbytes)[-1]

    monkeypatch.setattr(StepPrograms, "_first_that_fits", least)


@pytest.mark.usefixtures("larger_ones_keep_nothing")
@pytest.mark.parametrize(
    ("precision", "alpha", "bound", "separate"),
    [
        ("model", 0.0, None, True),
        pytest.param("model", 0.3, None, False, marks=pytest.mark.slow),
        ("bf16", 0.3, 1.6, False),
        pytest.param("bf16", 0.3, 1.6, True, marks=pytest.mark.slow),
    ],
)
def test_larger_batches_that_keep_nothing(storage, precision, alpha, bound, separate):
    """Each reads again what the step before has kept, and so does the step after it; also where one is evaluated."""
    harness, make = shared(precision), partial(adamw, max_grad_norm=bound)
    clip = {"clip": "speculative"} if bound else {}
    given = options(storage, alpha=alpha, separate_device=separate, **clip)
    once = {"between": partial(evaluate, harness.model), "after": (3, 4)}
    plain = trained(harness, given, (), never := Seen(), make, sizes=SIZES)
    found = trained(harness, given, FIRST, seen := Seen(**once), make, sizes=SIZES)
    assert found.differences(plain) == []
    assert not any(never.warm)
    assert seen.keeps == [size == 2 for size in SIZES]
    held = [bound is None or norm <= bound for norm in found.norms]
    both = [now and before for now, before in zip(seen.keeps[1:], seen.keeps, strict=False)]
    flushed = [bool(alpha or bound) and number in once["after"] for number in range(len(SIZES))]
    after = zip(both, held, flushed, strict=False)
    assert seen.warm == [False, *(kept and holds and not over for kept, holds, over in after)]


def test_a_larger_batch_fits_where_it_keeps_nothing(storage):
    """In the memory that the first one takes: checkpoints are all on SSD, and layers save nothing."""
    harness, sizes, needs = shared(vocab_size=1000), (2, 64, 2, 2), []

    def look(number, optimizer):
        planning = optimizer.engine.planning
        needs.append(max(planned_peak(program, "host") for program in planning.builder.programs(planning.placement)))

    trained(harness, options(storage, alpha=0.3), FIRST, look, sizes=sizes[:1])
    plain = trained(harness, options(storage, alpha=0.3), (), Seen(), sizes=sizes)
    given = options(storage, alpha=0.3, host_memory=needs[0])
    found = trained(harness, given, FIRST, seen := Seen(), sizes=sizes)
    assert found.differences(plain) == []
    assert (seen.warm, seen.keeps) == ([False, False, False, True], [True, False, True, True])
