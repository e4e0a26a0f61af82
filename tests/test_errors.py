"""What a user is told, and that it arrives as this package's error and not inside one of Dynamo's."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch._utils import ExceptionWrapper
from torch.utils.checkpoint import checkpoint
from zoo import GPT, TOKENS, WIDTH, Block, batch, compile_model, train

from gs_compile.capture import exchange
from gs_compile.capture.dynamo import check_torch
from gs_compile.errors import (
    CaptureError,
    ForkError,
    GraphBreakError,
    MixedDeviceError,
    NoBatchInputError,
    NothingRequiresGradError,
    UniformityError,
    VersionError,
)


def refused(error, model, *args, micro_batch_size=2, **options):
    """The message of the `error` that calling `model` raises; as itself, whatever Dynamo was doing then."""
    with pytest.raises(error) as caught:
        compile_model(model, micro_batch_size, **options)(*(args or batch()))
    assert type(caught.value) is error
    return caught.value.message


# The graph -------------------------------------------------------------------------------------------------------------


class ReadsAValue(Block):
    def forward(self, x_BTD):
        if x_BTD.sum().item() > 0:
            x_BTD = x_BTD + 1
        return super().forward(x_BTD)


class Decides(Block):
    def forward(self, x_BTD):
        if self.norm.weight[0] == 0:
            x_BTD = x_BTD + 1
        return super().forward(x_BTD)


class Breaks(Block):
    def forward(self, x_BTD):
        torch._dynamo.graph_break()
        return super().forward(x_BTD)


class LoopsOverExperts(Block):
    """As Switch Transformers of transformers, over those that have tokens."""

    def forward(self, x_BTD):
        found = (x_BTD.sum((0, 1)) > 0).nonzero()
        for expert in found:
            x_BTD = x_BTD + x_BTD[..., expert]
        return super().forward(x_BTD)


@pytest.fixture(autouse=True)
def _no_reasons_of_other_tests():
    """Dynamo counts a process's reasons by their words: one that an earlier file has met does not become the last."""
    for kind in ("graph_break", "unimplemented"):
        counters[kind].clear()


@pytest.mark.parametrize(
    ("block", "line", "reason", "remedy"),
    [
        (Breaks, "torch._dynamo.graph_break()", "graph_break", "move it out of forward"),
        (ReadsAValue, "if x_BTD.sum().item() > 0:", "item", "move it out of forward"),
        (LoopsOverExperts, "for expert in found:", "cannot go on", "multiply by zeros what is not"),
        (Decides, "if self.norm.weight[0] == 0:", "generic_jump", "compute both and choose by torch.where"),
    ],
)
def test_a_graph_break(block, line, reason, remedy):
    message = refused(GraphBreakError, GPT(block))
    place = re.escape(__file__) + r":\d+: " + re.escape(line)
    assert re.search(f"^the model's forward is not one graph: Dynamo breaks it at {place}$", message, re.MULTILINE)
    assert re.search(f"^Dynamo's reason: .*{reason}", message, re.MULTILINE | re.IGNORECASE)
    assert remedy in message


def test_a_graph_break_before_the_first_operation():
    class Model(GPT):
        def forward(self, ids, labels):
            torch._dynamo.graph_break()
            return super().forward(ids, labels)

    message = refused(GraphBreakError, Model())
    assert re.search(rf"breaks it at {re.escape(__file__)}:\d+: torch._dynamo.graph_break\(\)$", message, re.MULTILINE)


class Recurrent(GPT):
    """Dynamo stops at the whole line, which it cannot go on in later."""

    def __init__(self):
        super().__init__()
        self.lstm = torch.nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.places = torch.nn.Embedding(TOKENS, WIDTH)
        self.call = lambda module, x: module(x)[0]

    def forward(self, ids, labels):
        x_BTD = self.embedding(ids)
        x_BTD = x_BTD + self.places.weight[: ids.shape[1]]
        return self.head(self.call(self.lstm, x_BTD))


class Replaced(GPT):
    """Dynamo stops in a method of nn.Module that the line calls."""

    def __init__(self):
        super().__init__()
        self.places = torch.nn.Buffer(torch.ones(WIDTH))

    def forward(self, ids, labels):
        x_BTD = self.embedding(ids) * 2
        self.places = torch.nn.Buffer(self.places + 1)
        return self.head(x_BTD + self.places)


@pytest.mark.parametrize("again", [False, True], ids=["first", "again"])
@pytest.mark.parametrize(
    ("model", "line", "reason"),
    [
        (Recurrent, r"(return self\.head\(|self\.call = lambda ).*", "LSTM"),  # since torch 2.15 the line inside
        (Replaced, r"self\.places = .* \(inside it, .*torch/nn/modules/module\.py:.*\)", r"python_type"),
    ],
)
def test_a_graph_break_in_what_is_torchs_own_names_the_users_line(model, line, reason, again):
    if again:  # Dynamo has met the reason before, and another one since
        for earlier in (model, Breaks):
            refused(GraphBreakError, earlier() if earlier is model else GPT(earlier))
            torch._dynamo.reset()
    message = refused(GraphBreakError, model())
    assert re.search(rf"breaks it at {re.escape(__file__)}:\d+: {line}$", message, re.MULTILINE)
    assert re.search(f"^Dynamo's reason: (.*\n)?.*{reason}", message, re.MULTILINE)


