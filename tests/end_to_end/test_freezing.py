"""`requires_grad` that changes between steps, as where layers are frozen and unfrozen by a schedule."""

from __future__ import annotations

import gc
import logging
import math
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import count

import pytest
import setups
import torch
from learner import distance
from tiered import Harness, Outcome, adamw, gpt2, loss_of, options, outcome, shared, step, tokens

import gs_compile
from gs_compile.errors import MemoryBudgetError, OptimizerError, StepOrderError, StorageFullError
from gs_compile.model import engine, freezing

KEEPS_CAPTURES = True

pytestmark = pytest.mark.filterwarnings("ignore::gs_compile.errors.UniformityWarning")  # layers, one of them frozen
SCHEDULE = ["h.1", "", "h.0", ""]  # of each step, what is in the names of all that is trained


def freeze(model: torch.nn.Module, trained: str) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained in name)


def learn(model, optimizer, *, begin=0):
    for number, trained in enumerate(SCHEDULE[begin:], begin):
        freeze(model, trained)
        step(model, optimizer, tokens(number))


def states(optimizer):
    return {
        f"{number}.{name}": value
        for number, state in optimizer.state_dict()["state"].items()
        for name, value in state.items()
    }


def test_a_schedule_learns_what_plain_pytorch_does(tmp_path, caplog):
    """Moments and steps are each parameter's own; a run that is loaded from plain PyTorch's state goes on likewise."""
    make = partial(torch.optim.AdamW, lr=1e-2, eps=1e-4)
    plain, ours = gpt2(), gpt2()
    theirs, optimizer = make(plain.parameters()), adamw(list(ours.parameters()), eps=1e-4)
    ours.compile(backend="greedysnake", options=options(tmp_path, alpha=0.5))
    learn(plain, theirs)
    with caplog.at_level(logging.INFO):
        learn(ours, optimizer)
    words = [each.getMessage() for each in caplog.records if "has changed" in each.getMessage()]
    assert [text.split(": ")[1].split(".")[0] for text in words] == [
        "24 parameters are trained in the place of 10",
        "10 parameters are trained in the place of 24",
        "24 parameters are trained in the place of 10",
    ]
    assert distance(dict(ours.state_dict()), dict(plain.state_dict())) < 1e-6
    found, wanted = states(optimizer), states(theirs)
    assert {name: float(value) for name, value in found.items() if name.endswith("step")} == {
        name: float(value) for name, value in wanted.items() if name.endswith("step")
    }
    assert {float(value) for name, value in wanted.items() if name.endswith("step")} == {2.0, 3.0}
    assert distance(found, wanted) < 1e-6

    loaded = gpt2()
    loaded.load_state_dict(plain.state_dict())
    other = adamw(list(loaded.parameters()), eps=1e-4)
    other.load_state_dict(theirs.state_dict())
    loaded.compile(backend="greedysnake", options=options(tmp_path))
    step(loaded, other, tokens(9))
    step(plain, theirs, tokens(9))
    assert distance(dict(loaded.state_dict()), dict(plain.state_dict())) < 1e-6
    assert distance(states(other), states(theirs)) < 1e-6
    with pytest.raises(OptimizerError, match="some parameters have taken fewer steps than others, but not in this run"):
        optimizer.load_state_dict(plain_steps(theirs.state_dict()))


def test_an_optimizer_that_is_made_later_goes_on_with_the_parameters(tmp_path):
    """As a second phase of training makes one: with settings of its own, and moments that begin anew."""
    plain, ours = gpt2(), gpt2()
    ours.compile(backend="greedysnake", options=options(tmp_path, alpha=0.5))
    first = optimizer = adamw(list(ours.parameters()), eps=1e-4)
    theirs = torch.optim.AdamW(plain.parameters(), lr=1e-2, eps=1e-4)
    for number in range(4):
        if number == 2:
            optimizer = gs_compile.AdamW(ours.parameters(), lr=1e-3, eps=1e-4, max_grad_norm=math.inf)
            theirs = torch.optim.AdamW(plain.parameters(), lr=1e-3, eps=1e-4)
            assert first.state_dict()["state"][0]["step"] == 2
        step(ours, optimizer, tokens(number))
        step(plain, theirs, tokens(number))
    assert distance(dict(ours.state_dict()), dict(plain.state_dict())) < 1e-6
    assert distance(states(optimizer), states(theirs)) < 1e-6
    for use in (first.step, first.state_dict, partial(first.load_state_dict, theirs.state_dict())):
        with pytest.raises(OptimizerError, match="another optimizer was made for these parameters later"):
            use()
    loss_of(ours, tokens(4)).backward()
    other = adamw(list(ours.parameters()))
    with pytest.raises(
        StepOrderError, match=r"the optimizer of .* has changed .*: change it between optimizer.step\(\)"
    ):
        loss_of(ours, tokens(4))
    optimizer.step()
    optimizer.zero_grad()
    step(ours, other, tokens(5))
    assert (optimizer.num_steps, other.num_steps) == (3, 1)
    del other
    gc.collect()
    with pytest.raises(OptimizerError, match="the optimizer of this model is gone"):
        step(ours, first, tokens(6))


