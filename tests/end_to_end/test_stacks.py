"""Stacks in whatever style they are written train from SSD as plain PyTorch does: units follow the data."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch
from captured import TOKENS, WIDTH, WORDS, Block, Tiny, batch
from tiered import options
from torch import nn
from torch.nn import functional

import gs_compile
from gs_compile.codegen.compiled import compilations_of
from gs_compile.model.residency import is_offloaded

pytestmark = pytest.mark.filterwarnings("ignore:the model's blocks are of:gs_compile.errors.UniformityWarning")


class Feed(nn.Module):
    """A branch: who calls it adds its input."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x):
        return self.down(torch.tanh(self.up(self.norm(x))))


class Mix(nn.Module):
    """Another branch, of another class."""

    def __init__(self):
        super().__init__()
        self.norm, self.inner = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        h = self.inner(self.norm(x))
        return torch.softmax(h @ h.mT, -1) @ h


class Model(Tiny):
    """What comes between embedding and head is the subclass's."""

    def __init__(self, blocks=()):
        super().__init__(blocks=blocks)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, ids, labels):
        return self.criterion(self.head(self.norm(self.stack(self.embed(ids), ids))) * 0.5, labels)


class Residuals(Model):
    def __init__(self):
        super().__init__([Feed() for _ in range(3)])

    def stack(self, x, ids):
        for f in self.blocks:
            x = x + f(x)
        return x


class OneNorm(Residuals):
    """A norm that all layers and the head share stands before each branch."""

    def stack(self, x, ids):
        for f in self.blocks:
            x = x + f(self.norm(x))
        return x


class Pairs(Model):
    def __init__(self):
        super().__init__([nn.ModuleList([Mix(), Feed()]) for _ in range(3)])

    def stack(self, x, ids):
        for attn, ff in self.blocks:
            x = attn(x) + x
            x = ff(x) + x
        return x


class Scaled(Model):
    """Layers are scaled by a parameter each, made positive, and by a constant each."""

    def __init__(self):
        super().__init__([Block() for _ in range(3)])
        self.scales = nn.ParameterList(torch.rand(WIDTH) for _ in range(3))

    def stack(self, x, ids):
        for number, (f, scale) in enumerate(zip(self.blocks, self.scales, strict=True)):
            x = f(x) * scale.exp() * (1 - 0.1 * number)
        return x


class Weighted(Model):
    """Each layer takes in the embedding beside the layer before, both weighted by entries of one parameter."""

    def __init__(self):
        super().__init__([Block() for _ in range(3)])
        self.weights = nn.Parameter(torch.rand(3, 2))

    def stack(self, x, ids):
        first = x
        for number, f in enumerate(self.blocks):
            x = f(self.weights[number, 0] * x + self.weights[number, 1] * first)
        return x


class Named(Model):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleDict({"first": Block(), "then": Block(), "last": Block()})

    def stack(self, x, ids):
        for f in self.blocks.values():
            x = f(x)
        return x


class Universal(Model):
    """One block, three times."""

    def __init__(self):
        super().__init__()
        self.block = Block()

    def stack(self, x, ids):
        for _ in range(3):
            x = self.block(x)
        return x


class Twice(Model):
    """Two blocks in turn, each twice."""

    def __init__(self):
        super().__init__([Block() for _ in range(2)])

    def stack(self, x, ids):
        for f in [*self.blocks, *self.blocks]:
            x = f(x)
        return x


class Neighbour(Residuals):
    """A connection that passes by a block, and not by the layer that it ends in."""

    def stack(self, x, ids):
        first = self.blocks[0](x)
        return self.blocks[2](self.blocks[1](first) + first)


class Backwards(Residuals):
    def stack(self, x, ids):
        for f in reversed(self.blocks):
            x = x + f(x)
        return x


class Alternating(Residuals):
    def __init__(self):
        Model.__init__(self, [Feed(), Mix(), Feed(), Mix()])


class Biased(nn.Module):
    """The first block makes a bias for all, as T5's does."""

    def __init__(self, is_first):
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.bias = nn.Parameter(torch.rand(TOKENS, TOKENS)) if is_first else None

    def forward(self, x, bias, mask):
        bias = self.bias.exp() + mask if bias is None else bias
        h = self.mix(x)
        return x + torch.softmax(h @ h.mT + bias, -1) @ h, bias


