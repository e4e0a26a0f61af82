"""samples: inside of a block, what mixes the samples of the batch is refused, and what keeps them apart is right."""

from __future__ import annotations

from functools import cache, partial

import pytest
import torch
from captured import TOKENS, WIDTH, Each, Tiny, assert_same_step, batch, captured, compiled, run
from sample_functions import (
    AddedAndDivided,
    Centred,
    Clamped,
    Halved,
    Nested,
    NestedBackward,
    Normalised,
    OfSamplesAlone,
    OfTheFirst,
    OfTheProduct,
    Scaled,
    Shrinking,
    Sized,
    Standardised,
)
from torch import nn
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.scan import scan
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from gs_compile.capture.loss import loss
from gs_compile.capture.operations import draws, operation
from gs_compile.errors import SeparationError

pytestmark = [
    # Dynamo instantiates an autograd.Function, for plain torch too.
    pytest.mark.filterwarnings("ignore:<class 'torch.autograd.function.Function'>:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Implicit dimension choice for softmax:UserWarning"),
]


@torch.compiler.assume_constant_result
def constant():
    """In a graph it is a tensor of its own, as graphs of functions are."""
    return torch.full((WIDTH,), 3.0)


class Attention(nn.Module):
    """Not batch_first, as torch's is where nobody says so."""

    def __init__(self, batch_first):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=batch_first)

    def forward(self, x):
        return x + self.attention(x, x, x)[0]


