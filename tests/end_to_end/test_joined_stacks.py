"""An encoder and a decoder, both streamed: what they learn, and the bytes that their steps move."""

from __future__ import annotations

import copy
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from captured import captured
from closed_forms import both, spared, units_of_parts, vertical
from tiered import LENGTH, VOCABULARY, Block, Harness, Output, adamw, moved, options, sgd, step, tokens
from torch import nn
from torch.nn import functional

import gs_compile
from benchmarks.zoo.registry import CASES
from benchmarks.zoo.trial import run
from gs_compile.options import Ratios
from gs_compile.placement.placement import Placement
from gs_compile.planner.run import RunPlanner

KEEPS_CAPTURES = True
WIDE, NARROW, MICRO_BATCH, NUM_STEPS = 32, 24, 2, 3
# The unit of each part of the model; the joint is layer 2, and has what stands between the stacks.
PARTS = {"embed": "e", "encoder.0": 0, "encoder.1": 1, "between": 2, "decoder.0": 3, "decoder.1": 4, "head": "h"}


class Reader(Block):
    """A block that reads the encoder's output, which has another width."""

    def __init__(self) -> None:
        super().__init__(NARROW, 0.0)
        self.read = nn.Linear(WIDE, NARROW)

    def forward(self, x_BTD: torch.Tensor, memory_BTE: torch.Tensor) -> torch.Tensor:
        return super().forward(x_BTD + torch.tanh(self.read(memory_BTE)))


class Joined(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDE)
        self.encoder = nn.ModuleList(Block(WIDE, 0.0) for _ in range(2))
        self.between = nn.ModuleDict({"norm": nn.LayerNorm(WIDE), "embed": nn.Embedding(VOCABULARY, NARROW)})
        self.decoder = nn.ModuleList(Reader() for _ in range(2))
        self.head = nn.Linear(NARROW, VOCABULARY)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Output:
        x_BTE = self.embed(input_ids.flip(1))
        for block in self.encoder:
            x_BTE = block(x_BTE)
        memory_BTE, x_BTD = self.between["norm"](x_BTE), self.between["embed"](input_ids)
        for block in self.decoder:
            x_BTD = block(x_BTD, memory_BTE)
        logits = self.head(x_BTD)[:, :-1]
        return Output(functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten()), logits)


def joined() -> nn.Module:
    torch.manual_seed(0)
    return Joined().train()


@pytest.fixture(scope="module")
def harness() -> Harness:
    return Harness(joined)


MIXED = {"ratios": {"parameter": 0.5, "checkpoint": 0.4, "optimizer": 0.3}, "alpha": 0.25}
PLACEMENTS = {
    "SSD": {},
    "host": {"ratios": {"parameter": 1.0, "checkpoint": 1.0, "optimizer": 1.0}, "alpha": 1.0},
    "mixed": MIXED,
    "a device, SSD": {"separate_device": True},
    "a device, mixed": {"separate_device": True, **MIXED, "ratios": {**MIXED["ratios"], "device_checkpoint": 0.3}},
}


@contextmanager
def apart():
    """Have plans keep of the encoder what is on SSD of the decoder, and the other way round; gives their placements.

    The joint goes with the decoder.
    """
    usual, made = RunPlanner._decided, list[Placement]()
    encoder = Ratios(checkpoint=1.0, parameter=0.0, optimizer=1.0, device_checkpoint=0.0, device_parameter=0.0)
    ratios = encoder, replace(encoder, checkpoint=0.0, parameter=1.0, optimizer=0.0)

    def decided(run, budgets):
        found = usual(run, budgets)
        made.append(run.builder(run.model.masters).placement(replace(found.placement.decision, ratios=ratios)))
        return replace(found, placement=made[-1])

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(RunPlanner, "_decided", decided)
        yield made


@pytest.mark.parametrize(
    "places",
    [("SSD", "a device, mixed"), pytest.param(tuple(PLACEMENTS), marks=pytest.mark.slow)],
    ids=["some", "all"],
)
def test_the_same_bits_wherever_data_lives(harness, tmp_path, places):
    found = {
        name: harness.train(adamw, options(tmp_path / name, **PLACEMENTS[name]), NUM_STEPS, batch_size=5)
        for name in places
    }
    with apart() as made:
        name, chosen = "each stack its own", options(tmp_path, separate_device=True)
        found[name] = harness.train(adamw, chosen, NUM_STEPS, batch_size=5)
    homes = [(unit.unit, {part.tier for part in unit.w.values()}) for unit in made[0].units]
    assert homes == [
        ("e", {"ssd"}),
        (0, {"ssd"}),
        (1, {"ssd"}),
        (2, {"host"}),
        (3, {"host"}),
        (4, {"host"}),
        ("h", {"host"}),
    ]
    first = found.pop("SSD")
    assert {name: each.differences(first) for name, each in found.items()} == {name: [] for name in found}


