"""Workloads of real models, against closed forms and against the same models captured whole."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch
import zoo
from planned import gpt

from gs_compile.errors import PlanError
from gs_compile.placement.shards import QUANTUM
from gs_compile.planner.cost import workload as module
from gs_compile.planner.cost.model import DEPTH, built
from gs_compile.planner.cost.workload import ModelSpec
from gs_compile.planner.measure.machines import profile as find_profile
from gs_compile.planner.plan import plan, planner_of
from gs_compile.planner.request import Request
from gs_compile.program.ir import height
from gs_compile.runtime.codecs import CODECS

FAMILIES = [
    "gpt2",
    *(pytest.param(n, marks=pytest.mark.slow) for n in ("llama", "qwen3", "mistral", "gpt_neox", "opt")),
]

# B samples, T tokens, D width, V words.
B, T, D, V = 8, 2048, 8192, 50304


@pytest.fixture(scope="module")
def gpt_65b():
    return ModelSpec.of("gpt-65b", sequence=T, precision="bf16").workload(B)


def size(workload, unit):
    (found,) = (size for size in workload.sizes if size.unit == unit)
    return found


def test_a_layer_of_65b_has_six_times_the_elements_of_its_checkpoint(gpt_65b):
    layer = size(gpt_65b, 5)
    assert layer.num_trained == 12 * D**2 + 13 * D == pytest.approx(8.05e8, rel=1e-3)
    assert gpt_65b.x_nbytes == (B * T * D * 2,)
    assert layer.num_trained / (gpt_65b.x_nbytes[0] / layer.itemsize) == pytest.approx(6, rel=1e-3)


def test_the_sizes_of_65b(gpt_65b):
    assert (gpt_65b.name, gpt_65b.num_layers, gpt_65b.dtype, gpt_65b.tokens) == ("gpt-65b", 80, "bf16", B * T)
    assert [s.unit for s in gpt_65b.sizes] == ["t", "e", *range(80), "h"]
    assert gpt_65b.num_trained == 80 * (12 * D**2 + 13 * D) + V * D + T * D + 2 * D
    assert {(s.itemsize, s.gradient_itemsize, s.state_itemsize, s.has_master) for s in gpt_65b.sizes} == {
        (2, 4, 10, False)
    }
    assert gpt_65b.shape.tied == {"e", "h"}
    assert gpt_65b.shape.has_loss
    assert gpt_65b.shape.frozen == frozenset()


def test_the_operations_of_65b(gpt_65b):
    matrices, attention, last = 24 * B * T * D**2, 4 * B * T**2 * D, 8 * B * T * D**2
    layer, head = gpt_65b.costs[79], gpt_65b.costs["h"]
    assert layer.forward_flops == matrices + attention
    # Twice the forward, and the forward again: but for its last product, which no gradient needs. The fused kernel
    # makes the scores once more.
    assert layer.backward_flops == 3 * layer.forward_flops - last + attention / 2
    assert head.forward_flops == 2 * B * T * D * V
    assert head.backward_flops == 3 * head.forward_flops
    assert gpt_65b.model_flops == pytest.approx(6 * gpt_65b.num_trained * gpt_65b.tokens, rel=0.06)
    assert gpt_65b.model_flops == 3 * (80 * layer.forward_flops + head.forward_flops)


def test_what_a_layer_needs_inside(gpt_65b):
    """Its gradients, and of its activations what its backward reads, at least."""
    gradients, hidden = 2 * (12 * D**2 + 13 * D), 2 * B * T * D
    assert gradients < gpt_65b.costs[0].workspace_nbytes < gradients + 80 * hidden


@pytest.mark.parametrize("name", FAMILIES)
def test_short_captures_give_the_workloads_of_whole_ones(name, monkeypatch):
    config = zoo.configuration(name)
    spec = ModelSpec.of(config, sequence=zoo.TOKENS)
    assert (spec.num_layers, spec.specialized(2).split.num_layers) == (zoo.LAYERS, DEPTH)
    short = spec.workload(2)
    monkeypatch.setattr(module, "repeated", lambda _: None)
    spec = ModelSpec.of(config, sequence=zoo.TOKENS)
    assert spec.specialized(2).split.num_layers == zoo.LAYERS
    assert spec.workload(2) == short
    model = zoo.huggingface(name)
    padded = sum(-(-p.numel() // QUANTUM) * QUANTUM for p in model.parameters())
    assert short.num_trained == padded
    assert short.name == name


@pytest.mark.slow
def test_a_module_has_the_workload_of_its_config():
    model = zoo.huggingface("gpt2", dropout=None)
    expected = ModelSpec.of(zoo.configuration("gpt2"), sequence=zoo.TOKENS).workload(2)
    found = ModelSpec.of(model, sequence=zoo.TOKENS).workload(2)
    assert replace(found, name=expected.name) == expected


def test_experts_are_counted_for_the_tokens_that_they_get():
    config = zoo.configuration("mixtral")
    cost = ModelSpec.of(config, sequence=zoo.TOKENS, precision="bf16").workload(2).costs[0]
    tokens, width, head = 2 * zoo.TOKENS, config.hidden_size, config.hidden_size // config.num_attention_heads
    projections = 2 * width**2 + 2 * width * config.num_key_value_heads * head
    experts = config.num_experts_per_tok * 3 * width * config.intermediate_size + width * config.num_local_experts
    attention = 4 * tokens * zoo.TOKENS * width
    assert cost.forward_flops == 2 * tokens * (projections + experts) + attention


def test_several_micro_batch_sizes_of_one_spec():
    spec = ModelSpec.of(zoo.GPT(num_layers=4), sequence=zoo.TOKENS, precision="bf16")
    one, three = spec.workload(1), spec.workload(3)
    assert three.sizes == one.sizes
    assert three.x_nbytes[0] == 3 * one.x_nbytes[0] == 3 * zoo.TOKENS * zoo.WIDTH * 2
    for unit, cost in one.costs.items():
        assert three.costs[unit].forward_flops == 3 * cost.forward_flops
        assert three.costs[unit].backward_flops == 3 * cost.backward_flops
    assert size(one, "h").state_itemsize == 10
    eight = replace(spec, states="8bit").workload(1)
    assert eight.states_nbytes == one.states_nbytes * (2 + 2 * (1 + 4 / 256)) / 10
    assert one.name == "GPT"


def test_what_is_frozen_is_placed_but_not_trained():
    model = zoo.GPT(zoo.Block, num_layers=4)
    model.embedding.requires_grad_(False)
    for block in model.blocks:
        block.requires_grad_(False)
        block.norm.requires_grad_()
    workload = ModelSpec.of(model, sequence=zoo.TOKENS).workload(1)
    assert workload.shape.frozen == {"e", "t"}
    assert workload.shape.first_grad == 0
    assert size(workload, 3).trained_numels == (QUANTUM,) * 2
    assert sum(size(workload, 3).frozen_numels) > sum(size(workload, 3).trained_numels)
    assert size(workload, "e").num_trained == 0


@pytest.mark.slow
def test_frozen_layers_are_all_frozen():
    model = zoo.GPT(num_layers=4)
    model.blocks.requires_grad_(False)
    workload = ModelSpec.of(model, sequence=zoo.TOKENS).workload(1)
    assert workload.shape.frozen == {"t", 0, 1, 2, 3}
    assert sorted(workload.costs, key=height) == ["e", 0, 1, 2, 3, "h"]


class Halved(torch.nn.Linear):
    def __init__(self) -> None:
        super().__init__(zoo.WIDTH, zoo.VOCAB, dtype=torch.float16)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        return super().forward(x_BTD.half()).float()


def test_a_unit_of_two_dtypes():
    """One of float32 among those of 16 bits takes two elements for each of its own."""
    model = zoo.GPT(num_layers=2)
    model.head = Halved()
    head = size(ModelSpec.of(model, sequence=zoo.TOKENS).workload(1), "h")
    norms = (2 * zoo.WIDTH + QUANTUM - 1) // QUANTUM * QUANTUM
    halved = tuple(-(-p.numel() // QUANTUM) * QUANTUM for p in model.head.parameters())
    assert (head.itemsize, sorted(head.trained_numels)) == (2, sorted([*halved, norms, norms]))


@pytest.mark.slow
def test_fp64_is_its_own_master():
    workload = ModelSpec.of(zoo.GPT(num_layers=2).to(torch.float64), sequence=zoo.TOKENS).workload(1)
    assert (workload.dtype, size(workload, 0).itemsize, size(workload, 0).has_master) == ("fp32", 8, False)


def test_a_plan_counts_the_workspace_at_its_own_micro_batch_size(captured_once):
    """A layer's parameter gradients are in it once, whatever the micro-batch: scaled from one sample it is too much."""
    given = {"machine": "a100", "sequence": zoo.TOKENS, "micro_batch_size": 4, "num_micro_batches": 2, "alpha": 0.0}
    config, planners = captured_once
    planner = planner_of(config, Request(**given, recompute="all"), planners.values())
    spec = planner.workloads.captured("vertical")
    one, four = spec.workload(1).costs[0].workspace_nbytes, spec.workload(4).costs[0].workspace_nbytes
    found = planner.plan()
    assert found.workload.costs[0].workspace_nbytes == four < 4 * one


