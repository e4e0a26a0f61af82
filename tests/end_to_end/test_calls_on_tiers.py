"""What users do between steps, with their parameters on the tiers: as plain PyTorch, or a clear refusal."""

from __future__ import annotations

import copy
import json
from contextlib import ExitStack
from functools import partial

import pytest
import torch
from learner import distance
from tiered import LENGTH, VOCABULARY, Harness, Output, adamw, gpt2, loss_of, options, step, tokens
from torch import nn
from torch.nn import functional
from zoo import GPT, VOCAB, WIDTH, small

import gs_compile
from gs_compile.errors import OptimizerError, ReleasedParameterError, StepOrderError
from gs_compile.placement.ranges import result_ranges
from gs_compile.planner import programs
from gs_compile.planner.simulate.measured import measured
from gs_compile.program.ir import LANES
from gs_compile.runtime import tiers
from gs_compile.runtime.issue import TieredExecutor

KEEPS_CAPTURES = True


class Pair:
    """The same model twice: plain, and with its data on SSD, by an optimizer that is made for both kinds."""

    def __init__(self, ours, optimizer):
        self.plain, self.ours, self.optimizer = gpt2(), ours, optimizer
        self.plain_optimizer = make(torch.optim, self.plain)

    def step(self, samples, seed=0):
        ids = tokens(seed, samples)
        expected, found = step(self.plain, self.plain_optimizer, ids), step(self.ours, self.optimizer, ids)
        assert found == pytest.approx(expected, rel=1e-5)


def make(package, model):
    return package.AdamW(model.parameters(), lr=3e-4)


@pytest.fixture
def pair(harness, tmp_path):
    """Make a pair, of the model that is captured once."""
    with ExitStack() as pairs:

        def made(**expert):
            placed = {"alpha": 0.5, "ratios": {"parameter": 0.3}, **expert}
            given = options(tmp_path, micro_batch_size=1, outputs="all", **placed)
            optimizer = pairs.enter_context(harness.fresh(lambda _: make(gs_compile, harness.model), given))
            return Pair(harness.model, optimizer)

        yield made


def test_where_results_are_is_found_once_for_a_program(harness, tmp_path, monkeypatch):
    found = []
    monkeypatch.setattr(
        tiers, "result_ranges", lambda program, *given: found.append(program) or result_ranges(program, *given)
    )
    harness.train(adamw, options(tmp_path, alpha=0.0), 4)
    assert len(found) == len(set(map(id, found))) < 4  # of four steps, and of what is read after them


@pytest.mark.parametrize("separate", [pytest.param(False, marks=pytest.mark.slow), True])
def test_batches_of_any_size_in_any_order(pair, separate, monkeypatch):
    """Also of more sizes than programs are kept for."""
    monkeypatch.setattr(programs, "MOST_PROGRAMS", 4)
    monkeypatch.setattr(tiers, "MOST_PLACES", 2)
    both = pair(separate_device=separate)
    for seed, samples in enumerate((4, 2, 3, 5, 1, 4)):
        both.step(samples, seed)
    assert len(both.optimizer.engine.planning._programs) == 4


# A call of one sample has nothing in host memory between its forward and its backward.
ON_DEVICE = {"parameter": 1.0, "optimizer": 1.0, "gradient": 0.0, "checkpoint": 0.3, "device_checkpoint": 0.7}
HALF_ON_DEVICE = ON_DEVICE | {"checkpoint": 0.5, "device_checkpoint": 0.5}


def test_a_call_that_waits_with_nothing_in_host_memory_has_it_for_itself(pair):
    """Its checkpoints, and their gradient, are on the device. A larger call comes before its backward."""
    both = pair(separate_device=True, accumulate=True, alpha=1.0, ratios=ON_DEVICE)
    for model, optimizer in ((both.plain, both.plain_optimizer), (both.ours, both.optimizer)):
        for loss in [model(input_ids=ids, labels=ids).loss for ids in (tokens(0, 1), tokens(1, 4))]:
            loss.backward()
        optimizer.step()
    assert distance(dict(both.ours.state_dict()), dict(both.plain.state_dict())) < 2e-6