class Scaling(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.scale, self.function = nn.Parameter(torch.full((WIDTH,), 3.0)), function

    def forward(self, x):
        return x + self.function(x, self.scale)


class Counting(nn.Module):
    def forward(self, x):
        return (x > 0).sum((0, 1))


class Block(nn.Module):
    def __init__(self, function, ahead=None):
        super().__init__()
        self.ahead, self.function = ahead or nn.Linear(WIDTH, WIDTH), function

    def forward(self, x):
        return x + self.function(self.ahead(x))


def flat(x):
    return x.reshape(-1, WIDTH)


def turned(x):
    """Tokens before samples."""
    return x.transpose(0, 1).flatten(0, 1)


def like(rows, x):
    return rows.reshape(x.shape)


def numbers(x):
    return torch.arange(x.shape[0])


def zeros(x):
    return torch.zeros_like(x, dtype=torch.long)


def order(x):
    return x.argmax(-1).flatten().argsort(stable=True)


def inverse(places):
    found = torch.empty_like(places)
    found[places] = torch.arange(len(places))
    return found


def load(x):
    return (x.argmax(-1)[..., None] == torch.arange(WIDTH)).sum((0, 1))


def changed(x, *index):
    x = 1 * x
    x[index] = 0.0
    return x


def decayed(x, dim, combine=lambda carry, row: 0.5 * carry + row):
    """Each row and half of those before it."""

    def step(carry, row):
        carry = combine(carry, row)
        return carry, carry.clone()

    return scan(step, x.new_zeros([*x.shape[:dim], *x.shape[dim + 1 :]]), 1 * x, dim=dim)[1]


def chosen(x, predicate, other=torch.neg):
    return torch.cond(predicate, other, lambda x: 1.0 * x, (x,))


def attended(x, score=None, mask=None):
    """By functions of the numbers of a sample, a head, a query and a key. On a CPU it has no gradient."""
    rows = x.detach()[:, None]
    blocks = torch.ones(1, 1, 1, dtype=torch.int32), torch.zeros(1, 1, 1, 1, dtype=torch.int32)
    all_blocks = BlockMask.from_kv_blocks(*blocks, BLOCK_SIZE=1 << 30, mask_mod=mask, seq_lengths=(1, 1))
    return flex_attention(rows, rows, rows, score, all_blocks)[:, 0]


def scored(x, score):
    """By what is made of a value for each of the sample's tokens, others without samples, and numbers."""
    own, table = x.detach().sum(-1), torch.arange(99.0)
    return attended(x, lambda value, *numbers: value + score(own, table, *numbers))


def per_sample(x, kernel):
    """A convolution by another kernel for each sample, as groups of one image."""
    image = x.transpose(1, 2).reshape(1, -1, TOKENS)
    image = functional.conv1d(image, kernel, padding=1, groups=x.shape[0] * WIDTH)
    return image.view(-1, WIDTH, TOKENS).transpose(1, 2)


ALONG, NUMBERS, COUNTED = "runs along the batch", "with the numbers of the samples", "with what is counted over"
ROWS, PART, PAIRS = "takes rows of several samples", "takes a part of the samples", "pairs the samples"
RANKS = "with the places of entries in the order of those of all samples"
PICKED, SIZE, REDUCES = "by indices that none of them decides", "computes with the batch size", "reduces over the"
NO_SUM = "of values reduced over the batch is not a sum of shares"
MIXES = {
    "numbers by arithmetic": (lambda x: x * (1 + numbers(x))[:, None, None], NUMBERS),
    "numbers compared": (lambda x: torch.where((numbers(x) > 1)[:, None, None], x, -x), NUMBERS),
    "numbers in a table": (lambda x: x + torch.arange(99.0)[numbers(x)][:, None, None], NUMBERS),
    "rows of some numbers changed": (lambda x: changed(x, numbers(x) == 1), NUMBERS),
    "rows in another order": (lambda x: x[torch.arange(x.shape[0] - 1, -1, -1)], NUMBERS),
    "rows moved on": (lambda x: x[(numbers(x) + 1) % x.shape[0]], NUMBERS),
    "rows in pairs": (lambda x: x[numbers(x) ^ 1], NUMBERS),
    "rows shuffled": (lambda x: x + x[torch.randperm(x.shape[0])], NUMBERS),
    "all arguments by name": (lambda x: functional.softmax(input=x, dim=0), ALONG),
    "rows by a matrix": (lambda x: (torch.eye(x.shape[0]) @ x.flatten(1)).view_as(x), PAIRS),
    "rows by a matrix of ones": (lambda x: (torch.ones(x.shape[0], x.shape[0]) @ x.flatten(1)).view_as(x), PAIRS),
    "tokens of all shifted": (lambda x: like(functional.pad(flat(x), (0, 0, 1, -1)), x), ALONG),
    "tokens of all averaged": (lambda x: like(functional.avg_pool1d(flat(x).T[None], 3, 1, 1)[0].T, x), ALONG),
    "tokens of all convolved": (
        lambda x: like(functional.conv1d(flat(x).T[None], torch.ones(WIDTH, 1, 3), padding=1, groups=WIDTH)[0].T, x),
        ALONG,
    ),
    "tokens of all normalised": (lambda x: like(functional.instance_norm(flat(x).T[None])[0].T, x), ALONG),
    "rows weighed by all": (lambda x: torch.einsum("btd,ctd->bd", x, x)[:, None], "sums over the samples"),
    "rows softened": (lambda x: torch.special.softmax(x, 0), ALONG),
    "rows softened, by an operator": (lambda x: torch.ops.aten.softmax.int(x, 0), ALONG),
    "rows softened, as nobody says": (lambda x: functional.softmax(x), ALONG),
    "rows normalised by those of all": (
        lambda x: torch.native_batch_norm(x.mT, None, None, None, None, True, 0.1, 1e-5)[0].mT,
        "normalises by the statistics of the batch",
    ),
    "rows differenced": (lambda x: torch.diff(x, dim=0, prepend=torch.zeros(1, TOKENS, WIDTH)), ALONG),
    "rows scanned": (lambda x: decayed(x, 0), ALONG),
    "rows decomposed": (lambda x: torch.linalg.pinv(x.flatten(1)).T.view_as(x), ALONG),
    "entries of all bounded": (lambda x: torch.renorm(x, 2, 2, 0.1), ALONG),
    "a diagonal through all": (lambda x: (1 * x.flatten(1)).fill_diagonal_(0.0).view_as(x), ALONG),
    "tokens of all transformed": (lambda x: like(torch.fft.fft(flat(x), dim=0).real, x), ALONG),
    "halves exchanged": (lambda x: torch.fft.fftshift(x), ALONG),
    "the best tokens of all": (
        lambda x: like(torch.zeros_like(flat(x)).index_add(0, flat(x).sum(-1).topk(3).indices, flat(x)[:3]), x),
        ALONG,
    ),
    "tokens of all in order": (lambda x: like(flat(x)[flat(x).sum(-1).argsort()], x), ALONG),
    "values in order": (lambda x: x.sort(0).values, ALONG),
    "values in order, by another name": (lambda x: torch.msort(x), ALONG),
    "as many tokens as there is room for": (lambda x: like(flat(x) * (order(x).argsort() < 7)[:, None], x), RANKS),
    "rows for columns": (lambda x: x.reshape(TOKENS, -1, WIDTH).transpose(0, 1), ROWS),
    "rows for columns, in two steps": (lambda x: flat(x).view(TOKENS, -1, WIDTH).transpose(0, 1), ROWS),
    "heads for samples": (
        lambda x: (
            x.view(-1, TOKENS, 2, WIDTH // 2).permute(2, 0, 1, 3).reshape(-1, TOKENS, WIDTH // 2)
            .view(-1, 2, TOKENS, WIDTH // 2).transpose(1, 2).flatten(2)
        ),
        ROWS,
    ),
    "tokens of samples with samples of tokens": (lambda x: like(flat(x) * turned(x), x), PAIRS),
    "the first tokens of all": (lambda x: flat(x)[: x.shape[0], None], PART),
    "each of so many tokens of all": (lambda x: turned(x)[::TOKENS, None], PART),
    "tokens of samples beside samples of tokens": (lambda x: like(torch.cat([flat(x), turned(x)], 1)[:, :WIDTH], x), PAIRS),
    "a third of two in turn": (lambda x: torch.cat([x.repeat_interleave(2, 0), x]).chunk(3)[0], PART),
    "halves in turn": (lambda x: torch.cat(x.chunk(2)[::-1]), PART),
    "samples beside each other, halved": (lambda x: x.repeat_interleave(2, 0).chunk(2)[1], PART),
    "two batches, from the second sample on": (lambda x: torch.cat([x, -x])[1 : x.shape[0] + 1], PART),
    "memory of others": (
        lambda x: torch.cat([x, -x], 1).as_strided((x.shape[0], TOKENS, WIDTH), (TOKENS * WIDTH, WIDTH, 1)),
        "reads the memory of several samples",
    ),
    "the first changed": (lambda x: changed(x, 0), PART),
    "a row of a tensor changed": (lambda x: changed(x, torch.tensor([0])), PART),
    "a row scattered": (lambda x: x.scatter(1, torch.zeros(1, 1, WIDTH, dtype=torch.long), 0.0), PART),
    "tokens changed that each sample names": (lambda x: changed(x, slice(None), x.argmax(1)[:, 0]), PAIRS),
    "tokens filled that each sample names": (lambda x: x.index_fill(1, x.argmax(1)[:, 0], 0.0), PAIRS),
    "rows of bags": (lambda x: functional.embedding_bag(zeros(flat(x)[:, 0]), torch.ones(3, WIDTH), numbers(x) + x.argmax(1)[:, 0])[:, None], "bags that begin"),
    "rows picked by a constant": (lambda x: x.gather(0, zeros(x)), PICKED),
    "rows of a table of samples": (lambda x: functional.embedding(zeros(flat(x)[:, 0]), flat(x)).view_as(x), PICKED),
    "rows indexed by a constant": (lambda x: x[torch.zeros(x.shape[0], dtype=torch.long)], PICKED),
    "rows added to the first": (lambda x: torch.zeros_like(x).scatter_add(0, zeros(x), x), PICKED),
    "rows added to one": (lambda x: x.index_add(0, torch.tensor([0]), torch.ones(1, TOKENS, WIDTH)), PICKED),
    "tokens picked by a constant": (lambda x: like(flat(x).index_select(0, zeros(flat(x)[:, 0])), x), PICKED),
    "the batch size in a tensor": (lambda x: x * torch.full((x.shape[0], 1, 1), x.shape[0]), SIZE),
    "the batch size as a scale": (lambda x: functional.scaled_dot_product_attention(x, x, x, scale=1 / x.shape[0]), SIZE),
    "the batch size as a bound": (lambda x: torch.clip(x, max=0.1 * x.shape[0]), SIZE),
    "attention over samples": (partial(Attention, batch_first=False), ALONG),
    "a function of its own": (lambda x: Centred.apply(x), "(mean) reduces over the samples"),
    "a function of its own, with two results": (lambda x: Standardised.apply(x), "(var_mean) reduces over the samples"),
    "a function in a function": (lambda x: Nested.apply(x), "(mean) reduces over the samples"),
    "a function in the backward of a function": (lambda x: NestedBackward.apply(x), "(mean) reduces over the samples"),
    "a gradient of its own": (lambda x: Normalised.apply(x), "(norm) reduces over the samples"),
    "a gradient of the first sample": (partial(Scaling, OfTheFirst.apply), "(getitem) reduces over the samples"),
    "a gradient of two sums": (partial(Scaling, OfTheProduct.apply), "(einsum) reduces over the samples"),
    "a gradient of no sample": (partial(Scaling, Shrinking.apply), "the same for all micro-batches"),
    "a gradient of a sum in place": (partial(Scaling, AddedAndDivided.apply), "`norm` " + NO_SUM),
    "a gradient of a parameter": (partial(Scaling, lambda x, scale: x * Clamped.apply(scale)), "`clamp` " + NO_SUM),
    "the batch size in a function": (lambda x: Sized.apply(x), SIZE),
    "what is scanned with": (
        lambda x: decayed(x, 1, lambda carry, row: 0.5 * carry + row - row.mean(0)),
        "(mean) reduces over the samples",
    ),
    "what is chosen": (lambda x: chosen(x, torch.ones((), dtype=torch.bool), lambda x: x - x.mean(0)), "(mean) reduces"),
    "a choice": (lambda x: chosen(x, (x > 9).any()), COUNTED),
    "a score of the number": (lambda x: scored(x, lambda own, table, b, h, q, k: 0.1 * b), NUMBERS),
    "a score of the number in a table": (lambda x: scored(x, lambda own, table, b, h, q, k: table[b]), NUMBERS),
    "a score of the number elsewhere": (lambda x: scored(x, lambda own, table, b, h, q, k: own[b, b]), NUMBERS),
    "a score of the first sample": (lambda x: scored(x, lambda own, table, b, h, q, k: own[0, k]), REDUCES),
    "a score of others": (lambda x: scored(x, lambda own, table, b, h, q, k: own[q % 2, k]), PICKED),
    "a mask of the number": (lambda x: attended(x, mask=lambda b, h, q, k: (b % 2 == 0) | (q >= k)), NUMBERS),
    "a mask of the first sample": (
        lambda x: (lambda own: attended(x, mask=lambda b, h, q, k: (own[0, k] > 1) | (q >= k)))(x.argmax(-1)),
        COUNTED,
    ),
    "any": (lambda x: torch.where((x > 9).any(), -x, x), COUNTED),
    "a count": (lambda x: x * (x > 0).sum(), COUNTED),
    "the load of each token's expert": (lambda x: x / load(x)[x.argmax(-1)][..., None], RANKS),
    "tokens by how many there are": (lambda x: x * (x.argmax(-1) < load(x).max())[..., None], RANKS),
    "a count, copied": (lambda x: torch.zeros_like(x).copy_((x > 0).sum()) + x, COUNTED),
    "samples in turn": (lambda x: torch.cartesian_prod(torch.arange(2.0), x[:, 0, 0])[: x.shape[0], None, :1], PAIRS),
    "a count as a bound": (lambda x: torch.maximum(x, (x > 0).sum()), COUNTED),
    "counts of experts": (lambda x: (x @ torch.histc(x.argmax(-1).float(), WIDTH))[..., None], COUNTED),
    "a count, returned": (Counting, "is counted over the samples"),
}  # fmt: skip
KEEPS = {
    "attention": partial(Attention, batch_first=True),
    "a token of each": lambda x: x + x[numbers(x), x.sum(-1).argmax(1)][:, None],
    "a token of each, by places of all": lambda x: (
        x + flat(x)[numbers(x) * TOKENS + x.sum(-1).argmax(1)][:, None] + flat(x)[numbers(x) * TOKENS + 1][:, None]
    ),
    "experts' tokens": lambda x: like(flat(x)[numbers(flat(x)).repeat_interleave(2)[order(x) * 2]][order(x).argsort()], x),
    "experts' tokens, by places that are written": lambda x: like(flat(x)[order(x)][inverse(order(x))], x),
    "tokens of all changed": lambda x: changed(x, slice(None), torch.tensor([0, 2])),
    "masked tokens changed": lambda x: changed(x, x.sum(-1) > 0),
    "features of each, scattered": lambda x: x.scatter(-1, x.argmax(-1, keepdim=True), 0.0),
    "a token of each, put": lambda x: torch.zeros_like(x).index_put((numbers(x), x.sum(-1).argmax(1)), x[:, 0]),
    "a function of its own": partial(Scaling, Scaled.apply),
    "a function of a parameter": partial(Scaling, lambda x, scale: x * Halved.apply(scale)),
    "a function of a constant": lambda x: Scaled.apply(x, constant()),
    "tokens weighed": lambda x: torch.einsum("b t d, b s d -> b t", x, x.tanh())[..., None],
    "tokens shifted": lambda x: functional.pad(x, (0, 0, 1, -1)),
    "tokens averaged": lambda x: functional.avg_pool1d(x.transpose(1, 2), 3, 1, 1).transpose(1, 2),
    "tokens in order": lambda x: x.gather(1, x.sort(1).indices).sort(-1).values,
    "tokens scanned": lambda x: decayed(x, 1),
    "tokens scanned in a tree": lambda x: associative_scan(lambda a, b: a + 0.5 * b, x, dim=1, combine_mode="generic"),
    "rows bounded": lambda x: torch.renorm(x, 2, 0, 0.1),
    "channels normalised": lambda x: functional.group_norm(x.transpose(1, 2), 4).transpose(1, 2),
    "tokens by expert": lambda x: like(torch.zeros_like(flat(x)).index_copy(0, order(x), flat(x)[order(x)]), x),
    "heads before samples": lambda x: (
        x.view(-1, TOKENS, 2, WIDTH // 2).permute(2, 0, 1, 3).reshape(-1, TOKENS, WIDTH // 2).softmax(1)
        .view(2, -1, TOKENS, WIDTH // 2).permute(1, 2, 0, 3).flatten(2)
    ),
    "tokens before samples": lambda x: turned(x).view(TOKENS, -1, WIDTH).transpose(0, 1),
    "the first token of each": lambda x: flat(x)[::TOKENS, None],
    "windows of tokens": lambda x: (1 * x).as_strided((x.shape[0], TOKENS - 1, 2, WIDTH), (*x.stride()[:1], WIDTH, WIDTH, 1))[:, :1, 1],
    "two batches": lambda x: torch.cat([x, 2 * x])[x.shape[0] :] + torch.cat([x, -x]).chunk(2)[1],
    "samples beside each other": lambda x: x.repeat_interleave(2, 0)[1::2],
    "the last of two in turn": lambda x: torch.cat([x.repeat_interleave(2, 0), -x])[2 * x.shape[0] :],
    "a choice": lambda x: chosen(x, torch.ones((), dtype=torch.bool)),
    "a score of each": lambda x: scored(x, lambda own, table, b, h, q, k: own[b.long(), k] + own[b][q] + table[k]),
    "a mask of each": lambda x: (lambda own: attended(x, mask=lambda b, h, q, k: (own[b, k] > 1) | (q >= k)))(x.argmax(-1)),
    "all arguments by name": lambda x: functional.scaled_dot_product_attention(query=x, key=x, value=torch.gather(input=x, dim=1, index=x.argsort(1))),
    "a kernel for each": lambda x: per_sample(x, x[:, :3].transpose(1, 2).reshape(-1, 1, 3)),
}  # fmt: skip


def made(function):
    return function() if isinstance(function, partial | type) else Block(function, nn.Identity())


@cache
def mixing():
    """One capture for all, at two samples."""
    torch.manual_seed(0)
    case = captured(Each(made(function) for function, _ in MIXES.values()), torch.randn(4, TOKENS, WIDTH))
    return case.captured, case.specialized(2)


@pytest.mark.parametrize("name", MIXES)
def test_what_mixes_samples_is_refused(name):
    found, module = mixing()
    with pytest.raises(SeparationError) as caught:
        loss(module, found, kept=[each == name for each in MIXES], alone=False)
    assert MIXES[name][1] in caught.value.message


def test_what_keeps_samples_apart_is_right():
    torch.manual_seed(0)
    case = captured(Each(map(made, KEEPS.values())), torch.randn(4, TOKENS, WIDTH))
    module = case.separated(2).module
    parts = zip(*(run(module, case.named(start, 2)) for start in (0, 2)), strict=True)
    for name, found, whole in zip(KEEPS, parts, run(case.specialized(4), case.named()), strict=True):
        torch.testing.assert_close(torch.cat(found), whole, msg=lambda words, name=name: f"{name}: {words}")


def test_the_places_of_some_tokens_are_no_numbers_to_compute_with():
    def placed(x):
        places = (flat(x).sum(-1) > 0).nonzero()[:, 0]
        return like(torch.zeros_like(flat(x)).index_add(0, places, places[:, None] * flat(x)[places]), x)

    model = compiled(Tiny(blocks=[Block(placed), Block(placed)]))
    with pytest.raises(SeparationError, match=RANKS):
        model(*batch(4))


def test_a_function_that_gives_a_parameter_no_gradient_leaves_it_none():
    """Which optimizers pass over, where zeros would have it decay."""
    torch.manual_seed(0)
    model = Tiny(blocks=[Scaling(OfSamplesAlone.apply) for _ in range(2)])
    compiled(model)(*batch(4)).backward()
    assert [name for name, each in model.named_parameters() if each.grad is None] == [
        "blocks.0.scale",
        "blocks.1.scale",
    ]


def test_a_scan_over_the_sequence_trains():
    torch.manual_seed(0)
    blocks = [Block(lambda x: decayed(x, 1)) for _ in range(2)]
    assert_same_step(Tiny(blocks=blocks), *batch(4))


@pytest.mark.parametrize(
    ("criterion", "words"),
    [
        (lambda p, y: (p, torch.arange(p.shape[0])), "is of the numbers of the samples"),
        (lambda p, y: (p, torch.ones(p.shape[0], p.shape[0])), "pairs the samples of the batch"),
    ],
)
def test_what_is_no_output(criterion, words):
    with pytest.raises(SeparationError, match=words):
        captured(Tiny(criterion), *batch(4)).separated(2)


def numbered(p):
    return torch.arange(p.shape[0])


@pytest.mark.parametrize(
    ("criterion", "words"),
    [
        (lambda p, y: p[numbered(p), 0, numbered(p)].sum(), "with the numbers of the samples"),
        (lambda p, y: p[:, 0].gather(1, numbered(p)[:, None]).sum(), "with the numbers of the samples"),
        (lambda p, y: p.gather(-1, ((y + p.shape[0]) % 2)[..., None]).sum(), "computes with the batch size"),
    ],
)
def test_numbers_of_samples_and_their_count_pick_no_columns(criterion, words):
    """Each sample's own row is picked by its number, and nothing else: a micro-batch counts its samples from 0."""
    with pytest.raises(SeparationError, match=words):
        captured(Tiny(criterion), *batch(4)).separated(2)


def test_pythons_own_names_of_operations_are_those_of_torch():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    names = {"__eq__": "eq", "__iadd__": "iadd", "__and__": "and", "__init__": "__init__", "add_": "add"}
    for target, name in names.items():
        node = graph.call_method(target, (x, 1))
        assert operation(node) == name
        assert not draws(node)
