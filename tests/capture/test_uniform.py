from __future__ import annotations

from dataclasses import replace

import expecttest
import pytest
import torch
from captured import WIDTH, Block, Tiny, assert_same_step, batch, captured
from torch import fx, nn

from gs_compile.capture.graph import Source, TensorSpec, UnitGraph
from gs_compile.capture.uniform import structure, uniform


class Scaled(Block):
    """A block with a constant in its code."""

    def __init__(self, factor=2.0, hidden=2 * WIDTH, operation=torch.tanh, frozen=False):
        super().__init__(hidden=hidden)
        self.factor, self.operation = factor, operation
        self.requires_grad_(not frozen)

    def forward(self, x):
        return x + self.down(self.operation(self.up(x))) * self.factor


def classes(*blocks):
    case = captured(Tiny(blocks=blocks), *batch(4))
    return uniform(case.split(), case.captured)


class TestText(expecttest.TestCase):
    def report(self, *blocks):
        return classes(*blocks).report

    def test_constant(self):
        self.assertExpectedInline(
            self.report(Scaled(), Scaled(), Scaled(3.0), Scaled(), Scaled(3.0)),
            """\
class 0: 3 layers: 0-1, 3
class 1: 2 layers: 2, 4
layer 2 differs from layer 0 at blocks.2: mul(3.0) against mul(2.0)""",
        )

    def test_shape(self):
        self.assertExpectedInline(
            self.report(Scaled(), Scaled(hidden=5), Scaled()),
            """\
class 0: 2 layers: 0, 2
class 1: 1 layers: 1
layer 1 differs from layer 0 at blocks.1.up.weight: float32[5, 8] against float32[16, 8]""",
        )

    def test_trainable_against_frozen(self):
        self.assertExpectedInline(
            self.report(Scaled(frozen=True), Scaled(), Scaled(), Scaled(frozen=True)),
            """\
class 0: 2 layers: 0, 3
class 1: 2 layers: 1-2
layer 1 differs from layer 0 at blocks.1.up.weight: float32[16, 8] against float32[16, 8] (trainable against frozen)""",
        )

    def test_number_of_operations(self):
        class Longer(Scaled):
            def forward(self, x):
                return super().forward(x).neg()

        self.assertExpectedInline(
            self.report(Scaled(), Scaled(), Longer()),
            """\
class 0: 2 layers: 0-1
class 1: 1 layers: 2
layer 2 differs from layer 0: 6 operations against 5""",
        )

    def test_no_two_alike(self):
        self.assertExpectedInline(
            self.report(Scaled(), Scaled(hidden=5), Scaled(3.0)),
            """\
class 0: 1 layers: 0
class 1: 1 layers: 1
class 2: 1 layers: 2
layer 1 differs from layer 0 at blocks.1.up.weight: float32[5, 8] against float32[16, 8]
layer 2 differs from layer 0 at blocks.2: mul(3.0) against mul(2.0)""",
        )

    def test_strides(self):
        class Turned(Block):
            def forward(self, x):
                return super().forward(x).mT.contiguous().mT

        self.assertExpectedInline(
            self.report(Turned(), Turned(), Turned()),
            """\
class 0: 1 layers: 0
class 1: 2 layers: 1-2
layer 1 differs from layer 0 at its x input: float32[2, 5, 8] against float32[2, 5, 8] (strides [40, 1, 5] against [40, 8, 1])""",
        )


# structure, by itself -------------------------------------------------------------------------------------------------

SPEC = TensorSpec((2, 3), (3, 1), torch.float32, torch.device("cpu"), True, (0,))


def unit(
    constant=1, *, target=torch.add, spec=SPEC, source="x", kind="x", names=("x", "y"), attribute=None, order=(0, 0)
):
    graph = fx.Graph()
    x = graph.placeholder(names[0])
    y = graph.call_function(target, (x, constant))
    y.name = names[1]
    z = graph.call_function(torch.mul, tuple((x, y)[i] for i in order))
    root = nn.Module()
    if attribute is not None:
        root.constant = attribute
        z = graph.call_function(torch.add, (z, graph.get_attr("constant")))
    z.meta["spec"] = spec
    graph.output((z,))
    return UnitGraph(0, fx.GraphModule(root, graph), (Source(source),), (spec,), (kind,))


NUMBERS = [0.0, -0.0, 0, False, 1, 1.0, True, 2, float("nan"), float("inf")]
OTHERS = [None, "", "1", (1, 2), (1, 2.0), (True, 2), slice(None, 1), slice(None, True), slice(1, None)]
CONSTANTS = [*NUMBERS, *OTHERS, torch.float32, torch.float16, torch.device("cpu")]


@pytest.mark.parametrize("left", range(len(CONSTANTS)))
def test_constants_are_told_apart(left):
    for right, constant in enumerate(CONSTANTS):
        assert (structure(unit(CONSTANTS[left])) == structure(unit(constant))) == (left == right)


@pytest.mark.parametrize(
    "other",
    [
        unit(target=torch.sub),
        unit(spec=replace(SPEC, shape=(2, 4))),
        unit(spec=replace(SPEC, stride=(1, 2))),
        unit(spec=replace(SPEC, dtype=torch.float16)),
        unit(spec=replace(SPEC, requires_grad=False)),
        unit(source="side"),
        unit(kind="loss"),
        unit(order=(0, 1)),
        unit(order=(1, 0)),
        unit(attribute=torch.ones(2)),
    ],
    ids=["operation", "shape", "stride", "dtype", "frozen", "source", "result", "wiring", "order", "attribute"],
)
def test_what_makes_a_difference(other):
    assert structure(unit()) != structure(other)


class Damped(Block):
    def forward(self, x, part):
        return torch.lerp(x, super().forward(x), part)


class Weighted(Tiny):
    """Each layer has a number from a vector of all, as nanochat's."""

    def __init__(self, taken):
        super().__init__(blocks=[Damped() for _ in range(3)])
        self.parts, self.taken = nn.Parameter(torch.tensor([0.5, 0.75, 1.5])), taken

    def forward(self, ids, labels):
        x = self.embed(ids)
        for block, part in zip(self.blocks, self.taken(self.parts), strict=True):
            x = block(x, part)
        return self.criterion(self.head(x), labels)


@pytest.mark.parametrize(
    "taken",
    [
        lambda parts: [parts[number] for number in range(3)],
        lambda parts: [parts.select(0, number).sigmoid() for number in range(3)],
        torch.unbind,
    ],
    ids=["index", "select", "unbind"],
)
def test_an_entry_of_what_all_layers_share_makes_no_difference(taken):
    model = Weighted(taken)
    case = captured(model, *batch(4))
    assert uniform(case.split(), case.captured).layer_classes == ((0, 1, 2),)
    assert_same_step(model, *batch())


def test_what_makes_no_difference():
    assert structure(unit()) == structure(unit(names=("hidden", "result")))
    other = replace(unit(), unit=7, sources=(Source("x", 3),))
    assert structure(unit()) == structure(other)
    assert hash(structure(unit())) == hash(structure(other))


def test_attributes_count_by_their_values():
    values = [[1.0, 2.0], [1.0, 3.0], [1, 2], [[1.0, 2.0]], [float("nan")], [0.0], [-0.0]]
    left, right = ([structure(unit(attribute=torch.tensor(value))) for value in values] for _ in range(2))
    assert left == right
    assert len(set(left)) == len(values)
