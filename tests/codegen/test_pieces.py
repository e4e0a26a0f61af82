"""A unit in pieces of tokens gives what the whole one gives, in the memory that its plan counts."""

from __future__ import annotations

import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from alive import Alive, most_allocated
from captured import captured
from parts import code_and_autograd
from pieces import (
    COMPILERS,
    EAGER,
    PIECE,
    SAMPLES,
    TOKENS,
    WIDTH,
    WORDS,
    equal,
    flat_loss,
    hold_memory,
    in_pieces,
    layer_of,
)
from torch import nn
from torch.nn import functional
from torch.nn.functional import cross_entropy

from benchmarks.pieces import UNITS, code_of
from benchmarks.pieces import inputs_of as drawn
from gs_compile.capture.graph import UnitGraph
from gs_compile.capture.inductor import Generator
from gs_compile.codegen.parts import PartInPieces
from gs_compile.codegen.pieces import LEAST, InPieces
from gs_compile.codegen.token_wise import Subgraph
from gs_compile.hf.fused_head import log_probabilities


class Model(nn.Module):
    """Two blocks, a norm, and a head with its loss: `head(model, x, ids, labels, mask, teacher)`."""

    def __init__(self, head) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(2))
        self.norm, self.words = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WORDS)
        self.scale, self.weights, self.head = nn.Parameter(torch.tensor(1.5)), torch.rand(WORDS) + 0.5, head

    def forward(self, ids, labels, mask, teacher):
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x)
        return self.head(self, self.norm(x), ids, labels, mask, teacher)


def odd_views(model, x, ids, labels, mask, teacher):
    """Dimensions that come and go, an index that is shorter than what it picks from, and a norm over the words."""
    logits = model.words(x).unsqueeze(0).squeeze(0).squeeze(-1)[:, :, None].squeeze(2)
    first = logits.gather(-1, labels[:, :, None]).squeeze()
    return (first * mask + logits.norm(dim=-1)).sum() - logits.gather(1, labels[:, :1, None] % TOKENS).sum()


def moved_labels(model, x, ids, labels, mask, teacher):
    return flat_loss(model.words(x).float(), functional.pad(labels, (0, 1), value=-100)[..., 1:].contiguous())


def moved_logits(model, x, ids, labels, mask, teacher):
    return flat_loss(model.words(x)[:, :-1].contiguous(), labels[:, 1:])


def of_the_middle(model, x, ids, labels, mask, teacher):
    return flat_loss(model.words(x)[:, 2:-1], labels[:, 2:-1])


def smooth(model, x, ids, labels, mask, teacher):
    return flat_loss(model.words(x), labels, label_smoothing=0.1, reduction="sum")


def weighted(model, x, ids, labels, mask, teacher):
    return flat_loss(model.words(x), labels, weight=model.weights)


def classes_in_the_middle(model, x, ids, labels, mask, teacher):
    logits = torch.tanh(model.words(x) / 30) * 30
    return (cross_entropy(logits.transpose(1, 2), labels, reduction="none") * mask).sum()


def with_z_loss(model, x, ids, labels, mask, teacher):
    logits = model.words(x)
    return flat_loss(logits, labels, reduction="sum") + 0.01 * torch.logsumexp(logits, -1).square().sum()


def distilled(model, x, ids, labels, mask, teacher):
    return functional.kl_div(
        functional.log_softmax(model.words(x)[:, :-1] / 2, -1), (teacher[:, :-1] / 2).softmax(-1), reduction="sum"
    )


def of_squares(model, x, ids, labels, mask, teacher):
    return (model.words(x) - teacher).square().mean()


