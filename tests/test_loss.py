from __future__ import annotations

import contextlib
import inspect
import warnings

import expecttest
import pytest
import torch
from captured import TOKENS, WIDTH, WORDS, Block, Tiny, assert_same_step, batch, captured, compiled, run, text
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from gs_compile.errors import SeparationError
from gs_compile.passes.loss import loss

EXACT = 1e-6  # relative and absolute, fp32
WEIGHT = torch.linspace(0.5, 2.0, WORDS)


class Scale(nn.Module):
    """The smallest layer: what is tested here comes after it."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x):
        return x * self.weight


def short(criterion):
    return Tiny(criterion, [Scale(), Scale()])


def flat(logits, labels):
    return logits.flatten(0, 1), labels.flatten()


def cross_entropy(logits, labels, **options):
    return functional.cross_entropy(*flat(logits, labels), **options)


def mask_of(labels):
    return (labels != -100).float()


def classes(labels):
    """Targets with no sample left out, for losses that know no ignored label."""
    return functional.one_hot(labels.clamp(min=0), WORDS).float()


def shifted(logits, labels):
    """HuggingFace's causal loss: labels padded and moved by one."""
    labels = functional.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
    return functional.cross_entropy(
        logits.view(-1, WORDS).float(), labels.view(-1), ignore_index=-100, reduction="mean"
    )


def accumulated(logits, labels):
    loss = torch.zeros(())
    loss += cross_entropy(logits, labels)
    loss = loss + 0.5 * logits.pow(2).mean()
    loss *= 2
    return loss


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
    "cross_entropy class weights and label_smoothing": lambda p, y: cross_entropy(
        p, y, weight=WEIGHT, label_smoothing=0.2
    ),
    "cross_entropy class probabilities": lambda p, y: functional.cross_entropy(
        p.flatten(0, 1), classes(y).flatten(0, 1)
    ),
    "cross_entropy unflattened": lambda p, y: functional.cross_entropy(p.transpose(1, 2), y),
    "cross_entropy of one label a sample": lambda p, y: functional.cross_entropy(p.mean(1), y[:, 3]),
    "HuggingFace's causal mean": shifted,
    "nll_loss mean": lambda p, y: functional.nll_loss(functional.log_softmax(p.flatten(0, 1), -1), y.flatten()),
    "nll_loss class weights": lambda p, y: functional.nll_loss(
        functional.log_softmax(p.flatten(0, 1), -1), y.flatten(), weight=WEIGHT
    ),
    "nll_loss sum": lambda p, y: functional.nll_loss(
        functional.log_softmax(p.flatten(0, 1), -1), y.flatten(), reduction="sum"
    ),
    "mse_loss": lambda p, y: functional.mse_loss(p, classes(y)),
    "mse_loss sum": lambda p, y: functional.mse_loss(p, classes(y), reduction="sum"),
    "mse_loss against a constant": lambda p, y: functional.mse_loss(p.mean(-1).mean(-1), p.new_zeros(p.shape[0])),
    "l1_loss": lambda p, y: functional.l1_loss(p, classes(y)),
    "smooth_l1_loss": lambda p, y: functional.smooth_l1_loss(p, classes(y), beta=0.3),
    "huber_loss": lambda p, y: functional.huber_loss(p, classes(y), delta=0.3),
    "binary_cross_entropy": lambda p, y: functional.binary_cross_entropy(p.sigmoid(), classes(y)),
    "binary_cross_entropy_with_logits": lambda p, y: functional.binary_cross_entropy_with_logits(p, classes(y)),
    "bce_with_logits pos_weight": lambda p, y: functional.binary_cross_entropy_with_logits(
        p, classes(y), pos_weight=WEIGHT
    ),
    "kl_div batchmean": lambda p, y: functional.kl_div(p.log_softmax(-1), classes(y), reduction="batchmean"),
    "kl_div sum": lambda p, y: functional.kl_div(p.log_softmax(-1), classes(y), reduction="sum"),
    "mean": lambda p, y: p.mean(),
    "sum": lambda p, y: p.pow(2).sum(),
    "a count of labels as an int": lambda p, y: cross_entropy(p, y, reduction="sum") / 12,
    "loss / batch size": lambda p, y: cross_entropy(p, y, reduction="sum") / p.shape[0],
    "loss / number of tokens": lambda p, y: cross_entropy(p, y, reduction="sum") / (p.shape[0] * p.shape[1]),
    "mean * batch size": lambda p, y: p.mean() * p.shape[0],
    "count clamped": lambda p, y: (p.logsumexp(-1) * mask_of(y)).sum() / mask_of(y).sum().clamp(min=1),
    "weights that add to one": lambda p, y: (p.logsumexp(-1) * (mask_of(y) / mask_of(y).sum())).sum(),
    "z-loss": lambda p, y: cross_entropy(p, y) + 1e-2 * (p.logsumexp(-1) ** 2).mean(),
    "linear combination": lambda p, y: (
        2 * cross_entropy(p, y) - p.sum() / 3 + 0.25 * p.pow(2).mean() - (1 - p.mean()) + 7
    ),
    "accumulated in place": accumulated,
    "a penalty on parameters is not counted twice": lambda p, y: cross_entropy(p, y) + 0.1 * WEIGHT.pow(2).sum(),
    "stack and sum": lambda p, y: torch.stack([cross_entropy(p, y), p.mean(), p.sum()]).sum(),
    "mean in fp64": lambda p, y: p.double().mean(),
    "rows of different classes": lambda p, y: functional.mse_loss(p[:, 1:], p[:, :-1].detach()),
    "attention over tokens": lambda p, y: functional.scaled_dot_product_attention(p, p, p).mean(),
    "softmax over words": lambda p, y: -(p.log_softmax(-1) * classes(y)).sum(-1).mean(),
    "cumulative over tokens": lambda p, y: p.cumsum(1).tanh().mean(),
    "last token by index": lambda p, y: p[torch.arange(p.shape[0]), y[:, 3].clamp(0, TOKENS - 1)].pow(2).mean(),
    "batch_norm in eval mode": lambda p, y: (
        functional.batch_norm(p.flatten(0, 1), torch.zeros(WORDS), torch.ones(WORDS)).tanh().mean()
    ),
}


