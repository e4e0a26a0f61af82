"""The losses of Liger, by a stand-in that breaks the graph as they do."""

from __future__ import annotations

import sys
from types import FunctionType, SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional
from zoo import VOCAB, WIDTH, assert_same_gradients, gradients

import gs_compile
from gs_compile.capture.graph_breaks import remedy
from gs_compile.errors import GraphBreakError


def with_a_kernel(*given, **named):
    """A loss of Liger's stand-in."""
    torch._dynamo.graph_break()
    raise AssertionError("called")


class OfLiger(nn.Module):
    def __init__(self, loss):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.loss = loss

    def forward(self, ids, labels):
        x = self.embedding(ids)
        for layer in self.layers:
            x = x + layer(x).tanh()
        return self.loss(self.head, x, labels)


def as_liger_says(head, x, labels):
    logits = 5 * torch.tanh(head(x)[:, :-1] / 5)
    return functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="sum") / 30


LIGER_LOSSES = {
    "fused with the head": lambda head, x, labels: with_a_kernel(
        x, head.weight, labels, WIDTH, 30, bias=head.bias, final_logit_softcapping=5.0, logits_to_keep=0
    ),
    "of logits": lambda head, x, labels: (
        with_a_kernel(head(x)[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum", softcap=5.0) / 30
    ),
    "smoothed": lambda head, x, labels: with_a_kernel(x, head.weight, labels, WIDTH, label_smoothing=0.1),
}


@pytest.mark.parametrize("case", LIGER_LOSSES)
def test_losses_of_liger_are_what_they_say_in_pieces(case, monkeypatch):
    of_logits = case == "of logits"
    kernel = FunctionType(with_a_kernel.__code__, globals())  # another one each time
    monkeypatch.setitem(globals(), "with_a_kernel", kernel)
    where = "functional" if of_logits else "model.loss_utils"
    name = "liger_cross_entropy" if of_logits else "LigerForCausalLMLoss"
    monkeypatch.setitem(sys.modules, f"liger_kernel.transformers.{where}", SimpleNamespace(**{name: kernel}))
    model, ids = OfLiger(LIGER_LOSSES[case]), torch.randint(VOCAB, (4, 16))
    labels = ids.masked_fill(torch.rand(4, 16) < 0.3, -100)
    model.compile(
        backend="greedysnake", options={"micro_batch_size": 2, "expert": {"compiler": "eager", "piece_tokens": 8}}
    )
    if case == "smoothed":
        with pytest.raises(GraphBreakError, match=r"Liger's loss with .*label_smoothing.*: leave them out"):
            model(ids, labels)
        return
    plain = OfLiger(as_liger_says)
    expected = plain(ids, labels)
    expected.backward()
    loss = model(ids, labels)
    loss.backward()
    torch.testing.assert_close(loss, expected)
    assert_same_gradients(gradients(model), gradients(plain))
    assert "the head runs on 8 tokens at a time" in str(gs_compile.inspect(model))


def test_a_break_in_its_kernels_says_what_to_leave_out():
    assert "rms_norm=False" in remedy("", "lib/liger_kernel/transformers/rope.py:28")
    assert "rms_norm=False" not in remedy("", "model.py:28")
