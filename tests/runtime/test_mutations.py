"""On the CPU twin of a device training gives the same values and orders every access, and without any one wait of the
runtime it does not.
"""

from __future__ import annotations

import re
import threading
from contextlib import nullcontext, suppress
from functools import partial

import pytest
import torch
from happens_before import on_host, on_twin
from lines import JOIN, without
from stream_twin import Twin, TwinStream, TwinTensor
from tiered import adamw, gpt2, loss_of, options, step, tokens, two_groups

import gs_compile
from gs_compile.errors import MemoryBudgetError
from gs_compile.placement.ranges import Occupants, Ranges
from gs_compile.placement.users import Users
from gs_compile.runtime import ahead, issue, lanes
from gs_compile.runtime.ahead import Ahead
from gs_compile.runtime.commits import Commits
from gs_compile.runtime.issue import TieredExecutor
from gs_compile.runtime.lanes import Ticket
from gs_compile.runtime.optimizer import OptimizerStep
from gs_compile.runtime.values import Held, ValueTable

KEEPS_CAPTURES = True
SLOW = 5e-3  # of what is launched: on a busy machine too it is under way when somebody who does not wait comes
CHOSEN = {"alpha": 0.3, "ratios": {"parameter": 0.3, "checkpoint": 0.5, "optimizer": 0.5}}
PLACEMENTS = {
    "on every tier": CHOSEN,
    "on SSD": {"alpha": 0.0},
    "delayed": {"alpha": 1.0},
    "speculative": {"alpha": 0.3, "clip": "speculative"},
    "horizontal": {"schedule": "horizontal", "alpha": 0.5},
    "durable": {"durability": "step", **CHOSEN},
    "durable, speculative": {"durability": 2, "clip": "speculative", **CHOSEN},
}


def nothing(*_, **__):
    pass


def forget_users(ranges, where, _, end=Ranges.end):
    end(ranges, where, ())


MUTATIONS = {
    "the computation does not wait": (issue, "join_all", nothing),
    "lanes do not wait": (lanes, "join_all", nothing),
    "streams do not wait for events": (TwinStream, "wait_event", nothing),
    "no thread waits for a launch": (Ticket, "_wait_for_launch", nothing),
    "what is launched has no ticket": (TieredExecutor, "_launched", lambda *_: []),
    "readers of a value are forgotten": (Users, "use", nothing),
    "changes of a value are forgotten": (Users, "change", nothing),
    "who was in memory before is forgotten": (Occupants, "leave", nothing),
    "who has left a range that is in use is forgotten": (Ranges, "end", forget_users),
    "memory of the device is freed while it is copied": (Held, "keep", nothing),
    "files of the last commit are written": (Commits, "writable", lambda self, value: self.values.contents[value]),
}


LINES = [  # each by itself; more of them in device/test_runs_on_card.py
    (TieredExecutor, "_submit", "after += self._launched()  # the memory was in use on the stream that computes"),
    (TieredExecutor, "_launched", "ticket.event = event"),
    (TieredExecutor, "_allocated", "former += users if is_new else ()"),
    (TieredExecutor, "_compute", "self._users(value).change(value, ticket)"),
    (TieredExecutor, "_compute", "self._users(value).use(value, ticket)"),
    (ValueTable, "free", "allocation.end(users)"),
]


def named(mutation):
    owner, name, line = mutation
    return f"{owner.__name__}.{name}: {line}"


MUTATIONS |= {named(each): each for each in LINES}
BY_LINES = {  # each of whose lines is left out by itself
    "what is launched has no ticket",
    "readers of a value are forgotten",
    "changes of a value are forgotten",
    "who has left a range that is in use is forgotten",
}

ON_HOST = [  # where a CPU computes: in the slab, beside the lanes
    (TieredExecutor, "_allocated", "join_all(former, None)  # a checkpoint is copied here and now"),
    (TieredExecutor, "_define", "after += former"),
    (TieredExecutor, "_compute", "join_all(self._awaited(op.reads, op.changes), stream)"),
    (lanes.Lane, "_carry_out", "join_all(task.after, self._stream)"),
    (TieredExecutor, "_submit", "self._users(value).use(value, ticket)"),
    (TieredExecutor, "_submit", "self._users(value).change(value, ticket)"),
    (ValueTable, "free", "allocation.end(users)"),
]

SCALE = [  # lines of `TieredExecutor.scale`, and a size of micro-batches with which nothing else waits
    (JOIN, 2),
    ("self.values.users.change(value, ticket)", 5),
]

TAKE_MORE = {
    "what is held is never let go of": (Held, "let_go", nothing),
    "nobody waits for room on the device": (TieredExecutor, "_wait_for_memory", nothing),
}


