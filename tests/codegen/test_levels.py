"""What layers may save for their backwards: the same numbers at every level, and bytes by hand."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch
import zoo
from captured import WIDTH, Block, Tiny, batch, captured
from torch.nn import functional

from gs_compile.capture import partition
from gs_compile.capture.flops import node_flops
from gs_compile.capture.inductor import Generator
from gs_compile.codegen.differentiate import Differentiated

EAGER = Generator("eager")
SAMPLES, TOKENS = 2, zoo.TOKENS


def layers_of(name, tokens=TOKENS, halved=False, **changes):
    """The layers of a model in training, tiny ones if no changes say otherwise."""
    model = zoo.small(name, **changes)
    ids = torch.randint(zoo.VOCAB, (2 * SAMPLES, tokens))
    return captured(model, input_ids=ids, labels=ids, use_cache=False).split(SAMPLES, halved=halved).units[1:-1]


def outcome(unit, code, level):
    """Results, saved tensors and gradients of a unit at a level, of the same inputs and random numbers."""
    torch.manual_seed(1)
    inputs = [torch.rand(spec.shape).sub(0.5).mul(0.1).to(spec.dtype) for spec in unit.specs]
    gradients = [torch.randn(unit.result_specs[index].shape) for index in unit.differentiated]
    reads_input = level == 0 or code.levels[level - 1].reads_input
    with torch.no_grad():
        torch.manual_seed(2)
        made = code.function("forward", level)(*inputs)
        results, saved = made[: len(unit.results)], made[len(unit.results) :]
        again = [t for t, source in zip(inputs, unit.sources, strict=True) if reads_input or source.kind != "x"]
        torch.manual_seed(2)
        given = code.function("backward", level)(*again, *saved, *gradients)
    found = [*results, *(g if isinstance(g, torch.Tensor) else g.dense() for g in given)]
    return inputs, results, saved, found


def assert_levels_are_alike(unit, common=None):
    code = Differentiated(unit, EAGER, common)
    assert code.levels, code.no_levels_reason
    *_, expected = outcome(unit, code, 0)
    for number, level in enumerate(code.levels, 1):
        inputs, results, saved, found = outcome(unit, code, number)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        kinds = [(tuple(tensor.shape), tensor.stride(), tensor.dtype) for tensor in saved]
        assert kinds == [(spec.shape, spec.stride, spec.dtype) for spec in level.specs]
        assert [tensor.untyped_storage().nbytes() for tensor in saved] == [spec.nbytes for spec in level.specs]
        memory = Counter(tensor.untyped_storage().data_ptr() for tensor in (*inputs, *results, *saved))
        assert [memory[tensor.untyped_storage().data_ptr()] for tensor in saved] == [1] * len(saved)
    return code


@pytest.mark.parametrize(
    "name", ["gpt2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("llama", "mixtral"))]
)
def test_every_level_has_the_same_bits(name):
    """Of the halves of a block: together they are what a whole one is."""
    for unit in layers_of(name, halved=True, dropout=0.1 if name == "gpt2" else 0.0)[:2]:
        assert_levels_are_alike(unit)


class Gated(Block):
    """With a mask, and a value whose size follows from a length."""

    def forward(self, x):
        return super().forward(functional.dropout(x.flatten(0, 1), 0.5)).view_as(x)


class Drawing(Block):
    """Draws masks in one operation with what they are for, as torch does on GPUs."""

    def forward(self, x):
        return torch.native_dropout(super().forward(torch.native_dropout(x, 0.5, True)[0]), 0.5, True)[0]


@torch.library.custom_op("greedysnake_tests::dropped", mutates_args=())
def dropped(x: torch.Tensor, seed: torch.Tensor) -> torch.Tensor:
    return x * (torch.rand(x.shape, generator=torch.Generator().manual_seed(int(seed))) < 0.5)


@torch.library.custom_op("greedysnake_tests::seeded", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def seeded(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    seed = torch.randint(2**31, ())
    return dropped(x, seed), seed


dropped.register_fake(lambda x, seed: torch.empty_like(x))
seeded.register_fake(lambda x: (torch.empty_like(x), torch.empty((), dtype=torch.int64)))
seeded.register_autograd(
    lambda ctx, gradient, _: dropped(gradient, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output[1]),
)


class Seeding(Block):
    """Draws a seed in one operation with what it is for, which the backward gets, as attention does on GPUs."""

    def forward(self, x):
        return seeded(super().forward(x))[0]


class Returned(Block):
    """Its backward reads what it returns."""

    def forward(self, x):
        return super().forward(x).tanh()


def layer_of(block):
    torch.manual_seed(0)
    return captured(Tiny(lambda p, y: p, [block(), block()]), *batch(4)).split(SAMPLES).units[1]


def test_one_code_for_all_lengths():
    """The second length runs the graphs of the first, in which dropout is one operation that draws and multiplies."""
    torch.manual_seed(0)
    model, common = Tiny(lambda p, y: p, [Gated(), Gated()]), None
    for tokens in (5, 7):
        unit = captured(model, *batch(4, tokens), dynamic=True).split(SAMPLES).units[1]
        assert unit.symbols
        code = assert_levels_are_alike(unit, common)
        common = code.common
        assert code.levels == Differentiated(unit, EAGER).levels
        (level,) = code.levels
        assert [spec.shape for spec in level.specs] == [(SAMPLES * tokens, WIDTH), (SAMPLES * tokens, 2 * WIDTH)]
        assert not level.reads_input
        (shared,) = common.codes
        for key in itertools.product(("forward", "backward"), range(2)):
            assert code.function(*key).func is shared.function(*key)


@pytest.mark.parametrize("block", [Drawing, Seeding, Returned])
def test_hard_layers(block):
    code = assert_levels_are_alike(layer_of(block))
    assert torch.bool not in {spec.dtype for level in code.levels for spec in level.specs}
    if block is not Seeding:  # what draws with its value runs again
        assert products_of(code)[-1] == 4  # two for each product: a mask is drawn without what it is multiplied by


def test_a_layer_that_cannot_be_cut_has_no_levels_and_says_why(monkeypatch):
    def refuse(*_, **__):
        raise RuntimeError("a tensor that cannot be saved")

    monkeypatch.setattr(partition, "min_cut_rematerialization_partition", refuse)
    code = Differentiated(layer_of(Block), EAGER)
    assert code.levels == ()
    assert code.no_levels_reason == "torch's partitioner refuses it: a tensor that cannot be saved"


def products_of(code):
    """The matrix products and attentions of the backward of each level."""
    return [
        sum(map(bool, map(node_flops, code.graph("backward", level).graph.nodes)))
        for level in range(len(code.levels) + 1)
    ]


def test_bytes_and_products_of_gpt2():
    code = Differentiated(layers_of("gpt2")[0], EAGER)
    tokens, width, heads = SAMPLES * TOKENS, zoo.WIDTH, 4
    first, last = code.levels
    # queries, keys and values; attention; its sums of exponentials; what the second half reads; the wide product
    assert Counter(spec.numel for spec in first.specs) == Counter(
        [3 * width * tokens, width * tokens, heads * tokens, width * tokens, 4 * width * tokens]
    )
    assert first.reads_input
    assert first.nbytes < last.nbytes
    assert products_of(code) == [4 + 8 + 1, 8 + 1, 8 + 1]  # two for each product, one for attention


@pytest.mark.slow
def test_compiled_levels_draw_the_same_masks():
    """In a layer as large as this inductor would draw them in another order in each graph; rounding is that of fp32."""
    unit = layers_of("gpt2", tokens=256, dropout=0.1, n_embd=768, n_head=12, n_positions=256)[0]
    *_, expected = outcome(unit, Differentiated(unit, EAGER), 0)
    code = Differentiated(unit, Generator("inductor"))
    assert len(code.levels) == 2
    for level in range(3):
        *_, found = outcome(unit, code, level)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-5 * float(other.abs().max()))
