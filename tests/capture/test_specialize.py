from __future__ import annotations

from dataclasses import replace

import pytest
import sympy
import torch
from captured import Tiny, batch, captured, leaves, run
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from gs_compile.capture.graph import Length, TensorSpec


def node_of(module, name):
    return next(node for node in module.graph.nodes if node.name == name)


def assert_as_in_torch(criterion):
    """The loss and the gradients of a model with this criterion, specialized."""
    torch.manual_seed(0)
    model, args = Tiny(criterion), batch(4)
    case = captured(model, *args)
    found, expected = run(case.specialized(4), case.named())[0], model(*args)
    torch.testing.assert_close(found, expected)
    ours, plain = (torch.autograd.grad(loss, list(model.parameters())) for loss in (found, expected))
    torch.testing.assert_close(ours, plain)


def test_specs():
    def criterion(logits, labels):
        return (
            logits,
            logits.transpose(0, 1),
            logits.flatten(0, 1),
            logits.sum(0),
            logits[:, None] - logits[None],
            logits.sum(),
            logits.half(),
        )

    case = captured(Tiny(criterion), *batch(4))
    outputs = case.specialized(3).graph.output_node().args[0]
    *specs, half = [node.meta["spec"] for node in outputs]
    assert [(spec.shape, spec.batch_dims) for spec in specs] == [
        ((3, 5, 11), (0,)),
        ((5, 3, 11), (1,)),
        ((15, 11), (0,)),
        ((5, 11), ()),
        ((3, 3, 5, 11), (0, 1)),
        ((), ()),
    ]
    assert half == TensorSpec((3, 5, 11), (55, 11, 1), torch.float16, torch.device("cpu"), True, (0,))
    assert (half.nbytes, str(half)) == (330, "float16[3, 5, 11]")
    given = {node.name: node.meta["spec"] for node in case.specialized(3).graph.nodes if node.op == "placeholder"}
    for entry in case.captured.inputs:
        if entry.role != "size":
            assert given[entry.name].batch_dims == ((0,) if entry.role == "batch" else ())


def test_a_squeeze_leaves_samples_where_a_micro_batch_has_one():
    def criterion(p, y):
        first = p[:, :1]
        one = p.sum().squeeze(0) + p[0, 0, 0].detach().squeeze(-1)  # torch has dimensions 0 and -1 of a scalar
        first = first + 0 * one
        return first.squeeze(), first.squeeze(0), torch.squeeze(input=first, dim=1), first.squeeze((0, 1)), p.squeeze(1)

    case = captured(Tiny(criterion), *batch(4))
    whole, module = run(case.specialized(4), case.named()), case.specialized(1)
    parts = [run(module, case.named(start, 1)) for start in range(4)]
    for found, wanted in zip(zip(*parts, strict=True), whole, strict=True):
        torch.testing.assert_close(torch.cat(found), wanted)


