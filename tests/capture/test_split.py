from __future__ import annotations

from functools import partial

import expecttest
import pytest
import torch
import zoo
from captured import TOKENS, WIDTH, WORDS, Block, Tiny, assert_same_step, batch, captured, text, texts
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from parts import Any, Reading, Sides, assert_units_equal_the_model
from torch import nn
from torch.nn import functional

from gs_compile.capture.graph import OutputSpec, Source
from gs_compile.capture.loss import loss
from gs_compile.capture.split import split
from gs_compile.program.ir import EPILOGUE, PROLOGUE


class Shifting(Tiny):
    """Labels are shifted before the layers run, a mask is made for all of them, and glue stands between them."""

    def forward(self, ids, labels):
        mask = (ids > 0).to(torch.float32)[..., None]
        labels = functional.pad(labels[:, 1:], (0, 1), value=-100)
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x * mask) * 0.5
        return self.criterion(self.head(x), labels)


class TestText(expecttest.TestCase):
    def test_units(self):
        """Glue goes with the later block; labels are shifted in the head, and again where they are counted."""
        case = captured(Shifting(), *batch(4))
        cut = case.split(2)
        self.assertExpectedInline(
            texts([cut.units[0], cut.units[2]], case.captured),
            """\
# e returns x side
inputs ids, embed.weight
gt = gt(ids, 0)
to = to(gt, torch.float32)
mask = getitem(to, (Ellipsis, None))
x = embedding(ids, embed.weight, None, None, 2.0, False, False)
mul = mul(x, mask)
return (mul, mask)

# 1 returns x
inputs add, mask, blocks.1.up.weight, blocks.1.up.bias, blocks.1.down.weight, blocks.1.down.bias
x_1 = mul(add, 0.5)
mul_2 = mul(x_1, mask)
linear_2 = linear(mul_2, blocks.1.up.weight, blocks.1.up.bias)
tanh_1 = tanh(linear_2)
linear_3 = linear(tanh_1, blocks.1.down.weight, blocks.1.down.bias)
add_1 = add(mul_2, linear_3)
return (add_1,)""",
        )
        self.assertExpectedInline(
            text(cut.count.module, case.captured),
            """\
inputs labels
getitem_1 = getitem(labels, (slice(None, None, None), slice(1, None, None)))
labels = pad(getitem_1, (0, 1), constant, -100)
flatten_1 = flatten(labels)
ne = ne(flatten_1, -100)
sum_1 = sum(ne, dtype=torch.float32)
return (sum_1,)""",
        )
        assert [unit.unit for unit in cut.units] == [PROLOGUE, 0, 1, EPILOGUE]
        names = [entry.name for entry in case.captured.inputs]
        assert cut.count.sources == (Source("input", names.index("l_labels_")),)
        assert [source.kind for source in cut.units[2].sources] == ["x", "side", *["input"] * 4]
        assert [source.kind for source in cut.units[3].sources] == ["input", "x", "input", "input", "total"]
        assert cut.units[2].differentiable == (0, 2, 3, 4, 5)
        assert [spec.shape for spec in cut.sides[PROLOGUE]] == [(2, 5, 1)]


def test_a_layers_input_requires_a_gradient_even_above_frozen_layers():
    model = Tiny()
    model.embed.requires_grad_(False)
    model.blocks[0].requires_grad_(False)
    units = captured(model, *batch(4)).split().units
    assert [unit.specs[0].requires_grad for unit in units[1:]] == [True, True, True]
    assert units[1].differentiable == (0,)


@pytest.mark.parametrize("mapped", [torch.vmap(torch.sin), torch.vmap(torch.vmap(torch.sin))], ids=["one", "nested"])
def test_a_vmap_is_closed_in_the_unit_that_opens_it(mapped):
    class Mapped(Block):
        def forward(self, x):
            return super().forward(mapped(x))

    assert_units_equal_the_model(Tiny(lambda p, y: p, [Mapped(), Mapped()]), *batch(4))
    assert torch._C._functorch.maybe_current_level() is None


# Side inputs ----------------------------------------------------------------------------------------------------------


class Weighing(Block):
    """Integers, which no gradient reaches."""

    def forward(self, x, *sides):
        return super().forward(x * sides[0][..., None] if sides else x)


