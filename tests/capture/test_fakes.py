"""What `fakes.py` says that operators make of symbolic sizes is what their decompositions make."""

from __future__ import annotations

import fakes
import pytest
import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.nn import functional
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
SIZES = {
    "x": (5, 7, 32),
    "transposed": (5, 7, 32),
    "labels": (5, 7),
    "others": (5, 7),
}  # of which the first is a symbol
WEIGHT, VECTOR, TABLE = (48, 32), (32,), (70, 32)


def symbolic(mode, name, dtype):
    shape = SIZES[name]
    made = torch.zeros(shape, dtype=torch.long if name in ("labels", "others") else dtype)
    dynamic = [DimDynamic.DYNAMIC, *[DimDynamic.STATIC] * (len(shape) - 1)]
    context = StatelessSymbolicContext(dynamic_sizes=dynamic)
    found = mode.from_tensor(made, symbolic_context=context, source=ConstantSource(name))
    return found.transpose(1, 2) if name == "transposed" else found


CALLS = {
    "gelu": lambda given: functional.gelu(given("x")),
    "gelu by tanh": lambda given: functional.gelu(given("x"), approximate="tanh"),
    "elements": lambda given: [
        getattr(given("x"), name)() for name in "tanh relu sigmoid exp log sqrt rsqrt sin cos neg".split()
    ],
    "silu": lambda given: functional.silu(given("x")),
    "of another order": lambda given: [given("transposed").tanh(), functional.gelu(given("transposed"))],
    "of whole numbers": lambda given: [given("labels").sqrt(), given("labels").neg()],
    "powers": lambda given: [given("x").pow(2), given("x").pow(0.5), given("labels").pow(2)],
    "means": lambda given: [given("x").mean(*each) for each in ((-1, True), (-1,), ((0, 2),), (1, True))],
    "means of another order": lambda given: [given("transposed").mean(1), given("labels").float().mean(-1)],
    "of dimensions": lambda given: [
        given("x").transpose(1, 2),
        given("x").transpose(-1, 0),
        given("x").permute(2, 0, 1),
        given("x")[1:].transpose(0, 1),
    ],
    "padded": lambda given: [
        functional.pad(given("labels"), (0, 1), value=-100),
        functional.pad(given("x"), (1, 2, 3, 0)),
        functional.pad(given("x"), (-1, 2)),
    ],
    "slices": lambda given: [
        *(given("x")[:, each] for each in (slice(1, None), slice(-3, -1), slice(2, 90), slice(5, 3), slice(0, 7, 3))),
        given("x")[2:],
        given("transposed")[..., 1:],
        given("labels")[:, :-1],
    ],
    "dropout": lambda given: [functional.dropout(given("x"), p) for p in (0.0, 0.3, 1.0)],
    "softmax": lambda given: [given("x").softmax(-1), given("transposed").log_softmax(1), given("x").log_softmax(2)],
    "layer norm": lambda given: [
        functional.layer_norm(given("x"), VECTOR, *pair)
        for pair in ((given(VECTOR), given(VECTOR)), (given(VECTOR),), (None, given(VECTOR)), ())
    ],
    "layer norm of two dimensions": lambda given: functional.layer_norm(given("x"), (7, 32)),
    "layer norm of another order": lambda given: functional.layer_norm(given("transposed"), (7,)),
    "its statistics": lambda given: aten.native_layer_norm(given("x"), VECTOR, given(VECTOR), given(VECTOR), 1e-5),
    "linear": lambda given: functional.linear(given("x"), given(WEIGHT), given((48,))),
    "linear without": lambda given: functional.linear(given("x"), given(WEIGHT)),
    "linear of another order": lambda given: functional.linear(given("transposed"), given((48, 7)), given((48,))),
    "addmm": lambda given: torch.addmm(given((1, 48)), given("x").flatten(0, 1), given(WEIGHT).t()),
    "embedding": lambda given: [
        functional.embedding(each, given(TABLE)) for each in (given("labels"), given("labels").flatten())
    ],
    "embedding of another order": lambda given: functional.embedding(given("labels").t(), given(TABLE)),
    "loss": lambda given: [
        functional.cross_entropy(given("x").flatten(0, 1), given("labels").flatten(), reduction=each)
        for each in ("mean", "sum", "none")
    ],
    "loss of weights": lambda given: functional.cross_entropy(
        given("x").flatten(0, 1), given("labels").flatten(), given(VECTOR)
    ),
    "loss of another symbol, which has to be the same": lambda given: functional.cross_entropy(
        given("x").flatten(0, 1), given("others").flatten()
    ),
    "views": lambda given: [
        given("x").view(*shape) for shape in ((-1, 32), (-1, 7, 4, 8), (-1,), (1, -1, 7, 32), (-1, 224, 1))
    ],
    "views of another order": lambda given: [
        given("transposed").view(-1, 4, 8, 7),
        given("x")[:, 1:].view(-1, 6, 2, 16),
    ],
}


def made(call, dtype):
    """Shapes, strides and types of what a call makes, whether it shares memory, and what has been found out of sizes."""
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    known = {}

    def given(what):
        if what not in known:
            known[what] = symbolic(mode, what, dtype) if what in SIZES else torch.zeros(what, dtype=dtype)
        return known[what]

    with mode, enable_python_dispatcher():
        found = tree_leaves(call(given))
    memory = {each.untyped_storage()._cdata for each in known.values() if isinstance(each, torch.Tensor)}
    return [
        (str(tuple(each.shape)), str(each.stride()), each.dtype, each.device, each.untyped_storage()._cdata in memory)
        for each in found
    ], sorted(map(str, env.replacements.items()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_it_is_what_decompositions_make(call, dtype, monkeypatch):
    found = made(call, dtype)
    for operator in fakes.KNOWN:
        monkeypatch.delitem(fake_impls.get_fast_op_impls(), operator, raising=False)
    assert made(call, dtype) == found
