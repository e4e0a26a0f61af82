"""What the tests of `loss` share: the smallest model, criteria for it, and how shares are added."""

from __future__ import annotations

import torch
from captured import TOKENS, WIDTH, WORDS, Tiny, batch, captured, run
from torch import nn
from torch.nn import functional

from gs_compile.capture.arrange import needed_by

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
    needed = needed_by([known[node]], graph)
    for each in reversed([each for each in graph.nodes if each.op != "output" and each not in needed]):
        graph.erase_node(each)
    return torch.fx.GraphModule(separated.module, graph)


def logits_and_labels():
    torch.manual_seed(0)
    return torch.randn(5, TOKENS, WORDS, requires_grad=True), batch(5)[1]


def assert_combines(criterion, *args, tolerance=1e-5):
    expected = criterion(*args)
    found = combined(criterion, *args)
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance, equal_nan=True)
    if expected.requires_grad:
        ours, plain = (torch.autograd.grad(value, args[0])[0] for value in (found, expected))
        torch.testing.assert_close(ours, plain, rtol=10 * tolerance, atol=tolerance, equal_nan=True)