def test_the_batch_size_in_the_models_code():
    class Fixed(GPT):
        def forward(self, ids, labels):
            return super().forward(ids.view(5, TOKENS), labels)

    message = refused(CaptureError, Fixed())
    line = r":\d+ in forward: return super\(\)\.forward\(ids\.view\(5, TOKENS\), labels\)\)"
    start = (
        rf"the model's code fixes the batch size at 5 \({re.escape(__file__)}{line}, so it cannot run in micro-batches"
    )
    assert re.match(start, message)
    torch._dynamo.reset()
    compile_model(Fixed(), 5)(*batch())[1].backward()  # the remedy of the message


class Recurrent(Block):
    def __init__(self):
        super().__init__()
        self.recurrent = torch.nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x):
        return super().forward(self.recurrent(x)[0])


class Masked(Block):
    def forward(self, x):
        longest = x.sum((1, 2)).abs().long().max()
        return super().forward(x) + torch.arange(longest).sum()


@pytest.mark.parametrize(
    ("block", "words"),
    [(Recurrent, "compile a part of the model that has none of them"), (Masked, "take it from a shape, as ids.shape")],
)
def test_a_break_at_what_dynamo_does_not_trace_says_what_to_do(block, words):
    assert words in refused(GraphBreakError, GPT(block))


def test_samples_that_are_the_tensors_of_a_list():
    class Listed(GPT):
        def forward(self, rows):
            ids = torch.cat(rows)
            return super().forward(ids, ids)

    rows = list(batch()[0].split(1))
    message = refused(CaptureError, Listed(), rows)
    assert message.startswith("the samples of the batch are the 5 tensors of rows, and micro-batches are cut from ")
    torch._dynamo.reset()
    compile_model(Listed(), 5)(rows)[1].backward()  # a remedy of the message


def test_samples_of_different_lengths_that_are_the_tensors_of_a_list():
    """Fault: the tokens of the first were cut, and the loss had the others in each micro-batch, without a word."""

    class Padded(GPT):
        def forward(self, rows):
            ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
            return super().forward(ids, ids)

    rows = [row[:length] for row, length in zip(batch()[0], (6, 2, 2, 1), strict=False)]
    message = refused(CaptureError, Padded(lambda: torch.nn.Linear(WIDTH, WIDTH)), rows)
    assert message.startswith("the samples of the batch are the 4 tensors of rows, and micro-batches are cut from ")
    assert message.endswith("as torch.stack or pad_sequence makes it, or set micro_batch_size to 6")


def reduced_in_place(losses):
    dist.all_reduce(losses)
    return losses


class Reduced(torch.autograd.Function):
    @staticmethod
    def forward(ctx, losses):
        return reduced_in_place(losses.clone())

    @staticmethod
    def backward(ctx, gradient):
        return reduced_in_place(gradient.clone())


def reduced_in_a_block(losses):
    return checkpoint(lambda each: reduced_in_place(each * 1), losses, use_reentrant=False)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by Dynamo
@pytest.mark.parametrize("reduced", [reduced_in_place, Reduced.apply, reduced_in_a_block])
def test_an_exchange_with_other_ranks_in_the_forward(reduced, monkeypatch):
    group = SimpleNamespace(size=lambda: 2)  # so the capture is told of the one rank's
    monkeypatch.setattr(exchange, "_resolve_process_group", lambda name: group)

    class Counts(GPT):
        def forward(self, ids, labels):
            return reduced(super().forward(ids)[0].mean(2).mul(labels > 3).sum(1)).sum()

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert "the model's forward exchanges values with other ranks (" in refused(CaptureError, Counts())
    finally:
        dist.destroy_process_group()


# Inputs ----------------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_a_nested_tensor():
    """Fault: it ended with an AttributeError of Dynamo's, for a size that has no number."""
    ids = torch.nested.nested_tensor([torch.arange(3), torch.arange(5)], layout=torch.jagged)
    assert "ids is a nested tensor, whose samples have no common length" in refused(CaptureError, GPT(), ids, ids)


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


# Options and versions --------------------------------------------------------------------------------------------------


def test_torch_is_too_old():
    with pytest.raises(VersionError, match=r"torch 2\.10\.0 is too old: greedysnake needs torch >= 2\.11; pip install"):
        check_torch("2.10.0")
    for version in ("2.11.0", "2.13.0+cu126", "3.0", "2.12.0a0+git1234567"):
        check_torch(version)


def test_a_refusal_is_said_at_every_call():
    model = compile_model(GPT(num_layers=1), 2)
    for _ in range(2):
        with pytest.raises(
            UniformityError, match=r"^the model has no repeated block: blocks \(1 block\).*nn.ModuleList"
        ):
            train(model, *batch())


def test_a_data_loader_raises_what_its_worker_has_raised():
    try:
        raise ForkError("a child")
    except ForkError:
        wrapped = ExceptionWrapper(where="in a worker")
    with pytest.raises(ForkError, match="a child"):
        wrapped.reraise()