@pytest.mark.parametrize(
    ("make", "reads", "layer", "requires_grad"),
    [
        (lambda model, x, ids: [ids], [[0], [0], [0]], Weighing, [False]),
        (
            lambda model, x, ids: [functional.embedding(ids, model.table), ids.float()[..., None].cos()],
            [[0], [1], [0]],
            Reading,
            [True, False],
        ),
        (lambda model, x, ids: [x], [[], [0], [0]], Reading, [True]),
    ],
    ids=["the batch", "different ones", "the embedding, which is x0 too"],
)
def test_side_inputs(make, reads, layer, requires_grad):
    model = Sides(make, reads, layer)
    cut = captured(model, *batch(4)).split()
    assert cut.units[0].results == ("x", *["side"] * len(requires_grad))
    sides = [[source.index for source in unit.sources if source.kind == "side"] for unit in cut.units]
    assert sides == [[], *reads, []]
    assert [spec.requires_grad for spec in cut.sides[PROLOGUE]] == requires_grad
    assert_units_equal_the_model(model, *batch(4))


class Sinking(nn.Module):
    """Attention in many steps, by a mask, rotations and a sink, as gpt-oss has it."""

    def __init__(self):
        super().__init__()
        self.queries, self.keys, self.values = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.sink = nn.Parameter(torch.zeros(()))

    def forward(self, x, mask, *turns):
        cos, sin = (turn[..., None] for turn in turns)
        scores = (self.queries(x) * cos) @ (self.keys(x) * sin).mT + mask
        scores = torch.cat([scores, self.sink.expand(len(x), TOKENS, 1)], -1)
        return x + scores.softmax(-1)[..., :-1] @ self.values(x)


class OwnMasks(Tiny):
    """Each of two layers reads another mask than the other, and both the same turns."""

    def forward(self, ids, labels=None):
        x, turns = self.embed(ids), (ids.cos(), ids.sin())
        masks = [(ids > bound).float()[:, None] for bound in (3, 5)]
        for block, mask in zip(self.blocks, masks, strict=True):
            x = block(x, mask, *turns)
        return self.head(x)


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (partial(OwnMasks, blocks=[Sinking(), Sinking()]), (2, TOKENS, WIDTH)),
        pytest.param(partial(zoo.small, "gpt_oss"), (2, TOKENS, zoo.WIDTH), marks=pytest.mark.slow),
    ],
    ids=["two masks", "gpt_oss"],
)
def test_a_mask_that_the_first_of_two_layers_reads_is_not_what_goes_through_them(model, shape):
    units = captured(model(), batch(4)[0]).split().units
    assert [unit.result_specs[0].shape for unit in units[:-1]] == [shape] * 3


# Stacks and outputs ---------------------------------------------------------------------------------------------------


class TwoStacks(Tiny):
    def __init__(self, before, after):
        super().__init__(lambda p, y: p, [Block() for _ in range(after)])
        self.encoder = nn.ModuleList([Block() for _ in range(before)])

    def forward(self, ids, labels):
        x = self.embed(ids)
        for block in [*self.encoder, *self.blocks]:
            x = block(x)
        return self.head(x)


def test_stacks_that_follow_each_other_need_no_joint():
    model = TwoStacks(2, 3)
    cut = captured(model, *batch(4)).split()
    assert (cut.num_layers, cut.joints) == (5, frozenset())
    assert_units_equal_the_model(model, *batch(4))


class Joined(Tiny):
    """Blocks of another width read what an encoder of the batch makes; `tap` says what else of it is used."""

    def __init__(self, tap=None):
        super().__init__(lambda p, y: p, [Reading(4) for _ in range(2)])
        self.encoder = nn.ModuleList([Block() for _ in range(3)])
        self.narrow, self.wide, self.tap = nn.Linear(WIDTH, 4), nn.Linear(4, WIDTH), tap

    def forward(self, ids, labels):
        x, mask = self.embed(ids), (ids > 3).float()[..., None]
        y = self.narrow(x.flip(1)[:, 1:])
        below = []
        for block in self.encoder:
            x = block(x * mask)
            below.append(x)
        given = x if self.tap == "layer" else x.tanh()
        if self.tap == "layers":  # as Llama 3.2's decoder reads hidden states of layers of the encoder of images
            given = given + below[0] * below[1]
        sides = given[:, 1:, :4] * mask[:, 1:], mask[:, 1:]
        for block in self.blocks:
            y = block(y, *sides)
        y = self.wide(y)
        if self.tap == "below":  # as CLIPSeg's decoder reads layers of the encoder of images, behind one of texts
            return self.head(y + below[0].mean(1, keepdim=True))
        return self.head(y + given.mean(1, keepdim=True) if self.tap == "head" else y), *([x] if self.tap else [])


