"""Ways to write a model's blocks: each gives the gradients that plain PyTorch gives."""

from __future__ import annotations

import copy
from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.nn import functional
from zoo import (
    GPT,
    TOKENS,
    WIDTH,
    Block,
    Feed,
    assert_same_gradients,
    batch,
    both_ways,
    compile_model,
    gradients,
    scaled,
    small,
    train,
)

from gs_compile.codegen.compiled import compilations_of

KEEPS_CAPTURES = True


class InPlace(Block):
    def forward(self, x_BTD):
        y_BTD = self.up(self.norm(x_BTD))
        y_BTD += 0.5
        y_BTD = y_BTD.masked_fill_(y_BTD > 1, 0.25).clone()
        y_BTD[:, 0] = y_BTD[:, 1] * 2
        y_BTD[..., ::2].mul_(3)
        x_BTD = x_BTD + 0
        x_BTD += self.down(y_BTD)
        return x_BTD


class ToldInPlace(Block):
    """Changes told by a flag, the result not used: the activation, and what the block reads."""

    def forward(self, x_BTD):
        functional.leaky_relu(x_BTD, 0.5, True)
        y_BTD = self.up(self.norm(x_BTD))
        functional.relu(y_BTD, inplace=True)
        return x_BTD + self.down(y_BTD)


class ChangesItsInput(Block):
    def forward(self, x_BTD):
        x_BTD += self.down(functional.gelu(self.up(self.norm(x_BTD.clone()))))
        return x_BTD


class TakesNone(Feed):
    def forward(self, x_BTD, mask=None, scale=None):
        x_BTD = super().forward(x_BTD)
        return x_BTD if mask is None else x_BTD * mask


class HasBuffers(Feed):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", 1 + torch.rand(WIDTH))  # another in each layer
        self.register_buffer("places", torch.arange(64).float() / 64, persistent=False)

    def forward(self, x_BTD):
        return super().forward(x_BTD) * self.scale + self.places[: x_BTD.shape[1], None]


class Shift(nn.Module):
    """Its parameter has the hidden state's shape where a micro-batch is one sample, and so its very gradient."""

    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.randn(1, TOKENS, WIDTH))

    def forward(self, x_BTD):
        return x_BTD + self.shift


@pytest.mark.parametrize("block", [InPlace, ToldInPlace, ChangesItsInput, TakesNone, HasBuffers, Shift])
def test_blocks(block):
    both_ways(GPT(block), scaled, 1 if block is Shift else 2)