QUICK = frozenset(
    [
        "HuggingFace's causal mean",
        "cross_entropy class weights",
        "count clamped",
        "linear combination",
        "accumulated in place",
    ]
)  # end to end; the others are run through the pass alone, and through the backend by the slow tests


@pytest.mark.parametrize("form", [f if f in QUICK else pytest.param(f, marks=pytest.mark.slow) for f in FORMS])
def test_form_equals_the_whole_batch(form):
    """Five samples as 2 + 2 + 1: uneven labels, the second micro-batch without any."""
    torch.manual_seed(0)
    assert_same_step(short(FORMS[form]), *batch(5), tolerance=EXACT)


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


# What the pass writes -------------------------------------------------------------------------------------------------


class TestText(expecttest.TestCase):
    def tail(self, criterion, first):
        case = captured(short(criterion), *batch(4))
        separated = case.separated(2)
        lines = text(separated.module, case.captured).splitlines()
        start = next(index for index, line in enumerate(lines) if line.startswith(first))
        return "\n".join(lines[start:]), separated

    def derivation(self, separated):
        terms = []
        for term in separated.terms:
            assert term.where.startswith(f"{__file__}:")
            terms.append(f"{term.node}: {term.kind}: {term.why}")
        return "\n".join(terms)

    def test_huggingface_mean(self):
        tail, separated = self.tail(shifted, "pad =")
        self.assertExpectedInline(
            tail,
            """\
pad = pad(labels, (0, 1), constant, -100)
getitem = getitem(pad, (Ellipsis, slice(1, None, None)))
labels = contiguous(getitem)
view = view(linear, -1, 11)
float_1 = float(view)
view_1 = view(labels, -1)
ne = ne(view_1, -100)
sum_1 = sum(ne, dtype=torch.float32)
cross_entropy = cross_entropy(input=float_1, target=view_1, weight=None, size_average=None, ignore_index=-100, reduce=None, reduction=sum, label_smoothing=0.0)
div = div(cross_entropy, total_0)
return (div,)""",
        )
        self.assertExpectedInline(
            self.derivation(separated),
            """\
sum_1: total: made from the inputs alone: counted over the whole batch
cross_entropy: sum: cross_entropy(mean) = cross_entropy(sum) / total, the counted labels of the whole batch
div: sum: micro-batches add""",
        )
        assert list(separated.kinds.values()) == ["sum"]
        assert [node.name for node in separated.totals] == ["sum_1"]

    def test_means_and_sums(self):
        tail, separated = self.tail(lambda p, y: p.mean() + 2 * p.sum(), "mean =")
        self.assertExpectedInline(
            tail,
            """\
mean = mean(linear)
sum_1 = sum(linear)
mul_2 = mul(2, sum_1)
mul = mul(fraction, mean)
add = add(mul, mul_2)
return (add,)""",
        )
        self.assertExpectedInline(self.derivation(separated), """add: sum: micro-batches add""")

    def test_class_weights(self):
        tail, _ = self.tail(lambda p, y: functional.cross_entropy(p.transpose(1, 2), y, weight=WEIGHT), "transpose =")
        self.assertExpectedInline(
            tail,
            """\
transpose = transpose(linear, 1, 2)
ne = ne(labels, -100)
clamp = clamp(labels, min=0)
unsqueeze = unsqueeze(G.__import_test_loss.WEIGHT, -1)
embedding = embedding(clamp, unsqueeze)
squeeze = squeeze(embedding, -1)
mul = mul(squeeze, ne)
sum_1 = sum(mul, dtype=torch.float32)
cross_entropy = cross_entropy(input=transpose, target=labels, weight=G.__import_test_loss.WEIGHT, size_average=None, ignore_index=-100, reduce=None, reduction=sum, label_smoothing=0.0)
div = div(cross_entropy, total_0)
return (div,)""",
        )


