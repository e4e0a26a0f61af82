"""samples: inside of a block, what mixes the samples of the batch is refused, and what keeps them apart is right."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from captured import TOKENS, WIDTH, Tiny, batch, captured, run
from torch import nn
from torch.nn import functional

from gs_compile.errors import SeparationError

# Dynamo instantiates an autograd.Function, for plain torch too.
pytestmark = pytest.mark.filterwarnings("ignore:<class 'torch.autograd.function.Function'>:DeprecationWarning")


class Centred(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x - x.mean(0)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Standardised(Centred):
    @staticmethod
    def forward(ctx, x):
        variance, mean = torch.var_mean(x, 0)
        return (x - mean) / (variance + 1.0)


class Normalised(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1.0

    @staticmethod
    def backward(ctx, gradient):
        return gradient / gradient.norm()


class Scaled(torch.autograd.Function):
    """By a parameter, whose gradient is a sum over the samples."""

    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(x, scale)
        return x * scale

    @staticmethod
    def backward(ctx, gradient):
        x, scale = ctx.saved_tensors
        found = (gradient * x).sum((0, 1))
        rows = (x.flatten(0, 1).sum(1)[None] @ gradient.flatten(0, 1)).t()[:, 0]
        return gradient * scale, 0.5 * torch.stack((found + rows / 2, rows)).sum(0)


class Attention(nn.Module):
    """Not batch_first, as torch's is where nobody says so."""

    def __init__(self, batch_first):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=batch_first)

    def forward(self, x):
        return x + self.attention(x, x, x)[0]


class Scaling(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.full((WIDTH,), 3.0))

    def forward(self, x):
        return x + Scaled.apply(x, self.scale)