def test_batch_numbers_tell_proportional_from_not():
    def criterion(p, y):
        size, tokens = p.shape[:2]
        numbers = (size, size * tokens, size - 1, size**2, size // 2, tokens, 3)
        return tuple(p.sum() / number for number in numbers)

    outputs = captured(Tiny(criterion), *batch(4)).specialized(3).graph.output_node().args[0]
    found = [node.meta["batch_numbers"] for node in outputs]
    assert found == [{3: True}, {15: True}, {2: False}, {9: False}, {1: False}, {}, {}]


def test_two_batch_symbols():
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(3, 2)

        def forward(self, left, right):
            return self.head(left).sum(-1) * self.head(right).sum(-1)

    case = captured(Pair(), torch.randn(4, 3), torch.randn(4, 3))
    (output,) = case.specialized(2).graph.output_node().args[0]
    assert (output.meta["spec"].shape, output.meta["spec"].batch_dims) == ((2,), (0,))


def test_no_grad_becomes_detach():
    def criterion(logits, labels):
        with torch.no_grad():
            target = logits.exp()
            assert not target.requires_grad
        return functional.mse_loss(logits, target)

    torch.manual_seed(0)
    model, args = Tiny(criterion), batch(4)
    case = captured(model, *args)
    module = case.specialized(4)
    names = [getattr(node.target, "__name__", str(node.target)) for node in module.graph.nodes]
    assert names.count("detach") == 1
    assert not any("grad_enabled" in name for name in names)
    assert not node_of(module, "detach").meta["spec"].requires_grad
    parameters = list(model.parameters())
    ours = torch.autograd.grad(run(module, case.named())[0], parameters)
    torch.testing.assert_close(ours, torch.autograd.grad(model(*args), parameters))


def test_changes_in_place_under_no_grad_have_no_gradient():
    """What they change keeps its own, as in PyTorch."""

    def criterion(logits, labels):
        scores = logits * 2
        with torch.no_grad():
            scores.mul_(logits.exp())
            scores[..., 0] = 0
            scores += logits
        return functional.mse_loss(scores, logits)

    assert_as_in_torch(criterion)


def test_several_views_whose_base_is_changed_behind_them_have_their_gradient():
    """Of such a view torch refuses to say what has made it."""

    def criterion(logits, labels):
        whole = logits * 2
        first, second = whole.split([5, 6], -1)
        total = first.sum(-1) * 3 - second.sum(-1)
        whole.add_(1)
        return functional.mse_loss(whole.sum(-1), total)

    assert_as_in_torch(criterion)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_views_and_results_in_tuples_have_no_gradient_under_no_grad(mode):
    """Torch says of a view that it requires one; what is given back as it is has its own."""

    def criterion(logits, labels):
        with mode():
            first, second = logits.split([5, 6], -1)
            most, _ = logits.max(-1)
            turned, exact = logits.transpose(0, 1), logits.contiguous()
        loss = (logits[..., :5] + first).square().sum() + second.sum() + (logits[..., 0] + most).sum()
        return loss + (turned[..., 0] + exact[..., 1].T).sum()

    assert_as_in_torch(criterion)


def test_autocast_regions_are_recorded():
    def criterion(logits, labels):
        with torch.autocast("cpu", torch.bfloat16):
            scores = logits @ logits.transpose(1, 2)
            with torch.autocast("cpu", enabled=False):
                plain = logits @ logits.transpose(1, 2)
        return scores.sum() + plain.sum()

    module = captured(Tiny(criterion), *batch(4)).specialized(2)
    regions = {node.name: node.meta.get("autocast") for node in module.graph.nodes}
    ((*inner, _),) = regions["scores"]
    assert inner == ["cpu", torch.bfloat16, True]
    assert regions["plain"][0] == regions["scores"][0]
    assert (len(regions["plain"]), regions["plain"][1][2]) == (2, False)
    assert regions["linear"] is None
    assert node_of(module, "scores").meta["spec"].dtype == torch.bfloat16
    assert not any("autocast" in name for name in regions)


def test_autocast_around_the_call_is_recorded():
    with torch.autocast("cpu", torch.bfloat16):
        case = captured(Tiny(), *batch(4))
    assert case.captured.autocast == ("cpu", torch.bfloat16, True, True)
    nodes = [node for node in case.specialized(2).graph.nodes if node.op == "call_function"]
    assert {node.meta["autocast"] for node in nodes} == {(case.captured.autocast,)}


class Varied(nn.Module):
    """Views and sizes of several kinds, chosen by `kind`."""

    def __init__(self, width, kind):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.kind = kind

    def forward(self, x):
        size, tokens, width = x.shape
        y = self.linear(x)
        match self.kind:
            case 0:
                return y.view(size * tokens, width).sum(-1).view(size, tokens)
            case 1:
                return y + torch.arange(size)[:, None, None] * 0 + torch.zeros(size, 1, width)
            case 2:
                return y.permute(1, 0, 2).reshape(tokens, size * width).view(tokens, size, width) / size
            case 3:
                return torch.cat([y, y[:, :1].expand(size, tokens, width)], 1).split([tokens, tokens], 1)
            case _:
                return y.new_full((size, tokens * 2), size) + y.sum((1, 2), keepdim=True)[:, :, 0]


@settings(deadline=None, max_examples=10)
@given(
    st.integers(0, 4),
    st.integers(2, 5),
    st.integers(1, 5),
    st.integers(2, 4),
    st.integers(1, 4),
    st.sampled_from([None, True]),
)
def test_specialized_equals_the_model_on_the_micro_batch(kind, size, micro_batch_size, tokens, width, dynamic):
    micro_batch_size = min(size, micro_batch_size)
    torch.manual_seed(0)
    model, x = Varied(width, kind), torch.randn(size, tokens, width)
    case = captured(model, x, dynamic=dynamic)
    found = run(case.specialized(micro_batch_size), case.named(0, micro_batch_size))
    torch.testing.assert_close(leaves(found), leaves(model(x[:micro_batch_size])), rtol=0, atol=1e-6)


def test_the_gradient_of_what_is_expanded_has_memory_for_each_entry():
    """Lengths stay lengths in its strides: the code for one length is that for others."""
    length = sympy.Symbol("length")
    tokens = Length.of(5, 2 * length + 1, {length: 2})
    kind = {"dtype": torch.float32, "device": torch.device("cpu"), "requires_grad": True, "batch_dims": (0,)}
    dense = TensorSpec(shape=(2, tokens, 3), stride=(3, 6, 1), **kind)
    assert dense.of_gradient == replace(dense, requires_grad=False)
    alone = TensorSpec(shape=(1, 3), stride=(0, 1), **kind)
    assert alone.of_gradient.stride == (0, 1), "where there is one entry nothing is shared"
    found = TensorSpec(shape=(2, tokens, 3), stride=(0, 3, 1), **kind).of_gradient
    assert found.stride == (15, 3, 1)
    assert isinstance(found.stride[0], Length)
    assert found.stride[0].expression == 6 * length + 3
    assert found.stride[0].symbols == {length: 2}
    assert not isinstance(found.stride[1], Length)
