"""Images that are encoded ahead of a call, of a model with the interface of transformers' Qwen2-VL."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from learner import distance
from seeing import PLACE, WIDTH, Seeing
from tiered import options
from torch import nn
from zoo import GPT

import gs_compile
from gs_compile.errors import GraphBreakError, OptionError
from gs_compile.hf.images import encode_ahead, reads_sizes


class Pictures(nn.Module):
    """Reads how many places an image has as a number, in its encoder and for positions."""

    def __init__(self) -> None:
        super().__init__()
        self.visual, self.seeing = nn.Linear(5, WIDTH), Seeing()

    def get_image_features(self, pixel_values, image_grid_thw=None, **kwargs):
        rows = self.visual(pixel_values).split(image_grid_thw.prod(1).tolist())
        return SimpleNamespace(pooler_output=rows, deepstack_features=[rows, tuple(2 * each for each in rows)])

    def compute_3d_position_ids(self, input_ids, image_grid_thw):
        heights = sum(image_grid_thw[:, 1].tolist())
        return (input_ids + 1 + torch.arange(heights, heights + 3)[:, None, None]) % 7

    def forward(self, input_ids, pixel_values=None, image_grid_thw=None, position_ids=None, mm_encoder_outputs=None):
        outputs = mm_encoder_outputs or {"image": self.get_image_features(pixel_values, image_grid_thw)}
        rows = [outputs["image"].pooler_output, *outputs["image"].deepstack_features]
        if position_ids is None:
            position_ids = self.compute_3d_position_ids(input_ids, image_grid_thw)
        return self.seeing(input_ids, position_ids, rows)


def batch(*sizes):
    """A sample for each of the images of these sizes."""
    grid = torch.tensor([[1, *each] for each in sizes])
    ids = torch.randint(1, 9, (len(sizes), 6))
    for row, number in zip(ids, grid.prod(1).tolist(), strict=True):
        row[:number] = PLACE
    return {"input_ids": ids, "pixel_values": torch.randn(int(grid.prod(1).sum()), 5), "image_grid_thw": grid}


@pytest.mark.filterwarnings("ignore::gs_compile.errors.UniformityWarning")  # the first layers get features
@pytest.mark.parametrize("trains_images", [False, True])
def test_it_learns_what_it_learns_in_plain_pytorch(tmp_path, trains_images):
    torch.manual_seed(0)
    model = Pictures()
    model.visual.requires_grad_(trains_images)
    plain, batches = copy.deepcopy(model), [batch((1, 2), (2, 2), (1, 1)), batch((1, 1), (1, 2), (2, 3), (1, 1))]
    assert reads_sizes(model)
    optimizer, theirs = gs_compile.SGD(model.parameters(), lr=0.1), torch.optim.SGD(plain.parameters(), lr=0.1)
    handle = encode_ahead(model)
    model.compile(backend="greedysnake", options=options(tmp_path))
    for each in batches:
        losses = [own(**each) for own in (model, plain)]
        assert losses[0].item() == pytest.approx(losses[1].item(), abs=1e-6)
        for loss, update in zip(losses, (optimizer, theirs), strict=True):
            loss.backward()
            update.step()
            update.zero_grad()
    assert distance(dict(model.state_dict()), dict(plain.state_dict())) < 1e-5
    handle.remove()
    with pytest.raises(GraphBreakError, match="is not one graph"):
        model(**batches[0])
    optimizer.engine.tiers.close()


def test_a_model_that_takes_nothing_encoded():
    assert not reads_sizes(GPT())
    with pytest.raises(OptionError, match=r"GPT\.forward takes no mm_encoder_outputs"):
        encode_ahead(GPT())
