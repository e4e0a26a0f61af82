from __future__ import annotations

import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, wait
from types import SimpleNamespace

import pytest
import torch
from captured import WIDTH, Block, Tiny, batch, captured, compiled
from parts import code_and_autograd
from torch import nn
from torch.nn import functional

from gs_compile.capture.inductor import Generator
from gs_compile.codegen import codes as shared
from gs_compile.codegen import differentiate as differentiate_module
from gs_compile.codegen.differentiate import Differentiated
from gs_compile.program.ir import EPILOGUE, PROLOGUE

EAGER = Generator("eager")
COMPILERS = [EAGER, pytest.param(Generator("inductor"), marks=pytest.mark.slow)]


def units_of(model, size=2, tokens=5):
    return captured(model, *batch(4, tokens)).split(size).units


def block_unit(block):
    """The unit of one layer in a model of two such layers."""
    torch.manual_seed(0)
    return units_of(Tiny(lambda p, y: p, [block(), block()]))[1]


def inputs_of(unit):
    torch.manual_seed(1)
    inputs = []
    for spec in unit.specs:
        if spec.dtype.is_floating_point:
            value = torch.rand(spec.shape).to(spec.dtype).add(0.1)
        else:
            value = torch.randint(2, 5, spec.shape).to(spec.dtype)
        inputs.append(value.requires_grad_(spec.requires_grad))
    return inputs


def dense(terms):
    return [term if isinstance(term, torch.Tensor) else term.dense() for term in terms]


