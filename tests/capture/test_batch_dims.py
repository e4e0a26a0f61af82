"""Which dimension of an input has the samples, where sizes are equal by coincidence and where they are not."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from zoo import both_ways, compile_model

from gs_compile.capture.frame_settings import batch_dims, of_batch
from gs_compile.errors import CaptureError

POSITIONS = (3, 4, 6)  # of Qwen2-VL, for 4 samples of 6 tokens


@pytest.mark.parametrize(
    ("shapes", "dims"),
    [
        ([(4, 6), (4,)], [0, 0]),
        ([(4, 6), (6, 6), (4, 3, 8, 8)], [0, None, 0]),
        ([(4, 6, 8), POSITIONS, (4, 6)], [0, 1, 0]),
        ([POSITIONS, (4, 6), (4, 6, 8)], [1, 0, 0]),  # frozen, nothing says more of the first
        ([(3, 6, 8), (3, 3, 6)], [0, 1]),  # as many samples as positions have rows
        ([(4, 4, 8), (3, 4, 4)], [0, 1]),  # as many as tokens
        ([(1, 6, 8), (3, 1, 6)], [0, 1]),
        ([(1, 6), (4, 6)], [None, 0]),  # a row that all share
        ([(3, 3, 3), (3, 3, 3)], [0, 0]),
        ([(4, 6), (2, 4)], [0, None]),  # of two dimensions the second is of tokens, or classes
        ([(4, 4, 8), (4, 4, 8), (4, 8)], [0, 0, 0]),  # the last a table of all tokens
        ([], []),
    ],
)
def test_the_dimension_of_samples(shapes, dims):
    assert batch_dims([torch.empty(shape) for shape in shapes]) == dims


@pytest.mark.parametrize("size", [3, 4, 6])
def test_positions_are_whole_numbers(size):
    ids, positions = torch.ones(size, 6, dtype=torch.long), torch.ones(3, size, 6, dtype=torch.long)
    assert batch_dims([ids, positions]) == [0, 1]
    assert batch_dims([positions, ids]) == [1, 0]


def test_positions_of_all_samples_are_not_the_batch():
    positions, hidden = torch.empty(POSITIONS), torch.empty(4, 6, 8)
    assert of_batch([positions, hidden]) is hidden
    assert of_batch([positions]) is positions


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x, table):
        for block in self.blocks:
            x = x + block(x).tanh()
        return x.square().mean() + table.square().mean()


def test_an_input_that_had_as_many_rows_as_the_batch_once():
    """Fault: its further rows were left out of the loss."""
    model, x = compile_model(Weighted(), 2), torch.ones(4, 3, 8)
    model(x, torch.ones(4, 5)).backward()
    with pytest.raises(CaptureError, match="x has 4 rows and table has 6, but as many in the call"):
        model(x, torch.arange(30.0).view(6, 5))


class Placed(Weighted):
    """Reads the places of tokens, which all samples share, ahead of the samples, as Krea 2 of diffusers does."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(8, 8)

    def forward(self, x, places):
        turn = places.cos().sum(-1)[:, None]
        return super().forward((self.enter(x) * turn).cumsum(1), x.new_zeros(1, 1))


@pytest.mark.parametrize("size", [4, 1])
def test_a_table_that_is_read_first_is_not_the_batch(size):
    """Fault: it was taken for the batch, and its number of rows for a batch size that the code fixes."""
    model = Placed()
    both_ways(model, lambda each: each(torch.ones(size, 7, 8), torch.arange(21.0).view(7, 3)).backward())