# Adapters -------------------------------------------------------------------------------------------------------------

peft_alone = pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6:FutureWarning")  # in PEFT


@pytest.fixture(scope="module")
def adapted():
    """A config, and a planner that captures it with adapters."""
    config = zoo.configuration("llama")
    return config, planner_of(config, Request(machine="a100", sequence=zoo.TOKENS, lora=4))


@peft_alone
@pytest.mark.slow
def test_two_blocks_with_adapters_stand_for_all(adapted, monkeypatch):
    """As those without in `test_short_captures_give_the_workloads_of_whole_ones`."""
    config, planner = adapted
    spec = planner.workloads.captured("vertical")
    monkeypatch.setattr(module, "repeated", lambda _: None)
    whole = ModelSpec.of(config, sequence=zoo.TOKENS, precision="bf16", lora=4)
    assert whole.specialized(2).split.num_layers == zoo.LAYERS
    assert whole.workload(2) == spec.workload(2)


@peft_alone
def test_adapters_alone_are_trained(adapted):
    spec = adapted[1].workloads.captured("vertical")
    assert (spec.num_layers, spec.specialized(2).split.num_layers) == (zoo.LAYERS, DEPTH)
    short = spec.workload(2)
    blocks = zoo.huggingface("llama").model.layers
    layers = [layer for layer in blocks.modules() if isinstance(layer, torch.nn.Linear)]
    elements = [QUANTUM * -(-4 * n // QUANTUM) for layer in layers for n in (layer.in_features, layer.out_features)]
    assert short.num_trained == sum(elements)
    assert {"e", "h"} <= short.shape.frozen
    assert short.name == "llama with LoRA of rank 4"


@peft_alone
def test_a_plan_is_of_the_adapters_that_are_asked_for(adapted):
    config, planner = adapted
    sizes = {"micro_batch_size": 1, "num_micro_batches": 2, "sequence": zoo.TOKENS}
    given = {"ratios": {"parameter": 1.0, "checkpoint": 1.0, "optimizer": 1.0}, "alpha": 0.0, "recompute": "all"}
    found = planner_of(config, Request(machine="a100", lora=4, **sizes, **given), [planner]).plan()
    assert found.workload.name == "llama with LoRA of rank 4"
    assert 0 < found.homes["s", "host"] < 12 * found.workload.num_trained + 1


def test_adapters_need_peft(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(PlanError, match=r"planning with LoRA needs PEFT: pip install 'greedysnake\[hf\]'"):
        ModelSpec.of(zoo.configuration("llama"), sequence=zoo.TOKENS, lora=4)


def test_a_workload_says_itself_what_its_parameters_take():
    with pytest.raises(PlanError, match="already has the sizes of its parameters: leave frozen out"):
        plan(gpt(2, 64), machine="a100", frozen="nf4")


@pytest.mark.parametrize(
    ("model", "complaint"),
    [
        (gpt(2, 64), "already has parameters that are trained: leave lora out"),
        (torch.nn.Linear(2, 2), "lora is 4, but lora needs a model by name, or its config"),
    ],
)
def test_a_model_that_is_given_has_its_own_adapters_or_none(model, complaint):
    with pytest.raises(PlanError, match=complaint):
        plan(model, machine="a100", lora=4)


@pytest.fixture(scope="module")
def captured_once():
    """A config, and planners of it by their optimizers, which share a capture."""
    config, planners = zoo.configuration("gpt2", n_embd=64), {}
    for optimizer in ("adamw", "muon"):
        request = Request(machine="rtx4090", sequence=zoo.TOKENS, optimizer=optimizer)
        planners[optimizer] = planner_of(config, request, planners.values())
    return config, planners


def test_muon_by_name(captured_once):
    """Matrices of layers have momentum alone; the memory that their products take is left of the budget."""
    config, planners = captured_once
    given = {"machine": "rtx4090", "sequence": zoo.TOKENS, "optimizer": "muon"}
    planner = planners["muon"]
    found = planner.problem(2)
    layer, embedding = size(found.workload, 0), size(found.workload, "t")
    assert (layer.state_itemsize, embedding.state_itemsize) == (2 + 4, 2 + 8)
    assert layer.products
    assert not embedding.products
    assert found.budgets.host_nbytes == find_profile("rtx4090").host_nbytes - layer.products.host_nbytes
    narrow = planner_of(config, Request(**given, states="bf16"), [planner]).problem(2)
    assert size(narrow.workload, 0).state_itemsize == 2 + 2
    shared = size(planner_of(config, Request(**given | {"machine": "a100"}, gpus=2), [planner]).problem(2).workload, 0)
    assert shared.state_itemsize == 2 + 8  # its biases are AdamW's
    assert shared.products.flops == layer.products.flops  # each rank orthogonalizes all
    assert shared.products.shared_nbytes == 2 * shared.num_trained


@pytest.mark.parametrize(("optimizer", "expected"), [("adamw", ["bf16", "8bit"]), ("muon", ["bf16"])])
def test_states_in_fewer_bits_are_planned_of_the_same_capture(monkeypatch, captured_once, optimizer, expected):
    planner = captured_once[1][optimizer]
    problem = planner.problem(2)
    monkeypatch.setattr(ModelSpec, "of", None)
    found = dict(planner.narrower(problem))
    assert list(found) == expected
    for states, each in found.items():
        assert each.workload == planner.asked(states=states).problem(2).workload
        assert each.workload.states_nbytes < problem.workload.states_nbytes
        assert each.builder.sizes == each.workload.sizes


def test_a_workload_has_states_of_its_own():
    planner = planner_of(gpt(2, 64), Request(machine="rtx4090"))
    assert not list(planner.narrower(planner.problem(1)))


def test_what_is_not_planned_with_muon():
    with pytest.raises(PlanError, match="optimizer is muon, whose states are fp32 or bf16, not 8bit"):
        Request(optimizer="muon", states="8bit")
    with pytest.raises(PlanError, match="leave masters, states and optimizer out"):
        plan(gpt(2, 64), machine="a100", optimizer="muon")


@peft_alone
def test_frozen_matrices_are_planned_in_their_bytes(adapted):
    """Of layers alone: each matrix in whole quanta of bf16, and its values beside what its layer's code computes with."""
    config, planner = adapted
    spec = planner.workloads.captured("vertical")
    plain, found = spec.workload(1), replace(spec, frozen="nf4").workload(1)
    named = built(config).named_parameters()
    matrices = [each for name, each in named if ".layers.0." in name and each.dim() == 2]
    stored = sum(-(-CODECS["nf4"].nbytes(each.shape) // (2 * QUANTUM)) * QUANTUM for each in matrices)
    dense = sum(-(-each.numel() // QUANTUM) * QUANTUM for each in matrices)
    for one, other in zip(plain.sizes, found.sizes, strict=True):
        is_layer = isinstance(one.unit, int)
        assert one.trained_numels == other.trained_numels
        assert sum(one.frozen_numels) - sum(other.frozen_numels) == (dense - stored if is_layer else 0)
        assert other.decoded_nbytes == (2 * sum(each.numel() for each in matrices) if is_layer else 0)
    layer = found.costs[0].workspace_nbytes + found.sizes[1].decoded_nbytes
    assert found.workspace_nbytes == max(layer, plain.workspace_nbytes)
