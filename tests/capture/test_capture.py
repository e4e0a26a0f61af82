"""What the capture rests on: facts of Dynamo, each under a test, so that a release that breaks one is told by name."""

from __future__ import annotations

import copy
import json
import re
import warnings
from dataclasses import dataclass
from functools import partial

import pytest
import tiered
import torch
import zoo
from torch import nn
from torch._dynamo import callback_handler, symbolic_convert
from torch._dynamo import config as dynamo_config
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.variables import builder as dynamo_builder
from torch.fx.experimental import _config as symbolic_config
from torch.nn import functional
from transformers.utils import logging
from zoo import GPT, NAMES_DIMENSIONS, VOCAB, WIDTH, Feed, assert_same_gradients, compile_model, gradients, train

import gs_compile
from gs_compile.capture.frame_settings import _Settings, set_from_the_start
from gs_compile.codegen.compiled import compilations_of
from gs_compile.model.backend import greedysnake

batch = partial(zoo.batch, marked=False)  # as users give it
OPTIONS = {"micro_batch_size": 2, "expert": {"compiler": "eager"}}


def settings():
    return {
        "dynamic_sources": torch.compiler.config.dynamic_sources,
        "specialize_float": dynamo_config.specialize_float,
        "use_duck_shape": symbolic_config.use_duck_shape,
        "end_callbacks": [
            each for each in callback_handler.end_callbacks if "given_up" not in type(each.__self__).__module__
        ],  # that look at compilations, for as long as there is a process
    }


@pytest.fixture(autouse=True)
def settings_are_put_back():
    callback_handler.start_callbacks.clear()  # a first trace has settings where a test asks for it
    before = settings()
    yield
    assert settings() == before


class Spy:
    """The backend, which notes the settings of each trace."""

    __module__ = greedysnake.__module__  # by which it is known as this package's

    def __init__(self):
        self.traces = []

    def __call__(self, module, example_inputs, **options):
        self.traces.append(settings())
        return greedysnake(module, example_inputs, **options)


def captured(model):
    """The single capture of a compiled model."""
    (compilation,) = compilations_of[next(model.parameters())]
    return compilation.captured


def roles(model):
    return {entry.path: entry.role for entry in captured(model).inputs if entry.role not in ("parameter", "size")}


# The first trace, and another -------------------------------------------------------------------------------------------


def traces_beside_another_setting():
    """The settings of the traces for two batches; the last has the batch dimension free."""
    model, spy = GPT(), Spy()
    model.compile(backend=spy, options=OPTIONS)
    with torch.compiler.config.patch(dynamic_sources="L['another']"):
        train(model, *batch())
        train(model, *batch(4))
        assert torch.compiler.config.dynamic_sources == "L['another']"
    symbolic = spy.traces[-1]
    named = [r"L\['ids'\]:0", r"L\['labels'\]:0"] if NAMES_DIMENSIONS else ["L['ids']", "L['labels']"]
    assert symbolic["dynamic_sources"].split(",") == ["L['another']", *named]
    assert symbolic["specialize_float"] is False  # one that has changed is an input
    assert symbolic["use_duck_shape"] is False
    assert captured(model).batch_symbols
    return spy.traces


def test_the_first_trace_has_its_own_settings_and_is_the_only_one():
    set_from_the_start()
    assert len(traces_beside_another_setting()) == 1


@pytest.mark.parametrize("logged", [False, True])
def test_files_are_parsed_for_logs_alone(monkeypatch, logged):
    """Dynamo looks up the function of each line that it traces, where it has its name."""
    looked_up = []
    monkeypatch.setattr(symbolic_convert, "get_funcname", lambda *place: looked_up.append(place))
    set_from_the_start()
    torch._logging.set_logs(trace_call=logged)
    try:
        train(compile_model(GPT()), *batch())
    finally:
        torch._logging.set_logs()
    assert bool(looked_up) == logged


def test_other_backends_are_compiled_for_as_without_this_package():
    set_from_the_start()
    before, seen = settings(), []

    def another(module, example_inputs):
        seen.append(settings())
        return module.forward

    model = GPT()
    model.compile(backend=another)
    train(model, *batch())
    assert seen
    assert all(each == before for each in seen)


