"""loss: what does not separate is refused by name, and nothing is ever silently wrong."""

from __future__ import annotations

import contextlib
import inspect
import warnings

import pytest
import torch
from captured import TOKENS, WIDTH, WORDS, Tiny, batch, captured, compiled
from criteria import (
    Criterion,
    assert_combines,
    classes,
    cross_entropy,
    logits_and_labels,
    mask_of,
)
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_mutation
from torch.nn import functional

from gs_compile.capture.loss import loss
from gs_compile.errors import CaptureError, SeparationError


def contrastive(logits, labels):
    rows = functional.normalize(logits[:, 0], dim=-1)
    scores = rows @ rows.T
    return functional.cross_entropy(scores, torch.arange(rows.shape[0]))


def load_balance(logits, labels):
    """The auxiliary loss of mixtures of experts: a product of two means over the tokens."""
    routes = logits.flatten(0, 1).softmax(-1)
    tokens_per_expert = functional.one_hot(routes.argmax(-1), WORDS).float().mean(0)
    return cross_entropy(logits, labels) + 0.01 * (tokens_per_expert * routes.mean(0)).sum()


def written_behind_a_name(logits, labels):
    losses = logits.new_zeros(3)
    first = losses[0]
    losses[0] = logits.mean()
    return first + losses.sum()


def written_where_labels_say(logits, labels):
    losses = logits.new_zeros(WORDS)
    losses[labels[:, 3].clamp(0)] = logits.mean()
    return (losses * torch.arange(WORDS)).sum()


