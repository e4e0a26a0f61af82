"""split: what cannot be cut into units is refused, by name."""

from __future__ import annotations

import re

import pytest
import torch
from captured import WIDTH, Block, Tiny, batch, captured
from parts import Any, Reading, Sides, assert_units_equal_the_model
from torch import nn

from gs_compile.errors import MutationError, UniformityError


def refused(error, model, *args):
    with pytest.raises(error) as caught:
        captured(model, *(args or batch(4))).split()
    return str(caught.value)


class Two(Block):
    def forward(self, pair):
        x, y = pair
        return super().forward(x), y + x.mean(-1)


class Carrying(Tiny):
    def __init__(self):
        super().__init__(lambda p, y: p, [Two(), Two()])

    def forward(self, ids, labels):
        x = self.embed(ids)
        pair = x, torch.zeros_like(x)[..., 0]
        for block in self.blocks:
            pair = block(pair)
        return self.criterion(self.head(pair[0] + pair[1][..., None]), labels)


def test_two_tensors_carried():
    message = refused(UniformityError, Carrying())
    assert re.search(
        r"layer 0 must pass exactly one tensor, to the next layer; found `\w+` float32\[2, 5, 8\]", message
    )
    assert re.search(r"; `\w+` float32\[2, 5\] read by layer 1 at .*test_split_refusals.py:\d+: return super", message)
    assert message.endswith(
        "Carry it inside the hidden state, or compute it in the embedding so that it becomes a side input"
    )


class Skipping(Tiny):
    def forward(self, ids, labels):
        first = self.blocks[0](self.embed(ids))
        second = self.blocks[1](first)
        return self.head(self.blocks[2](second + first) if len(self.blocks) > 2 else second + first)


@pytest.mark.parametrize(("layers", "last"), [(3, "layer 2"), (2, "the epilogue")])
def test_skip_connections(layers, last):
    """Glue goes with the later block, so what comes after the next layer reads the first one's output."""
    message = refused(UniformityError, Skipping(blocks=[Block() for _ in range(layers)]))
    assert "must pass exactly one tensor" in message
    assert f"read by layer 1, {last}" in message


def test_blocks_in_reverse():
    class Reversed(Tiny):
        def forward(self, ids, labels):
            return self.head(self.blocks[0](self.blocks[1](self.embed(ids))))

    message = refused(UniformityError, Reversed())
    assert message.startswith("the blocks do not run one after the other: `")


@pytest.mark.parametrize(("blocks", "found"), [([], "no numbered modules at all"), ([Block()], "blocks (1 block)")])
def test_no_repeated_block(blocks, found):
    message = refused(UniformityError, Tiny(blocks=blocks))
    assert message.startswith(
        f"the model has no repeated block: {found}. greedysnake schedules a stack of equal blocks"
    )
    assert message.endswith("keep the blocks in an nn.ModuleList (or nn.Sequential) of two or more")


def test_no_embedding_like_the_blocks_input():
    class Narrow(Tiny):
        def forward(self, ids, labels):
            return self.head(self.blocks[1](self.blocks[0](self.embed(ids)[..., :1])))

    message = refused(UniformityError, Narrow(lambda p, y: p, [nn.Linear(1, WIDTH), Block()]))
    assert re.match(
        r"the first block reads nothing like what blocks pass on \(\w+: float32\[2, 5, 8\]\); the embedding must",
        message,
    )


class Buffered(Block):
    def __init__(self, change):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.change = change

    def forward(self, x):
        self.change(self)
        return super().forward(x) + self.calls


def test_a_buffer_changed_in_place():
    blocks = [Buffered(lambda block: block.calls.add_(1)) for _ in range(2)]
    message = refused(MutationError, Tiny(blocks=blocks))
    assert message.startswith(
        "the model changes its input or buffer `l_self_modules_blocks_modules_0_buffers_calls_` in place ("
    )
    assert "block.calls.add_(1)" in message
    assert message.endswith("make it a result of forward, or freeze it (eval mode)")


def test_batch_norm_changes_its_statistics():
    class Normed(Block):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(5)

        def forward(self, x):
            return super().forward(self.norm(x))

    case = captured(Tiny(blocks=[Normed(), Normed()]), *batch(4))
    with pytest.raises(MutationError, match="changes its input or buffer"):
        case.split(4, alone=True)


def test_a_side_input_changed_in_place():
    class Changing(Reading):
        def forward(self, x, side):
            side.add_(1)
            return super().forward(x, side)

    model = Sides(lambda model, x, ids: [ids.float()[..., None].cos()], [[0], [0], [0]], Changing)
    message = refused(MutationError, model)
    assert re.search(
        r"`\w+` is read by several units and changed in place at .*side.add_\(1\); use the out-of-place form", message
    )


def test_a_layers_input_changed_in_place():
    """The checkpoint stays what it was: a layer changes a copy."""

    class Changing(Block):
        def forward(self, x):
            x.mul_(0.5)
            return super().forward(x)

    torch.manual_seed(0)
    assert_units_equal_the_model(Tiny(lambda p, y: p, [Changing(), Changing()]), *batch(4))


def test_a_returned_layer_input_changed_in_place():
    """The glue goes with the next layer, which changes a copy; the user would see the change."""
    message = refused(MutationError, Any(2, None, None, True, "states"))
    assert re.match(
        r"the model returns `\w+`, which a later unit changes in place at .*x\.mul_\(0\.5\); use the out-of", message
    )