class SharedBias(Model):
    def __init__(self):
        super().__init__([Biased(number == 0) for number in range(3)])

    def stack(self, x, ids):
        bias, mask = None, (ids > 3).float()[:, None]
        for block in self.blocks:
            x, bias = block(x, bias, mask)
        return x


class Valued(nn.Module):
    """The first block's values are added to those of all others."""

    def __init__(self):
        super().__init__()
        self.mix, self.value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, first):
        h, value = self.mix(x), self.value(x)
        first = value if first is None else first
        return x + torch.softmax(h @ h.mT, -1) @ (value + first), first


class FirstValues(Model):
    def __init__(self, number=4):
        super().__init__([Valued() for _ in range(number)])

    def stack(self, x, ids, ahead=0):
        first = None
        for number, block in enumerate(self.blocks):
            x, value = block(x, first)
            first = value if number >= ahead else None
        return x


class SharedValues(FirstValues):
    """The fourth of seven blocks makes values for those behind it, as the layers of Gemma 4 that share keys and values."""

    def __init__(self):
        super().__init__(7)

    def stack(self, x, ids):
        return super().stack(x, ids, 3)


class Joint(nn.Module):
    """A block of two streams, each of which reads the other."""

    def __init__(self):
        super().__init__()
        self.image, self.text = Block(), Block()

    def forward(self, image, text):
        seen = image.mean(1, keepdim=True)
        return self.image(image + text.mean(1, keepdim=True)), self.text(text + seen)


class TwoStreams(Model):
    """Two tensors of different shapes go from block to block, and come to the head."""

    def __init__(self):
        super().__init__([Joint() for _ in range(3)])

    def stack(self, x, ids):
        text = self.embed(ids[:, 1:3].flip(1))
        for block in self.blocks:
            x, text = block(x, text)
        return x + text.mean(1, keepdim=True)


class LongSkips(Model):
    """The last blocks add what the first ones make, in the reverse order, as in a U-Net."""

    def __init__(self):
        super().__init__([Block() for _ in range(6)])

    def stack(self, x, ids):
        made = []
        for block in self.blocks[:3]:
            made.append(x := block(x))
        for block in self.blocks[3:]:
            x = block(x + made.pop())
        return x


class Narrowing(nn.Module):
    """Layers of which no two are alike, and whose last makes the output."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(TOKENS, 8), nn.Tanh(), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3))

    def forward(self, ids, labels):
        return self.net(ids.float())


class Places(nn.Module):
    """As the table of positions of an example's model: a part of what is no layer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.randn(4000, WIDTH))

    def forward(self, x):
        return x + self.table[: x.shape[1]]


class Container(Model):
    """What makes the first layer's input are two numbered modules, and larger than the layers."""

    def __init__(self):
        super().__init__([Block() for _ in range(3)])
        self.embed = nn.Sequential(self.embed, Places())

    def stack(self, x, ids):
        for block in self.blocks:
            x = block(x)
        return x


class OneContainer(Container):
    """The embedding is a module of the list of layers, where it takes in ids."""

    def __init__(self):
        super().__init__()
        self.blocks.insert(0, self.embed)
        self.embed = nn.Identity()


class Bare(nn.Module):
    """Residual branches, whose last sum is the output."""

    def __init__(self):
        super().__init__()
        self.embed, self.blocks = nn.Embedding(WORDS, WIDTH), nn.ModuleList(Feed() for _ in range(3))

    def forward(self, ids, labels):
        x = self.embed(ids)
        for f in self.blocks:
            x = x + f(x)
        return x


class Memories(nn.Module):
    """Returns its hidden state, and what all layers take in, as the memories of a Transformer-XL."""

    def __init__(self):
        super().__init__()
        self.embed, self.blocks = nn.Embedding(WORDS, WIDTH), nn.ModuleList(Block() for _ in range(3))

    def forward(self, ids, labels):
        x, taken = self.embed(ids), []
        for block in self.blocks:
            taken.append(x.detach())
            x = block(x)
        return x, torch.stack(taken, 1)