def test_a_backward_that_another_backend_compiles_late_is_its_own():
    """Such backends compile it as it first runs, where Dynamo compiles no frame."""
    torch._dynamo.reset()
    set_from_the_start()
    plain, model = GPT(num_layers=2), GPT(num_layers=2)
    model.load_state_dict(plain.state_dict())
    model.compile(backend="aot_eager")
    for each in (plain, model):
        each(*batch())[1].backward()
    torch.testing.assert_close(model.head.weight.grad, plain.head.weight.grad)


@pytest.mark.parametrize("precision", ["model", "bf16"])
def test_parameters_that_leave_in_the_first_trace_are_not_captured_once_more(precision, tmp_path):
    """But for those that have another dtype on the tiers."""
    set_from_the_start()
    model, spy = GPT(), Spy()
    optimizer = gs_compile.AdamW(model.parameters())
    model.compile(backend=spy, options=tiered.options(tmp_path, precision=precision))
    for size in (5, 4):
        ids, labels = batch(size)
        model(ids, labels)[1].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert len(spy.traces) == (1 if precision == "model" else 2)
    optimizer.engine.tiers.close()


@dataclass
class Passed:
    """Tensors that are found in an object."""

    ids: torch.Tensor
    labels: torch.Tensor


def test_what_is_found_in_an_object_is_known_after_the_first_trace():
    set_from_the_start()
    model, spy = Called(lambda passed: (passed.ids, passed.labels, SHIFT)), Spy()
    reference = copy.deepcopy(model)
    model.compile(backend=spy, options=OPTIONS)
    for each in (model, reference):
        each(Passed(batch()[0], WEIGHTS)).backward()
    assert_same_gradients(gradients(model), gradients(reference))
    assert len(spy.traces) == 2


@pytest.mark.skipif(not NAMES_DIMENSIONS, reason="torch names whole sources: what is no batch stays symbolic")
def test_what_is_no_batch_is_fixed_after_the_first_trace():
    """The first tensor of two dimensions that the frame has is not the first that the model reads."""
    set_from_the_start()
    model, spy = Called(lambda shift_TD, ids, weights: (ids, weights, shift_TD)), Spy()
    reference = copy.deepcopy(model)
    model.compile(backend=spy, options=OPTIONS)
    for each in (model, reference):
        each(SHIFT.repeat(zoo.TOKENS, 1), batch()[0], WEIGHTS).backward()
    assert_same_gradients(gradients(model), gradients(reference))
    assert len(spy.traces) == 2
    assert sorted(roles(model).values()) == ["batch", "batch", "constant"]


def test_the_retrace_happens_once_and_under_its_own_settings():
    static, symbolic = traces_beside_another_setting()
    assert static["dynamic_sources"] == "L['another']"
    assert len(symbolic["end_callbacks"]) == len(static["end_callbacks"]) + 1


def test_settings_are_put_back_when_the_retrace_does_not_reach_the_backend(monkeypatch):
    runs = []

    def run(translator):
        runs.append(settings())
        if len(runs) > 1:
            raise ZeroDivisionError
        return original(translator)

    original = InstructionTranslator.run
    monkeypatch.setattr(InstructionTranslator, "run", run)
    before = settings()
    with pytest.raises(torch._dynamo.exc.InternalTorchDynamoError, match="ZeroDivisionError"):
        train(compile_model(GPT(), 2), *batch())
    assert len(runs) == 2
    assert runs[1] != before
    assert settings() == before


def test_what_changes_of_a_parameter_where_its_dict_does_not_is_guarded():
    set_from_the_start()
    model, spy = GPT(), Spy()
    model.compile(backend=spy, options=OPTIONS)
    for is_trained in (True, False, True):
        model.embedding.requires_grad_(is_trained)
        for _ in range(2):
            train(model, *batch())
    assert len(spy.traces) == 2


def test_what_dynamo_passes_over_is_named_in_the_log_of_its_configuration():
    """And of frames of this backend alone: of others it is their matter."""
    settings = _Settings()
    inside = dynamo_config.ignore_logging_functions
    settings.end(None)
    assert json.dumps(sorted(copy.deepcopy(inside)))
    assert {warnings.warn, logging.warning_once, logging.info_once} <= inside
    left = dynamo_config.ignore_logging_functions
    assert left.isdisjoint({warnings.warn, logging.warning_once, logging.info_once})


