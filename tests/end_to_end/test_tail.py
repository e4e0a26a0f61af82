"""What a model makes of all samples at once from its results: contrastive losses, quotients of sums, and others."""

from __future__ import annotations

import copy

import pytest
import torch
from learner import distance
from tiered import options
from torch import nn
from torch.nn import functional
from transformers import CLIPConfig, CLIPModel
from zoo import assert_same_gradients, gradients

import gs_compile
from gs_compile.errors import SeparationError

WIDTH, SAMPLES, TOKENS = 8, 6, 5
EAGER = {"micro_batch_size": 2, "expert": {"compiler": "eager"}}


class Pairs(nn.Module):
    """Two blocks, and a loss that each kind of test has its own of."""

    def __init__(self, loss, block=nn.Linear):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(20, WIDTH)
        self.blocks = nn.ModuleList(block(WIDTH, WIDTH) for _ in range(2))
        self.head, self.scale, self.bias = (
            nn.Linear(WIDTH, WIDTH),
            nn.Parameter(torch.ones(())),
            nn.Parameter(torch.zeros(1)),
        )
        self.loss = loss

    def forward(self, ids, others):
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x).tanh()
        return self.loss(self, self.head(x), others)


def contrastive(model, x, others):
    rows = functional.normalize(x.mean(1), dim=-1)
    logits = rows @ functional.normalize(others, dim=-1).T * model.scale.exp() + model.bias
    return {"loss": functional.cross_entropy(logits, torch.arange(len(logits))), "logits": logits, "rows": rows}


def masked(model, x, others):
    """A mean over tokens that the model draws itself."""
    is_masked = (torch.rand(x.shape[:2]) < 2).double()
    return {"loss": (x.square().mean(-1) * is_masked).sum() / is_masked.sum(), "mean": x.mean()}


def spread(model, x, others):
    return {"loss": x.mean(1).std(0).mean() + x.mean().square(), "norm": x.norm()}


def centred_in_place(model, x, others):
    rows = x.mean(1)
    return {"loss": functional.cross_entropy(rows.sub_(rows.mean(0)), torch.arange(len(rows)))}


def in_bf16(model, x, others):
    rows = functional.normalize(x.mean(1), dim=-1)
    with torch.autocast("cpu", torch.bfloat16):
        logits = rows.float() @ others.float().T
    return {"loss": functional.cross_entropy(logits.double(), torch.arange(len(logits))), "logits": logits}


def scaled_without_gradient(model, x, others):
    with torch.no_grad():
        scale = x.mean(1).std(0).mean()
    return {"loss": x.square().mean() / scale}


def changed_behind_it(model, x, others):
    rows = x.mean(1)
    loss = (rows - rows.mean(0)).abs().mean()
    rows.mul_(2)
    return {"loss": loss, "rows": rows}


def batch(number=0):
    torch.manual_seed(number)
    return torch.randint(20, (SAMPLES, TOKENS)), torch.randn(SAMPLES, WIDTH, dtype=torch.float64)


LOSSES = (contrastive, masked, spread, centred_in_place, in_bf16, scaled_without_gradient)


@pytest.mark.parametrize(
    ("loss", "wanted"),
    [
        *((loss, "all") for loss in LOSSES),
        *(pytest.param(loss, "loss", marks=[pytest.mark.slow] * (loss is not contrastive)) for loss in LOSSES),
    ],
)
def test_it_is_that_of_the_whole_batch(loss, wanted):
    model = Pairs(loss).double()
    plain = copy.deepcopy(model)
    model.compile(backend="greedysnake", options={**EAGER, "outputs": wanted})
    found, expected = model(*batch()), plain(*batch())
    found["loss"].backward()
    expected["loss"].backward()
    for name, value in expected.items():
        if wanted == "all" or name == "loss":
            torch.testing.assert_close(found[name], value, msg=name)
        elif value.dim():
            assert found[name] is None
    assert_same_gradients(gradients(model), gradients(plain), 1e-12)
    with torch.no_grad():
        torch.testing.assert_close(model(*batch(1))["loss"], plain(*batch(1))["loss"])


def test_it_trains_on_the_tiers(tmp_path, caplog):
    """And the log says once what stays in memory for it."""
    model = Pairs(contrastive).double()
    plain = copy.deepcopy(model)
    optimizer = gs_compile.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    theirs = torch.optim.AdamW(plain.parameters(), lr=1e-2, eps=1e-3)
    model.compile(backend="greedysnake", options=options(tmp_path, micro_batch_size=2))
    for number in range(3):
        for each, update in ((model, optimizer), (plain, theirs)):
            each(*batch(number))["loss"].backward()
            update.step()
            update.zero_grad()
    assert distance(dict(model.state_dict()), dict(plain.state_dict())) < 1e-12
    optimizer.engine.tiers.close()
    (told,) = (each for each in caplog.messages if "computed behind the model" in each)
    assert f"it reads {8 * (SAMPLES * WIDTH + 2)} B of" in told  # a row for each sample, and two parameters
    assert told.endswith("On several ranks it is refused")


def test_clip_of_transformers():
    """Two encoders, of which one is cut into layers, and the loss of all pairs of images and texts."""
    encoder = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {"vocab_size": 60, "max_position_embeddings": 16, "bos_token_id": 1, "eos_token_id": 2, **encoder}
    vision = {"image_size": 16, "patch_size": 8, **encoder}
    torch.manual_seed(0)
    model = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)).double().train()
    plain, found = copy.deepcopy(model), []
    model.compile(backend="greedysnake", options=EAGER)
    for each in (model, plain):
        torch.manual_seed(1)
        ids, pixels = torch.randint(3, 60, (SAMPLES, 8)), torch.randn(SAMPLES, 3, 16, 16, dtype=torch.float64)
        loss = each(input_ids=ids, pixel_values=pixels, return_loss=True).loss
        loss.backward()
        found.append(loss.item())
    assert found[0] == pytest.approx(found[1], rel=1e-12)
    assert_same_gradients(gradients(model), gradients(plain), 1e-10)


class Centring(nn.Linear):
    def forward(self, x):
        return super().forward(x - x.mean(0))


def test_results_that_the_model_changes_behind_it_are_refused():
    model = Pairs(changed_behind_it).double()
    model.compile(backend="greedysnake", options=EAGER)
    with pytest.raises(SeparationError, match=r"over the batch|over the samples"):
        model(*batch())


def test_what_a_block_makes_of_all_samples_is_refused():
    model = Pairs(contrastive, Centring).double()
    model.compile(backend="greedysnake", options=EAGER)
    with pytest.raises(SeparationError, match=r"reduced over the batch|of values"):
        model(*batch())


def mapped(model, x, others):
    return {"loss": torch.vmap(lambda row: row * row.sum())(x.flatten(1)).std() + x.mean()}


def test_what_is_mapped_over_samples_is_refused():
    """Fault: the map was taken apart, and torch spoke of its own faults."""
    model = Pairs(mapped)
    model.compile(backend="greedysnake", options=EAGER)
    with pytest.raises(SeparationError, match="of the whole batch cannot be computed from micro-batches"):
        model(torch.randint(20, (SAMPLES, TOKENS)), torch.randn(SAMPLES, WIDTH))
