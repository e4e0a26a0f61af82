"""Losses of all tokens at once, as those that balance experts, are those of plain PyTorch over micro-batches."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from learner import distance
from tiered import Harness, options
from torch import nn
from torch.nn import functional
from zoo import GPT, WIDTH, Feed, assert_same_gradients, batch, both_ways, compile_model, gradients, scaled, small

import gs_compile
from gs_compile.codegen.compiled import compilations_of

KEEPS_CAPTURES = True

pytestmark = pytest.mark.filterwarnings("ignore:the model's blocks are of:gs_compile.errors.UniformityWarning")

QWEN = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
IN_MEMORY = {"parameter": 1.0, "checkpoint": 1.0, "optimizer": 1.0}
ADAMW = {"lr": 1e-3, "eps": 1e-4}


def balanced(name="mixtral"):
    changes = QWEN | {"num_key_value_heads": 2} if name == "qwen3_moe" else {}
    return small(name, output_router_logits=True, router_aux_loss_coef=0.5, **changes)


once = cache(balanced)


def in_memory(name="mixtral"):
    """The one model of its name, captured once: its first call adds hooks, which tell it from others.

    Of mixtral, which comes last: a first model of another class has transformers' code captured anew.
    """
    (model := once(name)).zero_grad()
    return model


def padded():
    """A batch whose samples have their own numbers of tokens, which the balance leaves out."""
    ids, labels = batch()
    return ids, labels, (torch.arange(ids.shape[1]) < torch.tensor([12, 3, 9, 7, 1])[:, None]).long()


def half_of_the_loss(model):
    ids, labels = batch(4)
    output = model(input_ids=ids, labels=labels)
    (output.loss / 2).backward()
    return output.loss, output.aux_loss


def masked(model):
    """Twice, the second time accumulated."""
    ids, labels, mask = padded()
    for _ in range(2):
        output = model(input_ids=ids, labels=labels, attention_mask=mask)
        output.loss.backward()
    return output.loss, output.aux_loss


def its_own_term(model):
    ids, labels = batch(4)
    output = model(input_ids=ids, labels=labels)
    (output.loss + 3 * output.aux_loss - 0.1 * output.logits.mean()).backward()
    return output.loss, output.aux_loss


def alone(model):
    output = model(input_ids=batch()[0])
    output.aux_loss.backward()
    return output.aux_loss


def evaluated(model):
    ids, labels, mask = padded()
    with torch.no_grad():
        before = model(input_ids=ids, labels=labels, attention_mask=mask)
    masked(model)
    return before.loss, before.aux_loss


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt_oss", "qwen3_moe", "mixtral"])
@pytest.mark.parametrize("size", [2, 1, 5])
def test_a_loss_of_routers(name, size):
    both_ways(in_memory(name), half_of_the_loss, micro_batch_size=size, tolerance=2e-6)


@pytest.mark.slow
def test_models_that_share_its_code_have_inputs_of_their_own():
    for name in ("mixtral", "qwen3_moe"):
        both_ways(balanced(name), masked, tolerance=2e-6)
        torch._dynamo.reset()


@pytest.mark.parametrize(
    "use", [its_own_term, *(pytest.param(use, marks=pytest.mark.slow) for use in (alone, evaluated))]
)
def test_how_a_loss_of_routers_is_used(use):
    both_ways(balanced() if use is alone else in_memory(), use, tolerance=2e-6)


@pytest.mark.slow
def test_a_compiled_loss_of_routers():
    both_ways(balanced(), masked, compiler="inductor", tolerance=5e-6)


# On the tiers ----------------------------------------------------------------------------------------------------------


def steps(model, optimizer, backwards):
    """Losses, and values after the steps."""
    losses = []
    for number in range(3):
        for each in range(backwards):
            ids, labels = batch(4 - number % 2, seed=10 * number + each)
            output = model(input_ids=ids, labels=labels)
            (output.loss / backwards).backward()
            losses += [output.loss.detach(), output.aux_loss.detach()]
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": torch.stack(losses)} | {k: v.detach().clone() for k, v in model.state_dict().items()}


@pytest.fixture(scope="module")
def harness():
    return Harness(balanced)


def train(harness, storage, *, backwards=1, **changes):
    with harness.fresh(lambda groups: gs_compile.AdamW(ungrouped(groups), **ADAMW), options(storage, **changes)) as one:
        return steps(harness.model, one, backwards)


def ungrouped(groups):
    return [parameter for group in groups for parameter in group["params"]]


@cache
def plain(backwards=1):
    model = balanced()
    return steps(model, torch.optim.AdamW(model.parameters(), **ADAMW), backwards)


@pytest.fixture(scope="module")
def stored(harness, storage):
    """Everything on SSD, micro-batches of two samples."""
    return train(harness, storage)


def test_balanced_experts_learn_what_they_do_in_plain_pytorch(stored):
    assert distance(stored, plain()) < 1e-6


@pytest.mark.parametrize(
    "changes",
    [
        {"ratios": IN_MEMORY},
        pytest.param({"recompute": "none"}, marks=pytest.mark.slow),
        pytest.param({"separate_device": True, "alpha": 0.5}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_balanced_experts_learn_the_same_bits_wherever_data_is(stored, harness, tmp_path, changes):
    torch.testing.assert_close(train(harness, tmp_path, **changes), stored, rtol=0, atol=0)


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(4, marks=pytest.mark.slow)])
def test_balance_with_several_backwards_a_step(harness, tmp_path, size):
    """Nobody says so before: the first step begins again."""
    assert distance(train(harness, tmp_path, backwards=2, micro_batch_size=size), plain(2)) < 1e-6


# Models of one's own ---------------------------------------------------------------------------------------------------


class GatedBlock(Feed):
    """Has a gate, whose logits are for the loss alone."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, 3)

    def forward(self, x_BTD):
        x_BTD = super().forward(x_BTD)
        return x_BTD, self.gate(x_BTD)


