"""A model's first call: it goes to the tiers as a whole or stays as it is, on whatever device, and its files go with it."""

from __future__ import annotations

import copy
import gc
import re
import threading
import weakref
from pathlib import Path

import pytest
import torch
from learner import distance, gpt2, same_tensors, values
from tiered import adamw, files_in, loss_of, options, step, tokens, two_groups
from torch import nn

import gs_compile
from gs_compile.errors import (
    CaptureError,
    GraphBreakError,
    GreedySnakeError,
    OptimizerError,
    OptionError,
    UncapturedWarning,
)
from gs_compile.model import first_call
from gs_compile.model.residency import Residency


class Broken(nn.Module):
    """A model whose graph breaks, or is one that cannot be cut into micro-batches."""

    def __init__(self, breaks: bool) -> None:
        super().__init__()
        self.breaks = breaks
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x - x.mean(0))
        if self.breaks:
            torch._dynamo.graph_break()
        return x.mean()


@pytest.mark.parametrize("breaks", [True, False])
def test_a_refused_model_keeps_its_values(breaks, tmp_path):
    """Fault 3: its parameters were NaN."""
    model = Broken(breaks)
    before = values(model)
    optimizer = adamw(list(model.parameters()))
    model.compile(backend="greedysnake", options=options(tmp_path))
    for _ in range(2):
        with pytest.raises(CaptureError if breaks else GreedySnakeError):
            model(torch.ones(4, 4))
        assert {type(parameter) for parameter in model.parameters()} == {nn.Parameter}
        same_tensors(values(model), before)
    assert optimizer.engine is None