def plain_steps(state_dict):
    """The same after as many steps of each parameter."""
    for state in state_dict["state"].values():
        state["step"] = torch.tensor(4.0)
    return state_dict


def trained(harness, folder, *, detour=False, hinder=None, **given) -> Outcome:
    """detour: before a step another schedule is begun, and given up. hinder: has the call fail that begins a schedule."""
    model = harness.model

    def call(number):
        with pytest.MonkeyPatch.context() as patched, nullcontext() if hinder is None else hinder(patched):
            loss_of(model, tokens(number))

    with harness.fresh(partial(adamw, state_dtype="8bit"), options(folder, **given)) as optimizer:
        freeze(model, "h.1")
        step(model, optimizer, tokens(0))
        freeze(model, "")
        if hinder is not None:
            call(1)
        step(model, optimizer, tokens(1))
        if detour:
            freeze(model, "h.0")
            call(2)
            freeze(model, "")
        step(model, optimizer, tokens(2))
        return outcome(model, optimizer, [], [])


def test_the_same_bits_wherever_data_is_stored(tmp_path):
    """Parameters of two dtypes, states in 8 bits; all values and states move to another plan and back."""
    everywhere = dict.fromkeys(("parameter", "checkpoint", "optimizer"), 1.0)
    harness = Harness(partial(gpt2, norms=torch.float32))
    in_memory = trained(harness, tmp_path, ratios=everywhere, masters="whole", alpha=1.0)
    assert in_memory.differences(trained(harness, tmp_path, alpha=0.3, separate_device=True, detour=True)) == []


def hindrance(owner, name, index, error):
    """The index-th call of a function fails, as on a disk that is full for a while."""

    @contextmanager
    def hinder(patched):
        real, calls = getattr(owner, name), count()

        def call(*given):
            if next(calls) == index:
                raise error
            return real(*given)

        patched.setattr(owner, name, call)
        with pytest.raises(type(error)):
            yield

    return hinder


@pytest.fixture(scope="module")
def wanted(storage):
    return trained(shared(), storage, alpha=0.3)


FAILURES = [
    (freezing, "bring_out", 2, KeyboardInterrupt()),
    (engine, "open_tiers", 0, StorageFullError("full")),
    (engine, "move_in", 0, StorageFullError("full")),
]


@pytest.mark.parametrize(
    ("owner", "name", "index", "error", "detour"),
    [
        *((*failure, False) for failure in FAILURES),
        *(pytest.param(*failure, True, marks=pytest.mark.slow) for failure in FAILURES[:-1]),
        (*FAILURES[-1], True),
    ],
)
def test_a_schedule_that_fails_to_begin_costs_nothing(owner, name, index, error, detour, wanted, tmp_path):
    """The call is made again, or the schedule is given up."""
    found = trained(shared(), tmp_path, alpha=0.3, detour=detour, hinder=hindrance(owner, name, index, error))
    assert found.differences(wanted) == []


def test_what_is_trained_changes_between_steps(tmp_path):
    model = gpt2()
    optimizer = adamw(list(model.parameters()))
    model.compile(backend="greedysnake", options=options(tmp_path, accumulate=True))
    freeze(model, "h.1")
    loss_of(model, tokens(0)).backward()
    freeze(model, "")
    with pytest.raises(StepOrderError, match=r"requires_grad .* has changed .*: change it between optimizer.step\(\)"):
        loss_of(model, tokens(0))
    freeze(model, "h.1")
    loss_of(model, tokens(1)).backward()  # as if nothing had been
    optimizer.step()
    optimizer.zero_grad()
    assert optimizer.num_steps == 1
    loss = loss_of(model, tokens(2))
    freeze(model, "h.0")
    with pytest.raises(StepOrderError, match="was frozen between the forward and its backward"):
        loss.backward()


