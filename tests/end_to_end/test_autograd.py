"""A compiled model behaves under autograd as the user's own: same values, same gradients, same errors."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import NamedTuple

import pytest
import torch
from tiered import Harness
from torch import nn
from torch.nn import functional
from zoo import (
    GPT,
    WIDTH,
    Feed,
    Scaled,
    assert_same_gradients,
    batch,
    both_ways,
    compile_model,
    gradients,
    scaled,
    small,
)

import gs_compile
from gs_compile.codegen.compiled import compilations_of
from gs_compile.errors import OutputGradientError
from gs_compile.model.backend import greedysnake
from gs_compile.runtime.executor import Executor

KEEPS_CAPTURES = True

# What is differentiated ------------------------------------------------------------------------------------------------


def two_forwards_then_two_backwards(model):
    first, second = model(*batch(seed=1))[1], model(*batch(4, seed=2))[1]
    second.backward()
    first.backward()


def one_backward_of_two_forwards(model):
    (model(*batch(seed=1))[1] + 2 * model(*batch(seed=2))[1]).backward()


def accumulated_over_calls(model):
    for seed in (1, 2, 3):
        model(*batch(seed=seed))[1].backward()


def loss_outside(model):
    ids, labels = batch()
    functional.cross_entropy(model(ids)[0].flatten(0, 1), labels.flatten()).backward()


def loss_outside_of_logits_that_came_with_one(model):
    model(*batch())[0].square().mean().backward()


def loss_and_logits(model):
    logits, loss = model(*batch())
    (loss + 0.1 * logits.mean() - logits[:, 0].logsumexp(-1).sum()).backward()


def gradients_of_chosen_parameters(model):
    loss = model(*batch())[1]
    return torch.autograd.grad(loss, [model.head.weight, model.blocks[1].up.weight])


def with_grad_scale(model):
    model(*batch())[1].backward(torch.tensor(0.125))


class Outputs(NamedTuple):
    loss: torch.Tensor | None
    logits: torch.Tensor  # BTV
    hidden_states: tuple[torch.Tensor, ...]


class States(GPT):
    """Called as HuggingFace's; how their own hidden states come about, hf/test_hooks.py tests."""

    def forward(self, input_ids, labels=None, **_):
        states = [self.embedding(input_ids)]
        for block in self.blocks:
            states.append(block(states[-1]))
        states[-1] = self.norm(states[-1])
        logits = self.head(states[-1])
        loss = None if labels is None else functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return Outputs(loss, logits, tuple(states))


def hidden_states(model):
    """Those of every layer, the embedding's and the last among them, next to the loss."""
    ids, labels = batch()
    output = model(input_ids=ids, labels=labels, output_hidden_states=True, use_cache=False)
    squares = [weight * h.square().mean() for weight, h in enumerate(output.hidden_states, 1)]
    (output.loss + sum(squares)).backward()
    return output.hidden_states


def loss_alone(model):
    ids, labels = batch()
    model(input_ids=ids, labels=labels, output_hidden_states=True, use_cache=False).loss.backward()


def one_hidden_state_without_the_loss(model):
    hidden = model(input_ids=batch()[0], output_hidden_states=True, use_cache=False).hidden_states
    hidden[1].square().mean().backward()


def after_evaluation(model):
    """The same shapes without and with gradients are two codes."""
    with torch.no_grad():
        model(batch()[0])
    scaled(model)


def evaluation_between_two_halves(model):
    loss = model(*batch())[1]
    with torch.no_grad():
        model(*batch(seed=2))
    loss.backward()


