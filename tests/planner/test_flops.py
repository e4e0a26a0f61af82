"""What is counted on a graph, against closed forms."""

from __future__ import annotations

import captured
import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

from gs_compile.capture.flops import count_flops
from gs_compile.capture.inductor import Generator
from gs_compile.capture.memory import lifetimes, most_alive, peak_nbytes
from gs_compile.codegen.differentiate import Differentiated
from gs_compile.planner.cost.workload import unit_cost

# B samples, H heads, T tokens, D width of a head; R rows, M and N width in and out, E experts.
B, H, T, D = 2, 3, 64, 16
R, M, N, E = 8, 16, 32, 2


def traced(function, *arguments):
    return make_fx(function, tracing_mode="fake")(*arguments)


def test_a_linear_layer_is_two_operations_a_weight_and_row():
    graph = traced(functional.linear, torch.empty(R, M), torch.empty(N, M), torch.empty(N))
    assert count_flops(graph) == 2 * R * M * N


def test_attention_is_counted_in_full_and_its_backward_with_the_scores_again():
    def attend(query_BHTD, key_BHTD, value_BHTD):
        out = functional.scaled_dot_product_attention(query_BHTD, key_BHTD, value_BHTD, is_causal=True)
        return torch.autograd.grad(out.sum(), query_BHTD) if query_BHTD.requires_grad else out

    inputs = [torch.randn(B, H, T, D) for _ in range(3)]
    product = 2 * B * H * T * T * D
    forward = traced(attend, *inputs)
    assert any("flash_attention_for_cpu" in str(node.target) for node in forward.graph.nodes)
    assert count_flops(forward) == 2 * product
    assert count_flops(traced(attend, *(tensor.requires_grad_() for tensor in inputs))) == (2 + 5) * product


def grouped(left, right, ends):
    return torch._grouped_mm(left, right, offs=ends)


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [((R, M), (E, M, N), 2 * R * M * N), ((N, R), (R, M), 2 * R * M * N)],
    ids=["rows in groups", "what is summed over in groups"],
)
def test_products_of_experts(left, right, expected):
    left, right = (torch.zeros(shape, dtype=torch.bfloat16, device="meta") for shape in (left, right))
    graph = make_fx(grouped)(left, right, torch.zeros(E, dtype=torch.int32, device="meta"))
    assert count_flops(graph) == expected


def test_what_is_alive_at_once():
    def chain(x):
        first = x + 1
        view = first.view(-1)
        second = torch.cat([first, first])
        third = second * 2
        return third.sum(), view.neg()

    graph = traced(chain, torch.empty(4, 8))
    one = 4 * 8 * 4
    assert peak_nbytes(graph) == one + 2 * one + 2 * one  # first lives until neg, through its view
    assert peak_nbytes(graph, held={1}) == one + 2 * one + 2 * one
    assert peak_nbytes(traced(lambda x: ((x * 2).neg(),), torch.empty(4, 8)), held={0}) == one


def most(function, *shapes):
    """Of the bytes that compiled code has alive at once."""
    graph = traced(function, *(torch.empty(shape) for shape in shapes))
    return most_alive(lifetimes(graph, compiled=True))


def test_compiled_code_has_alive_what_products_read_and_what_that_is_made_of():
    def head(x, w, chosen):
        logits = x @ w
        shifted = logits - logits.amax(1, keepdim=True)
        log_p = shifted - shifted.exp().sum(1, keepdim=True).log()
        return (log_p * chosen).sum(), (log_p.exp() - chosen) @ w.t()

    rows, one = R * 4, 4
    assert most(head, (R, M), (M, N), (R, N)) == 2 * N * rows + 2 * rows + one  # and largest ones, sums, and the loss


def test_compiled_code_makes_again_what_is_cheap_and_keeps_the_rest():
    def cheap(x, w):
        made = x * 2
        return ((made.exp() @ w) * made,)

    def dear(x, w):
        made = x.tanh()
        return (((made * 2) @ w) * made,)

    assert [most(function, (R, N), (N, N)) for function in (cheap, dear)] == [2 * R * N * 4, 3 * R * N * 4]


def test_what_is_changed_in_place_is_in_memory():
    def written(x, places):
        made = torch.zeros_like(x)
        made[places] = 1.0
        return ((made * x).sum(),)

    graph = make_fx(written, tracing_mode="fake")(torch.empty(R, N), torch.empty(3, dtype=torch.long))
    assert most_alive(lifetimes(graph, compiled=True)) == R * N * 4 + 4 + 4  # and the number, and the sum


def test_compiled_code_makes_together_what_it_makes_of_the_same():
    def both(x, w, y):
        inner = x @ w
        first = inner.relu() @ w
        return first, (inner * y) @ w

    assert most(both, (R, N), (N, N), (R, N)) == 4 * R * N * 4  # inner, both that are made of it, and first


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(captured.WIDTH, 64, bias=False), nn.Linear(64, captured.WIDTH, bias=False)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


@pytest.fixture(scope="module")
def units():
    model = captured.Tiny(blocks=[Deep(), Deep()])
    return {unit.unit: unit for unit in captured.captured(model, *captured.batch(6)).split(2).units}


def cost_of(unit):
    return unit_cost(unit, Differentiated(unit, Generator("eager")))


def test_a_backward_is_twice_the_forward_and_what_it_needs_of_the_forward_again(units):
    product = 2 * 2 * captured.TOKENS * captured.WIDTH * 64
    cost = cost_of(units[0])
    assert cost.forward_flops == 2 * product
    assert cost.backward_flops == (1 + 4) * product  # the last product of a layer is not made again
    assert cost.workspace_nbytes > 2 * captured.TOKENS * 64 * 4


def test_a_head_is_one_forward_and_its_backward(units):
    product = 2 * 2 * captured.TOKENS * captured.WIDTH * captured.WORDS
    cost = cost_of(units["h"])
    assert (cost.forward_flops, cost.backward_flops) == (product, 3 * product)
