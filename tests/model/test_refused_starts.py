"""A start that is refused leaves nothing: the next one trains, whatever was wrong with it, and however often."""

from __future__ import annotations

from contextlib import nullcontext
from unittest.mock import Mock

import pytest
import torch
from tiered import adamw, gpt2, options, step, tokens, two_groups
from torch import nn
from torch._dynamo import config as dynamo_config
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._dynamo.exc import TorchRuntimeError
from torch.nn import functional
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.testing._internal.two_tensor import TwoTensor
from zoo import GPT, WIDTH, batch, compile_model, train

import gs_compile
from gs_compile.errors import (
    GraphBreakError,
    GreedySnakeError,
    OptimizerError,
    OptionError,
    ProfileError,
    UncapturedWarning,
    UniformityError,
)
from gs_compile.model import backend
from gs_compile.model.backend import check, greedysnake
from gs_compile.options import Options


class Backend:
    """This package's, which notes each trace."""

    __module__ = greedysnake.__module__  # by which it is known as this package's
    check = staticmethod(check)

    def __init__(self):
        self.num_traces = 0

    def __call__(self, module, example_inputs, **given):
        self.num_traces += 1
        return greedysnake(module, example_inputs, **given)


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"host_memroy": "1GiB"}, OptionError, "unknown option host_memroy; did you mean host_memory"),
        ({"machine": "rtx409"}, ProfileError, "unknown machine rtx409; did you mean rtx4090"),
        ({"mode": "max-autotne"}, OptionError, "mode must be one of default, .*; got 'max-autotne'"),
    ],
)
def test_options_are_refused_before_the_trace_and_dynamo_keeps_nothing_of_it(given, error, words):
    """Where it passes over errors of its own, a model is traced first."""
    for num_traces in (0, 1):
        torch._dynamo.reset()
        model, backend = GPT(), Backend()
        model.compile(backend=backend, options=given)
        with dynamo_config.patch(suppress_errors=bool(num_traces)), pytest.raises(error, match=words) as caught:
            model(*batch())
        assert type(caught.value) is error
        assert backend.num_traces == num_traces
        assert not any(entry.code for entry in _debug_get_cache_entry_list(GPT.forward.__code__))


def test_a_user_without_a_home_names_the_storage(tmp_path, monkeypatch):
    """Fault: a RuntimeError of Python's, in one of Dynamo's, although the storage was given."""
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", Mock(side_effect=KeyError))
    with pytest.raises(OptionError, match=r"no home directory, .*: set HOME, or XDG_CACHE_HOME"):
        Options()
    train(compile_model(GPT(), 2, storage=tmp_path), *batch())


def test_refused_models_do_not_count_for_dynamos_limit():
    """Fault: eight refusals of a class, and its next model ran as plain PyTorch does."""
    torch._dynamo.reset()
    with dynamo_config.patch(recompile_limit=1):
        for _ in range(2):
            with pytest.raises(UniformityError):
                train(compile_model(GPT(num_layers=1), 2), *batch())
        train(model := compile_model(GPT(), 2), *batch())
    assert gs_compile.inspect(model).num_layers == 2


def test_what_dynamo_never_compiles_again_is_said():
    """Fault: after 256 refused calls the model trained without this backend, and nobody was told."""
    torch._dynamo.reset()
    model = compile_model(GPT(num_layers=1), 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dynamo_config.patch(accumulated_recompile_limit=2, fail_on_recompile_limit_hit=False):
        for _ in range(2):
            with pytest.raises(UniformityError):
                train(model, *batch())
        train(model, *batch())
        another = register_optimizer_step_pre_hook(lambda *_: None)  # is called after ours
        with pytest.warns(UncapturedWarning, match="forward 2 times, for .* calls that were refused as well"):
            optimizer.step()
        another.remove()


class GivenUp(GPT):
    """Reads a number in a loop, where Dynamo breaks no graph."""

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x * self.norm.bias.sum().item())
        return x.square().sum()


def test_a_refusal_has_no_reasons_of_other_models():
    """Fault: what Dynamo had given up last in the process was said to be the cause."""
    with pytest.raises(GraphBreakError):
        compile_model(GivenUp(), 2)(batch()[0])
    with pytest.raises(UniformityError) as caught:
        compile_model(GPT(num_layers=1), 2)(*batch())
    assert not hasattr(caught.value, "__notes__")