# name: the function, what the message says of it, and the text of the line at fault
REFUSALS = {
    "product of means": (lambda p, y: p.mean() * p.exp().mean(), "`mul` of values reduced over the batch"),
    "root of a mean": (lambda p, y: p.pow(2).mean().sqrt(), "`sqrt` of values reduced over the batch"),
    "variance over the batch": (lambda p, y: p.var(0).sum(), "(var) reduces over the samples of the batch"),
    "a sum times the batch size": (lambda p, y: torch.add(p.mean(), p.mean(), alpha=p.shape[0]), "is not a sum of"),
    "written behind another name": (written_behind_a_name, "(setitem) `setitem` of values reduced over the batch"),
    "written where labels say": (written_where_labels_say, "(setitem) `setitem` of values reduced over the batch"),
    "variance by hand": (lambda p, y: (p - p.mean(0)).pow(2).mean(), "adds a value reduced over the batch to every"),
    "largest with its index": (lambda p, y: p.max(0).values.sum(), "reduces over the samples of the batch"),
    "norm": (lambda p, y: p.norm(), "(norm) reduces over the samples of the batch"),
    "softmax over the batch": (lambda p, y: (p.softmax(0) * p).sum(), "(softmax) runs along the batch dimension"),
    "cumulative over the batch": (lambda p, y: p.cumsum(0).tanh().mean(), "(cumsum) runs along the batch dimension"),
    "normalised over the batch": (
        lambda p, y: functional.normalize(p, dim=0).exp().mean(),
        "runs along the batch dimension",
    ),
    "batch_norm": (
        lambda p, y: functional.batch_norm(p.flatten(0, 1), None, None, training=True).tanh().mean(),
        "(batch_norm) normalises by the statistics of the batch (use LayerNorm, or put it in eval mode)",
    ),
    "gradients by frequency": (
        lambda p, y: (functional.embedding(y.clamp(0), torch.ones(WORDS, 1), scale_grad_by_freq=True) * p).mean(),
        "(embedding) divides gradients by how often the batch has an index (leave scale_grad_by_freq=True out)",
    ),
    "a table of samples": (
        lambda p, y: functional.embedding(y.clamp(0, 0), p[:, 0]).exp().mean(),
        "(embedding) looks rows up among the samples of the batch",
    ),
    "contrastive": (contrastive, "(matmul) pairs the samples of the batch with each other"),
    "a target of one dimension less": (
        lambda p, y: functional.kl_div(p[:, 0, :1], y[:, 0].clamp(1).float(), reduction="sum"),
        "(kl_div) pairs the samples of the batch with each other",
    ),
    "distances": (lambda p, y: torch.cdist(p[:, 0], p[:, 0]).mean(), "(cdist) pairs the samples of the batch"),
    "one sample": (lambda p, y: p[0].sum(), "(getitem) reduces over the samples of the batch"),
    "another of the rows that all samples share": (
        lambda p, y: (p * torch.ones(WORDS).expand(p.shape[0], -1)[1]).sum(),
        "(getitem) reduces over the samples of the batch",
    ),
    "mixture of experts": (load_balance, "`mul` of values reduced over the batch"),
    "labels of the model's own": (
        lambda p, y: functional.cross_entropy(p.flatten(0, 1), p.argmax(-1).flatten()),
        "(cross_entropy) averages over labels that the model makes itself",
    ),
    "labels that are drawn": (
        lambda p, y: functional.cross_entropy(p.transpose(1, 2), torch.where(torch.rand(y.shape) < 0.5, y, -100)),
        "(cross_entropy) averages over labels that the model makes itself",
    ),
    "unbiased mean": (lambda p, y: p.pow(2).sum() / (p.shape[0] - 1), "`truediv` of values reduced over the batch"),
    "batch size as a value": (lambda p, y: p.sum() + p.shape[0], "computes with the batch size"),
    "mean joined with samples": (
        lambda p, y: torch.cat([p.mean((0, 1))[None], p[:, 0]]).exp().sum(),
        "`cat` of values reduced over the batch is not a sum of shares",
    ),
    "a tensor dealt out by rows": (
        lambda p, y: (p.mean((1, 2)) * torch.arange(40.0).view(p.shape[0], -1).mean(1)).sum(),
        "(view) deals the rows of a tensor without samples out to those of the batch",
    ),
    "a tensor dealt out": (
        lambda p, y: p.masked_scatter(y[..., None] > 3, torch.arange(1000.0)).mean(),
        "(masked_scatter) deals the entries of a tensor without samples out to those of the batch",
    ),
    "a loss of batch means": (
        lambda p, y: functional.cross_entropy(p.mean(0), torch.zeros(TOKENS, dtype=torch.long)),
        "`cross_entropy` of values reduced over the batch is not a sum of shares",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusal_names_the_operation_and_the_line(name):
    function, words = REFUSALS[name]
    case = captured(Criterion(function), *logits_and_labels())
    with pytest.raises(SeparationError) as caught:
        case.separated(2)
    message = caught.value.message
    assert words in message
    assert "of the whole batch cannot be computed from micro-batches" in message
    assert "set micro_batch_size to the whole batch" in message
    lines, start = inspect.getsourcelines(function)
    places = [f"at {__file__}:{number}: {line.strip()}" for number, line in enumerate(lines, start)]
    assert any(place in message for place in places), message


class Rolled(nn.Linear):
    def forward(self, x):
        return x + super().forward(x).roll(1, 0)


def test_what_blocks_mix_is_told_before_what_a_loss_does():
    """Who computes the loss outside, as he is told to, would be refused once more."""
    blocks = [Rolled(WIDTH, WIDTH) for _ in range(2)]
    model = compiled(Tiny(lambda p, y: y.double().std() + p.exp().mean(), blocks))
    with pytest.raises(SeparationError, match=r"\(roll\) runs along the batch dimension"):
        model(*batch(4))


def test_a_kernel_that_forward_calls_itself():
    """Nothing reads what it returns, so it would be left out with all that it writes."""
    case = captured(Criterion(cross_entropy), *logits_and_labels())
    module = case.specialized(2)
    with module.graph.inserting_before(module.graph.output_node()):
        kernel = module.graph.call_function(triton_kernel_wrapper_mutation, kwargs={"kernel_idx": 0})
    kernel.meta["spec"] = None
    with pytest.raises(CaptureError, match="is a Triton kernel that forward calls itself"):
        loss(module, case.captured, kept=[True], alone=True)


def known_then_changed(logits, labels):
    """By what the model makes."""
    weights = mask_of(labels)
    weights.mul_(logits.detach().mean(-1).sigmoid())
    return (logits.sum(-1) * weights).sum() / weights.sum()


# What mixes samples, or counts them, in ways that are easy to overlook: every one must be refused or right.
SILENT = {
    "signs of one dimension less": lambda p, y: functional.hinge_embedding_loss(p[:, 0, :1], 2 * (y[:, 0] > 3) - 1),
    "one more than samples": lambda p, y: p.sum() / torch.ones(p.shape[0] + 1).sum(),
    "compared with their number": lambda p, y: torch.where(p * 10 > p.shape[0], p, -p).sum(),
    "known once, then changed": known_then_changed,
    "samples shifted": lambda p, y: (p[1:] - p[:-1]).pow(2).mean(),
    "samples halved": lambda p, y: (p[: p.shape[0] // 2] * p[-(p.shape[0] // 2) :]).sum(),
    "samples differenced": lambda p, y: torch.diff(p, dim=0).pow(2).sum(),
    "samples rolled": lambda p, y: (p * p.roll(1, 0)).sum(),
    "samples turned": lambda p, y: (p * p.flip(0)).mean(),
    "samples sorted": lambda p, y: (torch.sort(p, dim=0)[0][:, 0] * p[:, 0]).sum(),
    "samples ranked": lambda p, y: (p * torch.argsort(torch.argsort(p, 0), 0)).sum(),
    "samples padded": lambda p, y: functional.pad(p, (0, 0, 0, 0, 1, 0)).exp().mean(),
    "samples and a constant": lambda p, y: torch.cat([p, torch.zeros(1, TOKENS, WORDS)]).exp().mean(),
    "samples repeated": lambda p, y: (
        (p[:, 0].repeat(p.shape[0], 1) - p[:, 0].repeat_interleave(p.shape[0], 0)).pow(2).mean()
    ),
    "samples numbered": lambda p, y: (p.sum((1, 2)) * torch.arange(p.shape[0])).sum(),
    "samples numbered in another dtype": lambda p, y: (torch.arange(p.shape[0])[:, None].float() + p[:, 0]).exp().sum(),
    "samples compared with their numbers": lambda p, y: (
        p * (torch.arange(p.shape[0]) == y[:, 0].clamp(min=0) % 5)[:, None, None]
    ).sum(),
    "samples numbered where labels say": lambda p, y: (
        p * torch.where(y > 3, torch.arange(p.shape[0])[:, None], 0)[..., None]
    ).sum(),
    "samples numbered like labels": lambda p, y: (p * torch.arange(p.shape[0])[:, None].expand_as(y)[..., None]).sum(),
    "a table by their numbers and labels": lambda p, y: (
        p * functional.embedding(torch.arange(p.shape[0])[:, None] + y.clamp(0, 3), torch.eye(9))[..., :1]
    ).sum(),
    "samples picked": lambda p, y: (p[y[:, 0].clamp(0, 0)] * p).sum(),
    "samples picked by name": lambda p, y: (p.index_select(0, y[:, 0].clamp(0, 0)) * p).sum(),
    "samples picked in halves": lambda p, y: (p[torch.arange(p.shape[0]).clamp(max=1)] * p).sum(),
    "samples picked for others": lambda p, y: (p[torch.arange(p.shape[0]) // 3 * 3] * p).sum(),
    "samples picked twice": lambda p, y: (p[torch.arange(p.shape[0]) // 2] * p).sum(),
    "samples changed for others": lambda p, y: (
        p.exp().index_put((torch.arange(p.shape[0]) // 2,), torch.zeros(())).sum()
    ),
    "rows picked of other samples": lambda p, y: p.flatten(0, 1)[torch.arange(p.shape[0]) + 3].exp().sum(),
    "samples picked, tokens before them": lambda p, y: (
        p.transpose(0, 1)[:, y[:, 0].clamp(0, 0)] * p.transpose(0, 1)
    ).sum(),
    "samples picked behind a new dimension": lambda p, y: (p[None, y[:, 0].clamp(0, 0)] * p).sum(),
    "entries of all picked": lambda p, y: p.take(y.clamp(0, 0)).exp().sum(),
    "entries of all picked by name": lambda p, y: torch.take_along_dim(p, y.clamp(0, 0)).exp().sum(),
    "samples put": lambda p, y: p.exp().index_put((y[:, 0].clamp(0, 0),), torch.zeros(())).sum(),
    "samples shifted by half": lambda p, y: (torch.fft.fftshift(p) * p).sum(),
    "samples below each other": lambda p, y: p[:, :, 0].tril().exp().sum(),
    "samples scattered": lambda p, y: (
        torch.zeros(p.shape[0], WORDS).scatter_add(0, y[:, :1].clamp(0, 0).expand(-1, WORDS), p[:, 0]).exp().sum()
    ),
    "attention over samples": lambda p, y: functional.scaled_dot_product_attention(*[p.transpose(0, 1)] * 3).mean(),
    "layer_norm over samples": lambda p, y: (
        functional.layer_norm(p.permute(1, 2, 0), (p.shape[0],)) * p.permute(1, 2, 0).exp()
    ).sum(),
    "samples divided by their number": lambda p, y: (cross_entropy(p, y, reduction="none") / p.shape[0]).sum(),
    "samples times their number": lambda p, y: (p * p.shape[0]).mean(),
    "batch size in a tensor": lambda p, y: p.sum() / torch.full((), p.shape[0]),
    "batch size twice": lambda p, y: p.sum() / p.shape[0] / p.shape[0],
    "sum spread over samples": lambda p, y: p.sum().expand(p.shape[0]).sum(),
    "mean as a target": lambda p, y: functional.mse_loss(p, p.mean(0, keepdim=True).expand(p.shape[0], -1, -1)),
    "weights that the model makes": lambda p, y: functional.mse_loss(p, p.detach() + 1.0, weight=p.detach() ** 2),
    "counts as class weights": lambda p, y: cross_entropy(p, y, weight=classes(y).sum((0, 1))),
    "size_average": lambda p, y: cross_entropy(p, y, size_average=False),
    "size_average, the usual": lambda p, y: cross_entropy(p, y, size_average=True),
    "samples normalised": lambda p, y: functional.normalize(p, 2.0, 0).exp().mean(),
    "a truth about the batch size": lambda p, y: p.sum() * (p.shape[0] > 3),
    "reduce": lambda p, y: cross_entropy(p, y, reduce=False).sum(),
    "samples for classes": lambda p, y: functional.cross_entropy(p[:, 0].T, torch.zeros(WORDS, dtype=torch.long)),
    "samples for classes, by probabilities": lambda p, y: functional.cross_entropy(p[:, 0, 0], classes(y)[:, 0, 0]),
    "samples for classes, with a margin": lambda p, y: functional.multi_margin_loss(
        p[:, 0].T, torch.zeros(WORDS, dtype=torch.long)
    ),
    "distances over samples": lambda p, y: functional.triplet_margin_loss(p[:, 0].T, p[:, 1].T, p[:, 2].T),
    "angles over samples": lambda p, y: functional.cosine_embedding_loss(p[:, 0].T, p[:, 1].T, torch.ones(WORDS)),
    "samples for labels": lambda p, y: functional.multilabel_soft_margin_loss(
        p[:, 0].T, classes(y)[:, 0].T, reduction="sum"
    ),
    "entries of all put": lambda p, y: p.exp().put(y.clamp(0, 0), torch.zeros(y.shape)).sum(),
    "batch size in an option of a loss": lambda p, y: cross_entropy(p, y, label_smoothing=1 / p.shape[0]),
}


def in_place_by_an_alias(logits, labels):
    loss = cross_entropy(logits, labels)
    alias = loss
    loss += logits.sum()
    return alias


def in_place_method(logits, labels):
    loss = cross_entropy(logits, labels)
    loss.add_(logits.mean() * logits.mean())
    return loss


def collected(logits, labels):
    terms = torch.zeros(2)
    terms[0] = cross_entropy(logits, labels)
    terms[1] = logits.sum()
    return terms.sum()


def effective_number(logits, labels):
    weights = mask_of(labels) / mask_of(labels).sum()
    return (logits.sum(-1) * weights).sum() / weights.pow(2).sum()


SILENT |= {
    "in place, by an alias": in_place_by_an_alias,
    "in place, by a method": in_place_method,
    "in place, into a tensor": collected,
    "a total of totals": effective_number,
}


@pytest.mark.parametrize("name", SILENT)
def test_never_silently_wrong(name):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "size_average and reduce args will be deprecated")
        with contextlib.suppress(SeparationError):
            assert_combines(SILENT[name], *logits_and_labels())


# Any tree of sums, means, scalings and additions ----------------------------------------------------------------------


LEAVES = st.sampled_from(["p", "p.tanh()", "(p * m)", "p.mean(-1, keepdim=True)", "m", "torch.ones(())"])


def extend(children):
    numbers = st.sampled_from(["2", "-0.5", "p.shape[0]", "p.shape[1]"])
    return st.one_of(
        children.map("{}.sum()".format),
        children.map("{}.mean()".format),
        children.map("({} / m.sum())".format),
        st.tuples(children, st.sampled_from("*/"), numbers).map(lambda t: f"({t[0]} {t[1]} {t[2]})"),
        st.tuples(children, st.sampled_from("+-*"), children).map(lambda t: f"({t[0]} {t[1]} {t[2]})"),
    )


TREES = st.recursive(LEAVES, extend, max_leaves=4)


@given(TREES, st.integers(3, 5))
def test_any_tree_is_right_or_refused(tree, size):
    """The pass alone, on the tree's sum, with rows of three tokens and two words."""
    namespace = {"torch": torch}
    exec(f"def criterion(p, m):\n    return ({tree}).sum() + 0 * p.sum()\n", namespace)  # the tree is code
    torch.manual_seed(0)
    rows, mask = torch.rand(size, 3, 2, requires_grad=True), (torch.rand(size, 3, 1) > 0.4).float()
    with contextlib.suppress(SeparationError):
        assert_combines(namespace["criterion"], rows, mask, tolerance=1e-4)
