"""Models whose parts go where a test of `split` wants them, and a unit's code beside autograd."""

from __future__ import annotations

import torch
from captured import WIDTH, WORDS, Block, Tiny, captured, leaves, run_units
from torch import nn

from gs_compile.codegen.differentiate import Differentiated


def assert_units_equal_the_model(model, *args):
    case = captured(model, *args)
    found = run_units(case.split(len(args[0]), alone=True), case, 0, len(args[0]))
    torch.testing.assert_close(leaves(found), leaves(model(*args)))


def code_and_autograd(unit, generator, name="backward", *, most=5, code=None):
    """What "backward" or "both" of a unit's code returns for some inputs, and what autograd makes of its module."""
    torch.manual_seed(1)
    inputs = [
        torch.rand(s.shape) + 0.1 if s.dtype.is_floating_point else 2 + torch.rand(s.shape) * (most - 2)
        for s in unit.specs
    ]
    inputs = [tensor.to(spec.dtype) for tensor, spec in zip(inputs, unit.specs, strict=True)]
    leaves = [t.clone().requires_grad_(s.requires_grad) for t, s in zip(inputs, unit.specs, strict=True)]
    results = unit.module(*[leaf.clone() for leaf in leaves])
    is_both = name == "both"
    taken = [results[unit.results.index("loss")]] if is_both else [results[index] for index in unit.differentiated]
    given = [torch.ones_like(result) if is_both else torch.randn_like(result) for result in taken]
    wanted = [leaves[index] for index in unit.differentiable]
    expected = torch.autograd.grad(taken, wanted, given, allow_unused=True, materialize_grads=True)
    code, before = code or Differentiated(unit, generator), [tensor.clone() for tensor in inputs]
    with torch.no_grad():
        if is_both:
            found = code.function("both")(*inputs)
        else:
            found = (*code.function("forward")(*inputs), *code.function("backward")(*inputs, *given))
    torch.testing.assert_close(inputs, before, rtol=0, atol=0, equal_nan=True)
    return found, (*(result.detach() for result in results), *expected)


class Reading(Block):
    """Layers that read more than the layer before."""

    def forward(self, x, *sides):
        for side in sides:
            x = x + side
        return super().forward(x)


class Sides(Tiny):
    """`make` gives values from the embedding and the batch; layer i reads those that `reads[i]` lists."""

    def __init__(self, make, reads, layer=Reading):
        super().__init__(lambda p, y: p, [layer() for _ in reads])
        self.make, self.reads = make, reads
        self.table = nn.Parameter(torch.randn(WORDS, WIDTH))

    def forward(self, ids, labels):
        x = self.embed(ids)
        made = self.make(self, x, ids)
        for block, reads in zip(self.blocks, self.reads, strict=True):
            x = block(x, *(made[index] for index in reads))
        return self.criterion(self.head(x), labels)


class Any(nn.Module):
    """A stack with what a draw says: glue, side inputs, in-place changes, taps."""

    def __init__(self, layers, glue, side, in_place, outputs):
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(layers)])
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.glue, self.side, self.in_place, self.outputs = glue, side, in_place, outputs

    def forward(self, ids, labels):
        x = self.embed(ids)
        states = []
        mask = self.embed.weight.sum() + ids[..., None] if self.side == "made" else ids[..., None]
        for block in self.blocks:
            if self.glue == "before":
                x = x.sin()
            if self.side:
                x = x * mask
            x = block(x)
            if self.in_place:
                x.mul_(0.5)
                x[:, 0] += 1
            if self.glue == "after":
                x = x.cos()
            states.append(x)
        logits = self.head(x)
        return {"loss": (logits.sum(),), "logits": (logits, logits.mean()), "states": (logits, *states)}[self.outputs]