@pytest.mark.parametrize("tap", [None, "layer", "head", "below"])
def test_a_joint_begins_another_stack(tap):
    """With values of its own, and with what it hands on of those below."""
    model = Joined(tap)
    cut = captured(model, *batch(4)).split()
    assert (cut.num_layers, cut.joints) == (6, frozenset({3}))
    assert [spec.shape for spec in (unit.result_specs[0] for unit in cut.units[:-1])] == [
        *[(2, 5, 8)] * 4,
        *[(2, 4, 4)] * 3,
    ]
    assert [unit.is_joint for unit in cut.units] == [False] * 4 + [True] + [False] * 3
    sides = [{source.kind for source in unit.sources} & {"side"} for unit in cut.units]
    assert sides == [set(), set(), *[{"side"}] * 5, {"side"} if tap == "head" else set()]
    assert_units_equal_the_model(model, *batch(4))


def test_a_stack_that_gives_another_more_than_its_last_layer_makes_is_part_of_a_unit():
    """Fault: both were layers, and what the lower ones give the joint was refused."""
    model = Joined("layers")
    cut = captured(model, *batch(4)).split()
    assert (cut.num_layers, cut.joints) == (3, frozenset())
    assert_units_equal_the_model(model, *batch(4))


def test_a_head_of_several_layers_is_no_stack():
    model = Tiny(lambda p, y: p)
    model.head = nn.Sequential(nn.Linear(WIDTH, 64), nn.Linear(64, WORDS))
    cut = captured(model, *batch(4)).split()
    assert (cut.num_layers, cut.joints) == (2, frozenset())


def test_a_stack_that_is_smaller_than_a_layer_is_part_of_a_unit():
    model = TwoStacks(2, 3)
    model.encoder = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])
    cut = captured(model, *batch(4)).split()
    assert (cut.num_layers, cut.joints) == (3, frozenset())


class Halves(Block):
    """Its output is one half of what is in memory."""

    def __init__(self):
        super().__init__()
        self.down = nn.Linear(2 * WIDTH, 2 * WIDTH)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x))).chunk(2, -1)[1]


class WithGaps(Tiny):
    """Its embedding hands on tokens out of a row that has more; hidden states are returned."""

    def __init__(self):
        super().__init__(blocks=[Halves(), Halves()])

    def forward(self, ids, labels):
        states = [self.embed(ids)[:, :-1]]
        for block in self.blocks:
            states.append(block(states[-1]))
        return self.criterion(self.head(states[-1]), labels[:, 1:]), *states[:2]


def test_checkpoints_have_no_gaps_in_memory():
    """Where they come from is a stretch without any, and compiled code reads what has the strides that it was made for."""
    model, arguments = WithGaps(), batch(4, ignored=False)
    cut = captured(model, *arguments).split(2)
    checkpoints = [unit.result_specs[unit.results.index("x")] for unit in cut.units[:-1]]
    assert all(spec.is_dense for spec in checkpoints)
    assert len({(spec.shape, spec.stride) for spec in checkpoints}) == 1
    assert_same_step(model, *arguments)


def test_outputs_say_who_makes_them():
    class Giving(Tiny):
        def forward(self, ids, labels):
            x = self.embed(ids)
            states = [x]
            for block in self.blocks:
                x = block(x)
                states.append(x)
            logits = self.head(x)
            return (
                functional.cross_entropy(logits.flatten(0, 1), labels.flatten()),
                logits,
                *states,
                logits.detach().sum(),
            )

    model = Giving()
    case = captured(model, *batch(4))
    found = [(o.combine, o.kind, o.unit, o.index, o.dim) for o in case.split().outputs]
    assert found == [
        ("sum", "loss", EPILOGUE, 0, 0),
        ("concat", "y", EPILOGUE, 0, 0),
        ("concat", "x", 0, 0, 0),
        ("concat", "x", 1, 0, 0),
        ("concat", "x", 2, 0, 0),
        ("sum", "y", EPILOGUE, 1, 0),
    ]
    assert_units_equal_the_model(model, *batch(4))


def test_what_is_not_kept_is_not_computed():
    case = captured(Tiny(lambda p, y: (p.exp().sum(), p.sinh())), *batch(4))
    cut = split(loss(case.specialized(2), case.captured, kept=[True, False], alone=False), case.captured)
    assert cut.outputs[1] == OutputSpec("constant")
    names = [node.name for node in cut.units[-1].module.graph.nodes]
    assert "exp" in names
    assert "sinh" not in names


# Any model of blocks --------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=8)
@given(
    st.integers(2, 4),
    st.sampled_from([None, "before", "after"]),
    st.sampled_from([None, "batch", "made"]),
    st.booleans(),
    st.sampled_from(["loss", "logits", "states"]),
)
def test_units_one_after_the_other_equal_the_model(layers, glue, side, in_place, outputs):
    torch.manual_seed(0)
    assume(not (in_place and outputs == "states" and glue != "after"))  # refused, see above
    assert_units_equal_the_model(Any(layers, glue, side, in_place, outputs), *batch(3))
