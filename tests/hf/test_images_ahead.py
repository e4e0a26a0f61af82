"""Images that are encoded ahead of a call, of a model with the interface of transformers' Qwen2-VL."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from learner import distance
from pictures import FIRST, VIDEO, collated, qwen, samples
from seeing import PLACE, WIDTH, Seeing
from tiered import options
from torch import nn
from zoo import GPT, assert_same_gradients, compile_model, gradients

import gs_compile
from gs_compile.errors import CheckError, GraphBreakError, OptionError, ResumeError
from gs_compile.hf.images import encode_ahead, reads_sizes

# The first layers get features of images, the others none
pytestmark = pytest.mark.filterwarnings("ignore::gs_compile.errors.UniformityWarning")


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


@pytest.mark.parametrize(
    ("trains_images", "bound", "on_storage"),
    [
        (False, 0.05, True),
        (True, None, False),
        (True, 0.05, True),
        *(
            pytest.param(trains, bound, False, marks=pytest.mark.slow)
            for trains, bound in ((False, None), (True, 0.05))
        ),
    ],
)
def test_it_learns_what_it_learns_in_plain_pytorch(tmp_path, trains_images, bound, on_storage):
    """Faults: an encoder that is trained was refused with a bound, as its gradients come behind the model's, and in a
    model that was built on storage.
    """
    torch.manual_seed(0)
    plain = Pictures()
    torch.manual_seed(0)
    model = gs_compile.init_on_storage(Pictures, storage=tmp_path / "built") if on_storage else Pictures()
    for each in (plain, model):
        each.visual.requires_grad_(trains_images)
    batches = [batch((1, 2), (2, 2), (1, 1)), batch((1, 1), (1, 2), (2, 3), (1, 1))]
    assert reads_sizes(model)
    optimizer = gs_compile.SGD(model.parameters(), lr=0.1, max_grad_norm=bound)
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1)
    handle = encode_ahead(model)
    model.compile(backend="greedysnake", options=options(tmp_path))
    for each in batches:
        losses = [own(**each) for own in (model, plain)]
        assert losses[0].item() == pytest.approx(losses[1].item(), abs=1e-6)
        for loss, update in zip(losses, (optimizer, theirs), strict=True):
            loss.backward()
            if bound is not None and update is theirs:
                assert nn.utils.clip_grad_norm_(plain.parameters(), bound) > bound
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


def with_videos(kind):
    """A model, another one that encodes ahead, and a batch of images and videos, in float64."""
    plain, batch = qwen(kind).double(), collated(samples(0, has_video=True))
    model = copy.deepcopy(plain)
    encode_ahead(model)
    return plain, model, {name: each.double() if each.is_floating_point() else each for name, each in batch.items()}


def test_videos_beside_images_as_images_alone():
    """Qwen3-VL's code counts the places of both, which no graph has, so that it is given them as one."""
    plain, model, batch = with_videos("qwen3")
    for each in (plain, model):
        each(**batch).loss.backward()
    assert_same_gradients(gradients(model), gradients(plain), 1e-12)
    batch["input_ids"][batch["input_ids"] == VIDEO] = FIRST
    with pytest.raises(CheckError, match="the batch has 0 tokens for videos, and the encoder has made 8 rows"):
        model(**batch)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen2_5", "qwen3"])
def test_videos_beside_images(kind):
    """Fault: a batch of Qwen3-VL with both was not captured."""
    plain, model, batch = with_videos(kind)
    compile_model(model, 2)
    losses = [each(**batch).loss for each in (model, plain)]
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-6)  # which transformers computes in float32
    for each in losses:
        each.backward()
    assert_same_gradients(gradients(model), gradients(plain), 1e-6)


@pytest.mark.slow
def test_an_encoder_that_is_trained_from_the_second_step_on(tmp_path):
    """The first batch has no image. Fault: updates ran beside the backward from then on, and the second was refused."""
    model = qwen()
    plain, batches = copy.deepcopy(model), [collated(samples(step, num_seen=4 * step)) for step in range(2)]
    optimizer = gs_compile.SGD(model.parameters(), lr=0.1, max_grad_norm=0.05)
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1)
    encode_ahead(model)
    model.compile(backend="greedysnake", options=options(tmp_path, clip="speculative"))
    for batch in batches:
        for each, update in ((model, optimizer), (plain, theirs)):
            each(**batch).loss.backward()
            if each is plain:
                nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
            update.step()
            update.zero_grad()
    assert distance(dict(model.state_dict()), dict(plain.state_dict())) < 1e-6
    optimizer.engine.tiers.close()


def durable_steps(folder, numbers, **others):
    """The values after steps of some numbers of a durable run, which goes on if there is one. others: options by which
    it does so in the first call.
    """
    torch.manual_seed(0)
    batches, model = [batch((1, 2), (1, 1)) for _ in range(2)], Pictures()
    optimizer = gs_compile.SGD(model.parameters(), lr=0.1, max_grad_norm=0.05)
    encode_ahead(model)
    model.compile(backend="greedysnake", options=options(folder, durability="step", **others))
    if not others:
        gs_compile.resume(model, optimizer, storage=folder)
    try:
        for number in numbers:
            model(**batches[number]).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.commit()
        return model.state_dict()
    finally:
        if optimizer.engine is not None:
            optimizer.engine.tiers.close()


@pytest.mark.slow
def test_a_resumed_run_encodes_with_the_values_of_its_commit(tmp_path):
    """Fault: these came with the model's first call, so the encoder had run with others, unless a script had called the
    model before.
    """
    wanted = durable_steps(tmp_path / "one", [0, 1])
    durable_steps(tmp_path / "other", [0])
    with pytest.raises(ResumeError, match=r"made by parameters outside .*call `run = gs_compile.resume\("):
        durable_steps(tmp_path / "other", [1], resume="auto")
    found = durable_steps(tmp_path / "other", [1])
    assert all(torch.equal(value, found[name]) for name, value in wanted.items())