@pytest.mark.parametrize(
    "use",
    [
        two_forwards_then_two_backwards,
        accumulated_over_calls,
        loss_outside,
        loss_and_logits,
        evaluation_between_two_halves,
        *(
            pytest.param(use, marks=pytest.mark.slow)
            for use in (
                scaled,  # which other tests here have
                one_backward_of_two_forwards,
                loss_outside_of_logits_that_came_with_one,
                with_grad_scale,
                after_evaluation,
            )
        ),
    ],
)
@pytest.mark.parametrize("compiler", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_what_is_differentiated(use, compiler):
    both_ways(GPT(), use, compiler=compiler)


def test_gradients_asked_for_by_name():
    reference = GPT()
    expected = gradients_of_chosen_parameters(copy.deepcopy(reference))
    found = gradients_of_chosen_parameters(compile_model(reference, 2))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert gradients(reference) == {}


@pytest.mark.parametrize("compiler", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_hidden_states(compiler):
    reference = States()
    both_ways(reference, hidden_states, compiler=compiler)
    model, reference = compile_model(copy.deepcopy(reference), 2, compiler=compiler), copy.deepcopy(reference)
    one_hidden_state_without_the_loss(model)
    one_hidden_state_without_the_loss(reference)
    assert_same_gradients(gradients(model), gradients(reference))  # of layers above: None


@pytest.mark.parametrize(
    "name", [pytest.param("gpt2", marks=pytest.mark.slow), "llama"]
)  # llama's first block reads them as they are
def test_inputs_that_require_a_gradient(name):
    def use(model):
        _, labels = batch(4)
        generator = torch.Generator().manual_seed(0)
        embedded = torch.randn(*labels.shape, WIDTH, generator=generator, requires_grad=True)
        model(inputs_embeds=embedded, labels=labels).loss.backward()
        assert embedded.grad[:, 0].any()
        return embedded.grad

    both_ways(small(name), use)


def test_what_layers_make_beside_their_hidden_states():
    """A cache's keys and values; the second call knows that they are asked for, and one for the loss leaves them out."""

    def use(model):
        for seed, scale in enumerate((0.5, 1.0)):
            ids, labels = batch(4, seed=seed)
            output = model(input_ids=ids, labels=labels, use_cache=True)
            layers = output.past_key_values.layers
            terms = sum(number * layer.keys.square().sum() for number, layer in enumerate(layers, 1))
            (scale * (output.loss + terms)).backward()
        with gs_compile.loss_alone():
            model(input_ids=ids, labels=labels, use_cache=True).loss.backward()

    both_ways(small("gpt2"), use)


class Tapped(GPT):
    """Residual additions are the model's own; its loss has terms of what gates make, one of them of all samples, and of
    the first hidden state.
    """

    def __init__(self):
        super().__init__(num_layers=3)
        self.gates = nn.ModuleList(nn.Linear(WIDTH, 3) for _ in self.blocks)

    def forward(self, ids, labels):
        x = self.embedding(ids)
        logits, states = [], []
        for block, gate in zip(self.blocks, self.gates, strict=True):
            y = block(x)
            logits.append(gate(y))
            x = x + y
            states.append(x)
        terms = (logits[0] + logits[1]).square().mean() + logits[2].exp().var(0).sum() + 0.1 * states[0].sin().mean()
        found = self.head(self.norm(x))
        return found, functional.cross_entropy(found.flatten(0, 1), labels.flatten()) + terms, states[0]


@pytest.mark.filterwarnings("ignore:the model's blocks are of 2 kinds:gs_compile.errors.UniformityWarning")  # the first
def test_what_layers_make_for_the_loss_alone():
    """One gradient may come to several of them; a backward without the loss has none of what the heads have made."""

    def use(model):
        scaled(model)
        model(*batch(4))[2].square().mean().backward()

    both_ways(Tapped(), use)


def test_a_schedule_that_cuts_blocks_hands_nothing_else_on():
    (ids, labels), model = batch(4), small("gpt2")
    model.compile(backend=greedysnake, options={"expert": {"compiler": "eager", "schedule": "single"}})
    output = model(input_ids=ids, labels=labels, use_cache=True)
    with pytest.raises(OutputGradientError, match=r"made inside the .* of layer 1 .*leave the option schedule out"):
        (output.loss + output.past_key_values.layers[1].keys.sum()).backward()


# Which parameters ------------------------------------------------------------------------------------------------------

FREEZE = {
    "all but the biases": lambda name: not name.endswith("bias"),
    "the lower half": lambda name: name.startswith(("embedding", "blocks.0", "blocks.1")),
    "the head": lambda name: name.startswith(("norm", "head")),
    "all but the embedding": lambda name: not name.startswith("embedding"),
}


@pytest.mark.parametrize(
    "what", [pytest.param(each, marks=[pytest.mark.slow] * each.startswith("the lower")) for each in FREEZE]
)
@pytest.mark.filterwarnings("ignore:the model's blocks are of:gs_compile.errors.UniformityWarning")
def test_frozen_parameters_get_no_gradient(what):
    model = GPT(num_layers=4)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not FREEZE[what](name))
    both_ways(model, loss_and_logits if "head" in what else scaled)
    assert [p.grad is None for p in model.parameters()] == [FREEZE[what](name) for name, _ in model.named_parameters()]


def test_tied_embeddings_get_the_sum():
    torch._dynamo.reset()  # what is captured of two matrices would serve
    both_ways(GPT(tied=True), scaled)


def test_hooks_of_parameters_see_the_gradient_of_the_batch():
    seen = {}

    def use(model):
        seen.clear()
        weight, bias = model.blocks[1].up.weight, model.blocks[1].up.bias
        weight.register_hook(lambda gradient: seen.update(hook=gradient.clone()) or gradient * 10)
        bias.register_post_accumulate_grad_hook(lambda parameter: seen.update(post=parameter.grad.clone()))
        scaled(model)
        return seen["hook"].clone(), seen["post"].clone()

    both_ways(GPT(), use)


def test_hooks_that_take_the_gradient_away():
    """As an optimizer that steps inside the backward does."""
    model = compile_model(GPT(), 2)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))
    scaled(model)
    assert gradients(model) == {}


