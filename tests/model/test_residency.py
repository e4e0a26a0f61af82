"""Where a parameter's value is: placeholders take no memory and lose no value, and Dynamo makes one code of them."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn
from torch._dynamo import config as dynamo_config
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_

from gs_compile.errors import ReleasedParameterError
from gs_compile.model.gradients import is_zeroed, mark_gradient_unavailable
from gs_compile.model.residency import is_offloaded, residency_of, restore, roll_back, stash

# Tests here have parameters that are elsewhere read by a backend of their own.
pytestmark = pytest.mark.filterwarnings("ignore:a graph of another backend:gs_compile.errors.UncapturedWarning")

SHAPES = [(3, 4), (5,), (1,), (1, 1), (), (0,), (0, 3)]


def parameter(shape, dtype=torch.float32):
    values = torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)
    return nn.Parameter(values, requires_grad=dtype.is_floating_point)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool], ids=str)
def test_stashed_and_restored(shape, dtype):
    given = parameter(shape, dtype)
    values = given.data
    stash(given)
    assert is_offloaded(given)
    assert isinstance(given, nn.Parameter)
    assert (given.shape, given.dtype, given.requires_grad) == (values.shape, dtype, dtype.is_floating_point)
    assert given.untyped_storage().nbytes() == dtype.itemsize
    assert not isinstance(given.detach(), nn.Parameter)
    assert torch.equal(given.detach(), values)
    roll_back([given])
    assert not is_offloaded(given)
    assert type(given) is nn.Parameter
    assert given.data_ptr() == values.data_ptr()


def test_nothing_keeps_an_offloaded_parameter():
    given = parameter((3,))
    stash(given)
    mark_gradient_unavailable(given)
    alive = weakref.ref(given)
    gc.disable()
    del given
    gc.enable()
    assert alive() is None


def test_a_resident_parameter_with_an_entry_is_copied_and_pickled_without_it():
    given = parameter((3,))
    residency_of(given)
    for copied in (copy.deepcopy(given), pickle.loads(pickle.dumps(given))):
        assert torch.equal(copied, given)
        assert residency_of(copied) is not residency_of(given)


# Conversions ----------------------------------------------------------------------------------------------------------


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.big = nn.Linear(300, 300)
        self.register_buffer("count", torch.zeros(1))


@pytest.fixture(params=["in memory", "on storage"])
def stashed(request, tmp_path):
    """A stashed model, and the values it was built with."""
    torch.manual_seed(0)
    model = Pair()
    wanted = {name: value.clone() for name, value in model.state_dict().items()}
    for each in model.parameters():
        stash(each, values=each.data, folder=tmp_path if request.param == "on storage" else None)
    return model, wanted


@pytest.mark.parametrize(
    "convert",
    [
        lambda m: m.half(),
        lambda m: m.bfloat16().float(),
        lambda m: m.double().to(torch.float32).to("cpu"),
        lambda m: m.to(memory_format=torch.channels_last),
        lambda m: m.to(torch.zeros(1, dtype=torch.float64)),
        lambda m: m.cpu(),
    ],
)
def test_a_stashed_model_is_converted_as_any_other(convert, stashed):
    """Fault 1: it became NaN, in dense memory."""
    model, wanted = stashed
    other = Pair()
    other.load_state_dict(wanted)
    wanted = convert(other).state_dict()
    convert(model)
    assert all(is_offloaded(each) for each in model.parameters())
    assert all(each.untyped_storage().nbytes() <= 8 for each in model.parameters())
    for name, value in model.state_dict().items():
        assert value.dtype == wanted[name].dtype
        assert torch.equal(value, wanted[name]), name


def test_what_is_not_taken_up_changes_nothing(stashed):
    model, wanted = stashed
    model.big.weight.to(torch.float64)
    assert model.big.weight.dtype == torch.float32
    assert torch.equal(model.big.weight.detach(), wanted["big.weight"])


def test_a_conversion_that_would_lose_values_is_refused(stashed):
    model, _ = stashed
    with pytest.raises(ReleasedParameterError, match=r"cannot become torch.float32 on meta"):
        model.to("meta")
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        with pytest.raises(ReleasedParameterError, match=r"cannot become torch.float64"):
            model.double()
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)


# Dynamo ----------------------------------------------------------------------------------------------------------------


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.gain = nn.Parameter(torch.ones(1))
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.none = nn.Parameter(torch.ones(0, 4))

    def forward(self, x):
        weight = self.linear.weight.to(x.dtype).detach() * self.linear.bias.float()
        return self.linear(x) * self.gain * self.scale + self.none.sum() + weight.sum()


@pytest.fixture
def compiled():
    """A model, the same compiled, and the list that grows with each compilation."""
    torch._dynamo.reset()
    compilations = []

    def backend(graph, inputs):
        compilations.append(graph)
        return graph.forward

    model = Model()
    with dynamo_config.patch(skip_tensor_guards_with_matching_dict_tags=False):  # as for this package's
        yield model, torch.compile(model, backend=backend, dynamic=False, fullgraph=True), compilations
    torch._dynamo.reset()


def swap(model, values=None):
    """Stash all parameters, or restore them to `values`; returns what they had."""
    had = {name: each.data for name, each in model.named_parameters()}
    for name, each in model.named_parameters():
        stash(each) if values is None else restore(each, values[name])
    return had


def test_a_model_stashed_before_its_first_call_is_compiled_once(compiled):
    """Methods of the placeholder, such as `to`, are an ordinary tensor's there."""
    model, call, compilations = compiled
    x = torch.ones(3, 4)
    swap(model)
    call(x)
    swap(model, {name: torch.ones(each.shape) for name, each in model.named_parameters()})
    swap(model)
    call(x)
    assert len(compilations) == 1
    methods = [node.target for node in compilations[0].graph.nodes if node.op == "call_method"]
    assert {"to", "detach", "float"} <= set(methods)


