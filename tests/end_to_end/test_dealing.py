"""What ``masked_scatter`` deals out to the places of images, in micro-batches as in the whole batch, or not at all."""

from __future__ import annotations

import copy

import pytest
import torch
from learner import distance
from tiered import options
from torch import fx, nn

import gs_compile
from gs_compile.capture.dealing import masks_of
from gs_compile.errors import CaptureError, SeparationError

IMAGE = 0  # the token of a place
NUM_PLACES = 2  # of a sample's image


class Block(nn.Linear):
    def forward(self, x):
        return x + super().forward(x).relu()


class Seeing(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.tower = nn.Embedding(90, 8), nn.Linear(5, 8)
        self.blocks = nn.ModuleList(Block(8, 8) for _ in range(2))

    def forward(self, ids, images, mask=None):
        mask = ids == IMAGE if mask is None else mask
        x = self.words(ids).masked_scatter(mask[..., None], self.tower(images))
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def ids(*num_places: int) -> torch.Tensor:
    """A batch of samples that have these numbers of places."""
    made = torch.randint(1, 90, (len(num_places), 7))
    for row, number in zip(made, num_places, strict=True):
        row[:number] = IMAGE
    return made


class Indexed(Seeing):
    def forward(self, ids, images, mask=None):
        x = self.words(ids)
        x[ids == IMAGE if mask is None else mask] = self.tower(images).flatten(0, 1)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


@pytest.mark.parametrize(("kind", "given"), [(Seeing, False), (Seeing, True), (Indexed, False), (Indexed, True)])
def test_images_go_to_their_places_or_are_refused(tmp_path, kind, given):
    """given: the mask is an input, which is made up where code is timed."""
    torch.manual_seed(0)
    model, images = kind(), torch.randn(4, NUM_PLACES, 5)
    plain = copy.deepcopy(model)
    optimizer, theirs = gs_compile.SGD(model.parameters(), lr=0.1), torch.optim.SGD(plain.parameters(), lr=0.1)
    model.compile(backend="greedysnake", options=options(tmp_path))
    for batch in (ids(2, 2, 2, 2), ids(2, 2, 3, 1), ids(3, 1, 2, 2)):  # torch deals out across samples
        for each, update in ((model, optimizer), (plain, theirs)):
            each(batch, images, batch == IMAGE if given else None).backward()
            update.step()
            update.zero_grad()
    assert distance(dict(model.state_dict()), dict(plain.state_dict())) < 1e-5
    batch = ids(2, 2, 1, 2)  # a place of the second micro-batch is in the first
    batch[0, 6] = IMAGE
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(
        SeparationError, match=r"has 24 places .* for 32 entries, at .*test_dealing\.py:\d+: x( = self|\[ids)"
    ):
        model(batch, images, batch == IMAGE if given else None)
    assert distance(dict(model.state_dict()), before) == 0
    optimizer.engine.tiers.close()


@pytest.mark.parametrize("micro_batch_size", [2, 4])
def test_rows_that_an_index_takes_are_as_many_as_its_places(tmp_path, micro_batch_size):
    """As in torch, also where the micro-batch is the whole batch, of which a masked_scatter may leave some."""
    model = Indexed()
    optimizer = gs_compile.SGD(model.parameters(), lr=0.1)
    model.compile(backend="greedysnake", options=options(tmp_path, micro_batch_size=micro_batch_size))
    images = torch.randn(4, NUM_PLACES, 5)
    model(ids(2, 2, 2, 2), images).backward()
    optimizer.step(), optimizer.zero_grad()
    with pytest.raises(SeparationError, match=r"has \d+ places .*for \d+ entries, at .*test_dealing\.py:\d+: x\["):
        model(ids(2, 1, 2, 2), images)
    optimizer.engine.tiers.close()


class Repeated(Seeing):
    def forward(self, ids, images):
        x = self.words(ids)
        x[ids == IMAGE] = self.tower(images).flatten(0, 1)[:, :1]
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def test_rows_that_are_repeated_are_refused(tmp_path):
    model = Repeated()
    optimizer = gs_compile.SGD(model.parameters(), lr=0.1)
    model.compile(backend="greedysnake", options=options(tmp_path))
    with pytest.raises(CaptureError, match=r"at .*x\[ids == IMAGE\] = .*: write x\.masked_scatter"):
        model(ids(2, 2, 2, 2), torch.randn(4, NUM_PLACES, 5))
    assert optimizer.engine is None


def test_an_input_is_no_operation_that_it_is_named_after():
    """Fault: the first call of Qwen3-VL with images ended with a KeyError where its layers are timed for a plan."""
    graph = fx.Graph()
    x, mask, rows = map(graph.placeholder, ("masked_scatter_1_dealt", "mask", "rows"))
    graph.call_method("masked_scatter", (x, mask, rows))
    assert masks_of(graph) == {mask}
