"""Parameters' gradients as factors: where they come so, and that sums of them are what autograd gives."""

from __future__ import annotations

import pytest
import torch
from captured import Block, Tiny, batch, captured
from parts import code_and_autograd
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from gs_compile.capture.gradients import Product, SparseRows, put_term, put_terms, tensors_of
from gs_compile.capture.inductor import Generator
from gs_compile.codegen.differentiate import Differentiated
from gs_compile.program.ir import EPILOGUE, PROLOGUE

WIDE, WORDS = 64, 96
EAGER = Generator("eager")
INDUCTOR = Generator("inductor")
COMPILERS = [EAGER, pytest.param(INDUCTOR, marks=pytest.mark.slow)]


class Columns(nn.Module):
    """A linear map whose weight is stored as its transpose, as GPT-2's are."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDE, WIDE) / 8)

    def forward(self, x):
        return x @ self.weight


class Twice(nn.Module):
    """One weight in two products: its gradient is a sum."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDE, WIDE, bias=False)

    def forward(self, x):
        return self.linear(torch.tanh(self.linear(x)))


class Layer(Block):
    def __init__(self, inner):
        super().__init__(WIDE)
        self.up = inner
        self.down = nn.Identity()

    def forward(self, x):
        return x + torch.tanh(self.up(x))


class Model(nn.Module):
    """Units around layers of one kind."""

    def __init__(self, inner, table):
        super().__init__()
        self.table = table
        self.blocks = nn.ModuleList(Layer(inner()) for _ in range(2))
        self.head = nn.Linear(WIDE, WORDS, bias=False)

    def forward(self, ids, labels):
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return functional.cross_entropy(logits.view(-1, WORDS), labels.view(-1))


def linear():
    return nn.Linear(WIDE, WIDE)


def table(**chosen):
    return nn.Embedding(WORDS, WIDE, **chosen)


def found(inner=linear, embedding=None, *, tokens=6, generator=EAGER, dtype=torch.float32):
    """For each unit the gradients of its code, by the parameter's shape, and autograd's."""
    torch.manual_seed(0)
    model = Model(inner, embedding or table()).to(dtype)
    ids = torch.randint(0, 12, (4, tokens))  # few words, so that they repeat
    units = captured(model, ids, ids).split(2).units
    results = {}
    for unit in units:
        name = "both" if "loss" in unit.results else "backward"
        terms, expected = code_and_autograd(unit, generator, name, most=12)
        kinds = [unit.sources[index].kind for index in unit.differentiable]
        start = len(unit.results)
        results[unit.unit] = list(zip(kinds, terms[start:], expected[start:], strict=True))
    return results


def weights(results, unit):
    """The terms of a unit's matrices, and what they have to be."""
    return [(term, right) for kind, term, right in results[unit] if kind == "input" and right.dim() == 2]


def assert_adds_up(term, right):
    close = {"rtol": 1e-5, "atol": 1e-5}
    before = torch.randn(right.shape)
    total = before.clone()
    put_term(total, term, add=True)
    torch.testing.assert_close(total, before + right, **close)
    flat = torch.full((right.numel() + 7,), torch.nan)
    view = flat[3:-4].view(right.shape)
    put_term(view, term, add=False)
    torch.testing.assert_close(view, right, **close)
    assert flat[:3].isnan().all()
    assert flat[-4:].isnan().all()
    double = torch.zeros(right.shape, dtype=torch.float64)
    put_term(double, term, add=True)
    torch.testing.assert_close(double, right.double(), **close)
    put_term(double, term, add=False)
    torch.testing.assert_close(double, right.double(), **close)
    if not isinstance(term, torch.Tensor):
        torch.testing.assert_close(term.dense(), right, **close)