def test_one_sample_is_captured_without_a_retrace():
    """A batch of one is a constant to Dynamo; the first larger one is captured anew."""
    model, spy = GPT(), Spy()
    model.compile(backend=spy, options=OPTIONS)
    ids, _ = batch(1)
    assert_same_gradients(train(model, ids, ids)[1], train(GPT(), ids, ids)[1])
    assert len(spy.traces) == 1


def test_releases_that_cannot_name_a_dimension(monkeypatch):
    """There every dimension of a named source becomes symbolic, the tokens with the batch."""

    def is_dynamic_source(name, dim=None):
        sources = torch.compiler.config.dynamic_sources.split(",")
        return any(name == source or re.match(source, name) for source in filter(None, sources))

    monkeypatch.delattr(dynamo_builder, "_parse_source_entry", raising=False)
    monkeypatch.setattr(dynamo_builder, "is_dynamic_source", is_dynamic_source)
    model, spy = GPT(), Spy()
    model.compile(backend=spy, options=OPTIONS)
    for size, tokens in [(5, 12), (4, 8)]:
        ids, labels = batch(size, tokens)
        model.zero_grad()
        assert_same_gradients(train(model, ids, labels)[1], train(GPT(), ids, labels)[1])
    assert len(spy.traces) == 2
    assert spy.traces[1]["dynamic_sources"] == "L['ids'],L['labels']"


# What an input is ------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["in the first trace", "in another trace"])
def freed(request):
    """When the batch dimension is symbolic."""
    if request.param == "in the first trace":
        set_from_the_start()


def check(model, *args, **kwargs):
    """The gradients on greedysnake are those of plain PyTorch; returns the compiled model."""
    reference = copy.deepcopy(model)
    for each in (reference, compile_model(model, 2)):
        each(*args, **kwargs).backward()
    assert_same_gradients(gradients(model), gradients(reference))
    return model


class Called(nn.Module):
    """A small model with a loss, whose inputs are what `read` makes of the arguments."""

    def __init__(self, read):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Feed() for _ in range(2))
        self.read = read

    def forward(self, *args, **kwargs):
        ids, weight_B, shift = self.read(*args, **kwargs)
        x_BTD = self.embedding(ids)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return ((x_BTD + shift).square().mean((1, 2)) * weight_B).sum()


SHIFT = torch.linspace(-1, 1, WIDTH)  # the same for every sample
WEIGHTS = torch.arange(1.0, 6.0)


@pytest.mark.usefixtures("freed")
@pytest.mark.parametrize(  # what another trace knows is of graph inputs, which have no form
    "freed", ["in the first trace", pytest.param("in another trace", marks=pytest.mark.slow)], indirect=True
)
@pytest.mark.parametrize(
    ("read", "args", "kwargs"),
    [
        (lambda ids, weights, shift: (ids, weights, shift), ("ids", "weights", "shift"), {}),
        (lambda *, a, b, c: (a, b, c), (), {"a": "ids", "b": "weights", "c": "shift"}),
        (lambda ids, *, b, c: (ids, b, c), ("ids",), {"c": "shift", "b": "weights"}),
        (lambda d: (d["x"]["ids"], d["w"], d["s"]), ({"x": {"ids": "ids"}, "w": "weights", "s": "shift"},), {}),
        (lambda inputs: inputs, (["ids", "weights", "shift"],), {}),
        (lambda row, ids, weights: (row + ids, weights, 0.0), ("row", "ids", "weights"), {}),
    ],
    ids=["positional", "keyword", "both", "dict", "list", "a row that samples share"],
)
def test_forms_of_a_call(read, args, kwargs):
    values = {"ids": batch()[0], "weights": WEIGHTS, "shift": SHIFT, "row": torch.ones(1, zoo.TOKENS).long()}
    args, kwargs = torch.utils._pytree.tree_map(lambda name: values[name], (args, kwargs))
    model = check(Called(read), *args, **kwargs)
    assert sorted(roles(model).values()) == ["batch", "batch", "constant"]


def test_functions_that_call_a_model():
    """With the model in a closure, or as an argument."""
    model, reference, (ids, labels) = GPT(), GPT(), batch()
    reference(ids, labels)[1].backward()
    of_closure, of_argument = (lambda *given: model(*given)[1]), (lambda each, *given: each(*given)[1])
    for function, given in ((of_closure, ()), (of_argument, (model,))):
        model.zero_grad()
        torch.compile(function, backend="greedysnake", options=OPTIONS)(*given, ids, labels).backward()
        assert_same_gradients(gradients(model), gradients(reference))


