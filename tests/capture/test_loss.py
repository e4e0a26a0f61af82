"""loss: every form of a loss, from shares of micro-batches as from the whole batch."""

from __future__ import annotations

import pytest
import torch
from captured import TOKENS, WORDS, Tiny, assert_same_step, batch, captured, compiled, text
from criteria import (
    EXACT,
    WEIGHT,
    accumulated,
    assert_combines,
    classes,
    cross_entropy,
    logits_and_labels,
    mask_of,
    shifted,
    short,
)
from torch import nn
from torch.nn import functional

from gs_compile.errors import SeparationError
from gs_compile.runtime.units import CompiledUnits, MicroBatch


def weights(labels):
    """Of each class, in samples of different sums."""
    return classes(labels) + labels.clamp(min=0)[..., None]


def written(p, y):
    """In two tensors, one of which another value is made of between two writes."""
    losses, terms = p.new_zeros(3), torch.ones(2, 2)
    for number, loss in enumerate((cross_entropy(p, y), p.mean())):
        losses[number] = loss
    terms[0] = p.sum((0, 1))[:2]
    before = terms.sum()
    terms[torch.tensor([True, False]), 1:] = p[..., :1].mean((0, 1))
    losses[2] += terms.sum()
    return (losses * WEIGHT[:3]).sum() + before


