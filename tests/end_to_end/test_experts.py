"""Experts that get their tokens by index, of which values decide how many there are."""

from __future__ import annotations

import copy
from functools import cache

import pytest
import torch
import transformers.integrations.moe  # noqa: F401 (which makes an operation of products of groups)
from learner import distance
from tiered import options
from torch import nn
from torch.nn import functional
from zoo import NAMES_DIMENSIONS

import gs_compile
from gs_compile.codegen.compiled import compilations_of
from gs_compile.errors import CaptureError, LengthWarning, OptimizerError, PlanError, SeparationError
from gs_compile.runtime.units import seed_of

WIDTH, WORDS, EXPERTS = 8, 11, 2
IN_MEMORY = {"parameter": 1.0, "checkpoint": 1.0, "optimizer": 1.0}


class Routed(nn.Module):
    """Each token goes to one of the experts, and comes back weighted."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm, self.gate = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 12), nn.GELU(), nn.Dropout(dropout), nn.Linear(12, WIDTH))
            for _ in range(EXPERTS)
        )

    def forward(self, x_BTD):
        x = self.norm(x_BTD).flatten(0, 1)
        scores, chosen = self.gate(x).softmax(-1).topk(1)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, place = torch.where(chosen == number)
            y[token] += scores[token, place, None] * expert(x[token])
        return x_BTD + y.view_as(x_BTD)


class Chosen(Routed):
    """The same by other functions, and by the number of the tokens."""

    def forward(self, x_BTD):
        x = self.norm(x_BTD).flatten(0, 1)
        scores, chosen = self.gate(x).softmax(-1).topk(1)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, place = (chosen == number).nonzero().unbind(-1)
            weights = scores[token, place].unsqueeze(-1).expand(token.shape[0], WIDTH)
            given = x.index_select(0, token).view(token.numel(), 2, WIDTH // 2).flatten(1)
            y = y.index_add(0, token, weights * expert(given))
        return x_BTD + y.view_as(x_BTD)


class Sorted(nn.Module):
    """Two experts of three for each token, whose rows are sorted by expert, as transformers does."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm, self.gate = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3, bias=False)
        self.up, self.down = nn.Parameter(torch.randn(3, WIDTH, 12)), nn.Parameter(torch.randn(3, 12, WIDTH))

    def forward(self, x_BTD):
        x, product = self.norm(x_BTD).flatten(0, 1), torch.ops.transformers.grouped_mm_fallback
        scores, chosen = self.gate(x).softmax(-1).topk(2)
        sorted_, rows = chosen.flatten().sort()
        ends = torch.histc(sorted_.float(), 3, 0, 2).cumsum(0, dtype=torch.int32)
        made = product(functional.gelu(product(x[rows // 2], self.up, ends)), self.down, ends)
        made = (made * scores.flatten()[rows, None])[rows.argsort()].unflatten(0, (-1, 2)).sum(1)
        return x_BTD + made.view_as(x_BTD)


class Model(nn.Module):
    def __init__(self, block=Routed, dropout=0.0) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.ModuleList(block(dropout) for _ in range(2))

    def forward(self, ids, labels):
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def batches(lengths):
    """Batches of four samples; the second is of one word, which leaves an expert without tokens."""
    generator = torch.Generator().manual_seed(1)
    for number, length in enumerate(lengths):
        ids = torch.randint(WORDS, (4, length), generator=generator)
        yield (torch.full_like(ids, 3) if number == 1 else ids), torch.randint(WORDS, (4, length), generator=generator)


def train(storage, block=Routed, dropout=0.0, lengths=(4, 4), **changes):
    """Losses, and values after the steps; on no tiers where `storage` is None."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Model(block, dropout)
    kind = torch.optim.AdamW if storage is None else gs_compile.AdamW
    optimizer, losses = kind(model.parameters(), lr=0.01), []
    if storage is not None:
        model.compile(backend="greedysnake", options=options(storage, **changes))
    micro_batch = seed_each_unit(model) if dropout and storage is None else None
    for number, (ids, labels) in enumerate(batches(lengths)):
        torch.manual_seed(number)
        parts = zip(ids.split(2), labels.split(2), strict=True) if micro_batch else [(ids, labels)]
        loss = sum_of_shares(model, list(parts), micro_batch)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss)
    values = {"losses": torch.stack(losses)} | {k: v.detach().clone() for k, v in model.state_dict().items()}
    if storage is not None:
        optimizer.engine.tiers.close()
    return values


def seed_each_unit(model):
    """Have each layer of a plain model draw what is a unit's for the step and micro-batch in the list returned."""
    now = [0, 0]
    for layer, block in enumerate(model.blocks):
        block.register_forward_pre_hook(
            lambda *_, layer=layer: torch.manual_seed(seed_of(now[0], layer, now[1])) and None
        )
    return now


def sum_of_shares(model, parts, now):
    """The loss of the parts of a batch that are of one size, whose gradients add."""
    if now:
        now[0] = int(torch.randint(2**62, ()))
    total = torch.zeros(())
    for index, part in enumerate(parts):
        if now:
            now[1] = index
        loss = model(*part) / len(parts)
        loss.backward()
        total += loss.detach()
    return total


@cache
def plain(lengths=(4, 4)):
    return train(None, lengths=lengths)


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """Everything on SSD, micro-batches of two samples."""
    return train(tmp_path_factory.mktemp("stored"))


def test_an_expert_is_left_without_tokens():
    torch.manual_seed(0)
    block, found = Model().blocks[0], []
    for ids, _ in batches((4, 4)):
        x = torch.zeros(1, WIDTH) + ids.flatten()[:, None]
        found.append(block.gate(block.norm(x)).topk(1).indices.unique().numel())
    assert min(found) == EXPERTS - 1


def test_experts_learn_what_they_do_in_plain_pytorch(stored):
    assert distance(stored, plain()) < 1e-6


@pytest.mark.parametrize(
    "changes", [{"ratios": IN_MEMORY}, pytest.param({"recompute": "none"}, marks=pytest.mark.slow)], ids=str
)
def test_experts_learn_the_same_bits_wherever_data_is(stored, tmp_path, changes):
    found = train(tmp_path, **changes)
    torch.testing.assert_close(found, stored, rtol=0, atol=0)


def test_experts_in_pieces_learn_the_same_bits_wherever_data_is(tmp_path):
    places = {"memory": {"ratios": IN_MEMORY, "alpha": 0.5}, "storage": {}}
    found, stored = (train(tmp_path / name, Sorted, layer_tokens=3, **place) for name, place in places.items())
    torch.testing.assert_close(found, stored, rtol=0, atol=0)
    assert distance(found, train(None, Sorted)) < 1e-6


@pytest.mark.slow
def test_experts_save_beside_what_is_of_a_known_size(tmp_path):
    """Other lengths have code of their own then."""
    with pytest.warns(LengthWarning, match="the sizes of tensors inside depend on values"):
        found = train(tmp_path, lengths=(4, 4, 6), recompute="none")
    assert distance(found, train(None, lengths=(4, 4, 6))) < 1e-6


# A torch that names whole sources makes the first length's code for all.
@pytest.mark.filterwarnings(f"{'error' if NAMES_DIMENSIONS else 'ignore'}::gs_compile.errors.LengthWarning")
def test_dropout_in_experts_drops_the_same_again(tmp_path):
    """A backward draws what its forward drew, which is run again whole: nothing is saved beside."""
    assert distance(train(tmp_path, dropout=0.5), train(None, dropout=0.5)) < 1e-6
    words = "how many random numbers .* depends on values" if NAMES_DIMENSIONS else "Could not guard on data-dependent"
    with pytest.raises(PlanError, match=words):
        train(tmp_path, dropout=0.5, recompute="none")


@pytest.mark.slow
def test_compiled_experts_of_other_functions_learn_the_same(tmp_path):
    assert distance(train(tmp_path, Chosen, compiler="inductor"), plain()) < 2e-6


class Counted(Routed):
    """Leaves out experts without tokens."""

    def forward(self, x_BTD):
        y = torch.zeros_like(x_BTD)
        for number, expert in enumerate(self.experts):
            token = torch.where(self.gate(x_BTD).argmax(-1) == number)
            if token[0].numel() > 0:
                y[token] = expert(x_BTD[token])
        return x_BTD + y


class Repeated(Routed):
    """Has as many copies of a token as the gate says."""

    def forward(self, x_BTD):
        copies = x_BTD.flatten(0, 1).repeat_interleave(self.gate(x_BTD).argmax(-1).flatten(), 0)
        return x_BTD + self.experts[0](copies).sum(0)


class Mean(Routed):
    """Takes the mean over the tokens of an expert."""

    def forward(self, x_BTD):
        token = torch.where(self.gate(x_BTD).argmax(-1) == 0)
        return x_BTD + self.experts[0](x_BTD[token]).mean(0)


class Weighed(Routed):
    """Multiplies by how many tokens an expert gets, of a micro-batch or of all. Fault: by those of a micro-batch."""

    def forward(self, x_BTD):
        token = torch.where(self.gate(x_BTD).argmax(-1) == 0)
        return x_BTD + self.experts[0](x_BTD) * token[0].numel()


class Shared(Routed):
    """By their share of all tokens; as a tensor."""

    def forward(self, x_BTD):
        token = torch.where(self.gate(x_BTD).argmax(-1) == 0)
        share = torch.full(x_BTD.shape, token[0].shape[0] / x_BTD.numel(), dtype=x_BTD.dtype)
        return x_BTD + self.experts[0](x_BTD) * share


class Dropping(Routed):
    """An expert leaves out all but its first tokens, of a micro-batch or of all. Fault: of a micro-batch."""

    def forward(self, x_BTD):
        x = x_BTD.flatten(0, 1)
        token = torch.where(self.gate(x).argmax(-1) == 0)[0][:3]
        return x_BTD + torch.zeros_like(x).index_add(0, token, self.experts[0](x[token])).view_as(x_BTD)


class Packed(Model):
    """Hands its blocks the words alone that are no padding; or its head alone, which may mix them."""

    def __init__(self, block, is_loss=False, mix=lambda rows: rows):
        super().__init__(lambda _: block(WIDTH, WIDTH))
        self.is_loss, self.mix, self.norm = is_loss, mix, nn.LayerNorm(WIDTH)

    def forward(self, ids, labels):
        kept = torch.where(labels > 2)
        x = self.words(ids) if self.is_loss else self.words(ids)[kept]
        for block in self.blocks:
            x = x + block(x)
        x = self.mix(x[kept]) if self.is_loss else x
        return functional.cross_entropy(self.head(2 * self.norm(x).relu()), labels[kept])


REFUSED = {
    "an if": (
        lambda: Model(Counted),
        OptimizerError,
        r"(?s)gave the model's forward up at .*numel\(\) > 0.*grouped_mm",
    ),
    "any size": (
        lambda: Model(Repeated),
        CaptureError,
        r"`copies` \(repeat_interleave\).*repeat_interleave.*grouped_mm",
    ),
    "a mean": (lambda: Model(Mean), SeparationError, r"averages over as many elements as values decide, at .*mean"),
    "a number": (lambda: Model(Weighed), SeparationError, r"`mul.*` \(mul\) computes with what is counted"),
    "some of them": (lambda: Model(Dropping), SeparationError, r"`.*` \(getitem\) takes a part of the samples"),
    "a share": (lambda: Model(Shared), SeparationError, r"`.*` \(full\) computes with what is counted"),
    "a loss": (
        lambda: Packed(nn.Linear, is_loss=True, mix=lambda rows: (rows @ rows.T).softmax(-1) @ rows),
        SeparationError,
        r"has a size that values decide, at .*where\(labels",
    ),
    "a logarithm of rows": (
        lambda: Packed(nn.Linear, is_loss=True, mix=lambda rows: rows.square().log()),
        SeparationError,
        r"has a size that values decide, at .*where\(labels",
    ),
}


def one_step(model, optimizer):
    model(*next(batches((4,)))).backward()
    optimizer.step()


@pytest.mark.parametrize("name", REFUSED)
def test_where_sizes_of_values_are_refused(name, tmp_path):
    make, kind, words = REFUSED[name]
    model = make()
    optimizer = gs_compile.SGD(model.parameters(), lr=0.1)
    model.compile(backend="greedysnake", options=options(tmp_path))
    with pytest.raises(kind, match=words):
        one_step(model, optimizer)


def test_words_that_the_head_alone_chooses(tmp_path):
    """Of all of them, behind the model; refused before, in several micro-batches."""
    torch.manual_seed(0)
    model, step = Packed(nn.Linear, is_loss=True).double(), list(batches((4, 5)))
    plain = copy.deepcopy(model)
    optimizers = gs_compile.SGD(model.parameters(), lr=0.1), torch.optim.SGD(plain.parameters(), lr=0.1)
    model.compile(backend="greedysnake", options=options(tmp_path))
    for each, optimizer in zip((model, plain), optimizers, strict=True):
        for ids, labels in step:
            each(ids, labels).backward()
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(dict(model.state_dict()), dict(plain.state_dict()), rtol=1e-12, atol=1e-12)
    optimizers[0].engine.tiers.close()


@pytest.mark.parametrize("is_loss", [True, False])
def test_words_that_are_chosen_in_one_micro_batch(is_loss, tmp_path):
    """In the head a loss may be that of some words; what goes through blocks has a size that inputs decide."""
    torch.manual_seed(0)
    model, batch = Packed(nn.Linear, is_loss), next(batches((4,)))
    expected = float(model(*batch).detach())
    optimizer = gs_compile.SGD(model.parameters(), lr=0.1)
    model.compile(backend="greedysnake", options=options(tmp_path, micro_batch_size=4))
    if not is_loss:
        with pytest.raises(CaptureError, match="leaves its block, or the model, and its size depends on values"):
            model(*batch)
        return
    loss = model(*batch)
    loss.backward()
    optimizer.step()
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-6)
    optimizer.engine.tiers.close()


def test_memory_is_planned_for_all_tokens_at_every_expert(tmp_path):
    """Counted where values are not known: as if each expert got all tokens."""
    torch.manual_seed(0)
    model = Model()
    optimizer = gs_compile.SGD(model.parameters(), lr=0.1)
    model.compile(backend="greedysnake", options=options(tmp_path))
    model(*next(batches((4,)))).backward()
    optimizer.engine.tiers.close()
    (compilation,) = compilations_of[model.head.weight]
    code = compilation.latest.model.codes[0]
    rows = 2 * 4  # of an expert at the most: samples x tokens
    least = EXPERTS * rows * 2 * 12 * 4  # what the backward has computed again: two tensors of width 12 an expert
    assert least < code.workspace_nbytes < 4 * least
    assert code.cost("forward").flops == 2 * 8 * WIDTH * EXPERTS + EXPERTS * 2 * rows * 2 * WIDTH * 12