class Block(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.linear, self.function = nn.Linear(WIDTH, WIDTH), function

    def forward(self, x):
        return x + self.function(self.linear(x))


def flat(x):
    return x.reshape(-1, WIDTH)


def like(rows, x):
    return rows.reshape(x.shape)


def numbers(x):
    return torch.arange(x.shape[0])


def per_sample(x, kernel):
    """A convolution by another kernel for each sample, as groups of one image."""
    image = x.transpose(1, 2).reshape(1, -1, TOKENS)
    return (
        functional.conv1d(image, kernel, padding=1, groups=x.shape[0] * WIDTH).view(-1, WIDTH, TOKENS).transpose(1, 2)
    )


ALONG, NUMBERS, COUNTED = "runs along the batch", "with the numbers of the samples", "with what is counted over"
MIXES = {
    "numbers by arithmetic": (lambda x: x * (1 + numbers(x))[:, None, None], NUMBERS),
    "numbers compared": (lambda x: torch.where((numbers(x) > 1)[:, None, None], x, -x), NUMBERS),
    "numbers in a table": (lambda x: x + torch.arange(99.0)[numbers(x)][:, None, None], NUMBERS),
    "rows in another order": (lambda x: x[torch.arange(x.shape[0] - 1, -1, -1)], NUMBERS),
    "rows moved on": (lambda x: x[(numbers(x) + 1) % x.shape[0]], NUMBERS),
    "rows in pairs": (lambda x: x[numbers(x) ^ 1], NUMBERS),
    "rows shuffled": (lambda x: x + x[torch.randperm(x.shape[0])], NUMBERS),
    "rows by a matrix": (lambda x: (torch.eye(x.shape[0]) @ x.flatten(1)).view_as(x), NUMBERS),
    "tokens of all shifted": (lambda x: like(functional.pad(flat(x), (0, 0, 1, -1)), x), ALONG),
    "tokens of all averaged": (
        lambda x: like(functional.avg_pool1d(flat(x).T[None], 3, 1, 1)[0].T, x),
        ALONG,
    ),
    "tokens of all convolved": (
        lambda x: like(functional.conv1d(flat(x).T[None], torch.ones(WIDTH, 1, 3), padding=1, groups=WIDTH)[0].T, x),
        ALONG,
    ),
    "tokens of all normalised": (lambda x: like(functional.instance_norm(flat(x).T[None])[0].T, x), ALONG),
    "rows weighed by all": (lambda x: torch.einsum("btd,ctd->bd", x, x)[:, None], "sums over the samples"),
    "rows softened": (lambda x: torch.special.softmax(x, 0), ALONG),
    "rows differenced": (lambda x: torch.diff(x, dim=0, prepend=torch.zeros(1, TOKENS, WIDTH)), ALONG),
    "tokens of all transformed": (lambda x: like(torch.fft.fft(flat(x), dim=0).real, x), ALONG),
    "halves exchanged": (lambda x: torch.fft.fftshift(x), ALONG),
    "the best tokens of all": (
        lambda x: like(torch.zeros_like(flat(x)).index_add(0, flat(x).sum(-1).topk(3).indices, flat(x)[:3]), x),
        ALONG,
    ),
    "tokens of all in order": (lambda x: like(flat(x)[flat(x).sum(-1).argsort()], x), ALONG),
    "values in order": (lambda x: x.sort(0).values, ALONG),
    "rows for columns": (lambda x: x.reshape(TOKENS, -1, WIDTH).transpose(0, 1), "takes rows of several samples"),
    "attention over samples": (partial(Attention, batch_first=False), ALONG),
    "a function of its own": (lambda x: Centred.apply(x), "(mean) reduces over the samples"),
    "a function of its own, with two results": (
        lambda x: Standardised.apply(x),
        "(var_mean) reduces over the samples",
    ),
    "a gradient of its own": (lambda x: Normalised.apply(x), "(norm) reduces over the samples"),
    "any": (lambda x: torch.where((x > 9).any(), -x, x), COUNTED),
    "a count": (lambda x: x * (x > 0).sum(), COUNTED),
}
KEEPS = {
    "attention": partial(Attention, batch_first=True),
    "a token of each": lambda x: x + x[numbers(x), x.sum(-1).argmax(1)][:, None],
    "a token of each, by places of all": lambda x: (
        x + flat(x)[numbers(x) * TOKENS + x.sum(-1).argmax(1)][:, None] + flat(x)[numbers(x) * TOKENS + 1][:, None]
    ),
    "experts' tokens": lambda x: like(flat(x)[numbers(flat(x)).repeat_interleave(2)[order(x) * 2]][order(x).argsort()], x),
    "a token of each, put": lambda x: torch.zeros_like(x).index_put((numbers(x), x.sum(-1).argmax(1)), x[:, 0]),
    "a function of its own": partial(Scaling),
    "tokens weighed": lambda x: torch.einsum("b t d, b s d -> b t", x, x.tanh())[..., None],
    "tokens shifted": lambda x: functional.pad(x, (0, 0, 1, -1)),
    "tokens averaged": lambda x: functional.avg_pool1d(x.transpose(1, 2), 3, 1, 1).transpose(1, 2),
    "tokens in order": lambda x: x.gather(1, x.sort(1).indices).sort(-1).values,
    "channels normalised": lambda x: functional.group_norm(x.transpose(1, 2), 4).transpose(1, 2),
    "tokens by expert": lambda x: like(torch.zeros_like(flat(x)).index_copy(0, order(x), flat(x)[order(x)]), x),
    "heads before samples": lambda x: (
        x.view(-1, TOKENS, 2, WIDTH // 2).permute(2, 0, 1, 3).reshape(-1, TOKENS, WIDTH // 2).softmax(1)
        .view(2, -1, TOKENS, WIDTH // 2).permute(1, 2, 0, 3).flatten(2)
    ),
    "a kernel for each": lambda x: per_sample(x, x[:, :3].transpose(1, 2).reshape(-1, 1, 3)),
}  # fmt: skip


def order(x):
    return x.argmax(-1).flatten().argsort(stable=True)


QUICK = """numbers by arithmetic, rows shuffled, tokens of all shifted, tokens of all convolved, the best tokens of all,
rows for columns, attention over samples, a gradient of its own, any""".replace("\n", " ").split(", ")
assert {*QUICK} <= MIXES.keys()


def case_of(*functions):
    torch.manual_seed(0)
    made = [each() if isinstance(each, partial) else Block(each) for _ in range(2) for each in functions]
    half = len(functions)
    return captured(Tiny(lambda p, y: p, [nn.Sequential(*made[:half]), nn.Sequential(*made[half:])]), *batch(4))


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in MIXES])
def test_what_mixes_samples_is_refused(name):
    function, words = MIXES[name]
    with pytest.raises(SeparationError) as caught:
        case_of(function).separated(2)
    assert words in caught.value.message


def test_what_keeps_samples_apart_is_right():
    case = case_of(*KEEPS.values())
    module = case.separated(2).module
    parts = [run(module, case.named(start, 2))[0] for start in (0, 2)]
    whole = run(case.specialized(4), case.named())[0]
    torch.testing.assert_close(torch.cat(parts), whole)


def test_numbers_of_samples_are_no_output():
    case = captured(Tiny(lambda p, y: (p, torch.arange(p.shape[0]))), *batch(4))
    with pytest.raises(SeparationError, match="is of the numbers of the samples"):
        case.separated(2)