def test_starts_that_are_refused_leave_nothing(tmp_path):
    """Fault: after eight of them the model ran as plain PyTorch does, with the right options too."""
    torch._dynamo.reset()
    model = gpt2()
    optimizer = adamw(two_groups(model))
    with dynamo_config.patch(recompile_limit=1):
        for wrong in ({"precision": "bf8"}, {"host_memory": "1KiB"}, {"host_memory": "2KiB"}, {}):
            model.compile(backend="greedysnake", options=options(tmp_path, **wrong))
            with pytest.raises(GreedySnakeError, match=next(iter(wrong))) if wrong else nullcontext():
                step(model, optimizer, tokens(0))
    assert optimizer.num_steps == 1
    optimizer.engine.tiers.close()


@pytest.mark.parametrize("at", ["guard_model", "Compilation", "meet"])
def test_an_interrupt_within_the_first_capture_leaves_parameters_as_they_were(at, monkeypatch, tmp_path):
    """Fault: they had left the model, and had another dtype, so a script that went on without it had neither."""
    torch._dynamo.reset()
    model = gpt2()
    before = {name: each.clone() for name, each in model.named_parameters()}
    optimizer = adamw(two_groups(model))
    model.compile(backend="greedysnake", options=options(tmp_path, precision="bf16"))
    with monkeypatch.context() as patched:
        patched.setattr(backend, at, Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            step(model, optimizer, tokens(0))
    for name, each in model.named_parameters():
        assert type(each) is nn.Parameter
        assert torch.equal(each.data, before[name])  # which has the dtype, too
    step(model, optimizer, tokens(0))
    assert optimizer.num_steps == 1
    optimizer.engine.tiers.close()


class Scaled(GPT):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, ids, casts):
        x = self.embedding(ids) * (self.scale.to(self.embedding.weight.dtype) if casts else self.scale)
        for block in self.blocks:
            x = block(x)
        return x.float().square().mean()


class Convolved(Scaled):
    """Dynamo meets the error itself."""

    def forward(self, ids, casts):
        weight, table = self.head.weight[:, :, None], self.scale.expand(1, WIDTH, WIDTH)
        return super().forward(ids, casts) + functional.conv1d(table.to(weight) if casts else table, weight).sum()


@pytest.mark.parametrize("kind", [Scaled, Convolved])
def test_a_float32_buffer_that_meets_parameters_in_bf16_is_named(kind, tmp_path):
    """Fault: torch's error did not say that the option leaves buffers as they are, nor what to do."""
    torch._dynamo.reset()
    model = kind()
    optimizer = adamw(model.parameters())
    model.compile(backend="greedysnake", options=options(tmp_path, precision="bf16"))
    with pytest.raises(RuntimeError) as caught:
        model(batch()[0], False)
    assert isinstance(caught.value, TorchRuntimeError) == (kind is Convolved)
    (note,) = caught.value.__notes__
    assert "Of this model these are wider: scale. Cast what meets the parameters here" in note
    if other := optimizer.engine:
        other.tiers.close()
    model = kind()
    optimizer = adamw(model.parameters())
    model.compile(backend="greedysnake", options=options(tmp_path / "again", precision="bf16"))
    model(batch()[0], True).backward()  # as it says
    optimizer.step()
    assert optimizer.num_steps == 1
    optimizer.engine.tiers.close()


class Halved(nn.Module):
    """A block that is a stack of layers itself, or a model of such blocks, which are to be what breaks the graph."""

    def __init__(self, parts, breaks=lambda: None):
        super().__init__()
        self.parts, self.breaks = nn.ModuleList(parts), breaks

    def forward(self, x):
        for part in self.parts:
            self.breaks()
            x = x + torch.tanh(part(x))
        return x


class Squares(Halved):
    def forward(self, x):
        return super().forward(x).square().sum()


@pytest.mark.filterwarnings("ignore:the model.s blocks are of:gs_compile.errors.UniformityWarning")
def test_a_block_that_dynamo_hands_over_alone_is_no_model(tmp_path):
    """Faults: halves of a block were the layers of a model, which the optimizer was said to train beside another; once
    the break was gone, Dynamo still ran the forward as it is written; a break for a reason that Dynamo had named
    before, of a model elsewhere too, was said to be for a later one.
    """
    torch._dynamo.reset()
    blocks = [Halved(nn.Linear(4, 4) for _ in range(2)) for _ in range(3)]
    breaks = [torch._dynamo.graph_break]
    model = Squares(blocks, lambda: breaks[-1]())
    optimizer = adamw([{"params": list(model.parameters())}])
    for breaks[-1] in (torch._dynamo.graph_break, print):
        torch.compile(lambda x: x + len([breaks[-1]()]), backend="eager")(torch.ones(4))
    model.compile(backend="greedysnake", options=options(tmp_path))
    called, printed = r"Call to `torch._dynamo.graph_break\(\)`", "Failed to trace builtin operator"
    for breaks[-1], reason in [(torch._dynamo.graph_break, called), (int, None), (print, printed)] * 2:
        if reason is not None:
            with pytest.raises(GraphBreakError, match=f"Dynamo's reason: {reason}"):
                model(torch.ones(4, 4))
        else:
            model(torch.ones(4, 4)).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert optimizer.num_steps == 2
    optimizer.engine.tiers.close()