def has_what_is_planned(twin, _, optimizer):
    engine = optimizer.engine
    planned = dict(engine.snapshots[-1].peaks)["device"] + engine.planning.planner.figures.workload.workspace_nbytes
    assert planned // 2 < twin.reserved_nbytes <= planned


@pytest.mark.parametrize(
    "placement",
    [
        pytest.param(each, marks=[pytest.mark.slow] * (each in ("on SSD", "speculative", "durable")))
        for each in PLACEMENTS
    ],
)
def test_it_trains_the_same_and_every_access_is_ordered(harness, tmp_path, monkeypatch, placement):
    """No computation is launched before the one before has begun, where that is asked for (fault 15).

    The device has reserved no more than is planned. An ordinary backward multiplies no gradient by 1.0 (fault 13), and its norms wait for nothing (fault 17).
    """
    chosen, num_steps = PLACEMENTS[placement], 3 if "durable" in placement else 2
    maker = partial(adamw, max_grad_norm=0.5) if "clip" in chosen else adamw
    usual = {"separate_device": True, **chosen, "durability": "off"}
    expected = harness.train(maker, options(tmp_path, **usual), num_steps)
    begun, wait, add, norm = [], Ahead.wait, Ahead.add, OptimizerStep.norm

    def waited(*given):
        wait(*given)
        assert is_far or all(event.happened.is_set() for event in begun[-9:])

    def added(self, what, clock, begin, end):
        begun.append(begin)
        add(self, what, clock, begin, end)

    def without_waiting(*given):
        with pytest.MonkeyPatch.context() as meanwhile:
            meanwhile.setattr(Twin, "synchronize", lambda _: pytest.fail("a norm waits for the device"))
            return norm(*given)

    is_far = placement == "on every tier"
    monkeypatch.setattr(ahead, "AHEAD_SECONDS", 1.0 if is_far else 0.0)
    monkeypatch.setattr(Ahead, "wait", waited)
    monkeypatch.setattr(Ahead, "add", added)
    monkeypatch.setattr(TieredExecutor, "scale", lambda *_: pytest.fail("gradients are multiplied"))
    monkeypatch.setattr(OptimizerStep, "norm", without_waiting)
    with on_twin() as checker:
        look = partial(has_what_is_planned, checker.twin)
        found = harness.train(maker, options(tmp_path, **chosen), num_steps, look=look)
    assert len(begun) > 9
    if "clip" in chosen:
        assert found.losses == pytest.approx(expected.losses, rel=1e-6)  # the norm is summed in another order
    else:
        assert set(found.differences(expected)) <= {"norms"}
    assert found.norms == pytest.approx(expected.norms, rel=1e-6)


def test_a_computation_is_between_two_events(harness, tmp_path, monkeypatch):
    record, compute, events, found = Twin.record, TieredExecutor._compute, [], {}

    def recorded(twin, stream):
        events.append(threading.current_thread())
        return record(twin, stream)

    def computed(executor, op):
        before = events.count(threading.main_thread())
        compute(executor, op)
        found.setdefault(op.verb, set()).add(events.count(threading.main_thread()) - before)

    monkeypatch.setattr(Twin, "record", recorded)
    monkeypatch.setattr(TieredExecutor, "_compute", computed)
    with on_twin(delay_seconds=0.0):
        harness.train(adamw, options(tmp_path, **CHOSEN), 1)
    assert found["forward"] == found["backward"] == {2}


@pytest.mark.slow
def test_a_model_built_on_storage_trains_where_neither_memory_holds_it(tmp_path):
    """And moved to the device before its first call (fault 19): bit for bit as one that was built in memory.

    Fast tests have it on the card (device/test_runs_on_card.py), and after a move in model/test_first_call.py.
    """

    def trained(model, **device):
        torch._dynamo.reset()
        optimizer = adamw(two_groups(model))
        model.compile(
            backend="greedysnake", options=options(tmp_path / "run", alpha=0.0, host_memory=3 * nbytes, **device)
        )
        losses = [step(model, optimizer, tokens(number, 3)) for number in range(2)]
        values = {name: value.clone() for name, value in model.state_dict().items()}
        peaks = dict(optimizer.engine.snapshots[-1].peaks)
        optimizer.engine.tiers.close()
        return losses, values, peaks

    build = partial(gpt2, num_layers=10)
    nbytes = sum(parameter.nbytes for parameter in build().parameters())  # and twice as much in their states
    expected, wanted, _ = trained(build(), separate_device=True)
    with on_twin(delay_seconds=0.0):
        on_storage = gs_compile.init_on_storage(build, storage=tmp_path / "values", device="cpu")
        losses, values, peaks = trained(on_storage.to("cpu"))
    assert losses == expected
    assert [name for name in wanted if not torch.equal(values[name], wanted[name])] == []
    assert peaks["host"] <= 3 * nbytes
    assert peaks["device"] < nbytes