def test_alone_changes_nothing():
    case = captured(short(lambda p, y: p.std() * p.max()), *batch(2))
    module = case.specialized(2)
    before = text(module, case.captured)
    separated = case.separated(2, alone=True)
    assert text(separated.module, case.captured) == before
    assert (separated.totals, separated.terms) == ((), ())
    assert set(separated.kinds.values()) == {"sum"}


def test_what_is_not_kept_may_be_anything():
    case = captured(short(lambda p, y: (cross_entropy(p, y), p.std())), *batch(4))
    separated = loss(case.specialized(2), case.captured, kept=[True, False], alone=False)
    assert next(iter(separated.kinds.values())) == "sum"


class Criterion(nn.Module):
    """The shortest model: logits are made with a parameter, so nothing of them is known before the step."""

    def __init__(self, criterion):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.criterion = criterion

    def forward(self, p, y):
        return self.criterion(p * self.weight, y)


def combined(criterion, *args):
    """The pass alone: `criterion` of the whole batch from micro-batches of two, as the step program combines them."""
    size = len(args[0])
    case = captured(Criterion(criterion), *args)
    parts = [(start, min(2, size - start)) for start in range(0, size, 2)]
    separated = [case.separated(length) for _, length in parts]
    values = [{**case.named(start, length), "fraction": torch.tensor(length / size)} for start, length in parts]
    totals = {}
    for k in range(len(separated[0].totals)):
        counts = [run(alone(one, one.totals[k]), value) for one, value in zip(separated, values, strict=True)]
        totals[f"total_{k}"] = torch.stack(counts).sum(0)
    shares = [run(one.module, {**value, **totals})[0] for one, value in zip(separated, values, strict=True)]
    kind = next(iter(separated[0].kinds.values()))
    return shares[0] if kind == "same" else torch.stack(shares).sum(0)


def alone(separated, node):
    """A module that returns one node; it must not need a total."""
    graph = torch.fx.Graph()
    graph.output(graph.graph_copy(separated.module.graph, known := {}) and known[node])
    graph.eliminate_dead_code()
    for placeholder in [n for n in graph.nodes if n.op == "placeholder" and not n.users]:
        graph.erase_node(placeholder)
    return torch.fx.GraphModule(separated.module, graph)


def logits_and_labels(size=5):
    torch.manual_seed(0)
    return torch.randn(size, TOKENS, WORDS, requires_grad=True), batch(size)[1]