class Query(Model):
    """What the first layer takes in is one row, expanded to the batch: its gradient has memory for each."""

    def __init__(self):
        super().__init__([Feed() for _ in range(2)])
        self.query = nn.Parameter(torch.randn(1, TOKENS, WIDTH))

    def stack(self, x, ids):
        read = x.flip(1)
        x = self.query.expand(len(ids), -1, -1)
        for f in self.blocks:
            x = x + f(x + read)
        return x


class Encoder(Model):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, 0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, nn.LayerNorm(WIDTH), enable_nested_tensor=False)

    def stack(self, x, ids):
        return self.encoder(x, mask=nn.Transformer.generate_square_subsequent_mask(TOKENS), is_causal=True)


class Decoder(Model):
    def __init__(self):
        super().__init__()
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(WIDTH, 2, 16, 0.0, batch_first=True), 3)

    def stack(self, x, ids):
        return self.decoder(x, functional.normalize(x, dim=-1))


class EncoderDecoder(Model):
    """Both are streamed; what joins them is a layer."""

    def __init__(self):
        super().__init__()
        self.both = nn.Transformer(WIDTH, 2, 2, 3, 16, 0.0, batch_first=True)

    def stack(self, x, ids):
        return self.both(x, x.flip(1))


# A model, the classes of its layers, and the parameters that units share.
CASES = [
    (Residuals, "012", 0),
    (OneNorm, "012", 2),
    (Pairs, "012", 0),
    (Scaled, "0 1 2", 0),
    (Weighted, "0 12", 0),
    (Named, "012", 0),
    (Universal, "012", 4),
    (Twice, "0123", 8),
    (Neighbour, "02 1", 0),
    (Backwards, "012", 0),
    (Alternating, "02 13", 0),
    (SharedBias, "012", 0),
    (FirstValues, "012", 0),  # the first block runs with the embedding, as the first two of the next case
    (LongSkips, "0 1 23", 0),
    (SharedValues, "012 3 456", 0),  # the fourth is a joint
    (TwoStreams, "012", 0),
    (Narrowing, "0 1 2 3 4", 0),
    (Bare, "012", 0),
    (Memories, "0 12", 0),  # the first layer's input is detached in the embedding
    (Container, "012", 0),
    (OneContainer, "012", 0),
    (Query, "01", 0),
    (Encoder, "012", 0),
    (Decoder, "012", 0),
    (EncoderDecoder, "01 2 345", 0),
]


def losses_and_values(model, optimizer):
    losses = []
    for number in range(2):
        result = model(*batch(4, seed=number))
        result = result[0] + result[1].sum(1) if isinstance(result, tuple) else result
        loss = result.square().mean() if result.dim() else result
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [*losses, *(value.clone() for value in model.state_dict().values())]


# Of each, another case has more in it; of two streams, test_two_tensors.py.
SLOW = {Residuals, Pairs, Named, Universal, Neighbour, SharedBias, FirstValues, TwoStreams, Container, Encoder, Decoder}


@pytest.mark.parametrize(
    ("build", "classes", "num_shared"),
    [pytest.param(*case, marks=[pytest.mark.slow] * (case[0] in SLOW)) for case in CASES],
    ids=[case[0].__name__ for case in CASES],
)
def test_a_stack_trains_as_plain_pytorch(build, classes, num_shared, tmp_path):
    """Up to the order in which micro-batches are added. SGD changes values by their gradients alone, as AdamW does not."""
    torch.manual_seed(0)
    model = build()
    plain = copy.deepcopy(model)
    expected = losses_and_values(plain, torch.optim.SGD(plain.parameters(), lr=0.5))
    optimizer = gs_compile.SGD(model.parameters(), lr=0.5)
    model.compile(backend="greedysnake", options=options(tmp_path, outputs="all"))
    found = losses_and_values(model, optimizer)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert all(map(is_offloaded, model.parameters()))
    (compilation,) = compilations_of[next(model.parameters())]
    made = next(iter(compilation.models.values()))
    assert " ".join("".join(map(str, layers)) for layers in made.uniform.layer_classes) == classes
    read = Counter(index for graph in made.split.units for index in graph.parameters(compilation.captured))
    assert sum(times > 1 for times in read.values()) == num_shared
    optimizer.engine.tiers.close()
