"""split: what cannot be cut into units is refused, by name."""

from __future__ import annotations

import re

import pytest
import torch
from captured import WIDTH, Block, Tiny, batch, captured, compiled
from parts import Any, Reading, Sides, assert_units_equal_the_model
from torch import nn

from gs_compile.errors import MutationError, SeparationError, UniformityError


def refused(error, model, *args):
    with pytest.raises(error) as caught:
        captured(model, *(args or batch(4))).split()
    return caught.value.message


class Two(Block):
    """Blocks that take in and hand on two tensors."""

    def forward(self, pair):
        x, y = pair
        return super().forward(x + y.mean(-1)[:, None, None].to(x.dtype)), y + x.mean(-1)


class Carrying(Tiny):
    def __init__(self, dtype, blocks=2):
        super().__init__(lambda p, y: p, [Two() for _ in range(blocks)])
        self.dtype = dtype

    def forward(self, ids, labels):
        x = self.embed(ids)
        pair = x, torch.zeros_like(x)[..., 0]
        for block in self.blocks:
            x, y = block(pair)
            pair = x, y.to(self.dtype)
        return self.criterion(self.head(pair[0] + pair[1][..., None].to(x.dtype)), labels)


def test_two_tensors_of_one_type_go_on_as_one():
    model = Carrying(torch.float32, 3)
    cut = captured(model, *batch(4)).split(2)
    assert [unit.results for unit in cut.units] == [("x",), ("x",), ("x",), ("x",), ("y",)]
    assert cut.units[1].result_specs[0].shape == (2, 5 * WIDTH + 5)
    assert [len(unit.sources) for unit in cut.units[1:4]] == [5, 5, 5]
    assert_units_equal_the_model(model, *batch(4))


def test_two_tensors_of_two_types():
    message = refused(UniformityError, Carrying(torch.float64))
    assert re.search(
        r"layer 0 must pass exactly one tensor, to the next layer; found `\w+` float32\[2, 5, 8\]", message
    )
    assert re.search(r"; `\w+` float64\[2, 5\] read by layer 1 at .*test_split_refusals.py:\d+: pair = x, y", message)
    assert message.endswith(
        "Carry it inside the hidden state, have all that goes on be of one floating dtype, or compute it in the embedding "
        "so that it becomes a side input"
    )


class Centred(Tiny):
    """Reads the mean of an input over all samples in the embedding."""

    def forward(self, ids, labels):
        x = self.embed(ids) - labels.float().mean(0)[:, None]
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def test_a_sum_over_the_batch_that_is_read_ahead_of_the_head():
    message = refused(SeparationError, Centred())
    assert re.match(r"`\w+` \(\w+\) reads a sum of the inputs over the whole batch, at .*labels.float\(\)", message)
    assert message.endswith("pass it as an input, or set micro_batch_size to the whole batch")


class Skipping(Tiny):
    """Connections that pass by a whole layer, behind every block."""

    def forward(self, ids, labels):
        before = self.embed(ids)
        x = self.blocks[0](before)
        for block in self.blocks[1:]:
            x, before = block(x) + before, x
        return self.head(x)


def test_skip_connections():
    message = refused(UniformityError, Skipping(blocks=[Block() for _ in range(8)]))
    assert message.startswith("layer 0 must pass exactly one tensor, to the next layer; found `x` float32[2, 5, 8]")
    assert "read by layer 1, layer 2 at" in message


class Beside(Tiny):
    """Blocks of which none reads what another makes."""

    def forward(self, ids, labels):
        return self.head(self.blocks[0](self.embed(ids)) + self.blocks[1](torch.ones(len(ids), 5, WIDTH)))


def test_blocks_side_by_side():
    message = refused(UniformityError, Beside())
    assert message.startswith("the blocks do not run one after the other: `linear_2` (")
    assert message.endswith("return x + self.down(torch.tanh(self.up(x)))) does not depend on the block of `linear`")


@pytest.mark.parametrize(("blocks", "found"), [([], "no numbered modules at all"), ([Block()], "blocks (1 block)")])
def test_no_repeated_block(blocks, found):
    message = refused(UniformityError, Tiny(blocks=blocks))
    assert message.startswith(f"the model has no repeated block: {found}. greedysnake schedules a stack of blocks")
    assert "keep the blocks in an nn.ModuleList (or nn.Sequential) of two or more" in message
    assert message.endswith("compile the model that holds them, not each block")


class Buffered(Block):
    def __init__(self, change, *, is_read=True):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.change, self.is_read = change, is_read

    def forward(self, x):
        self.change(self)
        return super().forward(x) + self.calls if self.is_read else super().forward(x)