@pytest.mark.parametrize("schedule", ["vertical", "horizontal"])
def test_it_learns_what_plain_pytorch_does(harness, schedule, tmp_path):
    """Up to the order in which micro-batches are added."""
    plain = joined()
    optimizer = torch.optim.SGD(plain.parameters(), lr=1.0)
    losses = [step(plain, optimizer, tokens(number)) for number in range(NUM_STEPS)]
    found = harness.train(sgd, options(tmp_path, schedule=schedule), NUM_STEPS)
    torch.testing.assert_close(found.losses, losses, rtol=1e-5, atol=1e-5)
    for name, value in plain.named_parameters():
        torch.testing.assert_close(found.values[name], value.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("separate_device", [False, True])
def test_a_step_moves_what_it_has_to(harness, separate_device, tmp_path):
    """The layers of both stacks, each checkpoint as large as its stack has it, and the joint as a layer."""
    number = 3
    with harness.fresh(adamw, options(tmp_path, separate_device=separate_device, alpha=0.0)) as optimizer:
        for each in range(2):
            step(harness.model, optimizer, tokens(each, MICRO_BATCH * number))
        found = moved(harness.model, optimizer, tokens(3, MICRO_BATCH * number))
        engine = optimizer.engine
        kept = spared(engine.placement)
        layers = {unit.unit: unit.numel for unit in engine.placement.units}
    assert layers == units_of_parts(harness.model, PARTS)
    assert found.traced == found.planned
    token = MICRO_BATCH * LENGTH * 4
    expected = vertical(
        layers, [*[token * WIDE] * 3, *[token * NARROW] * 3], number, alpha=0.0, separate_device=separate_device
    )
    assert both(found.traced, kept) == expected


def test_where_blocks_are_cut_in_two_the_larger_stack_alone_is_streamed():
    case = captured(joined(), tokens(0), labels=tokens(1))
    assert (case.split().num_layers, case.split().joints) == (5, {2})
    halves = case.split(halved=True)
    assert (halves.num_layers, halves.joints) == (4, frozenset())


# A tower before a language model, and models of transformers ----------------------------------------------------------


class Pictures(nn.Module):
    """What a tower makes of an image's patches stands before the words."""

    def __init__(self, trained: bool) -> None:
        super().__init__()
        self.patches, self.places = nn.Conv2d(3, WIDE, 4, 4), nn.Parameter(torch.zeros(4, WIDE))
        layer = nn.TransformerEncoderLayer(WIDE, 2, 2 * WIDE, 0.0, batch_first=True)
        self.tower = nn.ModuleList(copy.deepcopy(layer) for _ in range(2))
        self.project, self.embed = nn.Linear(WIDE, NARROW), nn.Embedding(VOCABULARY, NARROW)
        self.blocks = nn.ModuleList(Block(NARROW, 0.0) for _ in range(2))
        self.head = nn.Linear(NARROW, VOCABULARY)
        for part in (self.patches, self.tower):
            part.requires_grad_(trained)
        self.places.requires_grad_(trained)

    def forward(self, images_BCHW: torch.Tensor, ids_BT: torch.Tensor) -> torch.Tensor:
        x_BPE = self.patches(images_BCHW).flatten(2).mT.contiguous() + self.places
        for block in self.tower:
            x_BPE = block(x_BPE)
        x_BTD = torch.cat([self.project(x_BPE), self.embed(ids_BT)], 1)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return functional.cross_entropy(self.head(x_BTD[:, 4:-1]).flatten(0, 1), ids_BT[:, 1:].flatten())


def learned(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    images_BCHW = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    losses = []
    for number in range(2):
        loss = model(images_BCHW, tokens(number, 4))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [*losses, *(value.clone() for value in model.state_dict().values())]


@pytest.mark.parametrize("trained", [True, False])
def test_a_tower_is_streamed_before_a_language_model(trained, tmp_path):
    """Frozen, it runs forward alone, and leaves no checkpoint."""
    torch.manual_seed(0)
    model = Pictures(trained)
    plain = copy.deepcopy(model)
    expected = learned(plain, torch.optim.SGD([p for p in plain.parameters() if p.requires_grad], lr=0.5))
    optimizer = gs_compile.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    model.compile(backend="greedysnake", options=options(tmp_path))
    torch.testing.assert_close(learned(model, optimizer), expected, rtol=1e-5, atol=1e-5)
    program = optimizer.engine.snapshots[-1]
    ssd = {value.unit for op in program.ops if op.lane == "ssd_write" for value in op.results if value.kind == "x"}
    backwards = [stage.unit for stage, _ in program.stages() if stage.phase == "backward"]
    assert program.joints == {2}
    assert backwards == ["h", 4, 3, 2, *([1, 0, "e"] if trained else [])]
    assert ssd == {2, 3, 4} | ({0, 1} if trained else set())
    optimizer.engine.tiers.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["t5, AutoModelForSeq2SeqLM", "bart, AutoModelForSeq2SeqLM", "whisper, WhisperForConditionalGeneration"],
)
def test_both_stacks_of_a_model_of_transformers_are_streamed(name):
    """As the zoo tries them: against plain PyTorch, and the same bits on SSD as in memory."""
    case = CASES[f"transformers/{name}"]
    found = run(case)
    assert (found["result"], found["streamed"], found["kinds"]) == ("trains", case.num_blocks, 2)
