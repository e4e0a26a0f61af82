"""Random models as source: what is computed ahead of three equal blocks, in each of them, and of their result to a loss.

A line is a template with names of earlier values in it. It stays if torch computes it of one batch, without a warning, to
finite values, few and small enough to compare. A model stays if plain PyTorch trains it on all batches.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from textwrap import indent
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

SAMPLES, TOKENS, WORDS, WIDTH, LAYERS = 6, 5, 7, 8, 3
TRIES = 30  # templates for a line
DIMENSIONS = (0, 1, 1, 2, -1, -1)
ERRORS = IndexError, RuntimeError, TypeError, ValueError, Warning
INPUTS = ("ids", "labels", "mask", "w")

EACH = (
    "torch.tanh({a})", "torch.sigmoid({a})", "{a}.relu()", "torch.exp(-{a}.abs())", "{a}.abs()",
    "torch.log1p({a}.abs())", "({a}.abs() + 0.1).sqrt()", "{a}.square()", "-{a}", "{a}.detach()", "{a} * 0.5",
    "{a} + 1.5", "{a}.clamp(-0.5, 0.5)", "{a}.contiguous()", "{a}.clone()",
)  # fmt: skip
PAIRS = (
    "{a} + {b}", "{a} * {b}", "{a} - {b}", "{a} / (1 + {b}.abs())", "torch.maximum({a}, {b})",
    "torch.where({a} > {b}, {a}, {b})", "torch.where({b} > 0.3, {a}, 0.0)", "{a} * ({b} > 0)",
    "{a}.masked_fill({b} < 0, 0.25)", "{a} + 0.1 * {b}.detach()", "torch.addcmul({a}, {b}, {b})",
    "torch.lerp({a}, {b}, 0.3)",
)  # fmt: skip
REDUCED = (
    "{a}.sum({d})", "{a}.mean({d})", "{a}.amax({d})", "{a}.logsumexp({d})", "{a}.var({d}, unbiased=False)",
    "{a}.norm(dim={d})", "{a}.mean({d}, keepdim=True)", "{a}.sum({d}, keepdim=True)", "{a}.max({d}).values",
    "{a}.min({d}, keepdim=True).values", "{a}.std({d}, unbiased=False, keepdim=True)",
)  # fmt: skip
ALONG = (
    "{a}.softmax({d})", "{a}.log_softmax({d})", "{a}.cumsum({d})", "{a}.flip({d})", "{a}.roll(1, {d})",
    "{a}.sort({d}).values", "F.normalize({a}, dim={d})", "{a} - {a}.mean({d}, keepdim=True)", "{a}.cummax({d}).values",
    "{a}.unsqueeze({d})", "{a}.logcumsumexp({d})",
)  # fmt: skip
VIEWS = (
    "{a}.flatten(0, 1)", "{a}.transpose(0, 1)", "{a}[:, :-1]", "{a}[:, 1:]", "{a}[0]", "{a}[:1]", "{a}[-1:]",
    "{a}[:, -1]", "{a}[::2]", "{a}.unsqueeze(-1)", "{a}.unsqueeze(0)", "{a}.squeeze(0)", "{a}.squeeze(-1)", "{a}.t()",
    "{a}.reshape(ids.shape[0], -1)", "{a}.reshape(-1)", "{a}.reshape(ids.shape[0], ids.shape[1], -1)", "{a}[..., 0]",
    "{a}[..., :2]", "{a}.chunk(2)[0]", "{a}.chunk(2)[1]", "{a}[:ids.shape[0] // 2]", "{a}[ids.shape[0] // 2:]",
    "{a}.permute(2, 0, 1)", "{a}.movedim(1, 0)", "{a}.repeat_interleave(2, 0)", "{a}.tile((2, 1))",
    "{a}.unflatten(0, (-1, 2))", "{a}.expand(3, *{a}.shape)", "{a}.narrow(0, 0, 2)", "{a}.unfold(1, 2, 1)",
)  # fmt: skip
JOINED = (
    "torch.cat([{a}, {b}])", "torch.stack([{a}, {b}])", "torch.cat([{a}, {b}], -1)", "torch.stack([{a}, {b}], -1)",
    "{a} @ {b}", "{a} @ {b}.transpose(-1, -2)", "torch.einsum('bs,bs->b', {a}, {b})",
    "torch.einsum('bsv,bs->bv', {a}, {b})", "torch.einsum('bsv,bsv->b', {a}, {b})",
    "F.cosine_similarity({a}, {b}, dim=-1)", "F.mse_loss({a}, {b})", "F.smooth_l1_loss({a}, {b}, reduction='none')",
    "F.kl_div({a}.log_softmax(-1), {b}.softmax(-1), reduction='batchmean')",
    "F.kl_div({a}.log_softmax(-1), {b}.softmax(-1), reduction='none')", "torch.outer({a}, {b})", "torch.cdist({a}, {b})",
    "F.l1_loss({a}, {b})", "F.huber_loss({a}, {b}, reduction='sum')",
    "F.binary_cross_entropy_with_logits({a}, {b}.sigmoid())", "F.margin_ranking_loss({a}, {b}, torch.ones_like({a}))",
)  # fmt: skip
OF_LABELS = (
    "F.cross_entropy({a}.reshape(-1, {a}.shape[-1]), labels.reshape(-1))", "F.cross_entropy({a}.transpose(1, 2), labels)",
    "F.cross_entropy({a}.transpose(1, 2), labels, reduction='none')",
    "F.cross_entropy({a}.transpose(1, 2), labels, ignore_index=3)",
    "F.cross_entropy({a}.transpose(1, 2), labels, reduction='sum')", "{a}.gather(-1, labels.unsqueeze(-1)).squeeze(-1)",
    "{a}.log_softmax(-1).gather(-1, labels[..., None])[..., 0]",
    "F.nll_loss({a}.log_softmax(-1).flatten(0, 1), labels.flatten())",
    "F.cross_entropy({a}.transpose(1, 2), labels, label_smoothing=0.1)", "({a}.argmax(-1) == labels).double()",
    "F.cross_entropy({a}[:, -1], labels[:, 0])",
    "F.cross_entropy({a}[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=0)",
    "F.multi_margin_loss({a}[:, 0], labels[:, 0])",
)  # fmt: skip
NUMBERS = (
    "({a} * mask).sum() / mask.sum()", "({a} * w).sum() / w.sum()", "{a}.mean()", "{a}.sum()", "{a}.square().mean()",
    "({a} * w.unsqueeze(-1)).mean()", "({a} * mask.unsqueeze(-1)).sum() / mask.sum().clamp(min=1)",
    "({a}.sum(-1) / mask.sum(-1)).mean()", "{a}.sum() / ids.shape[0]", "{a}.sum() / {a}.numel()", "{a}.amax()",
    "{a}.std()", "{a}.norm()", "{a}.sum() / (labels != 3).sum()", "{a}.logsumexp(0).sum()", "{a}.mean(0).sum()",
    "{a}.mean(0).square().sum()", "{a}.sum(0).mean()",
)  # fmt: skip
SUMS = (
    "{a} + 0.3 * {b}", "{a} * {b}", "{a} / (1 + {b}.abs())", "{a}.square() + {b}", "torch.stack([{a}, {b}]).mean()",
    "({a} + {b}) / 2", "torch.maximum({a}, {b})", "{a} - {b}.detach()", "{a} * (1 + {b}.detach())",
    "({a}.exp() + {b}.exp()).log()",
)  # fmt: skip
IN_A_BLOCK = ("{a} @ {b}.transpose(-1, -2) @ {a}",)
OF_SIDE = ("{a} * side", "{a} + side[..., None]", "{a} * side.unsqueeze(-1)", "{a} * side[:, None, None]")


def batch(size: int = SAMPLES, seed: int = 0) -> dict[str, Tensor]:
    """Tokens, their labels, those that count, and a weight of each sample."""
    generator = torch.Generator().manual_seed(seed)
    ids, labels = torch.randint(WORDS, (2, size, TOKENS), generator=generator)
    mask = (torch.rand(size, TOKENS, generator=generator) < 0.7).double()
    mask[:, 0] = 1.0
    weights = torch.rand(size, generator=generator, dtype=torch.float64) + 0.5
    return dict(zip(INPUTS, (ids, labels, mask, weights), strict=True))


BATCHES = batch(), batch(seed=1), batch(4, seed=2)


class Lines:
    """Lines that give names to values; `values`: what they come to for the first batch."""

    def __init__(self, chance: random.Random, **values: Tensor) -> None:
        self.chance, self.values = chance, values
        self.text: list[str] = []

    def add(
        self, *groups: Sequence[str], a: str = "", b: str = "", wanted: Callable[[Tensor], bool] = lambda _: True
    ) -> str | None:
        """The name of one more value; None: no template that was tried made one. a, b: of which; else of any."""
        names = list(self.values)
        for _ in range(TRIES):
            template = self.chance.choice(self.chance.choice(groups))
            first, second = self.chance.choice(names + names[-4:]), self.chance.choice(names)
            line = template.format(a=a or first, b=b or second, d=self.chance.choice(DIMENSIONS))
            value = self._computed(line)
            if value is not None and wanted(value):
                self.values[name := f"v{len(self.values)}"] = value
                self.text.append(f"{name} = {line}")
                return name
        return None

    def _computed(self, line: str) -> Tensor | None:
        with suppress(*ERRORS):
            value = eval(line, NAMES | BATCHES[0] | self.values)
            if value.dtype == torch.float64 and 0 < value.numel() < 3000 and value.isfinite().all():
                return value if value.abs().max() < 1e4 else None
        return None


def source(seed: int) -> str:
    """The functions `block` and `forward` of a model."""
    chance = random.Random(seed)
    while not trains(text := written(chance)):
        pass
    return text


def written(chance: random.Random) -> str:
    head = Lines(chance, mask=BATCHES[0]["mask"], w=BATCHES[0]["w"])
    for _ in range(chance.choice([0, 0, 1, 2, 3])):
        head.add(EACH, PAIRS, REDUCED, ALONG, VIEWS)
    num_ahead = len(head.text)
    side = chance.choice(list(head.values)) if chance.random() < 0.6 else None
    block = block_text(chance, head.values[side] if side else None)
    generator = torch.Generator().manual_seed(chance.randrange(1000))
    for name, width in ("y", WIDTH), ("logits", WORDS):
        head.values[name] = torch.randn(SAMPLES, TOKENS, width, dtype=torch.float64, generator=generator)
    for _ in range(chance.randint(0, 5)):
        head.add(EACH, PAIRS, REDUCED, ALONG, VIEWS, JOINED, OF_LABELS, OF_LABELS)
    made = list(head.values)[2 + num_ahead :]
    loss = number(head, made)
    for _ in range(chance.choice([0, 1, 1, 2])):
        loss = head.add(SUMS, a=loss, b=number(head, made), wanted=lambda value: value.dim() == 0) or loss
    if chance.random() < 0.5:
        loss += " + 0.0 * logits.sum()"
    outputs = [name for name in made if chance.random() < 0.3]
    lines = [
        *head.text[:num_ahead],
        "x = self.words(ids)",
        "for block in self.blocks:",
        f"    x = block(x, {side})",
        "y, logits = x, self.head(x)",
        *head.text[num_ahead:],
        f"return dict({', '.join([f'loss={loss}', *(f'{name}={name}' for name in outputs)])})",
    ]
    return f"{block}\n{function('forward', ('self', *INPUTS), lines)}"


def number(lines: Lines, made: Sequence[str]) -> str:
    """The name of a number that follows from one of the values."""
    a = lines.chance.choice(made)
    if lines.values[a].dim() == 0:
        return a
    return lines.add(NUMBERS, a=a, wanted=lambda value: value.dim() == 0) or number(lines, made)


def block_text(chance: random.Random, side: Tensor | None) -> str:
    shape = SAMPLES, TOKENS, WIDTH
    given = {"x": torch.randn(shape, dtype=torch.float64), "h": torch.randn(shape, dtype=torch.float64)}
    lines = Lines(chance, **given) if side is None else Lines(chance, **given, side=side)
    for _ in range(chance.choice([0, 0, 1, 2, 3])):
        lines.add(EACH, PAIRS, ALONG, REDUCED, IN_A_BLOCK, OF_SIDE if side is not None else EACH)
    fitting = [name for name, value in lines.values.items() if name != "x" and broadcasts(value, shape)]
    update = " * ".join(["h", *(f"{name}.tanh()" for name in fitting[-1:] if name != "h")])
    return function("block", ("x", "h", "side"), [*lines.text, f"return {update}"])


def function(name: str, arguments: Sequence[str], lines: Sequence[str]) -> str:
    return f"def {name}({', '.join(arguments)}):\n" + indent("\n".join(lines), "    ") + "\n"


def broadcasts(value: Tensor, shape: Sequence[int]) -> bool:
    with suppress(RuntimeError):
        return torch.broadcast_shapes(value.shape, shape) == shape
    return False


class Block(nn.Module):
    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.norm, self.linear, self.function = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), function

    def forward(self, x: Tensor, side: Tensor | None) -> Tensor:
        return x + 0.3 * self.function(x, torch.tanh(self.linear(self.norm(x))), side)


class Model(nn.Module):
    """Its forward is a random one."""

    def __init__(self, block: Callable[..., Tensor]) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.ModuleList(Block(block) for _ in range(LAYERS))


NAMES: dict[str, Any] = {"torch": torch, "F": functional}


def model(text: str) -> nn.Module:
    """The model of a source, in float64."""
    exec(text, found := dict(NAMES))
    kind: Any = type("Model", (Model,), {"forward": found["forward"]})
    torch.manual_seed(1)
    return kind(found["block"]).double()


def step(model: nn.Module, inputs: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The outputs of a call, and the gradients of its loss."""
    model.zero_grad()
    outputs = model(**inputs)
    outputs["loss"].backward()
    return outputs, {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


def trains(text: str) -> bool:
    """Whether plain PyTorch does what can be compared."""
    plain = model(text)
    with suppress(*ERRORS):
        for inputs in BATCHES:
            _, gradients = step(plain, inputs)
            if not all(each.isfinite().all() for each in gradients.values()):
                return False
        return True
    return False