def test_options_that_the_first_call_has_settled(tmp_path, monkeypatch):
    """Nothing would come of others, or wrong values of another precision; what is of one call alone may change.

    A relative directory is that of the first call, also where the process has another one since then.
    """
    model = gpt2()
    optimizer = adamw(list(model.parameters()))
    monkeypatch.chdir(tmp_path)
    model.compile(backend="greedysnake", options=options(Path("storage")))
    step(model, optimizer, tokens(0))
    (elsewhere := tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(elsewhere)
    before = values(model)
    for change, name in (
        ({"host_memory": "90MiB"}, "host_memory"),
        ({"alpha": 0.5}, r"expert\.alpha"),
        ({"precision": "bf16"}, "precision"),
    ):
        model.compile(backend="greedysnake", options=options(Path("storage"), **change))
        with pytest.raises(OptionError, match=rf"^{name} is .* in this call, and was .* in the first call of the run"):
            step(model, optimizer, tokens(1))
    with torch.no_grad(), pytest.raises(OptionError, match=r"^precision is"):  # an evaluation too
        loss_of(model, tokens(1))
    same_tensors(values(model), before)
    model.compile(backend="greedysnake", options=options(Path("storage"), micro_batch_size=5))
    step(model, optimizer, tokens(1))
    assert optimizer.num_steps == 2
    assert not list(elsewhere.iterdir())


@pytest.mark.parametrize("ends", [pytest.param(True, marks=pytest.mark.slow), False])
def test_more_models_of_a_class_than_dynamo_compiles_one_train_in_a_process(ends, tmp_path):
    """As in a search for settings. Each is captured, and Dynamo counts those of one model: the ninth was refused."""
    torch._dynamo.reset()
    kept = []
    with torch._dynamo.config.patch(recompile_limit=2):
        for number in range(2):  # each has two captures
            model = gpt2(num_layers=2 + number)
            optimizer = adamw(two_groups(model))
            model.compile(backend="greedysnake", options=options(tmp_path / str(number)))
            step(model, optimizer, tokens(0))
            with torch.no_grad():
                loss_of(model.eval(), tokens(1))
            assert optimizer.num_steps == 1
            kept += [] if ends else [(model, optimizer)]
            del model, optimizer
            gc.collect()


@pytest.mark.parametrize("on_storage", [pytest.param(False, marks=pytest.mark.slow), True])
def test_an_optimizer_that_is_made_after_a_refusal_is_in_time(on_storage, tmp_path):
    """Of a model in bf16 Dynamo kept the code of the call that was refused, with parameters of fp32."""
    build = (lambda: gs_compile.init_on_storage(gpt2, storage=tmp_path / "built")) if on_storage else gpt2
    losses = []
    for refused in (True, False):
        torch._dynamo.reset()
        model = build()
        model.compile(backend="greedysnake", options=options(tmp_path / "run", precision="bf16"))
        if refused:
            with pytest.raises(GreedySnakeError, match=r"before the (first )?call"):
                loss_of(model, tokens(0))
            assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
        optimizer = adamw(two_groups(model))
        losses.append([step(model, optimizer, tokens(number)) for number in range(2)])
        optimizer.engine.tiers.close()
    assert losses[0] == losses[1]


class OnDevice(torch.Tensor):
    """Values in the memory of a device: nothing but `cpu` brings them to the host."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        assert function is torch.Tensor.cpu, function
        return args[0].as_subclass(torch.Tensor)


def test_values_of_a_model_on_a_device_go_to_storage(tmp_path, monkeypatch):
    """Fault 11: they were taken as they were, and the bytes of a device's memory cannot be written to a file."""
    stashed = Residency.stashed_value
    monkeypatch.setattr(Residency, "stashed_value", lambda *given: stashed(*given).as_subclass(OnDevice))
    model = gpt2()
    before = values(model)
    optimizer = adamw(two_groups(model))
    model.compile(backend="greedysnake", options=options(tmp_path))
    with torch.no_grad():
        loss_of(model, tokens(0))
    found = model.state_dict()
    same_tensors({name: found[name] for name in before}, before)
    optimizer.engine.tiers.close()


@pytest.mark.usefixtures("as_for_users")
def test_files_go_with_the_model_at_once(tmp_path):
    """Fault 7: reference cycles kept them until the garbage collector ran."""

    def train():
        model = gpt2()
        optimizer = adamw(two_groups(model))
        compiled = torch.compile(model, backend="greedysnake", options=options(tmp_path, alpha=0.5))
        for number in range(2):
            step(compiled, optimizer, tokens(number))
        optimizer.synchronize()
        assert files_in(tmp_path)

    before = threading.enumerate()  # of models of other tests, some
    gc.disable()
    try:
        train()
        assert files_in(tmp_path) == []
        assert set(threading.enumerate()) <= set(before)
    finally:
        gc.enable()


@pytest.mark.usefixtures("as_for_users")
def test_garbage_of_earlier_models_is_collected_before_the_budget_is_fixed(tmp_path, monkeypatch):
    """Fault 9: a cell of a notebook that was run twice was refused."""
    garbage = []

    class Cycle:
        def __init__(self):
            self.itself = self
            garbage.append(weakref.ref(self))

    def planning(*_, **__):
        raise MemoryError("none is left" if garbage[0]() is None else "it is still there")

    model = gpt2()
    optimizer = adamw(two_groups(model))
    model.compile(backend="greedysnake", options=options(tmp_path))
    monkeypatch.setattr(first_call, "StepPrograms", planning)
    gc.disable()
    try:
        Cycle()
        with pytest.raises(MemoryError, match="none is left"):
            step(model, optimizer, tokens(0))
    finally:
        gc.enable()


def test_a_description_is_made_for_who_asks(tmp_path, monkeypatch):
    """Fault 10: one was made in every call."""
    model = gpt2()
    optimizer = adamw(two_groups(model))
    model.compile(backend="greedysnake", options=options(tmp_path))
    step(model, optimizer, tokens(0))
    described = []
    monkeypatch.setattr(type(optimizer.engine.planning), "describe", lambda *_: described.append(1) or "where")
    step(model, optimizer, tokens(1))
    assert not described
    assert gs_compile.inspect(model).tiers == "where"
    optimizer.engine.tiers.close()


@pytest.mark.parametrize(
    "convert", [pytest.param(lambda m: m.double(), marks=pytest.mark.slow), lambda m: m.bfloat16().float().to("cpu")]
)
def test_a_model_on_storage_trains_bitwise_after_a_conversion(convert, tmp_path):
    """Fault 19: `.to` made dense NaN of it. The device has memory of its own, less than the model."""
    found = []
    for build in (
        lambda: convert(gpt2()),
        lambda: convert(gs_compile.init_on_storage(gpt2, storage=tmp_path, device="cpu")),
    ):
        torch._dynamo.reset()
        model = build()
        optimizer = adamw(two_groups(model))
        model.compile(backend="greedysnake", options=options(tmp_path / "run", separate_device=True, alpha=0.0))
        losses = [step(model, optimizer, tokens(number)) for number in range(2)]
        found.append((losses, {name: value.clone() for name, value in model.state_dict().items()}))
        optimizer.engine.tiers.close()
    (losses, wanted), (others, ours) = found
    assert losses == others
    same_tensors(ours, wanted)


def test_a_break_in_a_hook_of_a_block_is_named():
    """Dynamo gives up a frame that breaks in a loop: it hands over each block for itself, without a reason."""
    torch._dynamo.reset()
    model = gpt2()
    model.transformer.h[1].register_forward_hook(lambda *_: torch._dynamo.graph_break())
    model.compile(backend="greedysnake", options={"micro_batch_size": 2})
    with pytest.raises(GraphBreakError, match=r"Dynamo's reason: Call to `torch._dynamo.graph_break\(\)`") as caught:
        model(input_ids=tokens(0), labels=tokens(0))
    assert re.search(rf"breaks it at {re.escape(__file__)}:\d+: model.transformer.h\[1\].register", str(caught.value))


def test_an_error_that_only_the_trace_meets_is_named():
    """Dynamo gives the forward up: it hands over each module for itself, without a reason."""

    class Overrides(nn.Parameter):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            return super().__torch_function__(function, types, args, kwargs or {})

    model = gpt2()
    model.transformer.ln_f = nn.RMSNorm(32)
    model.transformer.ln_f.weight = Overrides(torch.ones(32))
    assert torch.isfinite(loss_of(model, tokens(0)))
    model.compile(backend="greedysnake", options={"micro_batch_size": 2})
    with pytest.raises(GraphBreakError, match=r"no implementation found for 'torch\.nn\.functional\.rms_norm'"):
        model(input_ids=tokens(0), labels=tokens(0))


def test_a_backward_that_reads_values_is_named():
    """As that of grouped products in transformers 5.20 to 5.22: Dynamo takes the operator as it is."""

    @torch.library.custom_op("greedysnake_tests::scaled", mutates_args=())
    def scaled(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    scaled.register_fake(torch.empty_like)
    scaled.register_autograd(lambda ctx, gradient: gradient * max(2.0, gradient.max().item()))
    model = gpt2()
    for block in model.transformer.h:
        block.down.register_forward_hook(lambda _, __, output: scaled(output))
    assert torch.isfinite(loss_of(model, tokens(0)))
    model.compile(backend="greedysnake", options={"micro_batch_size": 2, "expert": {"compiler": "eager"}})
    with pytest.raises(
        GraphBreakError, match=rf"reads values of a tensor, at {re.escape(__file__)}:\d+: scaled\.register"
    ):
        model(input_ids=tokens(0), labels=tokens(0))


class Recurrent(nn.Module):
    """Dynamo gives this forward up, and no backend is asked for any of it."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.LSTM(8, 8, batch_first=True) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)[0]
        return x.square().mean()


def test_a_forward_that_is_given_up_before_the_backend_is_asked_is_warned_of_once():
    """Parameters stay in memory, so that nothing else would tell."""
    torch._dynamo.reset()
    model = Recurrent()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.compile(backend="greedysnake", options={"micro_batch_size": 2})
    model(torch.rand(4, 3, 8)).backward()
    line = r"test_first_call\.py:\d+: x = x \+ layer\(x\)\[0\]"
    with pytest.warns(UncapturedWarning, match=rf"(?s)gave the model's forward up at .*{line}.* RNN, GRU, or LSTM"):
        optimizer.step()
    model(torch.rand(4, 3, 8)).backward()
    optimizer.step()  # once


class Residual(nn.Linear):
    def forward(self, x):
        return x + super().forward(x).relu()


@pytest.mark.parametrize("method", [True, False])
def test_a_model_that_is_itself_a_sequential_is_compiled_by_torch_compile(tmp_path, method):
    """Before torch 2.14 Dynamo skips the forward of torch's own modules that ``model.compile`` gives it first."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Residual(8, 8) for _ in range(3)))
    plain, x = copy.deepcopy(model), torch.rand(4, 3, 8)
    optimizer, theirs = gs_compile.SGD(model.parameters(), lr=0.1), torch.optim.SGD(plain.parameters(), lr=0.1)
    if method:
        model.compile(backend="greedysnake", options=options(tmp_path))
        if torch.__version__ < "2.14":  # from there on Dynamo takes it whole
            words = r"itself a torch\.nn\.Sequential: .* model = torch\.compile\(model"
            with pytest.raises(GraphBreakError, match=words):
                model(x)
            return
    compiled = model if method else torch.compile(model, backend="greedysnake", options=options(tmp_path))
    for each, update in ((compiled, optimizer), (plain, theirs)):
        each(x).square().mean().backward()
        update.step()
    assert distance(dict(model.state_dict()), dict(plain.state_dict())) < 1e-5
    optimizer.engine.tiers.close()


def test_a_frame_without_operations_reads_a_parameter_on_the_tiers(tmp_path):
    """Dynamo makes no code of it, and would go on with ours."""

    class Looks(nn.Module):
        def forward(self, x):
            return x, self.weight.shape, self.weight.requires_grad

    model = gpt2()
    optimizer = adamw(two_groups(model))
    model.compile(backend="greedysnake", options=options(tmp_path))
    step(model, optimizer, tokens(0))
    looks = Looks()
    looks.weight = model.transformer.h[0].up.weight
    looks.compile(backend="greedysnake")
    x = torch.ones(2)
    assert looks(x) == (x, (128, 32), True) == looks(x)
    optimizer.engine.tiers.close()


GIVEN_UP = {  # what has Dynamo give a loop's function up, and its words
    "a number": (lambda bias, x: x * bias.sum().item(), r"Unsupported Tensor.item\(\) call"),
    "unknown sizes": (lambda bias, x: x * 2 if bias.nonzero().numel() > 1 else x, "(?s:.*)data-dependent"),
    "a comparison": (lambda bias, x: x + bias.equal(bias), "Data dependent operator"),
}


class InALoop(nn.Module):
    """Blocks that apply a function of the bias in a loop: Dynamo does not break a graph there."""

    def __init__(self, function):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.function = function

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(self.function(block.bias, x)))
        return x.square().sum()


@pytest.mark.parametrize("name", GIVEN_UP)
def test_a_forward_that_dynamo_gives_up_is_refused_with_its_reason(name, tmp_path):
    """What it hands over are the modules in the loop, each for itself: "no repeated block" would be true of these."""
    function, reason = GIVEN_UP[name]
    model = InALoop(function)
    optimizer = adamw([{"params": list(model.parameters())}])
    model.compile(backend="greedysnake", options=options(tmp_path))
    with pytest.raises(GraphBreakError, match=f"Dynamo's reason: {reason}") as caught:
        model(torch.ones(4, 4))
    line = rf"breaks it at {re.escape(__file__)}:\d+: \"{name}\": \(lambda bias, x:"
    assert re.search(line, str(caught.value))
    assert optimizer.engine is None


def test_a_forward_of_which_nothing_is_captured_is_named_at_the_step_of_its_model():
    """Fault: the reason of an earlier model was told of another, which was not compiled at all."""

    class Numbers(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x):
            for _ in range(2):
                x = float(self.weight.detach().sum()) * x
            return (x * self.weight).sum()

    given_up, plain = Numbers(), Numbers()
    given_up.compile(backend="greedysnake")
    line = r"gave the model's forward up at .*: x = float\(self.weight.detach\(\).sum\(\)\) \* x"
    for model, is_told in ((given_up, True), (plain, False)):
        optimizer = adamw([{"params": list(model.parameters())}])
        model(torch.ones(4, 4)).backward()
        with pytest.raises(OptimizerError, match=r"the model did not run with the greedysnake backend") as caught:
            optimizer.step()
        assert bool(re.search(line, str(caught.value))) == is_told
        assert ("Dynamo" in str(caught.value)) == is_told
