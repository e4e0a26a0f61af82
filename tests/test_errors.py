"""What a user is told, and that it arrives as this package's error and not inside one of Dynamo's."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn
from torch.nn import functional
from zoo import GPT, TOKENS, VOCAB, WIDTH, Block, batch, compile_model, huggingface, train

from gs_compile.capture.dynamo import check_torch
from gs_compile.errors import (
    CaptureError,
    GraphBreakError,
    MixedDeviceError,
    MutationError,
    NoBatchInputError,
    NothingRequiresGradError,
    OptionError,
    SeparationError,
    UniformityError,
    VersionError,
)


def refused(error, model, *args, micro_batch_size=2, **options):
    """The message of the `error` that calling `model` raises; as itself, whatever Dynamo was doing then."""
    with pytest.raises(error) as caught:
        compile_model(model, micro_batch_size, **options)(*(args or batch()))
    assert type(caught.value) is error
    return str(caught.value)


# The graph -------------------------------------------------------------------------------------------------------------


class ReadsAValue(Block):
    def forward(self, x_BTD):
        if x_BTD.sum().item() > 0:
            x_BTD = x_BTD + 1
        return super().forward(x_BTD)


class Breaks(Block):
    def forward(self, x_BTD):
        torch._dynamo.graph_break()
        return super().forward(x_BTD)


@pytest.mark.parametrize(
    ("block", "line", "reason"),
    [(Breaks, "torch._dynamo.graph_break()", "graph_break"), (ReadsAValue, "if x_BTD.sum().item() > 0:", "item")],
)
def test_a_graph_break(block, line, reason):
    message = refused(GraphBreakError, GPT(block))
    place = re.escape(__file__) + r":\d+: " + re.escape(line)
    assert re.search(f"^the model's forward is not one graph: Dynamo breaks it at {place}$", message, re.MULTILINE)
    assert re.search(f"^Dynamo's reason: .*{reason}", message, re.MULTILINE | re.IGNORECASE)
    assert "move it out of forward" in message


def test_a_graph_break_before_the_first_operation():
    class Model(GPT):
        def forward(self, ids, labels):
            torch._dynamo.graph_break()
            return super().forward(ids, labels)

    message = refused(GraphBreakError, Model())
    assert re.search(rf"breaks it at {re.escape(__file__)}:\d+: torch._dynamo.graph_break\(\)$", message, re.MULTILINE)


def test_a_single_block():
    message = refused(UniformityError, GPT(num_layers=1))
    assert message.startswith("the model has no repeated block: blocks (1 block)")
    assert "nn.ModuleList" in message


def test_no_block():
    class Flat(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x_BD):
            return (x_BD * self.weight).sum()

    message = refused(UniformityError, Flat(), torch.ones(4, WIDTH))
    assert message.startswith("the model has no repeated block: no numbered modules at all")


def test_blocks_that_all_differ():
    widths = iter([16, 32, 48])
    message = refused(UniformityError, GPT(lambda: Block(next(widths))))
    assert "all 3 blocks differ" in message
    assert "layer 1 differs from layer 0 at blocks.1.up.weight: float32[32, 32] against float32[16, 32]" in message


def test_two_tensors_from_layer_to_layer():
    class Pair(GPT):
        def forward(self, ids, labels):
            x_BTD = self.embedding(ids)
            y_BTD = x_BTD * 2
            for block in self.blocks:
                x_BTD, y_BTD = block(x_BTD), block.norm(y_BTD)
            return self.head(x_BTD + y_BTD).square().mean()

    message = refused(UniformityError, Pair())
    assert message.startswith("layer 0 must pass exactly one tensor, to the next layer; found `")
    assert message.count(f"float32[2, {TOKENS}, {WIDTH}] read by layer 1") == 2
    assert "return x_BTD + self.dropout" in message


def test_a_layer_that_a_later_one_reads():
    class Skip(GPT):
        def forward(self, ids, labels):
            x_BTD = first = self.blocks[0](self.embedding(ids))
            for block in list(self.blocks)[1:]:
                x_BTD = block(x_BTD)
            return (x_BTD + first).square().mean()

    message = refused(UniformityError, Skip())
    assert "layer 0 must pass exactly one tensor" in message
    assert "read by layer 1, the epilogue" in message


def test_a_buffer_changed_in_forward():
    class Counts(Block):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x_BTD):
            self.calls += 1
            return super().forward(x_BTD)

    message = refused(MutationError, GPT(Counts))
    assert re.match(r"the model changes its input or buffer `\w*calls\w*` in place \(.*self.calls \+= 1\)", message)


def test_the_batch_size_in_the_models_code():
    class Fixed(GPT):
        def forward(self, ids, labels):
            return super().forward(ids.view(5, TOKENS), labels)

    message = refused(CaptureError, Fixed())
    assert message.startswith("the model's code fixes the batch size at 5, so it cannot run in micro-batches of 2; ")
    torch._dynamo.reset()
    compile_model(Fixed(), 5)(*batch())[1].backward()  # the remedy of the message


# Inputs ----------------------------------------------------------------------------------------------------------------


def test_no_batch_input():
    class Alone(GPT):
        def __init__(self):
            super().__init__()
            self.register_buffer("ids", batch()[0])

        def forward(self, number):
            return super().forward(self.ids, self.ids)[1] * number

    message = refused(NoBatchInputError, Alone(), 3)
    assert "without a tensor that has a batch dimension (inputs found: ids (buffer))" in message
    torch._dynamo.reset()
    assert "(inputs found: ids (buffer), number (constant))" in refused(NoBatchInputError, Alone(), torch.tensor(3.0))


def test_an_input_on_another_device():
    class Unread(GPT):
        def forward(self, ids, labels, mask):
            return (*super().forward(ids, labels), mask * 2)

    message = refused(MixedDeviceError, Unread(), *batch(), torch.ones(5, 2, device="meta"))
    found = r"\S*embedding.weight on cpu, mask on meta"
    assert re.fullmatch(
        f"inputs and parameters are on several devices: {found}; move all of them to one device", message
    )


def test_nothing_requires_a_gradient():
    message = refused(NothingRequiresGradError, GPT().requires_grad_(False))
    assert "no parameter requires a gradient" in message
    assert "torch.no_grad()" in message


# Outputs ---------------------------------------------------------------------------------------------------------------


class Loss(GPT):
    """A model whose loss is made of its logits by `reduce`."""

    def __init__(self, reduce):
        super().__init__()
        self.reduce = reduce

    def forward(self, ids, labels):
        return self.reduce(super().forward(ids)[0])


def product_of_means(logits):
    return logits.mean() * logits.square().mean()


def variance(logits):
    return logits.var()


def correlation(logits):
    vectors = logits.mean(1)
    return (vectors @ vectors.T).square().mean()


def softmax_over_the_batch(logits):
    return logits.softmax(0).square().sum()


def largest(logits):
    return logits.max()


@pytest.mark.parametrize("reduce", [product_of_means, variance, correlation, softmax_over_the_batch, largest])
def test_a_loss_that_does_not_separate(reduce):
    message = refused(SeparationError, Loss(reduce))
    assert "of the whole batch cannot be computed from micro-batches" in message
    assert re.search(rf"at {re.escape(__file__)}:\d+: .*(vectors|logits)", message)
    assert "or set micro_batch_size to the whole batch" in message
    torch._dynamo.reset()
    model, reference = compile_model(Loss(reduce), 5), Loss(reduce)
    torch.testing.assert_close(model(*batch()), reference(*batch()))  # the remedy


def test_batch_statistics():
    class Normed(GPT):
        def __init__(self):
            super().__init__()
            self.batch_norm = nn.BatchNorm1d(VOCAB, track_running_stats=False)

        def forward(self, ids, labels):
            logits = self.batch_norm(super().forward(ids)[0].flatten(0, 1))
            return functional.cross_entropy(logits, labels.flatten())

    message = refused(SeparationError, Normed())
    assert "batch_norm) normalises by the statistics of the batch (use LayerNorm, or put it in eval mode)" in message


def test_an_auxiliary_loss_of_experts():
    model = huggingface("mixtral", output_router_logits=True)
    ids, labels = batch()
    model(
        input_ids=ids
    )  # transformers installs hooks at the first such call, behind a lock, which Dynamo does not enter
    with pytest.raises(SeparationError, match=r"cannot be computed from micro-batches: `.*modeling_mixtral.py"):
        compile_model(model, 2)(input_ids=ids, labels=labels)


# Options and versions --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"micro_batchsize": 2}, "unknown option micro_batchsize; did you mean micro_batch_size?"),
        ({"micro_batch_size": 0}, "micro_batch_size must be a whole number of samples, 1 or more; got 0"),
        ({"expert": {"snake": 1}}, "expert.snake must be one of True, False; got 1"),
    ],
    ids=str,
)
def test_options(options, message):
    from gs_compile.model.backend import greedysnake

    model = GPT()
    model.compile(backend=greedysnake, options=options)
    with pytest.raises(OptionError) as caught:
        train(model, *batch())
    assert str(caught.value).startswith(message)


def test_torch_is_too_old():
    with pytest.raises(VersionError, match=r"torch 2\.10\.0 is too old: greedysnake needs torch >= 2\.11; pip install"):
        check_torch("2.10.0")
    for version in ("2.11.0", "2.13.0+cu126", "3.0", "2.12.0a0+git1234567"):
        check_torch(version)


def test_a_refusal_is_said_at_every_call():
    model = compile_model(GPT(num_layers=1), 2)
    for _ in range(2):
        with pytest.raises(UniformityError):
            train(model, *batch())
