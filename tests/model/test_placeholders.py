"""Released parameters: no memory, NaN to read, few codes, and no clipping that does nothing."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn
from torch._dynamo.exc import TensorifyScalarRestartAnalysis
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_  # before any is released

from gs_compile.errors import ReleasedParameterError
from gs_compile.model.placeholders import is_released, release, restore

SHAPES = [(3, 4), (5,), (1,), (1, 1), (), (0,), (0, 3)]


def parameter(shape, dtype=torch.float32):
    values = torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)
    return nn.Parameter(values, requires_grad=dtype.is_floating_point)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool], ids=str)
def test_released_and_restored(shape, dtype):
    given = parameter(shape, dtype)
    values = given.data
    assert not is_released(given)
    release(given)
    assert is_released(given)
    assert (given.shape, given.dtype, given.requires_grad) == (values.shape, dtype, dtype.is_floating_point)
    assert given.untyped_storage().nbytes() == dtype.itemsize
    if dtype.is_floating_point:
        assert given.isnan().all()
    restore(given, values)
    assert not is_released(given)
    assert given.data_ptr() == values.data_ptr()


def test_released_is_a_matter_of_identity():
    one, other = parameter((3,)), parameter((3,))
    release(one)
    assert not is_released(other)
    assert not is_released(one.detach())


def test_data_that_anyone_gives_ends_the_release():
    given = parameter((1,))
    release(given)
    given.data = torch.ones(1)
    assert not is_released(given)


def test_values_that_do_not_fit_are_refused():
    given = parameter((3,))
    release(given)
    with pytest.raises(AssertionError, match="a parameter of"):
        restore(given, torch.ones(4))
    with pytest.raises(AssertionError, match="a parameter of"):
        restore(given, torch.ones(3, dtype=torch.float64))


def test_nothing_keeps_a_released_parameter():
    given = parameter((3,))
    release(given)
    alive = weakref.ref(given)
    del given
    gc.collect()
    assert alive() is None


def test_the_gradient_of_a_released_parameter_is_an_ordinary_tensor():
    given = parameter((3, 4))
    release(given)
    (given * 2).sum().backward()
    assert given.grad.stride() == (4, 1)
    assert (given.grad == 2).all()


# Dynamo ----------------------------------------------------------------------------------------------------------------


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.gain = nn.Parameter(torch.ones(1))
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.none = nn.Parameter(torch.ones(0, 4))

    def forward(self, x):
        return self.linear(x) * self.gain * self.scale + self.none.sum()


@pytest.fixture(params=["eager", "aot_eager"])
def compiled(request):
    """A model, the same compiled, and the list that grows with each compilation."""
    torch._dynamo.reset()
    compilations = []
    inner = torch._dynamo.lookup_backend(request.param)

    def backend(graph, inputs):
        compilations.append(graph)
        return inner(graph, inputs)

    model = Model()
    yield model, torch.compile(model, backend=backend, dynamic=False), compilations
    torch._dynamo.reset()


def swap(model, values=None):
    """Release all parameters, or restore them to `values`; returns what they had."""
    had = {name: each.data for name, each in model.named_parameters()}
    for name, each in model.named_parameters():
        release(each) if values is None else restore(each, values[name])
    return had


def test_a_model_released_before_its_first_call_is_compiled_once(compiled):
    model, call, compilations = compiled
    x = torch.ones(3, 4)
    swap(model)
    assert call(x).isnan().all()
    swap(model, {name: torch.ones(each.shape) for name, each in model.named_parameters()})
    swap(model)
    assert call(x).isnan().all()
    assert len(compilations) == 1


def test_a_model_called_with_its_parameters_in_memory_is_compiled_once_more(compiled):
    """Dynamo guards strides, which a placeholder cannot have; then both codes are kept, and it goes on without more."""
    model, call, compilations = compiled
    x = torch.ones(3, 4)
    wanted = call(x)
    for _ in range(3):
        values = swap(model)
        assert call(x).isnan().all()
        swap(model, values)
        assert torch.equal(call(x), wanted)
    assert len(compilations) == 2


def test_a_backend_that_releases_and_has_dynamo_trace_again_makes_one_code():
    """So strides cost nothing: the guards are those of the second trace, which has seen the placeholders."""
    torch._dynamo.reset()
    model, calls = Model(), []

    def backend(graph, inputs):
        calls.append(graph)
        if len(calls) == 1:
            swap(model)
            raise TensorifyScalarRestartAnalysis(restart_reason="parameters were released")
        return graph.forward

    call = torch.compile(model, backend=backend, dynamic=False)
    for _ in range(3):
        assert call(torch.ones(3, 4)).isnan().all()
    assert len(calls) == 2
    torch._dynamo.reset()


# Clipping --------------------------------------------------------------------------------------------------------------

CLIPS = {
    "clip_grad_norm_": lambda parameters: clip_grad_norm_(parameters, 1.0),
    "clip_grads_with_norm_": lambda parameters: clip_grads_with_norm_(parameters, 1.0, torch.tensor(5.0)),
    "clip_grad_value_": lambda parameters: clip_grad_value_(parameters, 1.0),
}


@pytest.mark.parametrize("name", CLIPS)
def test_clipping_a_released_parameter_is_refused(name):
    released, other = parameter((3,)), parameter((3,))
    release(released)
    for given in (released, [other, released], (each for each in (released, other))):
        with pytest.raises(ReleasedParameterError, match="Use max_grad_norm= of the gs_compile optimizer"):
            CLIPS[name](given)
    assert released.grad is None


@pytest.mark.parametrize("name", CLIPS)
def test_clipping_other_parameters_is_what_it_was(name):
    release(parameter((1,)))
    release(parameter((1,)))  # the guard is put in once
    given = parameter((2,))
    for argument in (given, [given], iter([given])):
        given.grad = torch.tensor([3.0, 4.0])
        CLIPS[name](argument)
        expected = torch.ones(2) if name == "clip_grad_value_" else torch.tensor([0.6, 0.8])
        torch.testing.assert_close(given.grad, expected)