def test_a_model_called_with_its_parameters_in_memory_is_compiled_once_more(compiled):
    """Dynamo guards strides, which a placeholder cannot have; then both codes are kept, and it goes on without more."""
    model, call, compilations = compiled
    x = torch.ones(3, 4)
    wanted = call(x)
    for _ in range(3):
        values = swap(model)
        call(x)
        swap(model, values)
        assert torch.equal(call(x), wanted)
    assert len(compilations) == 2


# Gradients ------------------------------------------------------------------------------------------------------------

USES = {
    "clip_grad_norm_ foreach": lambda parameters: clip_grad_norm_(parameters, 1.0, foreach=True),
    "clip_grads_with_norm_": lambda parameters: clip_grads_with_norm_(parameters, 1.0, torch.tensor(5.0)),
    "clip_grad_value_ foreach": lambda parameters: clip_grad_value_(parameters, 1.0, foreach=True),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, fused=True).step(),
    "a norm": lambda parameters: [each.grad.norm() for each in parameters],
}


@pytest.mark.parametrize("name", USES)
def test_a_gradient_that_has_gone_to_its_update_is_not_used(name):
    offloaded, other = parameter((3,)), parameter((3,))
    stash(offloaded)
    mark_gradient_unavailable(offloaded)
    other.grad = torch.ones(3)
    with pytest.raises(ReleasedParameterError, match="Use max_grad_norm= of the gs_compile optimizer"):
        USES[name]([other, offloaded])


@pytest.mark.parametrize("seen", [lambda grad: grad.data, torch.Tensor.detach, torch.Tensor.detach_])
def test_it_is_zeroed_by_its_data(seen):
    """As loops do that set gradients to zero by hand: ``p.grad.detach_()``, then ``p.grad.zero_()``."""
    offloaded = parameter((3,))
    stash(offloaded)
    mark_gradient_unavailable(offloaded)
    assert not is_zeroed([offloaded])
    seen(offloaded.grad).zero_()
    assert is_zeroed([offloaded])
    with pytest.raises(ReleasedParameterError):
        offloaded.grad.T.zero_()


@pytest.mark.parametrize("set_to_none", [False, True])
def test_it_can_be_dropped(set_to_none):
    module = nn.Linear(2, 2)
    for each in module.parameters():
        stash(each)
        mark_gradient_unavailable(each)
    assert module.weight.grad.shape == (2, 2)
    module.zero_grad(set_to_none=set_to_none)
    assert (module.weight.grad is None) == set_to_none
    torch.optim.SGD(module.parameters()).zero_grad(set_to_none=set_to_none)
