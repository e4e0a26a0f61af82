"""sample_layout: outputs that have all samples several times come in the order of the whole batch."""

from __future__ import annotations

import pytest
import torch
from captured import TOKENS, Tiny, batch, compiled


class InTurns(Tiny):
    """The layers have all samples twice, and so has the last hidden state, which is returned as it is."""

    def forward(self, ids, labels):
        x = self.embed(ids)
        x = torch.cat([x, -x])
        for block in self.blocks:
            x = block(x)
        return (x,)


def in_turns(p, y):
    """What has all samples several times, in as long runs or not, and parts of it."""
    beside = torch.cat([p.repeat_interleave(2, 0), p, -p])
    return (
        torch.cat([p, -p, p.exp()]),
        p.repeat(3, 1, 1) * torch.arange(TOKENS)[:, None],
        torch.stack([p, p.tanh()], 1).transpose(0, 1).flatten(0, 1),
        p.transpose(0, 1).flatten(0, 1),
        beside.flatten(1).unflatten(1, (TOKENS, -1)),
        beside[p.shape[0] * 2 :],
        beside.split([2 * p.shape[0], p.shape[0], p.shape[0]])[0],
        torch.cat([p.flatten(0, 1), p[:, 0]])[:, None],
        torch.cat([p[..., 0], 1.0 * y])[: (p.shape[0] + y.shape[0]) // 2, None],  # of two inputs
        p.flatten(0, 1).view(y.shape[0], -1, p.shape[-1]),
    )


@pytest.mark.parametrize("kind", [Tiny, InTurns])
def test_outputs_that_have_all_samples_several_times_are_the_whole_batchs(kind):
    """As of crops or masks behind one another; so are the gradients that come for them."""
    torch.manual_seed(0)
    model = kind(in_turns)
    expected = model(*batch(5))
    weights = [torch.randn(each.shape) for each in expected]
    gradients = []
    for outputs in (expected, compiled(model)(*batch(5))):
        for found, plain in zip(outputs, expected, strict=True):
            torch.testing.assert_close(found, plain)
        sum((each * weight).sum() for each, weight in zip(outputs, weights, strict=True)).backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
        model.zero_grad()
    torch.testing.assert_close(*gradients)
