"""Models captured without their weights, as they are when captured whole."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import captured
import pytest
import torch
import zoo
from torch import nn

import gs_compile
from gs_compile.errors import CaptureError, GraphBreakError, InspectionError
from gs_compile.planner.cost.model import repeated
from gs_compile.planner.cost.workload import ModelSpec


def depths(found, micro_batch_size=2):
    """Layers of the model, and those that were captured."""
    return found.num_layers, found.specialized(micro_batch_size).split.num_layers


def plain(num_layers=5, **changes):
    return zoo.GPT(num_layers=num_layers, **changes)


def test_the_model_stays_as_it_is():
    model = plain().eval()
    values = {name: (p, p.data_ptr(), p.detach().clone()) for name, p in model.named_parameters()}
    fields = [dict(vars(m)) for m in model.modules()]
    ModelSpec.of(model, sequence=zoo.TOKENS, precision="bf16")
    assert [vars(m) for m in model.modules()] == fields
    for name, parameter in model.named_parameters():
        same, pointer, value = values[name]
        assert parameter is same
        assert parameter.data_ptr() == pointer
        torch.testing.assert_close(parameter.detach(), value, rtol=0, atol=0)


def test_a_capture_leaves_the_models_own_alone():
    """Dynamo keeps no more than some captures of one function: those of planning must not be among them."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=1):
        for _ in range(2):
            assert depths(ModelSpec.of(plain(2), sequence=zoo.TOKENS)) == (2, 2)
        captured.compiled(model := plain(2))(*zoo.batch())
    assert gs_compile.inspect(model).num_layers == 2


def uneven(model):
    model.blocks[3] = zoo.Block(hidden=3 * zoo.WIDTH)


def frozen(model):
    model.blocks[2].requires_grad_(False)


def marked(model):
    model.blocks[1].dropout.p = 0.5


def shared(model):
    model.blocks[4] = model.blocks[0]


SLOW = [pytest.param(change, marks=pytest.mark.slow) for change in (uneven, marked)]


@pytest.mark.parametrize("change", [frozen, *SLOW])
@pytest.mark.filterwarnings("ignore::gs_compile.errors.UniformityWarning")
def test_blocks_that_can_be_told_apart_are_all_captured(change):
    model = plain()
    change(model)
    assert depths(ModelSpec.of(model, sequence=zoo.TOKENS)) == (5, 5)


def test_blocks_that_share_are_not_independent():
    model = plain()
    shared(model)
    assert repeated(model) is None


@pytest.mark.parametrize(
    ("names", "are_alike"),
    [
        (["blocks.0.qkv", "blocks.1.qkv", "blocks.2.qkv"], True),  # as PEFT has them
        (["blocks.4.qkv", "blocks.5.qkv", "blocks.6.qkv"], True),
        (["blocks.0.qkv", "blocks.1.qkv", "blocks.3.qkv"], False),
        (["blocks.0.qkv", "blocks.1.qkv", "blocks.2.up"], False),
        (["blocks.0.qkv", "blocks.1.qkv", "blocks.2"], False),
        (["first", "second", "third"], False),
    ],
)
def test_names_that_count_the_blocks_do_not_tell_them_apart(names, are_alike):
    model = plain(3)
    for block, name in zip(model.blocks, names, strict=True):
        block.marks = {"target": name, "loaded": False}
    assert repeated(model) is (model.blocks if are_alike else None)


def test_marks_of_other_names_tell_blocks_apart():
    model = plain(3)
    for number, block in enumerate(model.blocks):
        block.marks = {f"blocks.{number // 2}": False}
    assert repeated(model) is None


class Counting(zoo.GPT):
    """Its code goes by the number of its blocks."""

    def forward(self, ids, labels):
        x = self.embedding(ids)
        for number in range(4):
            x = self.blocks[number](x)
        return captured.token_loss(self.head(self.norm(x)), labels)


@pytest.mark.slow
def test_code_that_counts_its_blocks_is_captured_whole():
    assert depths(ModelSpec.of(Counting(num_layers=4), sequence=zoo.TOKENS)) == (4, 4)


class Silent(nn.Module):
    def forward(self, *arguments, **named):
        return None


class Reading(captured.Tiny):
    def forward(self, ids, labels):
        return super().forward(ids, labels) * self.head.weight.sum().item()


class Fixed(captured.Tiny):
    def forward(self, ids, labels):
        return super().forward(ids.view(2, captured.TOKENS), labels)


def test_a_model_that_names_no_tokens():
    with pytest.raises(InspectionError, match=r"^Silent\.forward has no required argument"):
        ModelSpec.of(Silent(), sequence=4)


def test_a_model_without_a_graph():
    class Named(Silent):
        def forward(self, input_ids):
            return None

    with pytest.raises(InspectionError, match=r"^Dynamo made no graph of Named"):
        ModelSpec.of(Named(), sequence=4)


def test_a_model_that_breaks_its_graph():
    with pytest.raises(GraphBreakError, match="forward is not one graph"):
        ModelSpec.of(Reading(), sequence=captured.TOKENS)


def test_a_model_with_a_batch_size_of_its_own():
    with pytest.raises(CaptureError, match="fixes the batch size"):
        ModelSpec.of(Fixed(), sequence=captured.TOKENS)


SWEEP = """
import torch
from gs_compile.planner.cost.model import built, named_config
from gs_compile.planner.cost.workload import ModelSpec
with torch._dynamo.config.patch(recompile_limit=1):
    for tokens in (8, 16):
        ModelSpec.of(built(named_config("gpt2", n_layer=2, n_embd=8, n_head=2, vocab_size=16)), sequence=tokens)
"""


@pytest.mark.slow
def test_captures_are_as_many_as_are_asked_for():
    """Fault: of a function that Dynamo compiles by itself, as GPT-2's forward behind what transformers logs, eight were
    all there were: the ninth plan in a notebook ended with an error of torch.
    """
    subprocess.run([sys.executable, "-W", "ignore", "-c", SWEEP], cwd=Path(__file__).parents[2], check=True)
