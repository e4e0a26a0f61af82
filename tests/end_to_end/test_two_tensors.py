"""Blocks that hand on two tensors, as of image and text, are the layers, whatever other stack could be cut as it is."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from tiered import options
from torch import nn
from zoo import WIDTH, assert_same_gradients, compile_model, gradients

import gs_compile
from gs_compile.codegen.compiled import compilations_of

LAYERS, SAMPLES = 3, 4
pytestmark = pytest.mark.filterwarnings("ignore:the model's blocks are of:gs_compile.errors.UniformityWarning")


class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.text = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, image, text):
        mean = torch.cat([image, text], 1).mean(1, keepdim=True)
        return image + self.image(image + mean).tanh(), text + self.text(text - mean).tanh()


class Diffusion(nn.Module):
    """With a small stack ahead of the blocks, of what the time is embedded by."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.enter, self.widen = nn.Linear(4, 4), nn.Linear(4, WIDTH)
        self.time = nn.Sequential(nn.Linear(4, 4), nn.SiLU(), nn.Linear(4, WIDTH))
        self.blocks = nn.ModuleList(Both() for _ in range(LAYERS))
        self.leave = nn.Linear(WIDTH, 4)

    def forward(self, image, text, time):
        image, text = self.widen(self.enter(image)), self.widen(self.enter(text)) + self.time(time)[:, None]
        for block in self.blocks:
            image, text = block(image, text)
        return self.leave(image) + text.mean()


class LooksUpItself(Diffusion):
    """As models of diffusers: Dynamo has other paths to its modules, by which all its linear ones were a stack."""

    def __init__(self):
        super().__init__()
        self.time = nn.Linear(4, WIDTH)

    def __getattr__(self, name):
        return super().__getattr__(name)


@pytest.mark.parametrize(("kind", "samples"), [(Diffusion, 5), (LooksUpItself, SAMPLES), (Diffusion, 1)])
def test_they_are_the_layers(kind, samples):
    model = kind().double()
    plain = copy.deepcopy(model)
    compile_model(model, 2)
    inputs = [torch.randn(samples, *shape).double() for shape in ((6, 4), (3, 4), (4,))]
    found, expected = model(*inputs), plain(*inputs)
    torch.testing.assert_close(found, expected)
    for each in (found, expected):
        each.square().mean().backward()
    assert_same_gradients(gradients(model), gradients(plain), 1e-12)
    (compilation,) = compilations_of[model.leave.weight]
    assert {each.split.num_layers for each in compilation.models.values()} == {LAYERS}