@pytest.mark.parametrize("compiler", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_shared_block(compiler):
    torch._dynamo.reset()  # what is captured of blocks that share nothing would serve
    block = Feed()
    both_ways(GPT(lambda: block), scaled, compiler=compiler)


def test_a_wide_block_is_a_class_of_its_own():
    widths = iter([48, 48, 96, 48])
    model = GPT(lambda: Feed(hidden=next(widths)), num_layers=4)
    with pytest.warns(
        UserWarning, match=r"of 2 kinds.*layer 2 differs from layer 0 at blocks\.2\.up\.weight: .*96.*48"
    ):
        both_ways(model, scaled)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
def test_gradient_checkpointing_is_absorbed():
    model = small("gpt2")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    reference = copy.deepcopy(model)
    compile_model(model, 2)
    assert_same_gradients(train(model, *batch(4))[1], train(reference, *batch(4))[1])
    assert len(compilations_of[next(model.parameters())]) == 1


class Autocast(Block):
    """Down in fp32, whatever region the model is called in."""

    def forward(self, x_BTD):
        with torch.autocast("cpu", torch.bfloat16):
            y_BTD = functional.gelu(self.up(self.norm(x_BTD)))
            with torch.autocast("cpu", enabled=False):
                return x_BTD + self.down(y_BTD.float())


def around_nothing(model):
    loss = model(*batch())[1]
    loss.backward()
    return loss.detach()


def around_the_call(model):
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(*batch())[1]
    loss.backward()
    return loss.detach()


def around_all(model):
    with torch.autocast("cpu", torch.bfloat16):
        return around_nothing(model)


@pytest.mark.parametrize(
    ("block", "use"),
    [
        pytest.param(Block, around_the_call, id="call", marks=pytest.mark.slow),
        pytest.param(Block, around_all, id="all"),
        pytest.param(Autocast, around_nothing, id="inside"),
        pytest.param(Autocast, around_the_call, id="both"),
    ],
)
def test_autocast(block, use):
    """One micro-batch does the operations of eager."""
    both_ways(GPT(block), use, 5)


def test_autocast_of_several_micro_batches():
    """They round partial sums, by 2^-9 each, in another order."""
    both_ways(GPT(Autocast), around_all, 2, tolerance=2**-7)


@pytest.mark.parametrize("use", [around_the_call, around_all])
def test_autocast_changes_what_is_computed(use):
    """So the test above cannot pass in fp32."""
    found, exact = GPT(), GPT()
    use(found)
    train(exact, *batch())
    with pytest.raises(AssertionError):
        assert_same_gradients(gradients(found), gradients(exact), 1e-4)


def test_gradients_of_bf16_parameters_are_summed_in_fp32():
    """256 samples that each add 1 to a gradient: in bf16 the sum of more than 256 ones stays at 256."""

    class Ones(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(2))
            self.bias = nn.Parameter(torch.zeros(2))

        def forward(self, x):
            x = x.clone()
            for block in self.blocks:
                x = block(x)
            return (x + self.bias).sum()

    model = compile_model(Ones().bfloat16(), 1)
    model(torch.ones(300, 2, dtype=torch.bfloat16)).backward()
    assert model.bias.grad.tolist() == [300, 300]
    assert torch.ones((), dtype=torch.bfloat16) + 256 == 256


class Numbered(nn.Module):
    """Its own modules are under numbers."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, WIDTH))

    def forward(self, x):
        return x + self.mlp(self.norm(x))


class InSequence(GPT):
    """Blocks of names in an nn.Sequential, as in torchvision's vision transformer."""

    def __init__(self):
        super().__init__(Numbered)
        self.blocks = nn.Sequential(OrderedDict((f"layer_{number}", each) for number, each in enumerate(self.blocks)))

    def forward(self, ids, labels):
        logits = self.head(self.norm(self.blocks(self.embedding(ids))))
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Losing(Numbered):
    def forward(self, x):
        h = self.mlp(self.norm(x))
        return x + h, h.square().mean(), h.mean((0, 1))


class Summing(GPT):
    """The forward adds up losses of its blocks between them, as those of experts, and vectors, as the loads of these."""

    def __init__(self):
        super().__init__(Losing, num_layers=3)

    def forward(self, ids, labels):
        x, total, loads = self.embedding(ids), 0.0, 0.0
        for block in self.blocks:
            x, loss, load = block(x)
            total = total + 0.1 * loss
            loads = loads + load
        return self.loss(x, labels, total, loads)

    def loss(self, x, labels, total, loads):
        loss = functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())
        return loss + total / 3 + (loads * torch.arange(WIDTH)).sum()


class SummingInPlace(Summing):
    def forward(self, ids, labels):
        x, total, loads = self.embedding(ids), torch.zeros(()), torch.zeros(WIDTH)
        for block in self.blocks:
            x, loss, load = block(x)
            total += 0.1 * loss
            loads.add_(load)
        return self.loss(x, labels, total, loads)


@pytest.mark.parametrize("build", [InSequence, Summing, SummingInPlace])
def test_blocks_that_a_forward_calls_in_its_own_way_are_layers(build):
    """Fault: the modules in a block of a name were the layers; a sum of losses so far was refused between two blocks,
    and then one that is made in place.
    """
    model, plain = compile_model(build(), 2), build()
    for each in (model, plain):
        each(*batch()).backward()
    assert_same_gradients(gradients(model), gradients(plain))
    (compilation,) = compilations_of[next(model.parameters())]
    (made, *_) = compilation.models.values()
    assert made.uniform.layer_classes == (tuple(range(len(model.blocks))),)


class Changing(GPT):
    """A number is changed after it was read, and both are added up."""

    def forward(self, ids, labels):
        x, total = self.embedding(ids), 0.0
        for block in self.blocks:
            x = block(x)
            number = x.square().mean()
            tripled = 3.0 * number
            number.mul_(0.5)
            total = total + tripled + number
        return self.head(x).square().mean() + total


@pytest.mark.filterwarnings("ignore:the model's blocks are of 2 kinds:gs_compile.errors.UniformityWarning")
def test_a_number_that_is_changed_was_read_before():
    """Fault: what is added up was computed ahead of the loss, where the number had changed."""
    model, plain = compile_model(Changing(), 2), Changing()
    for each in (model, plain):
        each(*batch()).backward()
    assert_same_gradients(gradients(model), gradients(plain))