@pytest.fixture(scope="module")
def host_memory(harness, tmp_path_factory):
    """As little as the run needs: its ranges are used anew as soon as they can be."""
    with pytest.raises(MemoryBudgetError) as refusal, on_twin():
        harness.train(adamw, options(tmp_path_factory.mktemp("refused"), host_memory=1, **CHOSEN), 1)
    return int(re.findall(r"\((\d+) bytes\) of it at least", str(refusal.value))[0])


@pytest.mark.parametrize(
    "mutation", [pytest.param(each, marks=[pytest.mark.slow] * (each in BY_LINES)) for each in MUTATIONS]
)
def test_without_it_something_is_not_ordered(harness, host_memory, tmp_path, monkeypatch, mutation):
    owner, name, changed = MUTATIONS[mutation]
    monkeypatch.setattr(owner, name, without(owner, name, changed) if isinstance(changed, str) else changed)
    with suppress(Exception), on_twin(delay_seconds=SLOW, to_first=True) as checker:
        durability = "step" if owner is Commits else "off"
        harness.train(adamw, options(tmp_path, host_memory=host_memory, durability=durability, **CHOSEN), 2)
    assert checker.races


@pytest.mark.parametrize("mutation", TAKE_MORE)
def test_without_it_the_device_takes_more_than_is_planned(harness, tmp_path, monkeypatch, mutation):
    """In one of several steps: a busy machine may issue a step so late that all before it is done."""
    monkeypatch.setattr(*TAKE_MORE[mutation])
    with on_twin() as checker, pytest.raises(AssertionError, match="<="):
        harness.train(adamw, options(tmp_path, **CHOSEN), 8, look=partial(has_what_is_planned, checker.twin))


@pytest.fixture(scope="module")
def host_memory_of_a_cpu(harness, tmp_path_factory):
    """The least, where a CPU computes in it."""
    with pytest.raises(MemoryBudgetError) as refusal:
        harness.train(adamw, options(tmp_path_factory.mktemp("refused"), host_memory=1, **CHOSEN), 1)
    return int(re.findall(r"\((\d+) bytes\) of it at least", str(refusal.value))[0])


def test_where_a_cpu_computes_every_access_is_ordered(harness, host_memory_of_a_cpu, tmp_path):
    with on_host() as checker:
        harness.train(adamw, options(tmp_path, host_memory=host_memory_of_a_cpu, **CHOSEN), 2)
    assert len(checker.accesses["memory"]) > 9


@pytest.mark.parametrize("mutation", ON_HOST, ids=named)
def test_without_it_something_is_not_ordered_where_a_cpu_computes(
    harness, host_memory_of_a_cpu, tmp_path, monkeypatch, mutation
):
    owner, name, line = mutation
    monkeypatch.setattr(owner, name, without(owner, name, line))
    with suppress(Exception), on_host(to_first=True) as checker:
        harness.train(adamw, options(tmp_path, host_memory=host_memory_of_a_cpu, **CHOSEN), 2)
    assert checker.races


@pytest.mark.parametrize(("line", "micro_batch_size"), [("", 2), *SCALE], ids=lambda each: str(each))
def test_a_loss_that_is_scaled(harness, tmp_path, monkeypatch, line, micro_batch_size):
    """Between the halves of a step, while copies of the head's gradients are under way: they end once it has begun."""
    issue, copy, has_run, begun = TieredExecutor._issue_at, Twin.copy, threading.Event(), threading.Event()
    own = without(TieredExecutor, "scale", line) if line else TieredExecutor.scale

    def noting(executor, at):
        issue(executor, at)
        if executor.program.ops[at].verb == "head":
            has_run.set()

    def held(twin, target, source):
        if has_run.is_set() and not isinstance(target, TwinTensor):
            twin.current_stream().launch(partial(begun.wait, 10))
        copy(twin, target, source)

    def scale(executor, factor):
        assert has_run.is_set()
        begun.set()
        own(executor, factor)

    monkeypatch.setattr(TieredExecutor, "_issue_at", noting)
    monkeypatch.setattr(Twin, "copy", held)
    monkeypatch.setattr(TieredExecutor, "scale", scale)
    given = options(tmp_path, micro_batch_size=micro_batch_size, **CHOSEN)
    outcome = pytest.raises(AssertionError) if line else nullcontext()
    with outcome, on_twin() as checker, harness.fresh(adamw, given) as optimizer:
        (loss_of(harness.model, tokens(0)) * 0.5).backward()
        optimizer.step()
    assert bool(checker.races) == bool(line)