@pytest.mark.usefixtures("freed")
def test_a_sequence_as_long_as_the_batch_is_large():
    """Equal sizes are not one symbol, so a later batch may have another."""
    model = compile_model(GPT(), 2)
    for size in (5, 3, 8):
        ids, labels = batch(size, tokens=5)
        model.zero_grad()
        assert_same_gradients(train(model, ids, labels)[1], train(GPT(), ids, labels)[1])
    assert captured(model).batch_symbols
    assert roles(model) == {"ids": "batch", "labels": "batch"}


@pytest.mark.usefixtures("freed")
def test_a_batch_of_vectors():
    """Without any input of two dimensions, the first of one dimension has the batch."""
    model = Called(lambda tokens, weights: (tokens[:, None], weights, 0.0))
    assert list(roles(check(model, torch.arange(5), WEIGHTS)).values()) == ["batch", "batch"]


@pytest.mark.usefixtures("freed")
def test_floats_of_the_model_are_constants_with_dynamic_shapes():
    class Scaled(Feed):
        scale = 0.5

        def forward(self, x_BTD):
            return super().forward(x_BTD) * self.scale + functional.layer_norm(x_BTD, (WIDTH,), eps=self.scale)

    model = GPT(Scaled)
    reference = copy.deepcopy(model)
    model.compile(backend=greedysnake, options=OPTIONS, dynamic=True)
    assert_same_gradients(train(model, *batch())[1], train(reference, *batch())[1])


@pytest.mark.skipif(not hasattr(functional, "linear_cross_entropy"), reason="of torch 2.13 and later")
def test_a_loss_of_torch_in_its_own_chunks_is_one_in_pieces():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

        def forward(self, ids, labels):
            x = self.embedding(ids)
            for layer in self.layers:
                x = x + layer(x).tanh()
            given = x.flatten(0, 1), self.head.weight, labels.flatten()
            return functional.linear_cross_entropy(*given, options=nn.LinearCrossEntropyOptions())

    torch.manual_seed(0)
    model, ids = Model(), torch.randint(VOCAB, (4, 16))
    labels = ids.masked_fill(torch.rand(4, 16) < 0.3, -100)
    plain = copy.deepcopy(model)
    expected = plain(ids, labels)
    expected.backward()
    model.compile(
        backend="greedysnake", options={"micro_batch_size": 2, "expert": {**OPTIONS["expert"], "piece_tokens": 8}}
    )
    loss = model(ids, labels)
    loss.backward()
    torch.testing.assert_close(loss, expected)
    assert_same_gradients(gradients(model), gradients(plain))
    assert "the head runs on 8 tokens at a time" in str(gs_compile.inspect(model))


class Masked(nn.Module):
    """A stack of torch's with a mask, and no word of whether it is causal."""

    def __init__(self, is_causal):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, 0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.is_causal, self.scale = is_causal, nn.Buffer(torch.tensor(0.5))

    def forward(self, ids):
        mask = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).triu(1 if self.is_causal else 3)
        self.scale = self.scale.to(ids.device)  # it is there already: Dynamo broke at this line of CTRL
        words = functional.one_hot(ids, VOCAB) * self.scale
        words.requires_grad = True  # as encoders of sound ask for a gradient: Dynamo broke there, too
        return self.head(self.encoder(words @ self.embedding.weight, mask=mask))


@pytest.mark.parametrize("is_causal", [pytest.param(True, marks=pytest.mark.slow), False])
def test_a_stack_of_torch_with_a_mask_is_one_graph(is_causal):
    """It compares the mask's values with those of a causal one, for a hint to kernels: Dynamo broke there."""
    ids, _ = batch(4)
    losses, model = [], Masked(is_causal)
    for each in (model, compiled := copy.deepcopy(model)):
        if each is compiled:
            each.compile(backend="greedysnake", options=OPTIONS)
        loss = functional.cross_entropy(each(ids).flatten(0, 1), ids.flatten())
        loss.backward()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert_same_gradients(gradients(compiled), gradients(model))