def test_what_is_trained_in_memory_is_what_the_forward_has_found():
    """As in torch: who is unfrozen since then has no gradient, and who is frozen neither."""
    plain, ours = gpt2(), gpt2()
    ours.compile(backend="greedysnake", options={"micro_batch_size": 2, "expert": {"compiler": "eager"}})
    for model in (plain, ours):
        freeze(model, "h.1")
        loss = loss_of(model, tokens(0))
        freeze(model, "mix")
        loss.backward()
    found, wanted = ({name: each.grad for name, each in model.named_parameters()} for model in (ours, plain))
    assert [name for name, grad in found.items() if grad is not None] == [
        "transformer.h.1.mix.weight",
        "transformer.h.1.mix.bias",
    ]
    for name, grad in wanted.items():
        torch.testing.assert_close(found[name], grad)


class Judge(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x).tanh()
        return x


def test_gradients_of_inputs_alone_are_refused_ahead_of_the_backward(tmp_path):
    """As where a discriminator is frozen for the generator's turn; the run goes on."""
    model, fake = Judge(), torch.randn(4, 8, requires_grad=True)
    optimizer = adamw(list(model.parameters()))
    model.compile(backend="greedysnake", options=options(tmp_path, outputs="all"))
    for _ in range(2):
        freeze(model, "")
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        freeze(model, "nothing")
        with pytest.raises(OptimizerError, match=r"all of its parameters are frozen: leave them trained"):
            model(fake)
    assert optimizer.num_steps == 2


def test_gradients_of_inputs_are_refused_where_nothing_was_ever_trained(tmp_path):
    """Fault: the call ran, and its backward was told of a step that was dropped, which there was none of."""
    model, fake = Judge(), torch.randn(4, 8, requires_grad=True)
    freeze(model, "nothing")
    teacher = gs_compile.SGD(model.parameters(), lr=0.0)
    model.compile(backend="greedysnake", options=options(tmp_path, outputs="all"))
    for _ in range(2):
        with pytest.raises(OptimizerError, match=r"all of its parameters are frozen: leave them trained"):
            model(fake)
    with torch.no_grad():
        assert model(fake).shape[0] == 4
    assert teacher.num_steps == 0


def test_a_plan_that_does_not_fit_leaves_the_run_as_it_was(tmp_path):
    model = gpt2(width=64)
    optimizer = adamw(list(model.parameters()))
    everything = dict.fromkeys(("parameter", "checkpoint", "optimizer"), 1.0)
    given = options(tmp_path, host_memory="1100KiB", ratios=everything)
    model.compile(backend="greedysnake", options=given)
    freeze(model, "h.1")
    step(model, optimizer, tokens(0))
    freeze(model, "")
    with pytest.raises(MemoryBudgetError):
        step(model, optimizer, tokens(1))
    freeze(model, "h.1")
    step(model, optimizer, tokens(1))
    assert optimizer.num_steps == 2


def test_a_durable_run_settles_it_at_the_first_call(tmp_path):
    model = gpt2()
    optimizer = adamw(list(model.parameters()))
    model.compile(backend="greedysnake", options=options(tmp_path, durability="step"))
    freeze(model, "h.1")
    step(model, optimizer, tokens(0))
    freeze(model, "")
    with pytest.raises(OptimizerError, match=r"settles what is trained in a durable run. Save the model .*state_dict"):
        step(model, optimizer, tokens(1))


class Scaled(setups.Tiny):
    def __init__(self):
        super().__init__()
        self.register_parameter("scale", None)

    def forward(self, ids):
        loss = super().forward(ids)
        return loss if self.scale is None else self.scale * loss


def test_what_is_new_alone_needs_a_run_of_its_own(tmp_path):
    """As an adapter after `merge_and_unload`; the error was about gradients of inputs."""
    model = Scaled()
    optimizer = gs_compile.SGD(model.parameters(), lr=0.1)
    model.compile(backend="greedysnake", options=options(tmp_path))
    model(setups.ids()).backward()
    optimizer.step()
    model.requires_grad_(False)
    model.scale = torch.nn.Parameter(torch.ones(()))
    with pytest.raises(OptimizerError, match="such as a new adapter, was no part of this run's first step"):
        model(setups.ids())
    optimizer.engine.tiers.close()
