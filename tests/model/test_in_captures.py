"""In a capture a parameter on the tiers is an ordinary parameter, whatever function takes it."""

from __future__ import annotations

import copy

import pytest
import torch
from tiered import adamw, options
from torch import fx, nn
from torch.nn import functional
from zoo import GPT, TOKENS, WIDTH, Block, batch

from gs_compile.model.residency import is_offloaded, stash


class Weighted(nn.Module):
    """A function of torch applied to the input and parameters of these shapes."""

    def __init__(self, function, *shapes):
        super().__init__()
        self.function = function
        self.weights = nn.ParameterList(torch.rand(shape) for shape in shapes)

    def forward(self, x):
        return self.function(x, *self.weights)


class Attends(nn.MultiheadAttention):
    def forward(self, x):
        return super().forward(x, x, x, need_weights=False)[0]


class Pairs(nn.Bilinear):
    def forward(self, x):
        return super().forward(x, x)


HIDDEN, CHANNELS, IDS = torch.rand(2, TOKENS, WIDTH), torch.rand(2, 4, 8, 8), torch.ones(2, TOKENS, dtype=torch.long)
CASES = {  # a module with parameters, and what it is called with
    "RMSNorm": (lambda: nn.RMSNorm(WIDTH), HIDDEN),
    "LayerNorm": (lambda: nn.LayerNorm(WIDTH), HIDDEN),
    "GroupNorm": (lambda: nn.GroupNorm(2, 4), CHANNELS),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(4).eval(), CHANNELS),
    "InstanceNorm2d": (lambda: nn.InstanceNorm2d(4, affine=True), CHANNELS),
    "Linear": (lambda: nn.Linear(WIDTH, 3), HIDDEN),
    "Bilinear": (lambda: Pairs(WIDTH, WIDTH, 3), HIDDEN),
    "PReLU": (lambda: nn.PReLU(TOKENS), HIDDEN),
    "Embedding": (lambda: nn.Embedding(5, 3, padding_idx=0), IDS),
    "EmbeddingBag": (lambda: nn.EmbeddingBag(5, 3), IDS),
    "Conv1d": (lambda: nn.Conv1d(TOKENS, 3, 3), HIDDEN),
    "Conv2d": (lambda: nn.Conv2d(4, 3, 3, padding_mode="circular"), CHANNELS),
    "ConvTranspose2d": (lambda: nn.ConvTranspose2d(4, 3, 3), CHANNELS),
    "MultiheadAttention": (lambda: Attends(WIDTH, 2, batch_first=True), HIDDEN),
    "TransformerEncoderLayer": (lambda: nn.TransformerEncoderLayer(WIDTH, 2, 8, 0.0, batch_first=True), HIDDEN),
    "weight_norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, 3)), HIDDEN),
    "rms_norm": (lambda: Weighted(lambda x, w: functional.rms_norm(x, (WIDTH,), weight=w), (WIDTH,)), HIDDEN),
    "normalize": (lambda: Weighted(lambda x, w: functional.normalize(w, dim=0) * x, (WIDTH,)), HIDDEN),
    "softmax": (lambda: Weighted(lambda x, w: x * functional.softmax(w, -1), (WIDTH,)), HIDDEN),
    "silu": (lambda: Weighted(lambda x, w: x * functional.silu(w), (WIDTH,)), HIDDEN),
    "einsum": (lambda: Weighted(lambda x, w: torch.einsum("btd,de->bte", x, w), (WIDTH, 3)), HIDDEN),
    "cat": (lambda: Weighted(lambda x, *ws: x @ torch.cat(ws, 1), (WIDTH, 3), (WIDTH, 2)), HIDDEN),
    "stack": (lambda: Weighted(lambda x, *ws: x * torch.stack(ws).sum(0), (WIDTH,), (WIDTH,)), HIDDEN),
    "norm": (lambda: Weighted(lambda x, w: x / torch.norm(w, dim=-1), (WIDTH, WIDTH)), HIDDEN),
    "split": (lambda: Weighted(lambda x, w: x @ torch.split(w, 2, dim=1)[1], (WIDTH, 5)), HIDDEN),
    "methods": (lambda: Weighted(lambda x, w: x @ w.T.unflatten(0, (2, -1)).float().sum(0).t(), (WIDTH, 4)), HIDDEN),
    "operators": (lambda: Weighted(lambda x, w: -(w**2) * x @ w.diag() + (1 - w)[:3].sum(), (WIDTH,)), HIDDEN),
}


def code_of(module: nn.Module, x: torch.Tensor) -> str:
    """The one graph that Dynamo makes of a call, without the types of its inputs."""
    graphs: list[str] = []

    def backend(graph: fx.GraphModule, _):
        graphs.append(graph.code.partition("):")[2])
        return graph.forward

    torch.compile(module, backend=backend, fullgraph=True)(x)
    (code,) = graphs
    return code


@pytest.mark.parametrize("name", CASES)
def test_a_capture_is_that_of_parameters_in_memory(name):
    build, x = CASES[name]
    module = build()
    for parameter in (elsewhere := copy.deepcopy(module)).parameters():
        stash(parameter)
    assert all(map(is_offloaded, elsewhere.parameters()))
    found = code_of(elsewhere, x)
    torch._dynamo.reset()
    assert found == code_of(module, x)


def test_a_function_that_dynamo_calls_while_it_traces_reads_the_value():
    weight = nn.Parameter(torch.tensor([3.0]))
    stash(weight)
    size = torch.compiler.assume_constant_result(lambda: float(weight.detach()))
    assert torch.equal(
        torch.compile(lambda x: x * size(), backend="eager", fullgraph=True)(torch.ones(1)), torch.ones(1) * 3
    )


class Normed(Block):
    """The norm of llama and its descendants, as torch has it."""

    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)


def test_rms_norms_on_storage_learn_as_in_memory(tmp_path):
    ids, _ = batch(4)
    losses = []
    for place in ("memory", "storage"):
        model = GPT(Normed)
        model.norm = nn.RMSNorm(WIDTH)
        if place == "storage":
            optimizer = adamw([{"params": list(model.parameters())}])
            model.compile(backend="greedysnake", options=options(tmp_path, outputs="all"))
        else:
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses.append([])
        for _ in range(3):
            loss = model(ids, ids)[1]
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(float(loss.detach()))
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert all(map(is_offloaded, model.parameters()))
    optimizer.engine.tiers.close()