class Gated(GPT):
    """Its loss has a term of the logits of gates, the last hidden state and a weight of its own."""

    def __init__(self, term):
        super().__init__(GatedBlock, num_layers=2)
        self.term = term

    def forward(self, ids, labels):
        x, logits = self.embedding(ids), []
        for block in self.blocks:
            x, each = block(x)
            logits.append(each)
        found = self.head(self.norm(x))
        loss = functional.cross_entropy(found.flatten(0, 1), labels.flatten())
        return found, loss + self.term(*logits, x, self.norm.weight)


def of_one_layer(first, second, *_):
    return first.exp().var(0).sum()


def product_of_means(first, second, *_):
    """Beside it what separates, of the same values."""
    one, other = (each.softmax(-1).flatten(0, 1).mean(0) for each in (first, second))
    return (one * other).sum() + torch.stack([first, second]).logsumexp(-1).square().mean()


def ranked_over_the_batch(first, *_):
    places = torch.arange(first.numel(), device=first.device)
    return (first.flatten().sort().values * places).sum() / first.numel() ** 2


def times_the_head(first, second, x, weight):
    """Shares of the head's own, each times what is made of all samples."""
    return first.std() * (x * weight).square().mean() + weight.sum() * second.var()


OF_ONE_LAYER = pytest.param(of_one_layer, marks=pytest.mark.slow)  # the fast one is micro-batch by micro-batch, below


@pytest.mark.parametrize("term", [OF_ONE_LAYER, product_of_means, ranked_over_the_batch, times_the_head])
def test_terms_of_all_samples(term):
    both_ways(Gated(term), scaled)


def changed_later(first, *_):
    value = first.mean() * first.exp().mean()
    return torch.stack([value.clone(), value.mul_(2.0)]).sum()


def of_the_hidden_state(first, second, x, weight):
    return x.mean() * x.exp().mean()


def of_a_weight(first, second, x, weight):
    return (first.mean(0) * weight.mean()).exp().std()


@pytest.mark.parametrize("term", [of_the_hidden_state, of_a_weight])
def test_terms_of_what_is_made_for_the_head(term):
    both_ways(Gated(term), scaled)


def test_values_that_change_in_place():
    """Right, or refused."""
    both_ways(Gated(changed_later), scaled)


@pytest.mark.parametrize("schedule", ["horizontal", pytest.param("lifetime", marks=pytest.mark.slow)])
def test_terms_of_all_samples_micro_batch_by_micro_batch(schedule):
    model, plain = Gated(of_one_layer), Gated(of_one_layer)
    expert = {"compiler": "eager", "schedule": schedule}
    model.compile(backend="greedysnake", options={"micro_batch_size": 2, "expert": expert})
    for each in (model, plain):
        scaled(each)
    assert_same_gradients(gradients(model), gradients(plain))


def with_noise(first, *_):
    """Homogeneous of degree 2 in what the gate makes, if its value and its gradient have one draw."""
    return (first * torch.randn_like(first)).sum().square()


def test_noise_is_drawn_once():
    model, (ids, labels) = compile_model(Gated(with_noise), 2), batch()
    found, loss = model(ids, labels)
    loss.backward()
    term = loss.detach() - functional.cross_entropy(found.detach().flatten(0, 1), labels.flatten())
    products = [(parameter * parameter.grad).sum() for parameter in model.blocks[0].gate.parameters()]
    torch.testing.assert_close(sum(products).detach(), 2 * term, rtol=1e-4, atol=1e-4)


def test_what_it_reads_and_its_gradients_are_counted_with_side_inputs():
    model, (ids, labels) = compile_model(in_memory(), 2), batch()
    model(input_ids=ids, labels=labels).loss.backward()
    (compilation,) = compilations_of[model.lm_head.weight]
    found = next(iter(compilation.models.values()))
    sides = sum(spec.nbytes for spec in found.split.sides["e"])
    layers, experts, tokens = 2, 4, 2 * ids.shape[1]
    assert found.side_nbytes == (sides + 2 * 4 * layers * experts * tokens,)


def test_the_derivation_names_what_is_of_the_whole_batch():
    model = compile_model(in_memory(), 2)
    half_of_the_loss(model)
    assert "of all samples at once" in gs_compile.inspect(model).derivation
