"""A compiled model behaves under autograd as the user's own: same values, same gradients, same errors."""

from __future__ import annotations

import copy
from importlib import metadata

import pytest
import torch
from torch import nn
from torch.nn import functional
from zoo import (
    GPT,
    TOKENS,
    VOCAB,
    WIDTH,
    Block,
    accumulate,
    assert_same_gradients,
    batch,
    compile_model,
    gradients,
    huggingface,
    train,
)

from gs_compile.backend import greedysnake
from gs_compile.errors import OutputGradientError


def both_ways(model, use, micro_batch_size=2, tolerance=1e-5, **options):
    """`use(model)`, and the gradients it leaves, on plain PyTorch and on greedysnake."""
    reference = copy.deepcopy(model)
    expected = use(reference)
    value = use(compile_model(model, micro_batch_size, **options))
    if expected is not None:
        torch.testing.assert_close(value, expected, rtol=tolerance, atol=tolerance)
    assert_same_gradients(gradients(model), gradients(reference), tolerance)


# What is differentiated ------------------------------------------------------------------------------------------------


def scaled(model):
    (model(*batch())[1] / 3).backward()


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


@pytest.mark.parametrize(
    "use",
    [
        scaled,
        two_forwards_then_two_backwards,
        one_backward_of_two_forwards,
        accumulated_over_calls,
        loss_outside,
        loss_outside_of_logits_that_came_with_one,
        loss_and_logits,
        with_grad_scale,
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


def gpt2_that_captures_hidden_states():
    """transformers installs its hooks at the first such call, behind a lock, which Dynamo does not enter."""
    model = huggingface("gpt2")
    model(batch()[0], output_hidden_states=True)
    return model


@pytest.mark.parametrize("compiler", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_hidden_states(compiler):
    """Those of every layer, the embedding's and the last among them, next to the loss."""

    def use(model):
        ids, labels = batch()
        output = model(input_ids=ids, labels=labels, output_hidden_states=True, use_cache=False)
        weights = range(1, 1 + len(output.hidden_states))
        (output.loss + sum(w * h.square().mean() for w, h in zip(weights, output.hidden_states, strict=True))).backward()
        return output.hidden_states

    both_ways(gpt2_that_captures_hidden_states(), use, compiler=compiler)


def test_one_hidden_state_without_the_loss():
    def use(model):
        model(input_ids=batch()[0], output_hidden_states=True, use_cache=False).hidden_states[2].square().mean().backward()

    reference = gpt2_that_captures_hidden_states()
    model = compile_model(copy.deepcopy(reference), 2)
    use(reference)
    use(model)
    found, expected = gradients(model), gradients(reference)
    assert expected
    above = found.keys() - expected.keys()  # which plain PyTorch leaves at None
    assert all(not found[name].any() for name in above)
    assert_same_gradients({name: found[name] for name in expected}, expected)


def test_inputs_that_require_a_gradient():
    reference = huggingface("gpt2")
    model = compile_model(copy.deepcopy(reference), 2)
    _, labels = batch()
    embedded = torch.randn(*labels.shape, WIDTH, generator=torch.Generator().manual_seed(0))
    found, expected = embedded.clone().requires_grad_(), embedded.clone().requires_grad_()
    model(inputs_embeds=found, labels=labels).loss.backward()
    reference(inputs_embeds=expected, labels=labels).loss.backward()
    torch.testing.assert_close(found.grad, expected.grad, rtol=1e-5, atol=1e-8)
    assert expected.grad[:, 0].any()
    assert_same_gradients(gradients(model), gradients(reference))


def test_a_cache_takes_no_gradient():
    ids, labels = batch()
    output = compile_model(huggingface("gpt2"), 2)(input_ids=ids, labels=labels, use_cache=True)
    keys = output.past_key_values.layers[1].keys
    with pytest.raises(OutputGradientError, match="an output made inside layer 1"):
        (output.loss + keys.sum()).backward()


# Which parameters ------------------------------------------------------------------------------------------------------

FREEZE = {
    "all but the biases": lambda name: not name.endswith("bias"),
    "the embedding": lambda name: name.startswith("embedding"),
    "the lower half": lambda name: name.startswith(("embedding", "blocks.0", "blocks.1")),
    "the head": lambda name: name.startswith(("norm", "head")),
    "all but the embedding": lambda name: not name.startswith("embedding"),
    "all but the head": lambda name: not name.startswith("head"),
    "one block": lambda name: name.startswith("blocks.1"),
}


@pytest.mark.parametrize("outside", [False, True], ids=["loss", "logits"])
@pytest.mark.parametrize("what", FREEZE)
@pytest.mark.filterwarnings("ignore:the model's blocks are of:gs_compile.errors.UniformityWarning")
def test_frozen_parameters_get_no_gradient(what, outside):
    model = GPT(num_layers=4)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not FREEZE[what](name))
    both_ways(model, loss_and_logits if outside else scaled)
    assert {n for n, p in model.named_parameters() if p.grad is None} == {
        n for n, _ in model.named_parameters() if FREEZE[what](n)
    }


def test_low_rank_adapters():
    class Adapted(Block):
        def __init__(self):
            super().__init__()
            self.requires_grad_(False)
            self.down_projection = nn.Parameter(torch.randn(4, WIDTH) * 0.1)
            self.up_projection = nn.Parameter(torch.randn(WIDTH, 4) * 0.1)

        def forward(self, x_BTD):
            return super().forward(x_BTD) + x_BTD @ self.down_projection.T @ self.up_projection.T

    model = GPT(Adapted)
    for part in (model.embedding, model.norm, model.head):
        part.requires_grad_(False)
    both_ways(model, scaled)
    assert len(gradients(model)) == 2 * len(model.blocks)


@pytest.mark.parametrize("use", [scaled, loss_outside], ids=lambda use: use.__name__)
def test_tied_embeddings_get_the_sum(use):
    both_ways(GPT(tied=True), use)


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


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation(mode):
    model = GPT(lambda: Block(dropout=0.5)).eval()
    reference = copy.deepcopy(model)
    verbs = spy_on_verbs(compile_model(model, 2))
    with mode():
        torch.testing.assert_close(model(*batch()), reference(*batch()), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(model(batch()[0])[0], reference(batch()[0])[0], rtol=1e-5, atol=1e-6)
    assert verbs() == {"count", "embed", "forward", "head", "free"}
    assert gradients(model) == {}


def spy_on_verbs(model):
    """A function that tells the verbs of all step programs made for `model` so far."""
    from gs_compile.backend import compiled_for

    def verbs():
        plans = [compiled.plan for compiled in compiled_for[next(model.parameters())]]
        return {op.verb for plan in plans for programs in plan.programs.values() for op in programs[-1].ops}

    return verbs


def test_training_after_evaluation():
    """The same shapes without and with gradients are two codes."""

    def use(model):
        with torch.no_grad():
            model(batch()[0])
        scaled(model)

    both_ways(GPT(), use, 5)


def test_evaluation_between_two_halves_of_a_step():
    def use(model):
        loss = model(*batch())[1]
        with torch.no_grad():
            model(*batch(seed=2))
        loss.backward()

    both_ways(GPT(), use)


@pytest.mark.parametrize("retain", [False, True])
def test_a_second_backward_is_the_usual_error(retain):
    loss = compile_model(GPT(), 2)(*batch())[1]
    loss.backward(retain_graph=retain)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


def test_a_parameter_changed_before_the_backward_is_the_usual_error():
    model = compile_model(GPT(), 2)
    loss = model(*batch())[1]
    with torch.no_grad():
        model.blocks[0].up.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_outputs_are_the_users_to_change():
    model = compile_model(GPT(), 5)  # one micro-batch: nothing is put together, so nothing is copied for that
    with torch.no_grad():
        first = model(batch()[0])[0]
        first.zero_()
        assert model(batch()[0])[0].any()


def test_the_loss_alone():
    logits, loss = compile_model(GPT(), 2, outputs="loss")(*batch())
    assert logits is None
    torch.testing.assert_close(loss, GPT()(*batch())[1])


# Batches ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "micro_batch_size"), [(5, 2), (3, 8), (1, 1), (1, 4), (2, 1), (7, 3)])
def test_batch_sizes(size, micro_batch_size):
    def use(model):
        ids, _ = batch(size)
        loss = model(ids, ids)[1]
        loss.backward()
        return loss

    both_ways(GPT(), use, micro_batch_size)


def count_captures(model, micro_batch_size, **options):
    """`model` compiled, and the list of its captures: of each the number of placeholders, one for each call."""
    calls = []

    def backend(module, example_inputs, **keywords):
        result = greedysnake(module, example_inputs, **keywords)
        calls.append(module)  # a call that asked for a retrace did not get here
        return result

    model.compile(backend=backend, options={"micro_batch_size": micro_batch_size, "expert": {"compiler": "eager"}}, **options)
    return model, calls


@pytest.mark.parametrize("options", [{}, {"dynamic": True}], ids=["automatic", "dynamic"])
def test_other_sizes_are_not_captured_again(options):
    model, captures = count_captures(GPT(), 2, **options)
    reference = GPT()
    expected = {}
    for size, tokens, num_captures in [(5, 12, 1), (4, 12, 1), (7, 12, 1), (2, 12, 1), (3, 8, 2), (5, 10, 2), (4, 12, 2)]:
        model.zero_grad(), reference.zero_grad()
        ids, _ = batch(size, tokens)
        _, found = train(model, ids, ids)
        _, expected = train(reference, ids, ids)
        assert_same_gradients(found, expected)
        assert len(captures) == (1 if options else num_captures), (size, tokens)


# Other ways to write and to call a model -------------------------------------------------------------------------------


class Square(torch.autograd.Function):
    """Twice the right gradient, so that one sees whose backward ran."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 4 * x * gradient


class OwnFunction(Block):
    def forward(self, x_BTD):
        return super().forward(x_BTD) + Square.apply(self.norm(x_BTD))


class InPlace(Block):
    def forward(self, x_BTD):
        y_BTD = self.up(self.norm(x_BTD))
        y_BTD += 0.5
        y_BTD = y_BTD.masked_fill_(y_BTD > 1, 0.25).clone()
        y_BTD[:, 0] = y_BTD[:, 1] * 2
        y_BTD[..., ::2].mul_(3)
        x_BTD = x_BTD + 0
        x_BTD += self.down(y_BTD)
        return x_BTD


class ChangesItsInput(Block):
    def forward(self, x_BTD):
        x_BTD += self.down(functional.gelu(self.up(self.norm(x_BTD.clone()))))
        return x_BTD


class TakesNone(Block):
    def forward(self, x_BTD, mask=None, scale=None):
        x_BTD = super().forward(x_BTD)
        return x_BTD if mask is None else x_BTD * mask


class HasBuffers(Block):
    number = 0

    def __init__(self):
        super().__init__()
        HasBuffers.number += 1
        self.register_buffer("scale", torch.full((WIDTH,), 1.0 + HasBuffers.number))
        self.register_buffer("places", torch.arange(64).float() / 64, persistent=False)

    def forward(self, x_BTD):
        return super().forward(x_BTD) * self.scale + self.places[: x_BTD.shape[1], None]


class Shift(nn.Module):
    """Its parameter has the hidden state's shape where a micro-batch is one sample, and so its very gradient."""

    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.randn(1, TOKENS, WIDTH))

    def forward(self, x_BTD):
        return x_BTD + self.shift


@pytest.mark.parametrize("micro_batch_size", [1, 2, 5])
@pytest.mark.filterwarnings("ignore:<class 'torch.autograd.function.Function'> should not be:DeprecationWarning")
@pytest.mark.parametrize("block", [OwnFunction, InPlace, ChangesItsInput, TakesNone, HasBuffers, Shift])
def test_blocks(block, micro_batch_size):
    both_ways(GPT(block), scaled, micro_batch_size)


@pytest.mark.parametrize("compiler", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_shared_block(compiler):
    block = Block()
    both_ways(GPT(lambda: block), scaled, compiler=compiler)


def test_a_wide_block_is_a_class_of_its_own():
    widths = iter([48, 48, 96, 48])
    model = GPT(lambda: Block(hidden=next(widths)), num_layers=4)
    with pytest.warns(UserWarning, match=r"of 2 kinds.*layer 2 differs from layer 0 at blocks\.2\.up\.weight: .*96.*48"):
        both_ways(model, scaled)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
def test_gradient_checkpointing_is_absorbed():
    model = huggingface("gpt2")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    reference = copy.deepcopy(model)
    model, captures = count_captures(model, 2)
    ids, labels = batch()
    assert_same_gradients(train(model, ids, labels)[1], train(reference, ids, labels)[1])
    assert len(captures) == 1


class Autocast(Block):
    def forward(self, x_BTD):
        with torch.autocast("cpu", torch.bfloat16):
            y_BTD = self.up(self.norm(x_BTD))
            with torch.autocast("cpu", enabled=False):
                y_BTD = functional.gelu(y_BTD.float())
            return x_BTD + self.down(y_BTD)


def around_the_call(model):
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(*batch())[1]
    loss.backward()
    return loss.detach()


def around_all(model):
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(*batch())[1]
        loss.backward()
    return loss.detach()


@pytest.mark.parametrize(
    ("block", "use"), [(Block, around_the_call), (Block, around_all), (Autocast, scaled)], ids=["call", "all", "inside"]
)
@pytest.mark.parametrize(("micro_batch_size", "tolerance"), [(5, 1e-5), (2, 2**-7)])
def test_autocast(block, use, micro_batch_size, tolerance):
    """One micro-batch does the operations of eager; several round partial sums, by 2^-9 each, in another order."""
    both_ways(GPT(block), use, micro_batch_size, tolerance)


@pytest.mark.parametrize("use", [around_the_call, around_all])
def test_autocast_changes_what_is_computed(use):
    """So the test above cannot pass in fp32."""
    found, exact = GPT(), GPT()
    use(found)
    train(exact, *batch())
    with pytest.raises(AssertionError):
        assert_same_gradients(gradients(found), gradients(exact), 1e-4)


def test_gradients_of_bf16_parameters_are_summed_in_fp32():
    """256 samples that each add 1 to a gradient: in bf16 the sum of more than 256 ones stays at 256."""

    class Ones(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(2))
            self.bias = nn.Parameter(torch.zeros(2))

        def forward(self, x):
            x = x.clone()
            for block in self.blocks:
                x = block(x)
            return (x + self.bias).sum()

    model = compile_model(Ones().bfloat16(), 1)
    model(torch.ones(300, 2, dtype=torch.bfloat16)).backward()
    assert model.bias.grad.tolist() == [300, 300]
    assert torch.ones((), dtype=torch.bfloat16) + 256 == 256


# Ways to compile -------------------------------------------------------------------------------------------------------


def test_a_wrapped_model_is_the_same():
    options = {"micro_batch_size": 2, "expert": {"compiler": "eager"}}
    in_place, inner = GPT(), GPT()
    in_place.compile(backend=greedysnake, options=options)
    wrapped = torch.compile(inner, backend=greedysnake, options=options)
    ids, labels = batch()
    (loss, found), (other, _) = train(in_place, ids, labels), train(wrapped, ids, labels)
    assert torch.equal(loss, other)
    assert all(torch.equal(found[name], gradient) for name, gradient in gradients(inner).items())
    assert found.keys() == gradients(inner).keys() == dict(in_place.named_parameters()).keys()


def test_the_name_of_the_backend():
    try:
        metadata.distribution("greedysnake")
    except metadata.PackageNotFoundError:
        pytest.skip("torch finds the backend by name only where the distribution is installed: pip install -e .")
    model = GPT()
    model.compile(backend="greedysnake", options={"micro_batch_size": 2, "expert": {"compiler": "eager"}})
    assert_same_gradients(train(model, *batch())[1], train(GPT(), *batch())[1])
