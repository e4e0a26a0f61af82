"""What users do between steps, with their parameters on the tiers: as plain PyTorch, or a clear refusal."""

from __future__ import annotations

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import gs_compile
from gs_compile.errors import OptimizerError

VOCABULARY, SEQUENCE = 61, 8


def build():
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "n_positions": SEQUENCE, "n_embd": 32, "n_layer": 3, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, use_cache=False, bos_token_id=0, eos_token_id=0)).eval()


def tokens(samples, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (samples, SEQUENCE), generator=generator)


def step(model, optimizer, ids):
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


class Pair:
    """The same model twice: plain, and with its data on SSD."""

    def __init__(self, storage, **expert):
        torch._dynamo.reset()
        self.plain, self.ours = build(), build()
        self.plain_optimizer = torch.optim.AdamW(self.plain.parameters(), lr=3e-4)
        self.optimizer = gs_compile.AdamW(self.ours.parameters(), lr=3e-4)
        expert = {"alpha": 0.5, "ratios": {"parameter": 0.3, "checkpoint": 0.0, "optimizer": 0.0}} | expert
        options = {"micro_batch_size": 1, "storage": storage, "expert": expert | {"compiler": "eager"}}
        self.ours.compile(backend="greedysnake", options=options)

    def step(self, samples, seed=0):
        ids = tokens(samples, seed)
        expected, found = step(self.plain, self.plain_optimizer, ids), step(self.ours, self.optimizer, ids)
        assert found == pytest.approx(expected, rel=1e-5)

    def close(self):
        if self.optimizer.engine is not None:
            self.optimizer.engine.tiers.close()


@pytest.fixture
def pair(tmp_path):
    pairs = []

    def make(**expert):
        pairs.append(Pair(tmp_path, **expert))
        return pairs[-1]

    yield make
    for made in pairs:
        made.close()


@pytest.mark.parametrize("separate", [False, True])
def test_batches_of_any_size_in_any_order(pair, separate):
    both = pair(separate_device=separate)
    for seed, samples in enumerate((4, 2, 3, 5, 1, 4)):
        both.step(samples, seed)


@pytest.mark.parametrize("separate", [False, True])
def test_a_call_that_fails_in_the_model_costs_nothing(pair, separate):
    both = pair(separate_device=separate)
    both.step(2)
    bad = torch.full((2, SEQUENCE), VOCABULARY + 7)
    with pytest.raises(IndexError), torch.no_grad():
        both.ours(input_ids=bad)
    both.step(2, seed=1)
    with pytest.raises(IndexError):
        both.ours(input_ids=bad, labels=tokens(2))
    assert not torch.isnan(both.ours.state_dict()["lm_head.weight"]).any()
    both.step(2, seed=2)
    with pytest.raises(IndexError):  # in the head, after all layers
        both.ours(input_ids=tokens(2), labels=bad)
    both.step(3, seed=3)


def test_a_first_call_in_inference_mode(pair):
    both = pair()
    with torch.inference_mode():
        both.ours(input_ids=tokens(2), labels=tokens(2))
    both.step(2)
    both.step(2, seed=1)


@pytest.mark.filterwarnings("ignore::gs_compile.errors.UniformityWarning")
@pytest.mark.parametrize("before", [True, False])
def test_what_is_trained_is_settled_at_the_first_call(pair, before):
    both = pair()
    layer = both.ours.transformer.h[1]
    layer.requires_grad_(before)
    step(both.ours, both.optimizer, tokens(2))
    layer.requires_grad_(not before)
    with pytest.raises(OptimizerError, match=r"requires_grad of a parameter of shape .* has changed"):
        step(both.ours, both.optimizer, tokens(2))
    layer.requires_grad_(before)
    step(both.ours, both.optimizer, tokens(2))


def test_an_input_that_wants_a_gradient_is_refused(pair):
    both = pair()
    embedded = torch.randn(2, SEQUENCE, 32, requires_grad=True)
    with pytest.raises(OptimizerError, match=r"an input of shape .* requires a gradient"):
        both.ours(inputs_embeds=embedded, labels=tokens(2))


def test_models_one_after_the_other_in_one_function(tmp_path):
    for _ in range(2):
        torch._dynamo.reset()
        model = build()
        optimizer = gs_compile.AdamW(model.parameters(), lr=3e-4)
        expert = {"compiler": "eager", "ratios": {"parameter": 0.0, "checkpoint": 0.0, "optimizer": 0.0}}
        model.compile(backend="greedysnake", options={"storage": tmp_path, "expert": expert})
        step(model, optimizer, tokens(2))
        del model, optimizer