# Without gradients, and the usual errors -------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [torch.no_grad, pytest.param(torch.inference_mode, marks=pytest.mark.slow)])
def test_evaluation(mode):
    model = GPT(lambda: Feed(dropout=0.5)).eval()
    reference = copy.deepcopy(model)
    compile_model(model, 2)
    with mode():
        torch.testing.assert_close(model(*batch()), reference(*batch()), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(model(batch()[0])[0], reference(batch()[0])[0], rtol=1e-5, atol=1e-6)
    compilations = compilations_of[next(model.parameters())]
    programs = [snapshots[-1] for each in compilations for snapshots in each.programs.values()]
    assert {op.verb for program in programs for op in program.ops} == {"count", "embed", "forward", "head", "free"}
    assert gradients(model) == {}


def test_the_usual_errors_of_a_backward():
    model, (ids, labels) = compile_model(GPT(), 2), batch()
    for retain in (False, True):
        loss = model(ids, labels)[1]
        loss.backward(retain_graph=retain)
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            loss.backward()
    for changed in (ids, model.blocks[0].up.weight):
        loss = model(ids, labels)[1]
        with torch.no_grad():
            changed.add_(0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize(
    ("repeats", "on_tiers"),
    [
        (False, False),
        (True, True),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in ((False, True), (True, False))),
    ],
)
def test_a_buffer_that_gets_other_memory_ahead_of_the_backward_has_been_read(repeats, on_tiers, tmp_path):
    """Fault: the recomputation read it, and the gradients were of neither value; also on the tiers.

    repeats: the forward, as a gradient comes to another output than the loss.
    """

    def use(model, optimizer, changes=True):
        loss, output = model(batch()[0])
        if changes:
            model.scale.data = torch.zeros(WIDTH)
        (loss + output.sum() if repeats else loss).backward()
        optimizer.step()
        return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    model, package = Scaled(), gs_compile if on_tiers else torch.optim
    plain = copy.deepcopy(model)
    wanted = use(plain, torch.optim.SGD(plain.parameters(), lr=0.1), changes=False)
    optimizer = package.SGD(model.parameters(), lr=0.1)
    found = use(compile_model(model, 2, storage=tmp_path), optimizer)
    for name, values in wanted.items():
        torch.testing.assert_close(found[name], values, rtol=1e-5, atol=1e-6)


def test_terms_beside_the_loss_have_the_first_forward_run_again(monkeypatch):
    """As on the tiers; in memory the head's inputs were kept for it in each step."""
    forwards, uses = [], (hidden_states, hidden_states, loss_alone)
    real = Executor.forward
    monkeypatch.setattr(Executor, "forward", lambda self: forwards.append(self) or real(self))
    Harness.forget_captures()
    plain = States()
    model = compile_model(copy.deepcopy(plain), 2)
    for use in uses:
        use(model)
        use(plain)
    assert len(forwards) == 1 + len(uses)
    assert_same_gradients(gradients(model), gradients(plain))


def test_a_head_that_waits_for_gradients_has_its_code_ahead_of_the_backward():
    """Fault: its forward and backward were compiled in the backward, and what does both, which never ran, before."""
    (loss_and_logits(model := compile_model(GPT(), 2)))
    compilation = compilations_of[model.head.weight][0]
    specialized = compilation.latest.model
    head = specialized.codes["h"]
    assert head.last_name == "both"
    for name in ("forward", "backward", "both"):
        head._functions.pop((name, 0), None)
    specialized.compile_code(compilation.latest.shape)
    assert [head.has_function(name, 0) for name in ("forward", "backward", "both")] == [True, True, False]


def test_anomalies_are_looked_for_from_the_first_step_on():
    model, (ids, labels) = compile_model(GPT(), 2), batch()
    with torch.autograd.set_detect_anomaly(True):
        model(ids, labels)[1].backward()
    assert gradients(model)


def test_a_gradient_of_gradients_is_refused():
    """It would be zero without a word; gradients of first order are the same where somebody may ask for it."""
    model, (ids, labels) = compile_model(GPT(), 2), batch()
    weight = model.blocks[0].up.weight
    (wanted,) = torch.autograd.grad(model(ids, labels)[1], weight)
    (found,) = torch.autograd.grad(loss := model(ids, labels)[1], weight, create_graph=True)
    assert torch.equal(found, wanted)
    with pytest.raises(OutputGradientError, match=r"a gradient of gradients was asked for \(create_graph=True\)"):
        (loss.detach() + found.square().sum()).backward()
    with pytest.raises(
        OutputGradientError, match="a gradient of gradients was asked for"
    ):  # as of a Hessian's diagonal
        torch.autograd.grad(found.sum(), weight, allow_unused=True)


def test_a_loss_that_lives_on_keeps_nothing_of_its_step():
    model, (ids, labels) = compile_model(GPT()), batch()
    loss = model(ids, labels)[1]
    loss.backward()
    kept = weakref.ref(ids)
    del ids
    gc.collect()
    assert kept() is None
    assert loss.grad_fn is not None


def test_outputs_are_the_users_to_change():
    model = compile_model(GPT(), 5)  # one micro-batch: nothing is put together, so nothing is copied for that
    with torch.no_grad():
        first = model(batch()[0])[0]
        first.zero_()
        assert model(batch()[0])[0].any()


def test_hooks_that_pack_what_autograd_saves_get_nothing_of_a_step():
    """A layer is differentiated with tensors that have no values, which these could not pack."""

    def use(model):
        with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved.numpy().copy(), torch.from_numpy):
            _, loss = model(*batch())
            loss.square().backward()
        return loss.detach()

    both_ways(GPT(), use)
