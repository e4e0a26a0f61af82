"""In a capture a parameter on the tiers is an ordinary parameter, whatever function takes it; it learns the same bits."""

from __future__ import annotations

import copy

import pytest
import torch
from functions import Use, Uses, every_use
from tiered import adamw, options
from torch import fx, nn
from torch.nn import functional
from zoo import GPT, TOKENS, WIDTH, Block, batch

import gs_compile
from gs_compile.capture.dynamo import complete_guards
from gs_compile.model.residency import is_offloaded, stash

# That they are read by others is what is tested.
pytestmark = pytest.mark.filterwarnings("ignore:a graph of another backend:gs_compile.errors.UncapturedWarning")


class Weighted(nn.Module):
    """A function of torch applied to the input and parameters of these shapes."""

    def __init__(self, function, *shapes):
        super().__init__()
        self.function = function
        self.weights = nn.ParameterList(torch.rand(shape) for shape in shapes)

    def forward(self, x):
        return self.function(x, *[self.weights[index] for index in range(len(self.weights))])


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

    def greedysnake(graph: fx.GraphModule, _):
        complete_guards()
        graphs.append(graph.code.partition("):")[2])
        return graph.forward

    torch.compile(module, backend=greedysnake, fullgraph=True)(x)
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


# Every function of torch --------------------------------------------------------------------------------------------

PARTS = 128
DRAWS = " torch.nn.init."  # a forward that draws a parameter anew trains nothing: it is refused, in other words
OTHERWISE = {  # what a capture has otherwise of a parameter on the tiers, and why nobody trains with it
    "override torch.Tensor.grad.__get__": "the gradient of the step before",
    "override torch.Tensor._grad.__get__": "the same",
    "override torch.Tensor._base.__get__": "a parameter is no view",
    "override torch.Tensor.register_hook": "refused: its gradient goes to its update alone",
    "view_as_complex": "Dynamo alone takes its memory for one element; the backend's own captures know better, below",
    "override torch.Tensor._clear_non_serializable_cached_data": "Dynamo fails on it in either case, in other words",
}


def outcome(use: Use, *, elsewhere: bool) -> str:
    """The graph that Dynamo makes of a function of parameters, or the first line of why it makes none."""
    torch._dynamo.reset()
    module = Uses([use])
    for parameter in module.parameters() if elsewhere else ():
        stash(parameter)
    try:
        return code_of(module, torch.zeros(2))
    except Exception as error:  # noqa: BLE001 (of whatever kind: that it is the same is the claim)
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0]}".replace(
            "OffloadedParameter", "Parameter"
        )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, PARTS))])
def test_a_capture_of_each_function_is_that_of_parameters_in_memory(part):
    known = {*OTHERWISE, *(name for name in every_use() if DRAWS in name)}
    uses = [every_use()[name]() for name in sorted(every_use().keys() - known)[part::PARTS]]
    found = {use.name: (outcome(use, elsewhere=True), outcome(use, elsewhere=False)) for use in uses}
    assert {name: pair for name, pair in found.items() if pair[0] != pair[1]} == {}
    assert sum("return" in code for code, _ in found.values()) > len(found) / 4  # graphs, not refusals alone


@pytest.mark.parametrize("name", ["torch.Tensor.grad.__get__", "torch.Tensor._base.__get__"])
def test_what_a_capture_has_otherwise_is_a_refusal(name):
    use = every_use()[f"override {name}"]()
    assert "return" in outcome(use, elsewhere=False)
    assert outcome(use, elsewhere=True).startswith("Unsupported: Unsupported tensor subclass attribute access")


def test_another_backend_reads_the_value():
    weight = nn.Parameter(torch.arange(6.0).reshape(2, 3))
    expected = weight.detach().T.clone()
    stash(weight)
    transpose = torch.compile(lambda x: x @ weight.T, backend="eager")
    with torch.no_grad():
        assert torch.equal(transpose(torch.eye(3)), expected)
        assert weight.stride() == (3, 1)


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


class Turned(nn.Module):
    """A block with complex entries."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8, 2) / 4)

    def forward(self, x):
        return x + (x.to(torch.complex64) @ torch.view_as_complex(self.weight)).real


class Turns(nn.Module):
    def __init__(self):
        super().__init__()
        self.ends, self.blocks = nn.ModuleList((nn.Linear(8, 8), nn.Linear(8, 1))), nn.ModuleList((Turned(), Turned()))

    def forward(self, x):
        x = self.ends[0](x)
        for block in self.blocks:
            x = block(x)
        return self.ends[1](x)


def test_a_capture_by_the_backend_knows_the_strides_of_a_value_on_storage(tmp_path):
    torch.manual_seed(0)
    model = Turns()
    plain, x = copy.deepcopy(model), torch.randn(4, 8)
    for parameter in model.parameters():
        stash(parameter)
    optimizer = gs_compile.SGD(model.parameters(), lr=0.1)
    model.compile(backend="greedysnake", options=options(tmp_path, outputs="all"))
    for each, step in ((model, optimizer), (plain, torch.optim.SGD(plain.parameters(), lr=0.1))):
        each(x).mean().backward()
        step.step()
    torch.testing.assert_close(model.state_dict(), plain.state_dict())


# Learned on storage --------------------------------------------------------------------------------------------------

# Of many kinds: elementwise, reductions, views, copies by place in memory, linear algebra, indices, norms and losses.
SOME = "sin logsumexp unfold as_strided_scatter linalg.det index_add nn.functional.rms_norm nn.functional.huber_loss".split()
NAMES = (
    "sin add amax logsumexp cumsum as_strided as_strided_copy as_strided_scatter unfold cat einsum matmul linalg.det "
    "fft.rfft gather index_add where nn.functional.rms_norm nn.functional.layer_norm nn.functional.conv2d "
    "softmax nn.functional.huber_loss view_as_complex"
).split()


class OfFunctions(nn.Module):
    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 4)
        self.blocks = nn.ModuleList(Uses([every_use()[name]() for name in names]) for _ in range(2))

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return x.square().sum()


def learned(make, names, storage):
    """The loss of a step and the values after it, whose change is the gradient."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = OfFunctions(names)
    optimizer = make(model.parameters(), lr=1.0)
    model.compile(backend="greedysnake", options=options(storage))
    loss = model(torch.arange(12).reshape(4, 3) % 11)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    values = [loss.detach(), *(value.clone() for value in model.state_dict().values())]
    if isinstance(optimizer, gs_compile.SGD):
        optimizer.engine.tiers.close()
    return values


@pytest.mark.parametrize("names", [SOME, pytest.param(NAMES, marks=pytest.mark.slow)], ids=["one of a kind", "all"])
def test_functions_of_parameters_on_storage_learn_as_in_memory(names, tmp_path):
    in_memory, on_storage = (learned(each.SGD, names, tmp_path) for each in (torch.optim, gs_compile))
    assert all(bool(torch.isfinite(value).all()) for value in in_memory)
    torch.testing.assert_close(on_storage, in_memory, rtol=0, atol=0)
