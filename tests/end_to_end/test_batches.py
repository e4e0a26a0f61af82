"""Batches of any size and shape, captured as seldom as can be, whichever way the model was compiled."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional
from zoo import GPT, WIDTH, Block, assert_same_gradients, batch, both_ways, compile_model, gradients, train

from gs_compile.capture.inductor import Generator, Sizes
from gs_compile.codegen import codes, compiled
from gs_compile.errors import LengthWarning
from gs_compile.model.backend import greedysnake

KEEPS_CAPTURES = True


@pytest.mark.parametrize(("size", "micro_batch_size"), [(3, 8), (1, 1), (7, 3)])
def test_batch_sizes(size, micro_batch_size):
    def use(model):
        ids, _ = batch(size)
        loss = model(ids, ids)[1]
        loss.backward()
        return loss

    both_ways(GPT(), use, micro_batch_size)


def test_a_size_equal_to_the_batch_by_coincidence():
    """The bias has as many rows as the batch has samples, but they are tokens."""

    class Biased(GPT):
        def forward(self, ids, labels, bias_TD):
            x_BTD = self.embedding(ids) + bias_TD
            for block in self.blocks:
                x_BTD = block(x_BTD)
            logits = self.head(self.norm(x_BTD))
            return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    bias_TD = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(0))
    both_ways(Biased(), lambda model: model(*batch(5, tokens=5), bias_TD).backward(), 2)


@pytest.mark.slow
def test_compiled_code_is_for_a_transposed_batch_and_another_default_dtype():
    """A micro-batch has the strides of the whole, and the fractions of a mean are not of the user's default dtype."""

    class Meaned(GPT):
        def forward(self, ids, labels):
            logits, loss = super().forward(ids, labels)
            return loss + logits.square().mean()

    def use(model):
        ids, labels = batch(4)  # micro-batches of one size: each other one is compiled for itself
        model(ids.T.contiguous().T, labels.repeat_interleave(2, 1)[:, ::2]).backward()

    torch.set_default_dtype(torch.float64)
    try:
        both_ways(Meaned().float(), use, 2, compiler="inductor")
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("options", [{}, {"dynamic": True}], ids=["automatic", "dynamic"])
def test_other_sizes_are_not_captured_again(options):
    captures = []

    def backend(module, example_inputs, **keywords):
        result = greedysnake(module, example_inputs, **keywords)
        captures.append(module)  # a call that asked for a retrace did not get here
        return result

    model, reference = GPT(), GPT()
    model.compile(backend=backend, options={"micro_batch_size": 2, "expert": {"compiler": "eager"}}, **options)
    for size, tokens, num_captures in [(5, 12, 1), (4, 12, 1), (7, 12, 1), (3, 8, 2), (5, 10, 2), (4, 12, 2)]:
        model.zero_grad(), reference.zero_grad()
        ids, _ = batch(size, tokens)
        assert_same_gradients(train(model, ids, ids)[1], train(reference, ids, ids)[1])
        assert len(captures) == (1 if options else num_captures), (size, tokens)


def test_programs_of_many_sizes_are_not_kept_for_ever(monkeypatch):
    monkeypatch.setattr(compiled, "MOST_PROGRAMS", 2)
    model, reference = compile_model(GPT(), 1), GPT()
    for size in (4, 5, 6, 4):
        model.zero_grad(), reference.zero_grad()
        assert_same_gradients(train(model, *batch(size))[1], train(reference, *batch(size))[1])
    (compilation,) = compiled.compilations_of[next(model.parameters())]
    assert [spec.num_micro_batches for spec in compilation.programs] == [6, 4]


@pytest.fixture
def no_codes(monkeypatch):
    """No capture and no code is there already, from another test of the process."""
    torch._dynamo.reset()
    monkeypatch.setattr(codes, "_codes", codes.Codes())


@pytest.mark.usefixtures("no_codes")
def test_one_code_serves_all_lengths(monkeypatch):
    """Of the sizes that are symbolic in a capture, also where a gradient's factors become larger than it."""
    generated = []
    generate = Generator.generate
    monkeypatch.setattr(Generator, "generate", lambda self, graph: generated.append(graph) or generate(self, graph))
    model, reference = GPT(Block), GPT(Block)
    model.compile(backend=greedysnake, options={"micro_batch_size": 2, "expert": {"compiler": "eager"}})
    for tokens, number in [(40, 5), (8, 5), (41, 0), (2, 0), (63, 0)]:
        generated.clear()
        model.zero_grad(), reference.zero_grad()
        ids, _ = batch(4, tokens)
        assert_same_gradients(train(model, ids, ids)[1], train(reference, ids, ids)[1])
        assert len(generated) == number, tokens


@pytest.mark.usefixtures("no_codes")
def test_where_lengths_cannot_be_symbolic(monkeypatch):
    """Each length has its code, and a warning says so."""
    monkeypatch.setattr(Sizes, "hold", lambda self, values: 1 / 0)
    model, reference = GPT(), GPT()
    model.compile(backend=greedysnake, options={"micro_batch_size": 2, "expert": {"compiler": "eager"}})
    train(model, *batch(4, 12))
    model.zero_grad()
    with pytest.warns(LengthWarning, match=r"for each length of the inputs.*division by zero.*pad_to_multiple_of"):
        found = train(model, *batch(4, 7))[1]
    assert_same_gradients(found, train(reference, *batch(4, 7))[1])


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
