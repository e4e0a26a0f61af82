"""Units in pieces train the same bits wherever data is stored, and what whole ones train to rounding."""

from __future__ import annotations

import re
from contextlib import nullcontext

import pytest
import tiered
import torch
from alive import most_allocated
from tiered import BATCH, adamw, options, sgd, shared, step, tokens
from zoo import GPT, Feed, assert_same_gradients, batch, gradients, train

import gs_compile
from gs_compile.codegen.compiled import compilations_of

KEEPS_CAPTURES = True
MODEL = {"tied": False}
IN_MEMORY = {"parameter": 1.0, "checkpoint": 1.0, "optimizer": 1.0}
PLACES = {
    "all on SSD": {},
    "half": {"ratios": dict.fromkeys(IN_MEMORY, 0.5)},
    "late updates": {"alpha": 0.5},
    "clipped": {"clip": "speculative"},
    "device apart": {"separate_device": True, "device_memory": "1MiB"},
}


class Long(tiered.GPT2):
    """With positions for long samples, and a large vocabulary."""

    def __init__(self):
        super().__init__(2, 16, 2048, 0.0, tied=False)
        self.transformer.wpe = torch.nn.Embedding(512, 16)


def in_memory(harness, storage, make, size, **changes):
    given = {"piece_tokens": size, "layer_tokens": size or None, "clip": "delayed", **changes}
    return harness.train(make, options(storage, ratios=IN_MEMORY, **given), 3)


@pytest.fixture(scope="module")
def expected(harness, storage):
    return {clip: in_memory(harness, storage, clipping(clip), 5) for clip in (False, True)}


def clipping(clips):
    return lambda groups: adamw(groups, **({"max_grad_norm": 0.05} if clips else {}))


@pytest.mark.parametrize("place", [pytest.param(each, marks=[pytest.mark.slow] * (each == "half")) for each in PLACES])
def test_the_same_bits_wherever_data_is_stored(place, harness, storage, expected):
    clips = "clip" in PLACES[place]
    found = harness.train(clipping(clips), options(storage, piece_tokens=5, layer_tokens=5, **PLACES[place]), 3)
    assert found.differences(expected[clips]) == []


def test_the_losses_and_gradients_of_whole_units(storage):
    """The update of SGD is the gradient: sums of fp32 in another order."""
    found, whole = (in_memory(shared(**MODEL), storage, sgd, size) for size in (5, 0))
    torch.testing.assert_close(found.losses, whole.losses, rtol=1e-6, atol=0)
    for name, value in found.values.items():
        torch.testing.assert_close(value, whole.values[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("outputs", [pytest.param("loss", marks=pytest.mark.slow), "all"])
def test_a_large_vocabulary_is_in_pieces_unasked(outputs, storage):
    """Also where the logits are results; all lengths from the second on have the same code."""
    torch.manual_seed(0)
    model = Long()
    optimizer = gs_compile.AdamW(model.parameters(), lr=1e-3)
    model.compile(backend="greedysnake", options={**options(storage), "outputs": outputs})
    for length in (256, 300, 340):
        step(model, optimizer, tokens(0, BATCH).repeat(1, 48)[:, :length])
    codes = [each.codes["h"] for c in compilations_of[next(model.parameters())] for each in c.models.values()]
    *_, second, third = [code for code in codes if code.tokens_per_piece]
    assert second.common is third.common
    sizes = {code.tokens_per_piece for code in codes}
    assert sizes >= {256, None}  # micro-batches of two samples of 256, and the last, of one
    assert sizes - {None} >= {
        int(*re.findall(r"the head runs on (\d+) tokens at a time", str(gs_compile.inspect(model))))
    }
    parts = {id(common): common for code in codes for common in code.common.parts.values()}.values()
    assert {len(common.codes) for common in parts if common.codes} == {1}
    numbers = [sum(bool(common.codes) for common in code.common.parts.values()) for code in (codes[0], second)]
    assert numbers[0] == numbers[1]  # of parts
    optimizer.engine.tiers.close()


def test_an_evaluation_for_the_loss_alone_makes_no_logits(storage):
    torch.manual_seed(0)
    model, ids = Long(), tokens(0, 8).repeat(1, 48)[:, :256]
    optimizer = gs_compile.AdamW(model.parameters(), lr=1e-3)
    model.compile(backend="greedysnake", options=options(storage))
    step(model, optimizer, ids)

    def evaluate(context):
        with torch.no_grad(), context():
            return model(input_ids=ids, labels=ids)

    for context in (nullcontext, gs_compile.loss_alone):
        evaluate(context)  # which compiles
    (most, whole), (least, alone) = (most_allocated(evaluate, each) for each in (nullcontext, gs_compile.loss_alone))
    assert alone.logits is None
    assert least < whole.logits.nbytes < most
    torch.testing.assert_close(alone.loss, whole.loss)
    optimizer.engine.tiers.close()


class Written(Feed):
    """Writes to parts of its values, as chunks of linear attention do."""

    def forward(self, x_BTD):
        x_BTD = super().forward(x_BTD)
        written = x_BTD.clone()
        written[..., 1:3] = x_BTD[..., :2].tanh()
        return written


def test_a_layer_that_writes_to_parts_of_its_values():
    model, plain = GPT(Written), GPT(Written)
    expert = {"compiler": "eager", "layer_tokens": 7, "piece_tokens": 5}
    model.compile(backend="greedysnake", options={"micro_batch_size": 2, "expert": expert})
    for each in (model, plain):
        train(each, *batch())
    assert_same_gradients(gradients(model), gradients(plain))
    assert "runs on 7 tokens at a time" in str(gs_compile.inspect(model))
