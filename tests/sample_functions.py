"""Functions of `torch.autograd` that mix the samples of a batch, or keep them apart, in a forward or a backward."""

from __future__ import annotations

import torch
from captured import TOKENS, WIDTH


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
        return (x - torch.var_mean(x, 0)[1]) / 2.0


class Sized(Centred):
    @staticmethod
    def forward(ctx, x):
        return x * torch.full((x.shape[0], 1, 1), x.shape[0])


class Nested(Centred):
    """Where gradients are on, the other function is one of its own in the graph."""

    @staticmethod
    def forward(ctx, x):
        with torch.enable_grad():
            return 2.0 * Centred.apply(x)


class Identity(Centred):
    @staticmethod
    def forward(ctx, x):
        return x * 1.0


class Normalised(Identity):
    @staticmethod
    def backward(ctx, gradient):
        return gradient / gradient.norm()


class NestedBackward(Identity):
    @staticmethod
    def backward(ctx, gradient):
        with torch.enable_grad():
            return Centred.apply(gradient)


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
        added = torch.zeros_like(scale)
        added.index_add_(0, torch.arange(WIDTH).repeat(x.shape[0] * TOKENS), (gradient * x).flatten())
        weighed = torch.einsum("btd,btd->d", gradient, x)
        return gradient * scale, 0.25 * torch.stack((found + rows / 2, rows, added, weighed)).sum(0)


class OfTheFirst(Scaled):
    @staticmethod
    def backward(ctx, gradient):
        x, scale = ctx.saved_tensors
        return gradient * scale, (gradient * x)[0].sum(0)


class OfTheProduct(Scaled):
    @staticmethod
    def backward(ctx, gradient):
        x, scale = ctx.saved_tensors
        return gradient * scale, torch.einsum("btd,csd->d", gradient, x)


class Shrinking(Scaled):
    @staticmethod
    def backward(ctx, gradient):
        _, scale = ctx.saved_tensors
        return gradient * scale, 0.1 * scale.sign()


class OfSamplesAlone(Scaled):
    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[1], None


class AddedAndDivided(Scaled):
    @staticmethod
    def backward(ctx, gradient):
        x, scale = ctx.saved_tensors
        added = torch.zeros_like(scale)
        added.index_add_(0, torch.arange(WIDTH).repeat(x.shape[0] * TOKENS), (gradient * x).flatten())
        return gradient * scale, added / added.norm()


class Halved(Identity):
    @staticmethod
    def backward(ctx, gradient):
        return 0.5 * gradient


class Clamped(Halved):
    @staticmethod
    def backward(ctx, gradient):
        return gradient.clamp(-0.1, 0.1)