def assert_equals_autograd(unit, generator=EAGER, tolerance=1e-6):
    for name in ("backward", "both") if "loss" in unit.results else ("backward",):
        found, expected = code_and_autograd(unit, generator, name)
        torch.testing.assert_close(dense(found), list(expected), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("generator", COMPILERS)
def test_every_unit_of_a_model(generator):
    torch.manual_seed(0)
    units = units_of(Tiny(lambda p, y: functional.mse_loss(p, p.detach() + 1, reduction="sum")))
    assert [unit.unit for unit in units] == [PROLOGUE, 0, 1, EPILOGUE]
    for unit in units:
        assert_equals_autograd(unit, generator)


class Cubed(torch.autograd.Function):
    """With a gradient that autograd alone would not give."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * x * 5


# Dynamo itself makes one, to look at it
INSTANTIATED = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


class OwnFunction(Block):
    def forward(self, x):
        return super().forward(Cubed.apply(x))


@torch.library.custom_op("greedysnake_tests::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


doubled.register_fake(lambda x: torch.empty_like(x))
doubled.register_autograd(lambda ctx, gradient: gradient * 7)


class OwnOperator(Block):
    def forward(self, x):
        return super().forward(doubled(x))


class Ungraded(Block):
    def forward(self, x):
        with torch.no_grad():
            scale = x.exp().mean(-1, keepdim=True)
        return super().forward(x / scale)


class Frozen(Block):
    def __init__(self):
        super().__init__()
        self.up.requires_grad_(False)

    def forward(self, x):
        return super().forward(x + x.softmax(-1) * x[:, :1].detach())


class Transposed(Block):
    """The gradient of softplus comes transposed, and goes on with other strides than it was traced with."""

    def forward(self, x):
        return super().forward(x + functional.softplus(self.up(x)).mT.contiguous().sum(1)[..., None])


@INSTANTIATED
@pytest.mark.parametrize("generator", COMPILERS)
@pytest.mark.parametrize("block", [OwnFunction, OwnOperator, Ungraded, Frozen, Transposed])
def test_hard_blocks(block, generator):
    assert_equals_autograd(block_unit(block), generator, 1e-5)


def test_a_parameter_that_no_gradient_reaches_gets_zeros():
    class Idle(Block):
        def forward(self, x):
            return x + self.up(x)[..., :WIDTH] + self.down(self.up(x)).detach()

    unit = block_unit(Idle)
    backward = Differentiated(unit, EAGER).function("backward")
    gradients = backward(*[t.detach() for t in inputs_of(unit)], torch.ones(2, 5, WIDTH))
    assert len(gradients) == len(unit.differentiable)
    assert [tuple(g.shape) for g in gradients] == [unit.specs[i].shape for i in unit.differentiable]
    assert sum(not g.any() for g in gradients) == 2


class Attending(Block):
    """Attention is one operation, marked as drawing whatever its rate."""

    def forward(self, x):
        return super().forward(functional.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None])[:, 0])


@pytest.mark.parametrize(
    ("block", "draws"),
    [
        (lambda: nn.Sequential(Block(), nn.Dropout(0.5)), True),
        (lambda: nn.Sequential(Block(), nn.Dropout(0.0)), False),
        (Block, False),
        (Attending, False),
    ],
)
def test_draws_random(block, draws):
    assert Differentiated(block_unit(block), EAGER).draws_random is draws


class InPlace(Block):
    def forward(self, x):
        y = self.up(x)
        y[:, :1].mul_(2.0)
        return x + self.down(y)


def recorded(monkeypatch):
    """The names of what is traced."""
    names, trace = [], Differentiated._traced
    monkeypatch.setattr(
        Differentiated, "_traced", lambda code, name, *rest: names.append(name) or trace(code, name, *rest)
    )
    return names


@INSTANTIATED
@pytest.mark.parametrize(
    "block", [Block, OwnFunction, OwnOperator, Ungraded, Frozen, Transposed, Attending, nn.Dropout, InPlace]
)
def test_a_training_step_is_traced_once(block, monkeypatch):
    """Its forward and backward are what they are when each is traced; where the order of operations counts each is."""
    units = units_of(Tiny(blocks=[block(), block()] if block is not nn.Dropout else [Block(), Block()]))
    if block is nn.Dropout:
        units = [block_unit(lambda: nn.Sequential(Block(), nn.Dropout(0.5)))]
    names, is_once = recorded(monkeypatch), block not in (nn.Dropout, InPlace)
    for unit in units:
        alone, code, both = Differentiated(unit, EAGER), Differentiated(unit, EAGER), "loss" in unit.results
        wanted = ("forward", "both") if both else ("forward", "backward")
        expected = [alone.graph(name).code for name in wanted]
        names.clear()
        code.trace_step()
        assert [code.graph(name).code for name in wanted] == expected
        known = is_once or unit.unit in (PROLOGUE, EPILOGUE)
        assert names == (["both" if both else "joint"] if known else ["joint", *wanted])


def test_levels_are_cut_of_what_was_traced(monkeypatch):
    names, code = recorded(monkeypatch), Differentiated(block_unit(Block), EAGER)
    code.trace_step()
    before = [code.graph(name).code for name in ("forward", "backward")]
    levels = code.levels
    assert names == ["joint"]
    assert levels == Differentiated(block_unit(Block), EAGER).levels
    assert [code.graph(name).code for name in ("forward", "backward")] == before


def operations(graph_module):
    return [node.target.__name__ for node in graph_module.graph.nodes if node.op == "call_function"]


def test_the_backward_recomputes_only_what_it_needs():
    """The result of the last linear is not needed for any gradient."""
    unit = block_unit(Block)
    code = Differentiated(unit, EAGER)
    counts = {name: Counter(operations(code.graph(name))) for name in ("forward", "backward")}
    assert (counts["forward"]["addmm.default"], counts["backward"]["addmm.default"]) == (2, 1)
    assert (counts["forward"]["tanh.default"], counts["backward"]["tanh.default"]) == (1, 1)
    assert counts["backward"]["mm.default"] == 4


def test_autograd_stays_in_the_thread_that_traces(monkeypatch):
    """Autograd's own threads, one for each GPU, know nothing of the tensors without memory."""
    pull, threads = differentiate_module.Differentiated._pull, []

    def seen(*given):
        threads.append(torch.autograd.is_multithreading_enabled())
        return pull(*given)

    monkeypatch.setattr(differentiate_module.Differentiated, "_pull", seen)
    Differentiated(block_unit(Block), EAGER).graph("backward")
    assert threads == [False]
    assert torch.autograd.is_multithreading_enabled()


def test_dynamo_compiles_nothing_in_another_thread_while_code_is_traced(monkeypatch):
    """It would take the methods of modules as they are patched for the time of a trace."""
    pull, made, order = differentiate_module.Differentiated._pull, [], []

    def backend(graph, _):
        order.append("compiled")
        return graph

    def seen(*given):
        made.append(pool.submit(torch.compile(Block(), backend=backend), torch.ones(2, 3, WIDTH)))
        wait(made, 0.5)
        order.append("traced")
        return pull(*given)

    monkeypatch.setattr(differentiate_module.Differentiated, "_pull", seen)
    with ThreadPoolExecutor(1) as pool:
        Differentiated(block_unit(Block), EAGER).graph("backward")
        assert made[0].result(60).shape == (2, 3, WIDTH)
    assert order == ["traced", "compiled"]


def test_compiled_once_for_all_layers(monkeypatch):
    made = []
    compiled_function = differentiate_module.Differentiated._compiled

    def counting(self, name, graph):
        made.append((self.unit.unit, name))
        return compiled_function(self, name, graph)

    monkeypatch.setattr(differentiate_module.Differentiated, "_compiled", counting)
    monkeypatch.setattr(shared, "_codes", shared.Codes())
    args = batch(4)
    run = compiled(Tiny(blocks=[Block() for _ in range(6)]))
    loss = run(*args)
    once = [("e", "forward"), ("e", "backward"), (0, "forward"), (0, "backward"), ("h", "both")]
    assert made == once  # before the backward, which runs in a thread of autograd's where a device has one
    loss.backward()
    run(*args).backward()
    compiled(Tiny(blocks=[Block() for _ in range(9)]))(*args).backward()
    assert made == once


def test_threads_that_ask_for_code_at_once_share_it():
    codes, together = shared.Codes(), threading.Barrier(4)

    def make(common):
        time.sleep(0.01)
        return SimpleNamespace(common=common or object())

    def ask(_):
        together.wait(60)
        return codes.get("a layer", (1,), make)

    with ThreadPoolExecutor(4) as pool:
        assert len(set(map(id, pool.map(ask, range(4))))) == 1
