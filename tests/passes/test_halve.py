from __future__ import annotations

import re

import expecttest
import pytest
import torch
from captured import WIDTH, Tiny, batch, captured, run_units
from torch import nn
from torch.nn import functional

from gs_compile.capture.operations import operation
from gs_compile.capture.uniform import uniform
from gs_compile.errors import UniformityError


class Two(nn.Module):
    """Two branches, each with a way past it."""

    def __init__(self, hidden=2 * WIDTH):
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)

    def attention(self, x):
        return self.mix(torch.cumsum(x, 1))

    def feed_forward(self, x):
        return self.down(torch.tanh(self.up(x)))

    def forward(self, x):
        x = x + self.attention(x)
        return x + self.feed_forward(x)


class PostNorm(Two):
    """The norm stands after each addition, as in BERT."""

    def forward(self, x):
        x = functional.layer_norm(x + self.attention(x), (WIDTH,))
        return functional.layer_norm(x + self.feed_forward(x), (WIDTH,))


class InPlace(Two):
    def forward(self, x):
        mixed = self.attention(x)
        mixed += x
        return self.feed_forward(mixed).add_(mixed)


class Flat(Two):
    """The second addition is of another shape, as in OPT of old."""

    def forward(self, x):
        x = (x + self.attention(x)).contiguous()
        flat = x.flatten(0, 1)
        return (flat + self.feed_forward(flat)).view(x.shape)


class Parallel(Two):
    def forward(self, x):
        return x + self.attention(x) + self.feed_forward(x)


class Chain(Two):
    def forward(self, x):
        return self.feed_forward(self.attention(x))


class Three(Two):
    def forward(self, x):
        x = super().forward(x)
        return x + self.feed_forward(x)


class Narrow(Two):
    """What is added in the middle has not the shape of the input."""

    def forward(self, x):
        flat = x.flatten(0, 1)
        flat = flat + self.mix(flat)
        return (flat + self.feed_forward(flat)).view(x.shape)


def halves(*blocks, alone=False):
    case = captured(Tiny(blocks=blocks), *batch(4))
    return case.split(2, alone=alone, halved=True), case


def shown(error):
    """Its text, without this file's place and the numbers of lines."""
    return re.sub(r"\S*test_halve\.py:\d+", "test_halve.py", error.message)


class TestText(expecttest.TestCase):
    def test_what_cannot_be_cut(self):
        found = []
        for block in (Parallel, Chain, Three, Narrow):
            with pytest.raises(UniformityError) as caught:
                halves(block(), block())
            found.append(shown(caught.value))
        self.assertExpectedInline(
            "\n\n".join(found),
            """\
layer 0 (blocks.0) cannot be cut in two: the single schedule keeps a checkpoint between attention and feed-forward, at the first of two residual additions that all of the block passes through; here there is one, `x_1` at test_halve.py: return x + self.attention(x) + self.feed_forward(x): the two run side by side, or one of them is missing. Choose expert.schedule="vertical"

layer 0 (blocks.0) cannot be cut in two: the single schedule keeps a checkpoint between attention and feed-forward, at the first of two residual additions that all of the block passes through; here there is none. Choose expert.schedule="vertical"

layer 0 (blocks.0) cannot be cut in two: the single schedule keeps a checkpoint between attention and feed-forward, at the first of two residual additions that all of the block passes through; here there are 3: `x_1` at test_halve.py: x = x + self.attention(x), `x_2` at test_halve.py: return x + self.feed_forward(x), `x_3` at test_halve.py: return x + self.feed_forward(x). Choose expert.schedule="vertical"

layer 0 (blocks.0) cannot be cut in two: the single schedule keeps a checkpoint between attention and feed-forward, at the first of two residual additions that all of the block passes through; here the first of two, `flat_1`, is float32[10, 8] and the block's input float32[2, 5, 8]. Choose expert.schedule="vertical\"""",
        )

    def test_two_values_between_the_halves(self):
        class Both(Two):
            """A table of the block's own is read on either side."""

            def forward(self, x):
                table = torch.arange(x.shape[1])[:, None] * 0.1
                x = x + self.attention(x * table)
                return x + self.feed_forward(x * table)

        with pytest.raises(UniformityError) as caught:
            halves(Both(), Both())
        self.assertExpectedInline(
            shown(caught.value),
            """the attention half of layer 0 must pass exactly one tensor, to the next layer; found `table` float32[5, 1] read by the feed-forward half of layer 0 at test_halve.py: table = torch.arange(x.shape[1])[:, None] * 0.1; `x_1` float32[2, 5, 8] read by the feed-forward half of layer 0 at test_halve.py: x = x + self.attention(x * table). Carry it inside the hidden state, have all that goes on be of one floating dtype, or compute it in the embedding so that it becomes a side input""",
        )

    def test_classes_are_of_halves(self):
        cut, case = halves(Two(), Two(hidden=5), Two())
        self.assertExpectedInline(
            uniform(cut, case.captured).report,
            """\
class 0: the attention halves of 3 layers: 0-2
class 1: the feed-forward halves of 2 layers: 0, 2
class 2: the feed-forward halves of 1 layers: 1
the feed-forward half of layer 1 differs from the feed-forward half of layer 0 at blocks.1.up.weight: float32[5, 8] against float32[16, 8]""",
        )
        cut, case = halves(Wide(), Two(hidden=5))
        self.assertExpectedInline(
            uniform(cut, case.captured).report,
            """\
class 0: the attention halves of 1 layers: 0
class 1: the feed-forward halves of 1 layers: 0
class 2: the attention halves of 1 layers: 1
class 3: the feed-forward halves of 1 layers: 1
the attention half of layer 1 differs from the attention half of layer 0 at blocks.1: add() against mul(2.0)
the feed-forward half of layer 1 differs from the feed-forward half of layer 0 at blocks.1.up.weight: float32[5, 8] against float32[16, 8]""",
        )


class Wide(Two):
    """Another attention."""

    def attention(self, x):
        return self.mix(torch.cumsum(x, 1)) * 2.0


@pytest.mark.parametrize("block", [Two, PostNorm, InPlace, Flat])
def test_the_halves_compute_what_the_blocks_do(block):
    cut, case = halves(block(), block(), alone=True)
    assert (cut.layers_per_block, cut.num_layers) == (2, 4)
    whole = case.split(2, alone=True)
    boundaries = [unit.module.graph.output_node().args[0][0] for unit in cut.units[1:-1:2]]
    assert [operation(node) in ("add", "iadd") for node in boundaries] == [True, True]
    for name in ("mix", "up"):
        owners = [
            unit.unit
            for unit in cut.units
            for source in unit.sources
            if source.kind == "input" and f".{name}.weight" in case.captured.inputs[source.index].path
        ]
        assert owners == ([0, 2] if name == "mix" else [1, 3])
    found, expected = (run_units(units, case, 0, 2) for units in (cut, whole))
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def test_what_only_one_half_reads_is_made_there():
    class Late(Two):
        """A table made first, read last."""

        def forward(self, x):
            table = torch.arange(x.shape[1])[:, None] * 0.1
            return super().forward(x) * table

    cut, _ = halves(Late(), Late())
    made = [any(node.target is torch.arange for node in unit.module.graph.nodes) for unit in cut.units]
    assert made == [False, False, True, False, True, False]