def test_an_evaluation_leaves_a_call_that_waits_its_memory(pair):
    """Fault: the next call took it too, and the first one's backward wrote over what that had there."""
    both = pair(separate_device=True, accumulate=True, alpha=1.0, ratios=HALF_ON_DEVICE)
    both.step(4)  # all have memory for as many samples from now on
    for model, optimizer in ((both.plain, both.plain_optimizer), (both.ours, both.optimizer)):
        losses = []
        for number, samples in enumerate((1, 4)):
            ids = tokens(number, samples)
            losses.append(model(input_ids=ids, labels=ids).loss)
            with torch.no_grad():
                model(input_ids=tokens(9, 1))
        for loss in losses:
            loss.backward()
        optimizer.step()
    assert distance(dict(both.ours.state_dict()), dict(both.plain.state_dict())) < 2e-6


@pytest.mark.parametrize("separate", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_call_that_fails_in_the_model_costs_nothing(pair, separate):
    both = pair(separate_device=separate)
    both.step(2)
    bad = torch.full((2, LENGTH), VOCABULARY + 7)
    with pytest.raises(IndexError), torch.no_grad():
        both.ours(input_ids=bad)
    both.step(2, seed=1)
    with pytest.raises(IndexError):
        both.ours(input_ids=bad, labels=tokens(0, 2))
    assert not torch.isnan(both.ours.state_dict()["lm_head.weight"]).any()
    both.step(2, seed=2)
    with pytest.raises(IndexError):  # in the head, after all layers
        both.ours(input_ids=tokens(0, 2), labels=bad)
    both.step(3, seed=3)


@pytest.mark.parametrize("separate", [False, True])
def test_evaluations_in_inference_mode(pair, separate):
    """Of a first call, and of more samples than steps have memory for."""
    Harness.forget_captures()
    both = pair(separate_device=separate)
    for number, samples in enumerate((2, 9, 3)):
        with torch.inference_mode():
            ids = tokens(number, samples)
            found, wanted = (model(input_ids=ids).logits for model in (both.ours, both.plain))
            torch.testing.assert_close(found, wanted)
        both.step(2, seed=number)


TERMS = [
    lambda found: found.loss + sum(each.keys.square().mean() for each in found.past_key_values.layers),
    lambda found: found.loss + found.logits.square().mean(),
    lambda found: found.loss,
    lambda found: found.loss + found.hidden_states[1].square().mean(),
    lambda found: found.loss,
]


@pytest.mark.parametrize("separate", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_terms_beside_the_loss(separate, tmp_path, monkeypatch):
    """They come and go. A forward runs once more where its program has not known of them."""
    forwards = []
    real = TieredExecutor.forward
    monkeypatch.setattr(TieredExecutor, "forward", lambda self: forwards.append(number) or real(self))
    model, reference = small("gpt2"), small("gpt2")
    optimizer, theirs = gs_compile.SGD(model.parameters(), lr=0.1), torch.optim.SGD(reference.parameters(), lr=0.1)
    given = options(tmp_path, alpha=0.5, separate_device=separate)
    model.compile(backend="greedysnake", options={**given, "outputs": "all"})
    for number, term_of in enumerate(TERMS):
        ids = tokens(number, 4) % VOCAB
        for each, update in ((model, optimizer), (reference, theirs)):
            term_of(each(input_ids=ids, labels=ids, output_hidden_states=True)).backward()
            update.step()
            update.zero_grad()
    assert distance(model.state_dict(), reference.state_dict()) < 1e-7
    assert forwards == [0, 0, 1, 2, 3, 3, 4]
    old, _ = (model(input_ids=ids, labels=ids) for _ in range(2))
    with pytest.raises(StepOrderError, match="dropped when the model was called again"):
        (old.loss + sum(each.values.sum() for each in old.past_key_values.layers)).backward()
    optimizer.engine.tiers.close()


class Entries(nn.Module):
    """Layers that share a vector of scales and a table of shifts, of which each has its entry."""

    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.scales, self.shifts = nn.Parameter(torch.linspace(0.5, 1.5, 3)), nn.Parameter(torch.randn(3, WIDTH))

    def forward(self, input_ids):
        x = self.words(input_ids)
        for number, block in enumerate(self.blocks):
            x = x * self.scales[number]
            x = x + block(x + self.shifts[number]).tanh()
        return self.head(x)


@pytest.mark.filterwarnings("ignore:the model's blocks are of . kinds:gs_compile.errors.UniformityWarning")
def test_entries_of_parameters_that_layers_share(tmp_path):
    """They are copied: the memory of the embedding's parameters has others, once the layers run."""
    torch.manual_seed(0)
    model = Entries()
    reference = copy.deepcopy(model)
    optimizer, theirs = gs_compile.SGD(model.parameters(), lr=0.1), torch.optim.SGD(reference.parameters(), lr=0.1)
    model.compile(backend="greedysnake", options={**options(tmp_path), "outputs": "all"})
    for number in range(2):
        ids = tokens(number) % VOCAB
        with torch.no_grad():
            assert distance({"logits": model(ids)}, {"logits": reference(ids)}) < 1e-6
        for each, update in ((model, optimizer), (reference, theirs)):
            for _ in range(2):
                each(ids).logsumexp(-1).mean().backward()
            update.step()
            update.zero_grad()
    assert distance(model.state_dict(), reference.state_dict()) < 1e-6
    assert "checkpoint:         float32[2, " in str(gs_compile.inspect(model)), "of samples, not an entry"
    optimizer.engine.tiers.close()


def test_a_trace_has_every_lane_of_every_step(pair, tmp_path):
    both = pair(trace=True)
    both.step(2)
    both.step(2, seed=1)
    both.optimizer.synchronize()
    both.optimizer.save_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    rows = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    slices = [event for event in events if event["ph"] == "X"]
    assert {rows[event["tid"]].split()[0] for event in slices} >= {"compute", "ssd_read", "ssd_write", "cpu"}
    assert sum(event["name"].startswith("backward 1_") for event in slices) == 2 * 2  # steps, micro-batches


def test_a_trace_says_what_the_computation_waited_for(pair):
    both = pair(trace=True)
    both.step(2)
    assert both.optimizer.waits() == {}
    both.step(2, seed=1)
    waits, engine = both.optimizer.waits(), both.optimizer.engine
    (found,) = measured(engine.tiers.trace, engine.latest[0], engine.snapshots[-1], inline=True)
    assert sum(waits.values()) + found.busy["compute"] * found.seconds == pytest.approx(found.seconds)
    assert waits.keys() >= {"issue", "fill"}
    lanes = {cause.split()[0] for cause in waits.keys() - {"issue", "fill", "turn"}}
    assert lanes <= set(LANES)
    with torch.no_grad():
        loss_of(both.ours, tokens(2))
    assert both.optimizer.waits() == waits, "an evaluation is no step"


def test_a_commit_is_measured_with_its_step(pair):
    both = pair(trace=True, durability="step")
    both.step(2)
    both.step(2, seed=1)
    both.optimizer.synchronize()
    trace = both.optimizer.engine.tiers.trace
    issued = {issue.number: issue.program.ops[issue.op_index].verb for issue in trace.issues()}
    found = [event.label.number for event in trace.events() if event.label.name == "seal"]
    assert {issued.get(number) for number in found} == {"seal"}


def test_without_a_trace(pair, tmp_path):
    both = pair()
    both.step(2)
    with pytest.raises(OptimizerError, match="there is no trace"):
        both.optimizer.save_trace(tmp_path / "trace.json")
    with pytest.raises(OptimizerError, match="there is no trace"):
        both.optimizer.waits()


def embedded(model, optimizer, number):
    """A step on embeddings of the user's own; their gradient, also of a loss that is multiplied."""
    torch.manual_seed(number)
    embeddings = torch.randn(5, 8, WIDTH, requires_grad=True)
    (3 * model(inputs_embeds=embeddings, labels=tokens(number, 5)).loss).backward()
    optimizer.step()
    optimizer.zero_grad()
    return embeddings.grad


class Embedded(GPT):
    """Its embedding is given: the prologue has no parameters."""

    def forward(self, inputs_embeds, labels):
        x = inputs_embeds
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return Output(functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits)


def frozen_below():
    model = Embedded()
    for each in (model.embedding, model.blocks):
        each.requires_grad_(requires_grad=False)
    return model


@pytest.mark.parametrize(
    ("make", "given"),
    [
        *(pytest.param(partial(small, name), {"alpha": 0.5}, marks=pytest.mark.slow) for name in ("gpt2", "llama")),
        (frozen_below, {"alpha": 0.5}),
        pytest.param(partial(small, "llama"), {"schedule": "horizontal"}, marks=pytest.mark.slow),
    ],
)
def test_gradients_of_inputs(make, given, tmp_path):
    """With micro-batches of which the last is smaller; the prologue has no parameters where it is given."""
    model, reference = make(), make()
    trained = [[p for p in each.parameters() if p.requires_grad] for each in (model, reference)]
    optimizer, theirs = gs_compile.SGD(trained[0], lr=0.1), torch.optim.SGD(trained[1], lr=0.1)
    model.compile(backend="greedysnake", options=options(tmp_path, **given))
    for number in range(2):
        found, wanted = embedded(model, optimizer, number), embedded(reference, theirs, number)
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-8)
    assert distance(model.state_dict(), reference.state_dict()) < 1e-7
    optimizer.engine.tiers.close()


@pytest.mark.parametrize("is_given", [False, True])
def test_a_step_of_zeros_that_had_no_backward_is_refused(harness, tmp_path, is_given):
    """torch would update by them; fault: nothing was done, without a word."""
    with harness.fresh(adamw, options(tmp_path)) as optimizer:
        loss_of(harness.model, tokens(0)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=is_given)
        if is_given:
            harness.model.lm_head.weight.grad = torch.zeros(VOCABULARY, 32)
        with pytest.raises(
            StepOrderError, match=r"gradients of zeros .* Call optimizer\.zero_grad\(\), which drops them"
        ):
            optimizer.step()
        optimizer.zero_grad()
        optimizer.step()
        assert optimizer.num_steps == 1


def test_a_call_is_not_done_again_with_other_parameters(harness, tmp_path):
    """Fault: where another call had come after the change, the gradient was that of the new values."""
    with harness.fresh(adamw, options(tmp_path)):
        loss = loss_of(harness.model, tokens(0))
        with torch.no_grad():
            harness.model.lm_head.weight.mul_(0.5)
        other = loss_of(harness.model, tokens(1))
        with pytest.raises(StepOrderError, match=r"its parameters were given other values"):
            loss.backward()
        del other


def test_gradients_that_are_refused_stay_where_they_were(harness, tmp_path):
    """Fault: the next step() did nothing, without a word."""
    with harness.fresh(adamw, options(tmp_path)) as optimizer:
        step(harness.model, optimizer, tokens(0))
        for parameter in harness.model.parameters():
            parameter.grad = torch.ones(parameter.shape)
        for use in (loss_of(harness.model, tokens(1)).backward, optimizer.step, optimizer.step):
            with pytest.raises(ReleasedParameterError, match="the first step of this run had none"):
                use()
        optimizer.zero_grad()
        step(harness.model, optimizer, tokens(1))
        assert optimizer.num_steps == 2
