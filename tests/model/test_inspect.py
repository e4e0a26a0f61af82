"""A compiled model, looked at. What is logged and traced of it, test_training_run.py has."""

from __future__ import annotations

import gc
import re
import weakref
from pathlib import Path

import expecttest
import pytest
import torch
from torch import fx, nn
from zoo import GPT, NAMES_DIMENSIONS, VOCAB, Block

import gs_compile
from gs_compile.errors import InspectionError
from gs_compile.model.backend import greedysnake
from gs_compile.program.text import parse

ROOT = Path(__file__).resolve().parents[2]
TOKENS = 5


def toy(*hidden: int) -> GPT:
    """A compiled model whose blocks are `hidden` wide."""
    widths = iter(hidden or (64, 64, 64))
    model = GPT(lambda: Block(next(widths)), num_layers=len(hidden) or 3)
    torch._dynamo.reset()
    model.compile(backend=greedysnake, options={"micro_batch_size": 2, "expert": {"compiler": "eager"}})
    return model


def loss_of(model: nn.Module, batch: int = 4, length: int = TOKENS) -> torch.Tensor:
    ids = torch.arange(batch * length).reshape(batch, length) % VOCAB
    return model(ids, ids)[1]


def batch_sizes(module: fx.GraphModule, key: str) -> list[int | torch.SymInt]:
    inputs = (node.meta.get(key) for node in module.graph.find_nodes(op="placeholder"))
    return [example.shape[0] for example in inputs if getattr(example, "dtype", None) == torch.int64]


@pytest.fixture(scope="module")
def inspection():
    model = toy()
    loss_of(model).backward()
    return gs_compile.inspect(model)


def test_the_report(inspection):
    report, _, program = str(inspection).replace(str(ROOT), "").partition("\n\n")
    assert program == str(inspection.program())
    report = re.sub(r"\d+\.\d\d in", "_ in", report) + "\n"
    expecttest.assert_expected_inline(
        re.sub(r"\.py:\d+", ".py:_", report),
        """\
3 layers of 1 class, 2 micro-batches of 2, 26,816 parameters of 104.8 KiB, checkpoints of 1.2 KiB
  embedding:          1 operation, 8.8 KiB
  layer of class 0:   17 operations, 29.0 KiB
  head:               6 operations, 9.0 KiB
  checkpoint:         float32[2, 5, 32] for each layer and micro-batch
step: forward and backward, the head computes the loss, divided by a total over the whole batch, other outputs of h
class 0: 3 layers: 0-2
loss of the whole batch:
  at /tests/zoo.py:_: loss = None if labels is None else functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    sum_1: total: made from the inputs alone: counted over the whole batch
    loss: sum: cross_entropy(mean) = cross_entropy(sum) / total, the counted labels of the whole batch
    div: sum: micro-batches add
what may give other bits in another run on a GPU, and what deterministic=True does:
  layer of class 0: scaled_dot_product_attention backward: takes another kernel; /tests/zoo.py:_: x_BTD = x_BTD + functional.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)
seconds: _ in passes, _ in compiling code
tiers:
  everything is on the device
""",
    )


def test_both_ways_of_compiling():
    model = GPT()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=greedysnake, options={"expert": {"compiler": "eager"}})
    with torch.no_grad():
        loss_of(compiled, batch=2)
    assert gs_compile.inspect(compiled).num_layers == 2
    assert gs_compile.inspect(model) == gs_compile.inspect(compiled)


def test_there_must_have_been_a_call():
    for model in (GPT(), toy()):
        with pytest.raises(InspectionError, match=r"this GPT has not run .* call the model once"):
            gs_compile.inspect(model)


def test_graphs_of_the_model_and_its_layers(inspection):
    assert "s" in str(batch_sizes(inspection.captured, "example_value"))
    assert set(batch_sizes(inspection.specialized, "spec")) == {2}
    (layers,) = inspection.classes
    assert layers.units == (0, 1, 2)
    assert layers.inputs == ("x", *(f"blocks.0.{name}" for name, _ in Block().named_parameters()))
    assert len(layers.forward.graph.find_nodes(op="call_function", target=torch.ops.aten.gelu.default)) == 1
    assert layers.backward.graph.find_nodes(op="call_function", target=torch.ops.aten.gelu_backward.default)
    assert inspection.prologue.units == ("e",)
    assert inspection.epilogue.units == ("h",)
    assert "loss" in inspection.epilogue.graph.results
    assert (
        len(inspection.epilogue.backward.graph.output_node().args[0]) == 2 + 4
    )  # loss, logits; dx, norm's weight and bias, weight


def test_a_frozen_embedding_has_no_backward():
    model = toy()
    model.embedding.requires_grad_(False)
    loss_of(model).backward()
    inspection = gs_compile.inspect(model)
    assert inspection.prologue.backward is None
    assert inspection.shape.frozen == {"e"}
    assert "frozen: e" in str(inspection)


def test_the_program_after_every_pass(inspection):
    assert [program.made_by for program in inspection.programs] == ["vertical", "snake", "free"]
    assert inspection.program() is inspection.programs[-1]
    assert inspection.program("vertical") is inspection.programs[0]
    assert parse(str(inspection.program())) == inspection.program()
    assert inspection.timetable("snake").splitlines()[0].startswith("stage")
    assert len(inspection.graph_module().graph.nodes) > len(inspection.graph_module("vertical").graph.nodes)
    with pytest.raises(InspectionError, match=r"no pass called 'sneak' .* vertical, snake, free"):
        inspection.program("sneak")


def test_captures_that_train_come_first():
    model = toy(64, 64)
    with torch.no_grad():
        loss_of(model)
    assert not gs_compile.inspect(model).shape.training
    loss_of(model)
    loss_of(model, length=7)
    with torch.no_grad():
        loss_of(model)
    inspection = gs_compile.inspect(model)
    assert inspection.captures[0] == inspection
    assert [(c.shape.training, c.checkpoint.shape[1]) for c in inspection.captures] == [
        (True, 7),
        *[(True, 5)] * NAMES_DIMENSIONS,  # else one capture serves both lengths
        (False, 5),
    ]


def test_of_several_batch_sizes_the_latest_is_shown():
    model = toy(40, 40)  # code of its own: equal layers of all models share theirs
    for batch, micro_batches in ((4, 2), (6, 3), (4, 2)):
        loss_of(model, batch)
        inspection = gs_compile.inspect(model)
        assert inspection.num_micro_batches == micro_batches
    # compiled before a thread of autograd's needs it
    assert inspection.classes[0].code.graphs.keys() == {"forward", "backward"}


def test_what_is_remembered_keeps_no_model_alive():
    model = toy()
    loss_of(model).backward()
    parameter = weakref.ref(model.head.weight)
    del model
    torch._dynamo.reset()
    gc.collect()
    assert parameter() is None