def assert_combines(criterion, *args, tolerance=1e-5):
    expected = criterion(*args)
    found = combined(criterion, *args)
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance, equal_nan=True)
    if expected.requires_grad:
        ours, plain = (torch.autograd.grad(value, args[0])[0] for value in (found, expected))
        torch.testing.assert_close(ours, plain, rtol=10 * tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("form", FORMS)
def test_shares_add_up(form):
    assert_combines(FORMS[form], *logits_and_labels())


# What is refused ------------------------------------------------------------------------------------------------------


def contrastive(logits, labels):
    rows = functional.normalize(logits[:, 0], dim=-1)
    scores = rows @ rows.T
    return functional.cross_entropy(scores, torch.arange(rows.shape[0]))


def load_balance(logits, labels):
    """The auxiliary loss of mixtures of experts: a product of two means over the tokens."""
    routes = logits.flatten(0, 1).softmax(-1)
    tokens_per_expert = functional.one_hot(routes.argmax(-1), WORDS).float().mean(0)
    return cross_entropy(logits, labels) + 0.01 * (tokens_per_expert * routes.mean(0)).sum()


# name: the function, what the message says of it, and the text of the line at fault
REFUSALS = {
    "product of means": (lambda p, y: p.mean() * p.exp().mean(), "`mul` of values reduced over the batch"),
    "square of a mean": (lambda p, y: p.mean() ** 2, "`pow` of values reduced over the batch"),
    "ratio of means": (lambda p, y: p.mean() / p.exp().mean(), "`truediv` of values reduced over the batch"),
    "root of a mean": (lambda p, y: p.pow(2).mean().sqrt(), "`sqrt` of values reduced over the batch"),
    "variance": (lambda p, y: p.var(), "(var) reduces over the samples of the batch"),
    "variance over the batch": (lambda p, y: p.var(0).sum(), "(var) reduces over the samples of the batch"),
    "variance by hand": (lambda p, y: (p - p.mean(0)).pow(2).mean(), "adds a value reduced over the batch to every"),
    "standard deviation": (lambda p, y: p.std(), "(std) reduces over the samples of the batch"),
    "largest of the batch": (lambda p, y: p.amax(0).sum(), "(amax) reduces over the samples of the batch"),
    "largest with its index": (lambda p, y: p.max(0).values.sum(), "reduces over the samples of the batch"),
    "median": (lambda p, y: p.median(), "(median) reduces over the samples of the batch"),
    "norm": (lambda p, y: p.norm(), "(norm) reduces over the samples of the batch"),
    "softmax over the batch": (lambda p, y: (p.softmax(0) * p).sum(), "(softmax) runs along the batch dimension"),
    "log_softmax, turned": (lambda p, y: p.transpose(0, 2).log_softmax(-1).mean(), "runs along the batch dimension"),
    "cumulative over the batch": (lambda p, y: p.cumsum(0).tanh().mean(), "(cumsum) runs along the batch dimension"),
    "normalised over the batch": (
        lambda p, y: functional.normalize(p, dim=0).exp().mean(),
        "runs along the batch dimension",
    ),
    "batch_norm": (
        lambda p, y: functional.batch_norm(p.flatten(0, 1), None, None, training=True).tanh().mean(),
        "(batch_norm) normalises by the statistics of the batch (use LayerNorm, or put it in eval mode)",
    ),
    "contrastive": (contrastive, "(matmul) pairs the samples of the batch with each other"),
    "distances": (lambda p, y: torch.cdist(p[:, 0], p[:, 0]).mean(), "(cdist) pairs the samples of the batch"),
    "differences": (lambda p, y: (p[:, None] - p[None]).abs().mean(), "(sub) pairs the samples of the batch"),
    "one sample": (lambda p, y: p[0].sum(), "(getitem) reduces over the samples of the batch"),
    "mixture of experts": (load_balance, "`mul` of values reduced over the batch"),
    "labels of the model's own": (
        lambda p, y: functional.cross_entropy(p.flatten(0, 1), p.argmax(-1).flatten()),
        "(cross_entropy) averages over labels that the model makes itself",
    ),
    "unbiased mean": (lambda p, y: p.pow(2).sum() / (p.shape[0] - 1), "`truediv` of values reduced over the batch"),
    "root of the batch size": (lambda p, y: p.sum() / p.shape[0] ** 0.5, "`truediv` of values reduced over the"),
    "batch size as a value": (lambda p, y: p.sum() + p.shape[0], "computes with the batch size"),
    "mean joined with samples": (
        lambda p, y: torch.cat([p.mean((0, 1))[None], p[:, 0]]).exp().sum(),
        "`cat` of values reduced over the batch is not a sum of shares",
    ),
    "batch counts in a loss of counts": (lambda p, y: p.sum().abs(), "`abs` of values reduced over the batch"),
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
    message = str(caught.value)
    assert words in message
    assert "of the whole batch cannot be computed from micro-batches" in message
    assert "set micro_batch_size to the whole batch" in message
    lines, start = inspect.getsourcelines(function)
    places = [f"at {__file__}:{number}: {line.strip()}" for number, line in enumerate(lines, start)]
    assert any(place in message for place in places), message


@pytest.mark.parametrize(
    "name", [n if n == "contrastive" else pytest.param(n, marks=pytest.mark.slow) for n in REFUSALS]
)
def test_what_is_refused_works_as_one_micro_batch(name):
    function, _ = REFUSALS[name]
    torch.manual_seed(0)
    assert_same_step(short(function), *batch(5, ignored=False), tolerance=1e-5, micro_batch_size=5)


def test_batch_norm_of_a_block():
    class Normed(Block):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(TOKENS, track_running_stats=False)

        def forward(self, x):
            return super().forward(self.norm(x))

    with pytest.raises(SeparationError, match=r"\(batch_norm\) normalises by the statistics of the batch"):
        compiled(Tiny(blocks=[Normed(), Normed()]))(*batch(5))


# What mixes samples, or counts them, in ways that are easy to overlook: every one must be refused or right.
SILENT = {
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
    "samples picked": lambda p, y: (p[y[:, 0].clamp(0, 0)] * p).sum(),
    "samples picked by name": lambda p, y: (p.index_select(0, y[:, 0].clamp(0, 0)) * p).sum(),
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
    "counts as class weights": lambda p, y: cross_entropy(p, y, weight=classes(y).sum((0, 1))),
    "size_average": lambda p, y: cross_entropy(p, y, size_average=False),
    "size_average, the usual": lambda p, y: cross_entropy(p, y, size_average=True),
    "samples normalised": lambda p, y: functional.normalize(p, 2.0, 0).exp().mean(),
    "a truth about the batch size": lambda p, y: p.sum() * (p.shape[0] > 3),
    "reduce": lambda p, y: cross_entropy(p, y, reduce=False).sum(),
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


# Outputs other than the loss ------------------------------------------------------------------------------------------


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


def test_mixed_outputs_are_refused_unless_left_out():
    torch.manual_seed(0)
    model = short(lambda p, y: (cross_entropy(p, y), p.detach().std()))
    args = batch(5)
    with pytest.raises(SeparationError, match=r"output `std`.*\(std\) reduces.*options=\{'outputs': 'loss'\}"):
        compiled(model)(*args)
    loss, left_out = compiled(model, outputs="loss")(*args)
    assert left_out is None
    torch.testing.assert_close(loss, model(*args)[0], rtol=EXACT, atol=EXACT)


def test_two_losses():
    torch.manual_seed(0)
    assert_same_step(short(lambda p, y: (cross_entropy(p, y), p.mean(), p.sum(0))), *batch(5), tolerance=EXACT)


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


def assert_right_or_refused(tree, size):
    """The pass alone, on the tree's sum, with rows of three tokens and two words."""
    namespace = {"torch": torch}
    exec(f"def criterion(p, m):\n    return ({tree}).sum() + 0 * p.sum()\n", namespace)  # the tree is code
    torch.manual_seed(0)
    rows, mask = torch.rand(size, 3, 2, requires_grad=True), (torch.rand(size, 3, 1) > 0.4).float()
    with contextlib.suppress(SeparationError):
        assert_combines(namespace["criterion"], rows, mask, tolerance=1e-4)


@settings(deadline=None, max_examples=25)
@given(TREES, st.integers(3, 5))
def test_any_tree_is_right_or_refused(tree, size):
    assert_right_or_refused(tree, size)


@pytest.mark.slow
@settings(deadline=None, max_examples=1000)
@given(TREES, st.integers(3, 5))
def test_any_tree_is_right_or_refused_at_length(tree, size):
    assert_right_or_refused(tree, size)