# Every form that is recognised, as a function of logits (batch, tokens, words) and labels (batch, tokens).
FORMS = {
    "cross_entropy mean": cross_entropy,
    "cross_entropy sum": lambda p, y: cross_entropy(p, y, reduction="sum"),
    "cross_entropy none, masked mean": lambda p, y: (
        (cross_entropy(p, y, reduction="none") * mask_of(y).flatten()).sum() / mask_of(y).sum()
    ),
    "cross_entropy none, tokens averaged first": lambda p, y: (
        cross_entropy(p, y, reduction="none").view(y.shape).mean(1).mean()
    ),
    "cross_entropy ignore_index": lambda p, y: cross_entropy(p, y.clamp(min=0), ignore_index=0),
    "cross_entropy label_smoothing": lambda p, y: cross_entropy(p, y, label_smoothing=0.1),
    "cross_entropy class weights": lambda p, y: cross_entropy(p, y, weight=WEIGHT),
    "cross_entropy class weights, an ignored label beyond the classes": lambda p, y: cross_entropy(
        p, y.clamp(min=0).masked_fill(y < 0, 255), weight=WEIGHT, ignore_index=255
    ),
    "cross_entropy class probabilities": lambda p, y: functional.cross_entropy(
        p.flatten(0, 1), classes(y).flatten(0, 1)
    ),
    "cross_entropy of one label a sample": lambda p, y: functional.cross_entropy(p.mean(1), y[:, 3]),
    "HuggingFace's causal mean": shifted,
    "nll_loss class weights": lambda p, y: functional.nll_loss(
        functional.log_softmax(p.flatten(0, 1), -1), y.flatten(), weight=WEIGHT
    ),
    "mse_loss": lambda p, y: functional.mse_loss(p, classes(y)),
    "mse_loss, weights for each value": lambda p, y: functional.mse_loss(p, classes(y), weight=weights(y)),
    "l1_loss, weights for each value": lambda p, y: functional.l1_loss(p, classes(y), weight=weights(y)),
    "huber_loss, weights for each value": lambda p, y: functional.huber_loss(p, classes(y), weight=weights(y)),
    "mse_loss against a constant": lambda p, y: functional.mse_loss(p.mean(-1).mean(-1), p.new_zeros(p.shape[0])),
    "binary_cross_entropy_with_logits": lambda p, y: functional.binary_cross_entropy_with_logits(p, classes(y)),
    "gaussian_nll_loss": lambda p, y: functional.gaussian_nll_loss(p, classes(y), p.square()),
    "kl_div batchmean": lambda p, y: functional.kl_div(p.log_softmax(-1), classes(y), reduction="batchmean"),
    "kl_div batchmean, tokens before samples": lambda p, y: functional.kl_div(
        p.transpose(0, 1).log_softmax(-1), classes(y).transpose(0, 1), reduction="batchmean"
    ),
    "a count as a truth": lambda p, y: cross_entropy(p, y) * (y != -100).sum().to(torch.bool),
    "mean": lambda p, y: p.mean(),
    "sum": lambda p, y: p.pow(2).sum(),
    "loss / batch size": lambda p, y: cross_entropy(p, y, reduction="sum") / p.shape[0],
    "loss / number of tokens": lambda p, y: cross_entropy(p, y, reduction="sum") / (p.shape[0] * p.shape[1]),
    "mean * batch size": lambda p, y: p.mean() * p.shape[0],
    "count clamped": lambda p, y: (p.logsumexp(-1) * mask_of(y)).sum() / mask_of(y).sum().clamp(min=1),
    "weights that add to one": lambda p, y: (p.logsumexp(-1) * (mask_of(y) / mask_of(y).sum())).sum(),
    "z-loss": lambda p, y: cross_entropy(p, y) + 1e-2 * (p.logsumexp(-1) ** 2).mean(),
    "z-loss, by a factor of the sum": lambda p, y: (
        cross_entropy(p, y).add_((p.logsumexp(-1) ** 2).mean(), alpha=1e-2).sub(p.sum(), alpha=0.5)
    ),
    "written one by one": written,
    "linear combination": lambda p, y: (
        2 * cross_entropy(p, y) - p.sum() / 3 + 0.25 * p.pow(2).mean() - (1 - p.mean()) + 7
    ),
    "accumulated in place": accumulated,
    "a penalty on parameters is not counted twice": lambda p, y: cross_entropy(p, y) + 0.1 * WEIGHT.pow(2).sum(),
    "sums in another order": lambda p, y: (p.sum((0, 1)).flip(0).roll(1) * WEIGHT).sum(),
    "stack and sum": lambda p, y: torch.stack([cross_entropy(p, y), p.mean(), p.sum()]).sum(),
    "mean in fp64": lambda p, y: p.double().mean(),
    "rows of different classes": lambda p, y: functional.mse_loss(p[:, 1:], p[:, :-1].detach()),
    "attention over tokens": lambda p, y: functional.scaled_dot_product_attention(p, p, p).mean(),
    "softmax over words": lambda p, y: -(p.log_softmax(-1) * classes(y)).sum(-1).mean(),
    "cumulative over tokens": lambda p, y: p.cumsum(1).tanh().mean(),
    "last token by index": lambda p, y: p[torch.arange(p.shape[0]), y[:, 3].clamp(0, TOKENS - 1)].pow(2).mean(),
    "a token by its number": lambda p, y: p.flatten(0, 1)[TOKENS * torch.arange(p.shape[0]) + 2].pow(2).mean(),
    "each token twice, by its number": lambda p, y: (
        p.flatten(0, 1)[torch.arange(2 * TOKENS * p.shape[0]) // 2].tanh().sum()
    ),
    "a row that all samples share": lambda p, y: (p * WEIGHT.expand(p.shape[0], -1)[:1].exp()).mean(),
    "the same, without its dimension": lambda p, y: (p * WEIGHT[None].expand(p.shape[0], WORDS)[0]).mean(),
    "cast to the kind of samples": lambda p, y: (p * WEIGHT.double().to(p)).mean() + WEIGHT.half().type_as(p).sum(),
    "batch_norm in eval mode": lambda p, y: (
        functional.batch_norm(p.flatten(0, 1), torch.zeros(WORDS), torch.ones(WORDS)).tanh().mean()
    ),
}


@pytest.mark.parametrize("given_as", [int, lambda n: torch.tensor(float(n))], ids=["int", "tensor"])
def test_number_of_labels_given_by_the_trainer(given_as):
    class Trained(Tiny):
        def forward(self, ids, labels, num_items_in_batch):
            x = self.embed(ids)
            for block in self.blocks:
                x = block(x)
            return cross_entropy(self.head(x), labels, reduction="sum") / num_items_in_batch

    torch.manual_seed(0)
    assert_same_step(Trained(), *batch(5), given_as(12), tolerance=EXACT)


def test_totals_have_the_dtype_that_the_head_is_compiled_for():
    """Sums of them have others, if nobody says so, of truths and of narrow integers."""

    def criterion(p, y):
        known = y != -100
        counts = functional.one_hot(y.clamp(min=0), WORDS).sum((0, 1), dtype=torch.int32)
        return p.sum() / known.bfloat16().mean() * known.sum().to(torch.int8) + (p.sum((0, 1)) / counts.clamp(1)).sum()

    case = captured(short(criterion), *batch(5))
    cuts, starts = [case.split(2), case.split(2), case.split(1)], (0, 2, 4)
    batches = [dict(enumerate(case.named(start, 2).values())) for start in starts]
    parts = [MicroBatch(cut, {}, {}, torch.tensor(0.4), {}) for cut in cuts]
    head = cuts[0].units[-1]
    wanted = [spec.dtype for source, spec in zip(head.sources, head.specs, strict=True) if source.kind == "total"]
    assert sorted(map(str, wanted)) == ["torch.bfloat16", "torch.int32", "torch.int8"]
    totals = CompiledUnits(parts, None).count(batches)
    assert [total.dtype for total in totals] == wanted


def test_weights_that_have_a_gradient_are_no_count():
    class Weighted(Tiny):
        def forward(self, ids, labels, weights):
            return (self.head(self.embed(ids)).sum(-1) * weights).sum() / weights.sum()

    with pytest.raises(SeparationError, match="`truediv` of values reduced over the batch"):
        captured(Weighted(), *batch(4), torch.rand(4, TOKENS, requires_grad=True)).separated(2)


def test_no_label_at_all_is_nan_as_in_plain_pytorch():
    ids, labels = batch(4)
    labels[:] = -100
    model = short(cross_entropy)
    assert model(ids, labels).isnan()
    assert compiled(model)(ids, labels).isnan()


def test_half_precision_does_not_overflow():
    """A sum of losses over many tokens is beyond fp16; their mean is not."""
    torch.manual_seed(0)
    model = short(lambda p, y: cross_entropy((p * 300).half(), y))
    ids, labels = batch(40, 40, ignored=False)
    expected = cross_entropy((model.head(nn.Sequential(*model.blocks)(model.embed(ids))) * 300).half().float(), labels)
    assert expected * labels.numel() > torch.finfo(torch.float16).max
    found = compiled(model, micro_batch_size=32)(ids, labels)
    torch.testing.assert_close(found.float(), expected, rtol=2e-3, atol=0)


@pytest.mark.parametrize(
    "form",
    [
        lambda p, y: p.pow(2).mean() + 0 * p.float().mean(),
        lambda p, y: cross_entropy(p, y, weight=WEIGHT.double() / 3),
    ],
    ids=["mean", "class weights"],
)
def test_of_float64_shares_are_of_float64(form):
    torch.manual_seed(0)
    assert_same_step(short(form).double(), *batch(5), tolerance=1e-14)


# What the pass writes -------------------------------------------------------------------------------------------------


def test_alone_changes_nothing():
    case = captured(short(lambda p, y: p.std() * p.max()), *batch(2))
    module = case.specialized(2)
    before = text(module, case.captured)
    separated = case.separated(2, alone=True)
    assert text(separated.module, case.captured) == before
    assert (separated.totals, separated.terms) == ((), ())
    assert set(separated.kinds.values()) == {"sum"}


@pytest.mark.parametrize("form", FORMS)
def test_shares_add_up(form):
    assert_combines(FORMS[form], *logits_and_labels())


# What is refused ------------------------------------------------------------------------------------------------------


def test_outputs_beside_the_loss():
    torch.manual_seed(0)

    def criterion(logits, labels):
        return {
            "loss": cross_entropy(logits, labels),
            "logits": logits,
            "turned": logits.transpose(0, 1).detach(),
            "hits": (logits.argmax(-1) == labels).sum(),
            "spread": logits.detach().mean(),
            "constant": WEIGHT * 2,
            "number": 3,
            "labels": labels,
        }

    model, args = short(criterion), batch(5)
    assert_same_step(model, *args, tolerance=EXACT)
    kinds = captured(model, *args).separated(2).kinds
    assert sorted(kinds.values()) == ["local", "local", "same", "sum", "sum", "sum"]
    expected, found = model(*args), compiled(model)(*args)
    assert found.keys() == expected.keys()
    assert found["number"] == 3
    assert found["labels"] is args[1]
    only_loss = compiled(model, outputs="loss")(*args)
    assert only_loss["logits"] is None
    assert torch.equal(only_loss["loss"], found["loss"])


def test_what_a_forward_stores_is_kept_beside_the_loss():
    """A cache that was left out was None in the next call."""

    class Caching(Tiny):
        table = None

        def forward(self, ids, labels):
            if self.table is None:
                self.table = torch.arange(ids.shape[1]).float()
            logits = super().forward(ids, labels) + self.table[:, None]
            self.seen.append(logits)
            return cross_entropy(logits, labels), 2 * logits

    torch.manual_seed(0)
    model, args = Caching(lambda logits, _: logits), batch(5)
    model.seen = []
    call = compiled(model, outputs="loss")
    for _ in range(2):
        loss, left_out = call(*args)
        assert left_out is None
        torch.testing.assert_close(loss, cross_entropy(model.seen[-1], args[1]))
    assert torch.equal(model.table, torch.arange(TOKENS).float())
    assert len(model.seen) == 2


def test_what_a_forward_does_not_read_stays_unread():
    """The second call found the losses of the first as inputs that its graph did not have."""

    class Logging(Tiny):
        def forward(self, ids, labels):
            loss = cross_entropy(super().forward(ids, labels), labels)
            self.log["losses"].append(loss)
            return loss

    torch.manual_seed(0)
    model, args = Logging(lambda logits, _: logits), batch(5)
    model.log = {"losses": []}
    call = compiled(model)
    losses = [call(*args) for _ in range(3)]
    assert [each.item() for each in model.log["losses"]] == [each.item() for each in losses]


@pytest.mark.parametrize(
    "criterion",
    [
        lambda p, y: functional.cross_entropy(p[:, 0], 2 * torch.arange(p.shape[0])),  # as contrastive ones have
        lambda p, y: functional.mse_loss(p[:, 0, 0], torch.arange(p.shape[0]).float()),
    ],
)
def test_a_loss_of_the_numbers_of_samples_is_refused(criterion):
    """A micro-batch counts its own from 0."""
    with pytest.raises(SeparationError, match="with the numbers of the samples"):
        captured(short(criterion), *batch(4)).separated(2)


def test_mixed_outputs_are_made_of_all_samples_unless_left_out():
    torch.manual_seed(0)
    model = short(lambda p, y: (cross_entropy(p, y), p.detach().std()))
    args = batch(5)
    for found, expected in zip(compiled(model)(*args), model(*args), strict=True):
        torch.testing.assert_close(found, expected, rtol=EXACT, atol=EXACT)
    loss, left_out = compiled(model, outputs="loss")(*args)
    assert left_out is None
    torch.testing.assert_close(loss, model(*args)[0], rtol=EXACT, atol=EXACT)