def preferred(model, x, ids, labels, mask, teacher):
    of_labels = model.words(x)[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    return -functional.logsigmoid(of_labels.sum(-1)).sum()


def with_a_learned_scale(model, x, ids, labels, mask, teacher):
    return model.scale * flat_loss(model.words(x) * model.scale, labels, reduction="sum")


def in_float64(model, x, ids, labels, mask, teacher):
    return flat_loss(x.double() @ model.words.weight.double().T, labels, reduction="sum")


def of_outputs(model, x, ids, labels, mask, teacher):
    logits = model.words(x)[:, :-1]
    log_p = logits.log_softmax(-1)
    of_labels = log_p.gather(-1, ids[:, 1:, None])[..., 0]
    return of_labels, -(log_p.exp() * log_p).sum(-1), logits.argmax(-1) == ids[:, 1:], logits.detach().mean(-1)


def partly_without_gradients(model, x, ids, labels, mask, teacher):
    with torch.no_grad():
        guess = model.words(x).argmax(-1)
    return flat_loss(model.words(x), guess, reduction="sum")


def of_torch(model, x, ids, labels, mask, teacher):
    return functional.linear_cross_entropy(x.flatten(0, 1), model.words.weight, labels.flatten(), reduction="sum")


def as_trl_does(model, x, ids, labels, mask, teacher):
    results = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
    labels = labels.masked_fill(mask < 0.3, -100)
    return tuple(log_probabilities(model.words(x)[:, :-1], labels[:, 1:], results, 0.7).values())


ONCE = [moved_labels, moved_logits, of_the_middle, smooth, weighted, classes_in_the_middle, with_z_loss, distilled]
ONCE += [of_squares, in_float64, partly_without_gradients]
ONCE += [of_torch] * hasattr(functional, "linear_cross_entropy")  # of later releases
TWICE = [preferred, with_a_learned_scale]


@cache  # arguments that are left out are others
def unit_of(head, size):
    generator = torch.Generator().manual_seed(0)
    ids, labels = (torch.randint(WORDS, (SAMPLES, TOKENS), generator=generator) for _ in range(2))
    mask, teacher = torch.rand(SAMPLES, TOKENS), torch.randn(SAMPLES, TOKENS, WORDS)
    return captured(Model(head), ids, labels, mask, teacher).split(size, alone=size == SAMPLES).units[-1]


@cache
def head_in_pieces(head, size, generator):
    return in_pieces(unit_of(head, size), generator)


@pytest.mark.parametrize("generator", COMPILERS, ids=["eager", "inductor"])
@pytest.mark.parametrize("size", [2, pytest.param(1, marks=pytest.mark.slow)], ids=["two samples", "one sample"])
@pytest.mark.parametrize(
    "head",
    [
        pytest.param(each, marks=[pytest.mark.slow] * (each is moved_logits))  # as of_the_middle
        for each in (*ONCE, *TWICE, of_outputs, as_trl_does, odd_views)
    ],
    ids=lambda head: head.__name__,
)
def test_results_and_gradients_are_those_of_the_whole_head(head, size, generator):
    unit, code = unit_of(head, size), head_in_pieces(head, size, generator)
    for name in ("backward", "both") if "loss" in unit.results else ("backward",):
        equal(*code_and_autograd(unit, generator, name, most=WORDS, code=code), generator)
    assert code.tokens_per_piece == PIECE


class Rows(nn.Module):
    """Three scores of each row of an input that has no other dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.scores = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2)), nn.Linear(WIDTH, 3)

    def forward(self, x, labels):
        for layer in self.layers:
            x = x + layer(x)
        return cross_entropy(self.scores(x), labels)


def test_the_gradient_of_rows_that_is_a_product_of_small_factors():
    unit = captured(Rows(), torch.randn(36, WIDTH), torch.randint(3, (36,))).split(18).units[-1]
    equal(*code_and_autograd(unit, EAGER, "both", most=3, code=in_pieces(unit)))


@pytest.mark.parametrize("head", [moved_labels, weighted, of_squares], ids=lambda head: head.__name__)
def test_means_over_a_batch_of_one_micro_batch(head):
    """Which divide by themselves: those of several micro-batches are sums by what is counted of all."""
    equal(
        *code_and_autograd(unit_of(head, SAMPLES), EAGER, "both", most=WORDS, code=head_in_pieces(head, SAMPLES, EAGER))
    )


class Products(torch.utils._python_dispatch.TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.rows = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            self.rows["products"] += 1
        return function(*args, **(kwargs or {}))


def inputs_of(unit):
    torch.manual_seed(0)
    return [
        torch.randn(spec.shape).to(spec.dtype) if spec.dtype.is_floating_point else torch.randint(WORDS, spec.shape)
        for spec in unit.specs
    ]


@pytest.mark.parametrize("head", [*ONCE, *TWICE], ids=lambda head: head.__name__)
def test_what_is_alive_is_what_is_planned_no_logits_are_and_products_run_once(head):
    unit, code = unit_of(head, 2), head_in_pieces(head, 2, EAGER)
    inputs = inputs_of(unit)
    function, alive, counted = code.function("both"), Alive(), Products()
    with torch.no_grad(), alive, counted:
        results = function(*inputs)
    x = next(i for i, index in enumerate(unit.differentiable) if unit.sources[index].kind == "x")
    held = results[len(unit.results) + x].nbytes + results[0].nbytes
    planned = code.cost("both").nbytes
    assert alive.most - held == pytest.approx(planned, rel=0.02)
    if head is not in_float64:  # which has the weight in another dtype
        assert alive.largest == 4 * max(PIECE * WORDS, WORDS * WIDTH)
    pieces = next(len(part._ranges) for part in code._parts if isinstance(part, PartInPieces))
    again = head in TWICE or head is partly_without_gradients
    assert counted.rows["products"] == (3 + again) * pieces  # logits, gradients of x and of the weight; logits again


@pytest.mark.slow
def test_what_a_compiled_head_takes_is_what_is_planned():
    """As `benchmarks.pieces` has it."""
    sizes = {"width": 64, "vocabulary": 4096, "experts": 0, "dtype": "float32", "compiler": "inductor"}
    name, piece = UNITS["head"][1], 192
    arguments = SimpleNamespace(**sizes, unit="head", piece=piece, tokens=4 * piece)
    code = code_of(arguments, arguments.tokens)
    inputs = drawn(code, name, arguments)
    with torch.no_grad():
        most, results = most_allocated(code.function(name), *inputs)
    held = next(each.nbytes for each in reversed(results) if each.shape == inputs[0].shape)  # the gradient of x
    assert most - held == pytest.approx(code.cost(name).nbytes, rel=0.03)


def test_gradients_of_all_pieces_are_summed_in_fp32():
    torch.manual_seed(0)
    model = Model(smooth).bfloat16()
    ids = torch.randint(WORDS, (SAMPLES, TOKENS))
    unit = (
        captured(model, ids, ids, torch.rand(SAMPLES, TOKENS), torch.randn(SAMPLES, TOKENS, WORDS)).split(2).units[-1]
    )
    inputs = inputs_of(unit)
    wide = [each.double().requires_grad_() if each.is_floating_point() else each for each in inputs]
    places = [index for index, spec in enumerate(unit.specs) if spec.shape == (WORDS, WIDTH)]
    place = len(unit.results) + unit.differentiable.index(places[0])
    gradient, whole = (in_pieces(unit, tokens=size).function("both")(*inputs)[place] for size in (1, 0))
    assert gradient.dtype == torch.float32
    (expected,) = torch.autograd.grad(unit.module(*wide)[0], [wide[places[0]]])
    # 18 sums in bf16 would be at twice the distance.
    assert (gradient - expected).norm() < 1.1 * (whole - expected).norm()


def test_a_length_that_is_new_is_no_new_code():
    """Pieces of all lengths share one code: what was traced for one serves others."""
    made = in_pieces(unit_of(moved_labels, 2))
    pieces = (part for part in made._parts if isinstance(part, PartInPieces))
    assert {end - begin for part in pieces for begin, end in part._ranges} == {4, 5}
    made.function("both")
    (common,) = made.common.parts.values()
    assert len(common.codes) == 1


def test_what_is_counted_may_be_larger_than_any_memory():
    """A plan counts whatever size is typed in: no piece by itself."""
    one, many = (in_pieces(layer_of(Attention, size)).cost("backward") for size in (2, 2 * 10**8))
    assert many.flops == pytest.approx(10**8 * one.flops)
    assert many.nbytes > 10**11


def of_the_length(model, x, ids, labels, mask, teacher):
    """A loss of each token that is divided by their number."""
    each = flat_loss(model.words(x), labels, reduction="none")
    return (each / x.shape[1]).sum()


@cache
def unit_at(num_tokens, head=moved_labels):
    torch.manual_seed(0)
    model, ids = Model(head), torch.randint(WORDS, (2, num_tokens))
    return captured(model, ids, ids, torch.rand(ids.shape), torch.randn(*ids.shape, WORDS)).split(1).units[-1]


def test_what_follows_from_a_length_is_that_length_s():
    """Also where lengths share the code of their pieces."""
    common = None
    for num_tokens in (4 * PIECE, 7 * PIECE):
        unit = unit_at(num_tokens, of_the_length)
        code = InPieces(unit, EAGER, common, (), PIECE)
        equal(*code_and_autograd(unit, EAGER, "both", most=WORDS, code=code))
        common = code.common


def dropped(model, x, ids, labels, mask, teacher):
    return flat_loss(functional.dropout(model.words(x), 0.5), labels)


def of_all_tokens(model, x, ids, labels, mask, teacher):
    return (model.words(x).cumsum(1) - teacher).square().sum()


def test_why_a_head_runs_whole():
    unit = unit_of(dropped, 2)
    code = in_pieces(unit)
    assert code.tokens_per_piece is None
    assert "draws at random" in code.whole_reason
    assert code.cost("both") == super(InPieces, code).cost("both")


def test_what_reads_all_logits_leaves_them_whole_where_that_saves_nothing():
    unit = unit_of(of_all_tokens, 2)
    equal(*code_and_autograd(unit, EAGER, "both", most=WORDS, code=in_pieces(unit)))
    assert InPieces(unit, EAGER, None, (), None).tokens_per_piece is None


class Room:
    def __init__(self, nbytes):
        self.workspace_nbytes = nbytes


def test_it_runs_in_pieces_where_it_needs_more_memory_than_another_unit():
    unit = unit_at(4 * LEAST)
    whole = InPieces(unit, EAGER, None, (), 0).cost("both").nbytes
    assert InPieces(unit, EAGER, None, [Room(whole)], None).tokens_per_piece is None
    code = InPieces(unit, EAGER, None, [Room(whole - 1), Room(7)], None)
    assert code.tokens_per_piece == LEAST
    assert code.cost("both").nbytes < whole / 3


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(("num_tokens", "size"), [(2 * LEAST - 1, None), (3 * LEAST - 2, 3 * LEAST // 2 - 1)])
def test_no_piece_is_smaller_than_products_need(num_tokens, size, device, monkeypatch):
    """Whatever the memory of a device."""
    monkeypatch.setattr(UnitGraph, "device_type", device)
    assert InPieces(unit_at(num_tokens), EAGER, None, [Room(0)], None).tokens_per_piece == size


def test_each_length_has_its_own_pieces():
    """Behind a first one that is short, and runs whole, too."""
    short = InPieces(unit_at(LEAST), EAGER, None, [Room(0)], None)
    assert short.tokens_per_piece is None
    assert InPieces(unit_at(4 * LEAST), EAGER, short.common, [Room(0)], None).tokens_per_piece == LEAST
    assert short.tokens_per_piece is None


def test_threads_make_code_one_after_the_other(monkeypatch):
    """Tracing changes the state of the process; each thread sees whole answers."""
    busy, trace = threading.Lock(), Generator.trace

    def alone(*given, **named):
        assert busy.acquire(blocking=False), "another thread traces"
        time.sleep(0.01)
        try:
            return trace(*given, **named)
        finally:
            busy.release()

    monkeypatch.setattr(Generator, "trace", alone)
    codes = [InPieces(unit_at(4 * LEAST), EAGER, None, [Room(0)], None) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(lambda code: code.tokens_per_piece, codes)) == [LEAST, LEAST]


def test_a_second_thread_sees_which_results_all_parts_take(monkeypatch):
    code, found, taken_of = in_pieces(layer_of(Attention, 2)), [], Subgraph.taken_of

    def meanwhile(part, names):
        if not found:
            found.append(None)
            with ThreadPoolExecutor(1) as pool:
                found[0] = pool.submit(code._taken_by, code._seeds("backward")).result()
        return taken_of(part, names)

    monkeypatch.setattr(Subgraph, "taken_of", meanwhile)
    assert code._taken_by(code._seeds("backward")) == found[0]
    assert len(found[0]) == len(code._parts)


# Layers ---------------------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Heads that attend to each other's past, in a layer with two norms and a feed-forward part."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.all, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x, turn):
        rows = (each.unflatten(-1, (2, -1)).transpose(1, 2) for each in self.all(self.first(x)).chunk(3, -1))
        query, key, value = rows
        seen = functional.scaled_dot_product_attention(query * turn[:, None, :, None], key, value, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.second(x))))


class Parallel(Attention):
    """Both halves read the same norm; scores are written out."""

    def forward(self, x, turn):
        y = self.first(x)
        query, key, value = (each.unflatten(-1, (2, -1)).transpose(1, 2) for each in self.all(y).chunk(3, -1))
        scores = (query @ key.transpose(-1, -2) * 0.5).softmax(-1) @ value
        return x + self.out(scores.transpose(1, 2).flatten(2)) + self.down(functional.gelu(self.up(y)))


class FeedForward(Attention):
    def forward(self, x, turn):
        return x + self.down(functional.gelu(self.up(self.second(x)))) * turn[..., None]


class LooksUp(Attention):
    """Tokens are the rows of a table."""

    def forward(self, x, turn):
        places = (5 * turn).long() + TOKENS * torch.arange(len(x))[:, None]
        return x + self.down(functional.gelu(self.up(functional.embedding(places, x.flatten(0, 1)))))


def test_a_table_of_tokens_is_whole():
    """Fault: a piece looked for its rows among its own tokens."""
    unit = layer_of(LooksUp, SAMPLES)
    equal(*code_and_autograd(unit, EAGER, code=in_pieces(unit)))


@pytest.mark.parametrize("generator", COMPILERS, ids=["eager", "inductor"])
@pytest.mark.parametrize("size", [2, pytest.param(1, marks=pytest.mark.slow)], ids=["two samples", "one sample"])
@pytest.mark.parametrize("layer", [Attention, Parallel, FeedForward], ids=lambda layer: layer.__name__)
def test_layers_give_the_results_and_gradients_of_the_whole(layer, size, generator):
    unit = layer_of(layer, size)
    code = in_pieces(unit, generator)
    equal(*code_and_autograd(unit, generator, code=code), generator)
    kinds = [isinstance(part, PartInPieces) for part in code._parts]
    assert kinds == ([True] if layer is FeedForward else [True, False, True])
    assert code.levels == ()
    assert code.no_levels_reason == "it runs in pieces of tokens"


@pytest.mark.parametrize("layer", [Attention, FeedForward], ids=lambda layer: layer.__name__)
def test_what_a_layer_has_alive_is_what_is_planned(layer):
    hold_memory(layer_of(layer, 2, 40))


def test_only_what_attention_reads_is_computed_again():
    """Its own forward runs once, and the feed-forward part's: queries, keys and values are made twice."""
    unit = layer_of(Attention, 2)
    piece, whole = (in_pieces(unit, tokens=tokens).cost("backward").flops for tokens in (PIECE, 0))
    assert piece - whole == 2 * 2 * TOKENS * WIDTH * 3 * WIDTH