class Single(nn.Module):
    """Both tensors as one; where it is given two, it returns two."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)

    def forward(self, image, text=None):
        x = image if text is None else torch.cat([text, image], 1)
        x = x + self.down(self.up(self.norm(x) + x.mean(1, keepdim=True)).tanh())
        return x if text is None else (x[:, text.shape[1] :], x[:, : text.shape[1]])


class TwoKinds(Diffusion):
    """Blocks of two tensors and then others, as models of diffusers: those of FLUX.1 take two tensors, too."""

    def __init__(self, number=3):
        super().__init__()
        self.ahead, self.singles = nn.ModuleList(), nn.ModuleList(Single() for _ in range(number))

    def forward(self, image, text, time):
        text = self.widen(self.enter(text)) + self.time(time)[:, None]
        for block in self.ahead:
            text = block(text)
        image = self.widen(self.enter(image))
        for block in self.blocks:
            image, text = block(image, text)
        return self.leave(self.behind(image, text))

    def behind(self, image, text):
        for block in self.singles:
            image, text = block(image, text)
        return image


class Reading(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(WIDTH, WIDTH)

    def forward(self, image, text):
        return image + self.net(image + text.mean(1, keepdim=True)).tanh()


class OneIsRead(TwoKinds):
    """The other blocks change the image, and all read what is made of the text, as those that decode a graph do."""

    def __init__(self):
        super().__init__(0)
        self.singles.extend(Reading() for _ in range(3))

    def behind(self, image, text):
        text = text.tanh()
        for block in self.singles:
            image = block(image, text)
        return image


class OneList(TwoKinds):
    def __init__(self):
        super().__init__(0)
        self.blocks.extend(Single() for _ in range(LAYERS + 1))


class JoinedBetween(TwoKinds):
    """One tensor has both ahead of the other blocks, as in FLUX.2."""

    def behind(self, image, text):
        x = torch.cat([text, image], 1)
        for block in self.singles:
            x = block(x)
        return x[:, text.shape[1] :]


class NormedBetween(JoinedBetween):
    """What is between the blocks has parameters, and so is a layer: the joint."""

    def __init__(self):
        super().__init__()
        self.between = nn.LayerNorm(WIDTH)

    def behind(self, image, text):
        return super().behind(self.between(image), text)


class Refined(JoinedBetween):
    """Blocks ahead of them take in the text alone, as in HunyuanVideo; the joint adds the image."""

    def __init__(self):
        super().__init__()
        self.ahead.extend(Single() for _ in range(2))


def trained(model, optimizer, tokens):
    """Losses and the values after two steps."""
    found = []
    for number in range(2):
        torch.manual_seed(number)
        image, text, time = (torch.randn(SAMPLES, *shape).double() for shape in ((6, 4), (tokens, 4), (4,)))
        loss = model(image, text, time).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    return [*found, *(value.clone() for value in model.state_dict().values())]


@pytest.mark.parametrize(
    ("build", "tokens", "joint"),
    [
        pytest.param(TwoKinds, 3, None, marks=pytest.mark.slow),
        (partial(TwoKinds, 5), 6, None),  # as many tokens of text as of image; the blocks of one tensor have most nodes
        pytest.param(OneList, 3, None, marks=pytest.mark.slow),
        (OneIsRead, 3, LAYERS),
        pytest.param(JoinedBetween, 3, None, marks=pytest.mark.slow),  # as the last one
        pytest.param(NormedBetween, 3, LAYERS, marks=pytest.mark.slow),
        (Refined, 3, 2),
    ],
    ids=[
        "two tensors everywhere",
        "one length",
        "one list",
        "one is read",
        "joined between",
        "a joint between",
        "a joint ahead",
    ],
)
def test_blocks_of_other_kinds_beside_them_are_layers_too(build, tokens, joint, tmp_path):
    """Trained from SSD, each block as a layer, as plain PyTorch does; SGD changes values by their gradients alone."""
    model = build().double()
    plain = copy.deepcopy(model)
    expected = trained(plain, torch.optim.SGD(plain.parameters(), lr=0.5), tokens)
    optimizer = gs_compile.SGD(model.parameters(), lr=0.5)
    model.compile(backend="greedysnake", options=options(tmp_path))
    torch.testing.assert_close(trained(model, optimizer, tokens), expected, rtol=1e-12, atol=1e-12)
    (compilation,) = compilations_of[model.leave.weight]
    split, captured = next(iter(compilation.models.values())).split, compilation.captured
    layers = [graph.parameters(captured) for graph in split.units[1:-1] if graph.unit != joint]
    stacks = {"ahead": model.ahead, "blocks": model.blocks, "singles": model.singles}
    blocks = [[f"{name}.{number}"] for name, stack in stacks.items() for number in range(len(stack))]
    assert [sorted({captured.inputs[each].path.rsplit(".", 2)[0] for each in read}) for read in layers] == blocks
    assert split.joints == ({joint} if joint else set())
    optimizer.engine.tiers.close()


class Coupling(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(WIDTH // 2, WIDTH)

    def forward(self, x, log_det):
        one, other = x.chunk(2, -1)
        scale, shift = self.net(one).tanh().chunk(2, -1)
        return torch.cat([other * scale.exp() + shift, one], -1), log_det + scale.sum((1, 2))


class Flow(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.enter, self.blocks = nn.Linear(4, WIDTH), nn.ModuleList(Coupling() for _ in range(LAYERS))

    def forward(self, x):
        x, log_det = self.enter(x), torch.zeros(len(x), dtype=x.dtype)
        for block in self.blocks:
            x, log_det = block(x, log_det)
        return (x.square().sum((1, 2)) / 2 - log_det).mean()


class FlowOfData(Flow):
    """As RealNVP: nothing is ahead of the first block, and the log determinants are added between blocks."""

    def __init__(self):
        super().__init__()
        del self.enter

    def forward(self, x):
        log_det = x.new_zeros(len(x))
        for block in self.blocks:
            x, more = block(x, 0)
            log_det = log_det + more
        return (x.square().sum((1, 2)) / 2 - log_det).mean()


class FlowInPlace(FlowOfData):
    def forward(self, x):
        log_det = x.new_zeros(len(x))
        for block in self.blocks:
            x, more = block(x, 0)
            log_det += more
        return (x.square().sum((1, 2)) / 2 - log_det).mean()


class CouplingInPlace(Coupling):
    def forward(self, x, log_det):
        x, more = super().forward(x, 0)
        log_det.add_(more)
        return x, log_det


class FlowInPlaceInside(Flow):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(CouplingInPlace() for _ in range(LAYERS))


@pytest.mark.parametrize(
    ("kind", "width"), [(Flow, 4), (FlowOfData, WIDTH), (FlowInPlace, WIDTH), (FlowInPlaceInside, 4)]
)
def test_one_number_for_each_sample_goes_on_beside_them(kind, width, tmp_path):
    """Fault: refused, as normalizing flows with a log determinant are; then those whose first block takes the batch as
    it is, as blocks that do not run one after the other; then those that add the log determinants in place.
    """
    model = kind().double()
    plain = copy.deepcopy(model)
    optimizers = gs_compile.SGD(model.parameters(), lr=0.1), torch.optim.SGD(plain.parameters(), lr=0.1)
    model.compile(backend="greedysnake", options=options(tmp_path))
    for number in range(2):
        inputs = torch.randn(SAMPLES, 3, width, generator=torch.Generator().manual_seed(number)).double()
        for each, optimizer in zip((model, plain), optimizers, strict=True):
            each(inputs).backward()
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(dict(model.state_dict()), dict(plain.state_dict()), rtol=1e-12, atol=1e-12)
    (compilation,) = compilations_of[model.blocks[0].net.weight]
    assert {each.split.num_layers for each in compilation.models.values()} == {LAYERS}
    optimizers[0].engine.tiers.close()