@pytest.mark.parametrize("generator", COMPILERS)
@pytest.mark.parametrize("inner", [linear, Columns])
def test_weights_and_tables_come_as_factors(inner, generator):
    results = found(inner, generator=generator)
    for unit, form in ((PROLOGUE, SparseRows), (0, Product), (1, Product), (EPILOGUE, Product)):
        ((term, right),) = weights(results, unit)
        assert isinstance(term, form)
        assert sum(tensor.numel() for tensor in tensors_of(term)) < right.numel()
        assert_adds_up(term, right)
    for kind, term, right in (entry for unit in results.values() for entry in unit):
        if kind != "input" or right.dim() < 2:
            assert isinstance(term, torch.Tensor), "only parameters' gradients are added to anything"
            torch.testing.assert_close(term, right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("generator", COMPILERS)
@pytest.mark.parametrize(
    "chosen", [{"inner": Twice}, {"tokens": 40}, {"dtype": torch.bfloat16}], ids=["a sum", "many tokens", "bf16"]
)
def test_what_is_no_smaller_in_factors_comes_as_it_is(chosen, generator):
    results = found(**chosen, generator=generator)
    ((term, right),) = weights(results, 0)
    assert isinstance(term, torch.Tensor)
    torch.testing.assert_close(term, right, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("generator", COMPILERS)
def test_the_row_that_is_padding_gets_nothing(generator):
    ((term, right),) = weights(found(embedding=table(padding_idx=7), generator=generator), PROLOGUE)
    assert isinstance(term, SparseRows)
    assert 7 in term.ids
    assert not right[7].any()
    assert_adds_up(term, right)


def test_rows_of_bf16_are_summed_in_fp32():
    ((term, right),) = weights(found(dtype=torch.bfloat16), PROLOGUE)
    assert isinstance(term, SparseRows)
    assert term.dense().dtype == torch.float32
    torch.testing.assert_close(term.dense(), right.float(), rtol=2e-2, atol=2e-2)


def test_repeated_rows_are_added_in_one_order():
    ids = torch.randint(0, 4, (512,), generator=torch.Generator().manual_seed(0))
    term = SparseRows(ids, torch.randn(512, 768, generator=torch.Generator().manual_seed(1)), 4)
    threads = torch.get_num_threads()
    sums = []
    for number in (1, 2, 4, 2):
        torch.set_num_threads(number)
        sums.append(term.dense())
    torch.set_num_threads(threads)
    assert all(torch.equal(sums[0], each) for each in sums)


def test_the_graph_that_is_shown_is_whole():
    unit = captured(Tiny(), *batch(4, 2)).split(2).units[1]
    code = Differentiated(unit, EAGER)
    before = code.graph("backward").code
    code.function("backward")
    assert code.graph("backward").code == before
    assert len(code.graph("backward").graph.output_node().args[0]) == len(unit.differentiable)


@pytest.mark.parametrize(
    ("tokens", "generator", "lines"),
    [(6, INDUCTOR, []), (60, EAGER, []), (60, INDUCTOR, [("embedding_dense_backward", "x = self.table(ids)")])],
)
def test_a_tables_gradient_that_inductor_adds_up_may_have_other_bits(tokens, generator, lines):
    """Not where it comes as rows, or from torch's own kernel; `deterministic` has another one."""
    ids = torch.zeros(4, tokens, dtype=torch.int64)
    prologue = captured(Model(linear, table()), ids, ids).split(2).units[0]
    found = Differentiated(prologue, generator).nondeterministic
    assert [(each.operator, each.where.split(": ")[-1]) for each in found] == lines
    assert {each.answer for each in found} <= {"replaced"}


class Seen(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_several_terms_are_put_as_each_by_itself_tensors_by_one_call():
    sizes = {key: (key + 2, 3) for key in range(6)}
    terms = {key: torch.randn(size, dtype=torch.bfloat16 if key == 1 else None) for key, size in sizes.items()}
    terms[5] = Product(torch.randn(7, 2), torch.randn(2, 3))
    added = {0, 1, 2, 5}
    totals = {key: torch.randn(size) for key, size in sizes.items()}
    expected = {key: total.clone() for key, total in totals.items()}
    for key, term in terms.items():
        put_term(expected[key], term, add=key in added)
    with Seen() as seen:
        seen.names = []
        put_terms(totals, terms, added)
    assert all(torch.equal(totals[key], expected[key]) for key in sizes)
    assert sorted(name for name in seen.names if "foreach" in name) == ["_foreach_add_", "_foreach_copy_"]
    assert not {"add_", "copy_"} & set(seen.names)
