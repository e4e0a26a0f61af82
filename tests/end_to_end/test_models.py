"""Every family of models: the loss and all gradients of the whole batch, as eager computes them."""

from __future__ import annotations

import copy

import pytest
import torch
from zoo import (
    BATCH,
    MODELS,
    WARNINGS,
    accumulate,
    assert_same_gradients,
    batch,
    build,
    compile_model,
    gradients,
    huggingface,
    loss_of,
    small,
    train,
)

from gs_compile.codegen.compiled import compilations_of

KEEPS_CAPTURES = True

pytestmark = WARNINGS


# What the other families have, one of these has too: untied embeddings, rotary positions, blocks of one residual, an
# autograd function. Tied embeddings and two kinds of masks, gpt2 and gpt_neo have below; experts, test_autograd.py.
VARIED = {"llama", "bert", "bloom", "falcon", "plain", "positional"}


def cases():
    for name in MODELS:
        for size in (BATCH, 3, 1):  # 1, 2 and 5 micro-batches; the second of two is smaller
            slow = name not in VARIED or (size != 3 and (name, size) != ("plain", 1))  # whole: test_batches.py
            slow = slow or name == "llama"  # which the test of bf16 has
            yield pytest.param(name, size, id=f"{name}-{-(-BATCH // size)}", marks=[pytest.mark.slow] * slow)


@pytest.mark.parametrize(("name", "size"), list(cases()))
def test_gradients_of_the_batch(name, size):
    shallow = size == 3 and name in VARIED - {"plain", "positional"}  # the slow ones have all layers
    check(small(name) if shallow else build(name), size)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_compiled_by_inductor(name):
    check(build(name), 3, compiler="inductor", outputs="loss")


def check(model, size, **options):
    ids, labels = batch()
    expected = train(copy.deepcopy(model), ids, labels)
    loss, found = train(compile_model(model, size, **options), ids, labels)
    torch.testing.assert_close(loss, expected[0], rtol=1e-6, atol=0)
    assert_same_gradients(found, expected[1])


@pytest.mark.parametrize(("name", "side"), [("gpt2", "left"), pytest.param("llama", "right", marks=pytest.mark.slow)])
def test_padding(name, side):
    model = small(name)
    ids, _ = batch(4)
    place = torch.arange(ids.shape[1])
    kept = (place if side == "right" else place.flip(0)) < torch.tensor([12, 3, 7, 5])[:, None]
    inputs = {"input_ids": ids, "attention_mask": kept.long(), "labels": ids.where(kept, -100)}
    reference = copy.deepcopy(model)
    reference(**inputs).loss.backward()
    compile_model(model, 2)(**inputs).loss.backward()
    assert_same_gradients(gradients(model), gradients(reference))


def test_bf16_is_as_near_to_fp32_as_gradient_accumulation():
    model = small("llama").bfloat16()
    ids, labels = batch()
    _, exact = train(copy.deepcopy(model).float(), ids, labels)
    plain = {key: value.bfloat16() for key, value in accumulate(copy.deepcopy(model), ids, labels, 1).items()}
    _, found = train(compile_model(model, 1), ids, labels)
    assert {gradient.dtype for gradient in found.values()} == {torch.bfloat16}
    assert distance(found, exact) <= 1.1 * distance(plain, exact)
    assert distance(found, exact) < 0.05 * distance(exact, {})  # so the bound above does not come from noise alone


def distance(left, right):
    return sum((value.float() - right.get(key, 0.0)).square().sum() for key, value in left.items()).sqrt().item()


def layer_classes(model):
    (compilation,) = compilations_of[next(model.parameters())]
    (layout,) = compilation.models.values()
    return layout.uniform.layer_classes


@pytest.mark.parametrize("name", ["gpt_neo", pytest.param("gemma2", marks=pytest.mark.slow)])
def test_layers_that_differ_in_their_masks_are_one_class(name):
    """Of each kind of mask one layer, or two."""
    kinds = {"attention_types": [[["global", "local"], 1]], "num_layers": 2}
    model = huggingface(name, **({"num_hidden_layers": 4} if name == "gemma2" else kinds))
    ids, labels = batch(4)
    loss_of(compile_model(model, 2, outputs="loss"), ids, labels).backward()
    assert layer_classes(model) == (tuple(range(model.config.num_hidden_layers)),)


def test_a_head_that_logs_inside_forward_is_one_graph():
    model = small("gpt2")
    model.loss_type = None  # transformers then warns, in the midst of forward
    torch._dynamo.utils.counters.clear()
    check(model, BATCH)
    assert not torch._dynamo.utils.counters["graph_break"]