@pytest.mark.parametrize("is_read", [True, False])
def test_a_buffer_changed_in_place(is_read):
    """Also where it counts, and nothing that is returned follows from it."""
    blocks = [Buffered(lambda block: block.calls.add_(1), is_read=is_read) for _ in range(2)]
    message = refused(MutationError, Tiny(blocks=blocks))
    assert message.startswith(
        "the model changes its input or buffer `l_self_modules_blocks_modules_0_buffers_calls_` in place ("
    )
    assert "block.calls.add_(1)" in message
    assert message.endswith("make it a result of forward, or freeze it (eval mode)")


def test_a_region_compiled_by_itself_that_changes_what_it_is_given():
    class Region(Block):
        @torch.compiler.nested_compile_region
        def changed(self, x):
            x.view(-1).add_(1)
            return 2 * x

        def forward(self, x):
            return super().forward(self.changed(2 * x))

    words = r"\(torch.compiler.nested_compile_region\) changes what it is given in place \(.*x.view\(-1\).add_\(1\)"
    with pytest.raises(MutationError, match=words):
        compiled(Tiny(blocks=[Region(), Region()]))(*batch(4))


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


def test_several_tensors_changed_in_place_at_once():
    blocks = [Buffered(lambda _: torch._foreach_add_([torch.zeros(2), torch.ones(2)], 1)) for _ in range(2)]
    assert "changes several tensors in place at once" in refused(MutationError, Tiny(blocks=blocks))


def test_a_table_that_renorms_its_rows():
    model = Tiny()
    model.embed.max_norm = 0.5
    assert "changes its input or buffer `l_self_modules_embed_parameters_weight_`" in refused(MutationError, model)


class Changing(Reading):
    def forward(self, x, side):
        side.add_(1)
        return super().forward(x, side)


def test_a_side_input_changed_in_place():
    """Each layer changes a copy, and hands that on."""
    torch.manual_seed(0)
    model = Sides(lambda model, x, ids: [ids.float()[..., None].cos()], [[0], [0], [0]], Changing)
    assert_units_equal_the_model(model, *batch(4))


def test_a_side_input_changed_in_place_and_read_by_an_older_name():
    def made(model, x, ids):
        side = ids.float()[..., None].cos()
        return [side, side[:]]

    message = refused(MutationError, Sides(made, [[0], [1], [0]], Changing))
    assert re.search(
        r"`\w+` is read by several units and changed in place at .*side.add_\(1\); use the out-of-place form", message
    )


class Collecting(Tiny):
    def forward(self, ids, labels):
        x, states = self.embed(ids), torch.zeros(2, *ids.shape, WIDTH)
        for number, block in enumerate(self.blocks):
            states[number] = x = block(x)
        return self.head(states.mean(0))


def test_a_tensor_of_all_layers_states():
    message = refused(MutationError, Collecting())
    assert re.search(
        r"in place at .*states\[number\] = x.*; use the out-of-place .* as torch\.stack of a list", message
    )


def test_a_layers_input_changed_in_place():
    """The checkpoint stays what it was: a layer changes a copy."""

    class Changing(Block):
        def forward(self, x):
            x.mul_(0.5)
            return super().forward(x)

    torch.manual_seed(0)
    assert_units_equal_the_model(Tiny(lambda p, y: p, [Changing(), Changing()]), *batch(4))


@torch.library.custom_op("greedysnake_tests::put_doubled", mutates_args=("out",))
def put_doubled(x: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(2 * x)


@put_doubled.register_fake
def _(x: torch.Tensor, out: torch.Tensor) -> None:
    return None


def test_an_operator_that_writes_to_what_it_is_given_is_no_dead_code():
    class Writing(Block):
        def forward(self, x):
            out = torch.zeros_like(x)
            put_doubled(x.detach(), out)
            return super().forward(x) + out

    torch.manual_seed(0)
    assert_units_equal_the_model(Tiny(lambda p, y: p, [Writing(), Writing()]), *batch(4))


def test_a_returned_layer_input_changed_in_place():
    """The glue goes with the next layer, which changes a copy, and gives it back."""
    torch.manual_seed(0)
    assert_units_equal_the_model(Any(2, None, None, True, "states"), *batch(4))


class Viewed(Block):
    def forward(self, x):
        x = super().forward(x)
        self.view = x[:]
        return x


class ChangingViewed(Tiny):
    def forward(self, ids, labels):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
            x.mul_(0.5)
        return self.head(x), [block.view for block in self.blocks]


def test_a_returned_view_of_a_layer_input_changed_in_place():
    """The user would see the change."""
    message = refused(MutationError, ChangingViewed(blocks=[Viewed(), Viewed()]))
    assert re.match(
        r"the model returns `\w+`, which a later unit changes in place at .*x\.mul_\(0\.5\); use the out-of", message
    )