class Checked(Halved):
    """Part `wrong` does not take five rows, nor two in Dynamo's eyes."""

    def __init__(self, parts, wrong):
        super().__init__(parts)
        self.wrong = wrong

    def forward(self, x):
        refused = x.shape[1] == 5 or (x.shape[1] == 2 and torch.compiler.is_compiling())
        for number, part in enumerate(self.parts):
            if number == self.wrong and refused:
                raise KeyError("five rows")
            x = x + torch.tanh(part(x))
        return x.square().sum()


@pytest.mark.parametrize("wrong", [0, 1])
@pytest.mark.parametrize("sizes", [(5, 4, 5, 4), pytest.param((4, 5, 4), marks=pytest.mark.slow)])
def test_an_exception_of_the_forward_arrives_as_itself_and_the_next_batch_trains(tmp_path, wrong, sizes):
    """Faults: it was a GraphBreakError where a block had been captured, and from a bad batch on the model ran as plain
    PyTorch does, so that a run on the tiers was over.
    """
    model = Checked([Halved([nn.Linear(4, 4)]) for _ in range(3)], wrong)
    optimizer = adamw([{"params": list(model.parameters())}])
    model.compile(backend="greedysnake", options=options(tmp_path))
    torch._dynamo.reset()
    for size in sizes:
        with pytest.raises(KeyError, match="five rows") if size == 5 else nullcontext():
            model(torch.ones(4, size, 4)).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert optimizer.num_steps == sizes.count(4)
    optimizer.engine.tiers.close()


def test_an_exception_that_only_dynamo_sees_is_a_graph_break(tmp_path):
    torch._dynamo.reset()
    model = Checked([Halved([nn.Linear(4, 4)]) for _ in range(3)], 1)
    model.compile(backend="greedysnake", options=options(tmp_path))
    loss = model(torch.ones(4, 2, 4))
    with pytest.raises(GraphBreakError, match="Observed exception"):
        loss.backward()


def test_an_optimizer_that_is_made_after_the_first_call_trains_on_the_tiers(tmp_path):
    """As where the loss is looked at first: gradients arrived in p.grad for as long as the model was."""
    losses = []
    for late in (False, True):
        model = gpt2()
        model.compile(backend="greedysnake", options=options(tmp_path))
        if late:
            step(model, torch.optim.SGD(model.parameters(), lr=0.0), tokens(0))
        optimizer = adamw(two_groups(model))
        losses.append([step(model, optimizer, tokens(number)) for number in range(2)])
        assert optimizer.num_steps == 2
        optimizer.engine.tiers.close()
    assert losses[0] == losses[1]


def test_an_optimizer_in_whose_place_another_was_made_is_refused_by_name(tmp_path):
    """It said that the model had not run with this backend."""
    model = gpt2()
    first, last = adamw(two_groups(model)), adamw(two_groups(model))
    model.compile(backend="greedysnake", options=options(tmp_path))
    with pytest.raises(OptimizerError, match="another optimizer was made for these parameters after this one"):
        step(model, first, tokens(0))
    last.step()
    assert last.num_steps == 1
    last.engine.tiers.close()


@pytest.mark.parametrize("trained", [True, False])
def test_weights_that_are_made_of_other_tensors_are_refused_by_name(trained, tmp_path):
    """As those of torchao, and DTensors: Dynamo's guard of one met the placeholder of an ordinary parameter."""
    model = GPT()
    weight = model.head.weight.detach()
    model.head.weight = nn.Parameter(TwoTensor(weight, weight.clone()), requires_grad=trained)
    trains = [each for each in model.parameters() if each.requires_grad]

    def begin():
        optimizer = gs_compile.AdamW(trains)
        train(compile_model(model, storage=tmp_path), *batch())
        optimizer.step()

    with pytest.raises(OptimizerError, match=r"of shape .* is a TwoTensor, which is made of other tensors"):
        begin()
