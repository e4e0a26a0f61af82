"""Habits that read, copy, cast, move, save or change parameters: on the tiers each works as in memory, or is refused."""

from __future__ import annotations

import copy
import io
import pickle
import re
import sys
import tempfile
from functools import partial
from pathlib import Path

import pytest
import torch
from learner import learner, same_tensors
from safetensors.torch import load, save, save_model
from tiered import tokens
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.func import functional_call
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from zoo import small

import gs_compile
from gs_compile.errors import ReleasedParameterError
from gs_compile.model import offloaded, optimizer_state
from gs_compile.model.residency import is_offloaded

KEEPS_CAPTURES = True


@pytest.fixture(
    scope="module",
    params=[
        pytest.param({"alpha": 0.5}, id="fp32", marks=pytest.mark.slow),  # such values test_state_dicts.py writes
        pytest.param({"precision": "bf16"}, id="bf16"),
    ],
)
def one(request, tmp_path_factory):
    """A model on the tiers, after a step."""
    folder = tmp_path_factory.mktemp("storage")
    with learner(folder, partial(gs_compile.AdamW, lr=1e-2), partial(small, "gpt2"), **request.param) as found:
        found.train(0)
        yield found


@pytest.fixture(scope="module")
def memory(one):
    """A copy in memory, which nothing changes."""
    with gs_compile.materialize(one.model):
        return copy.deepcopy(one.model)


@pytest.fixture
def pair(one, memory):
    """The model on the tiers, and a copy in memory to change; values on the tiers are what they were afterwards."""
    before = {name: value.clone() for name, value in one.model.state_dict().items()}  # what is read is not kept
    yield one.model, copy.deepcopy(memory)
    assert all(is_offloaded(parameter) for parameter in one.model.parameters())
    one.model.load_state_dict(before)


def weight(model):
    return model.lm_head.weight  # tied to the embedding


def saved(model):
    file = io.BytesIO()
    torch.save({name: parameter.data for name, parameter in model.named_parameters()}, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def state_saved(model):
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    return dict(torch.load(file, weights_only=True))


def model_saved(model):
    with tempfile.NamedTemporaryFile() as file:
        save_model(model, file.name)
        return sorted(load(Path(file.name).read_bytes()).items())


def averaged(model):
    """An exponential moving average as people write it."""
    shadow = {name: parameter.clone().detach() for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        shadow[name].mul_(0.9).add_(parameter.data, alpha=0.1)
    torch._foreach_lerp_(list(shadow.values()), list(model.parameters()), 0.5)
    return shadow


@torch.no_grad()
def eager(model):
    return model.forward(input_ids=tokens(3)).logits


@torch.inference_mode()
def inferred(model):
    return eager(model), weight(model).data + 1, weight(model).double().sum(), weight(model)[0].clone()


@torch.no_grad()
def called_by_function(model):
    return functional_call(model.transformer, dict(model.transformer.named_parameters()), (tokens(3),))[0]


def generated(model):
    """As the model that torch.compile returns does it: that model's own forward is not compiled."""
    compiled, model._compiled_call_impl = model._compiled_call_impl, None
    try:
        return model.generate(tokens(3)[:1, :3], max_new_tokens=2, do_sample=False, pad_token_id=0)
    finally:
        model._compiled_call_impl = compiled


READS = {
    "p.clone()": lambda m: {name: parameter.clone() for name, parameter in m.named_parameters()},
    "p.data": lambda m: {name: parameter.data + 1 for name, parameter in m.named_parameters()},
    "p.float(), p.to(dtype), p.cpu()": lambda m: [weight(m).double(), weight(m).half().float(), weight(m).to(torch.float64), weight(m).cpu() + 1],
    "tensor.copy_(p)": lambda m: torch.zeros(weight(m).shape).copy_(weight(m)),
    "p.norm()": lambda m: torch.stack([parameter.norm() for parameter in m.parameters()]),
    "torch._foreach_norm(parameters)": lambda m: torch.stack(torch._foreach_norm(list(m.parameters()))),
    "p == q, torch.equal(p, q)": lambda m: [weight(m) == weight(m), torch.equal(weight(m), m.transformer.wte.weight)],
    "p.sum().item()": lambda m: sum(parameter.float().sum().item() for parameter in m.parameters()),
    "p[3, 5].item()": lambda m: weight(m)[3, 5].item(),
    "p.numpy()": lambda m: weight(m).detach().float().numpy().tolist(),
    "p.isnan().any()": lambda m: not any(bool(parameter.isnan().any()) for parameter in m.parameters()),
    "parameters_to_vector": lambda m: parameters_to_vector(parameter.float() for parameter in m.parameters()),
    "p[:3], p.view(...), p.T": lambda m: torch.cat([weight(m)[:3], weight(m).data[3:5], weight(m).view(-1, 32)[5:7], weight(m).T[:1, :32]]),
    "torch.zeros_like(p)": lambda m: torch.zeros_like(weight(m)),
    "p.numel(), p.shape, p.nbytes": lambda m: [(len(p), p.numel(), p.shape, p.dtype, p.nbytes) for p in m.parameters()],
    "exponential averages": averaged,
    "torch.save of tensors": saved,
    "safetensors.torch.save": lambda m: sorted(load(save({"w": weight(m).data, "b": m.transformer.ln_f.bias.detach()})).items()),
    "state_dict(keep_vars=True)": lambda m: {k: v.clone() for k, v in m.state_dict(keep_vars=True).items()},
    "pickle of p.data": lambda m: pickle.loads(pickle.dumps(weight(m).data)),
    "copy.deepcopy(p.data)": lambda m: copy.deepcopy(weight(m).data),
    "an eager forward without gradients": eager,
    "torch.inference_mode()": inferred,
    "functional_call": called_by_function,
    "p.to_sparse()": lambda m: weight(m).to_sparse().to_dense(),
    "model.generate()": generated,
    "p.tolist(), for row in p": lambda m: [*(row.sum() for row in weight(m)), m.transformer.ln_f.bias.tolist()],
    "p @ x, functional.linear(x, p)": lambda m: [(weight(m) @ weight(m).T).detach(), nn.functional.linear(weight(m), weight(m)).detach()],
    "get_total_norm(parameters)": lambda m: nn.utils.get_total_norm(m.parameters()),
    "torch.save(model.state_dict())": state_saved,
    "safetensors.torch.save_model": model_saved,
    "p in {p}": lambda m: weight(m) in {weight(m)},
    "p.data_ptr() == q.data_ptr()": lambda m: [weight(m).data_ptr() == p.data_ptr() for p in m.parameters()],
    "model.get_input_embeddings()": lambda m: m.get_input_embeddings().weight.mean(),
    "model.num_parameters(), get_memory_footprint()": lambda m: (m.num_parameters(), m.get_memory_footprint()),
}  # fmt: skip


@pytest.mark.parametrize("habit", READS)
def test_values_are_read(habit, one, memory):
    found, wanted = (torch.utils._pytree.tree_leaves([READS[habit](model)]) for model in (one.model, memory))
    assert all(is_offloaded(parameter) for parameter in one.model.parameters())
    assert len(found) == len(wanted)
    for mine, theirs in zip(found, wanted, strict=True):
        if isinstance(theirs, torch.Tensor):
            assert mine.dtype == theirs.dtype
            assert torch.equal(mine, theirs)
        else:
            assert mine == theirs


@torch.no_grad()
def changed_in_place(model):
    for parameter in model.parameters():
        parameter.mul_(0.5).add_(1)
    weight(model)[2].zero_()
    weight(model)[4, 5] = 7
    weight(model).T[0].fill_(3)
    model.transformer.wpe.weight.copy_(other=2 * model.transformer.wpe.weight)


@torch.no_grad()
def lerped(model):
    torch._foreach_mul_(list(model.parameters()), 0.5)
    torch.lerp(weight(model), torch.ones(weight(model).shape, dtype=weight(model).dtype), 0.25, out=weight(model))


def detached(model):
    """As Lightning's average of weights and diffusers' copy them."""
    weight(model).detach().mul_(2)
    weight(model).detach()[1].zero_()
    first, norm = next(model.transformer.h.parameters()), model.transformer.ln_f.bias
    first.detach().copy_(torch.ones(first.shape))
    norm.requires_grad_(False).detach().fill_(3)
    norm.requires_grad_(True)


def by_data(model):
    data = weight(model).data
    data.mul_(2)
    data[1].zero_()
    weight(model).data += 1
    model.transformer.wpe.weight.data.zero_()
    model.transformer.ln_f.bias.data = torch.ones(32, dtype=weight(model).dtype)


def swapped(model):
    """As people evaluate an average of weights, and go back to the weights."""
    parameters = list(model.parameters())
    backup = [each.data for each in parameters]
    for each in parameters:
        each.data = torch.full_like(each, 0.5)
    backup[0].add_(1)  # no parameter's by now
    for each, values in list(zip(parameters, backup, strict=True))[1:]:
        each.data = values
    backup[1].mul_(2)  # a parameter's again
    square = model.transformer.h[0].attn.c_proj.weight
    data = square.data
    square.data = data.T
    assert torch.equal(square, data.T)


@torch.no_grad()
def reset(model):
    """As parametrizations of torch.nn.utils do where a weight is assigned, or they are removed."""
    weight(model).set_(torch.full_like(weight(model), 0.5))


WRITES = {
    "p.set_(values)": reset,
    "p.mul_(...), p[2].zero_(), p[4, 5] = 7": changed_in_place,
    "torch._foreach_mul_, out=p": lerped,
    "p.data.mul_(...), p.data = values": by_data,
    "backup = p.data, p.data = values, p.data = backup": swapped,
    "p.detach().copy_(...)": detached,
    "nn.init.*": lambda m: (torch.manual_seed(3), [nn.init.normal_(p) for p in m.parameters()]),
    "vector_to_parameters": lambda m: vector_to_parameters(
        torch.arange(sum(p.numel() for p in m.parameters())).to(weight(m).dtype) / 100, m.parameters()
    ),
    "load_state_dict": lambda m: m.load_state_dict({k: v + 1 for k, v in m.state_dict().items()}),
    "model.apply(...)": lambda m: m.apply(
        lambda each: each.weight.data.fill_(0.5) if isinstance(each, nn.LayerNorm) else None
    ),
    "tie_weights()": lambda m: m.tie_weights(),
}


@pytest.mark.parametrize("habit", WRITES)
def test_changes_are_written(habit, pair):
    for model in pair:
        WRITES[habit](model)
    tiered, memory = pair
    same_tensors(tiered.state_dict(), memory.state_dict())


REFUSED = {
    "copy.deepcopy(model)": (copy.deepcopy, "cannot be copied or pickled"),
    "pickle of the model": (pickle.dumps, "cannot be copied or pickled"),
    "torch.save(model)": (lambda m: torch.save(m, io.BytesIO()), "cannot be copied or pickled"),
    "swa_utils.AveragedModel": (
        lambda m: AveragedModel(m, multi_avg_fn=get_ema_multi_avg_fn(0.9)),
        "cannot be copied or pickled",
    ),
    "model.to(dtype)": (lambda m: m.to(torch.float64), "Convert the model before its first call"),
    "model.half()": (lambda m: m.half(), "Convert the model before its first call"),
    'model.to("meta")': (lambda m: m.to("meta"), "cannot become"),
    "model.share_memory()": (lambda m: m.share_memory(), "has no memory of its own"),
    "p.data = values of another shape": (
        lambda m: setattr(weight(m), "data", torch.zeros(3)),
        "cannot be given .data of shape",
    ),
    "resize_token_embeddings": (lambda m: m.resize_token_embeddings(80), "cannot be given .data of shape"),
    "p.register_hook": (lambda m: weight(m).register_hook(print), "gives its gradient to its update alone"),
    "register_multi_grad_hook": (
        lambda m: register_multi_grad_hook([*m.parameters()], print),
        "gives its gradient to its update alone",
    ),
    "int(p.data_ptr())": (lambda m: int(weight(m).data_ptr()), "has no memory of its own"),
    "an eager backward": (
        lambda m: m.forward(input_ids=tokens(3), labels=tokens(3)).loss.backward(),
        "only takes gradients from the compiled model's own backward",
    ),
    "torch.autograd.grad": (
        lambda m: torch.autograd.grad(weight(m).sum(), [weight(m)], allow_unused=True),
        "gives its gradient to its update alone",
    ),
}


@pytest.mark.parametrize("habit", REFUSED)
def test_what_cannot_work_is_refused(habit, one):
    model = one.model
    before = model.state_dict()
    change, message = REFUSED[habit]
    with pytest.raises(ReleasedParameterError, match=message):
        change(model)
    assert all(is_offloaded(parameter) for parameter in model.parameters())
    same_tensors(model.state_dict(), before)


def test_a_view_from_before_a_step_shows_what_the_step_made(one):
    """Also of a first average of weights that is none, as OpenNMT's `p.detach().float()`."""
    view, other = weight(one.model).data[2], weight(one.model).detach().T
    before = view.clone()
    one.train(1)
    assert not torch.equal(view, before)
    assert torch.equal(view, weight(one.model)[2])
    view.zero_()
    assert not weight(one.model)[2].any()
    assert torch.equal(other, weight(one.model).T)
    one.train(2)
    assert torch.equal(other, weight(one.model).T)


def test_a_view_of_other_memory_is_refused_after_a_step(one):
    view = weight(one.model).data
    one.train(1)
    weight(one.model).data = weight(one.model).data + 1
    with pytest.raises(ReleasedParameterError, match="take it from the parameter again"):
        view.sum()


def test_a_view_that_leads_to_a_gradient_is_refused_after_a_step(one):
    view = weight(one.model)[2]
    one.train(1)
    with pytest.raises(ReleasedParameterError, match="take it from the parameter again"):
        view.sum()


def test_a_conversion_is_a_copy_of_the_moment(one):
    before, wanted = weight(one.model).to(torch.float64), weight(one.model).clone().double()
    one.train(1)
    assert torch.equal(before, wanted)
    assert not torch.equal(before, weight(one.model).double())


def test_what_is_printed_is_no_placeholder(one):
    assert "OffloadedParameter(shape=(70, 32)" in repr(weight(one.model))
    assert "nan" not in repr(weight(one.model)) + repr(weight(one.model).data) + repr(one.model) + repr(
        one.model.state_dict()
    )


def test_the_documents_say_what_each_habit_does():
    """The table has every habit that is tried here, where it belongs, and no other."""
    text = (Path(__file__).parents[2] / "docs" / "larger_than_memory.md").read_text().partition("## Habits")[2]
    rows = re.findall(r"^\| (.+) \| (read|written|refused): .+ \|$", text, re.M)
    said = [(outcome, habit.replace("`", "")) for habits, outcome in rows for habit in habits.split("; ")]
    tried = {"read": [*READS, "print(p), repr(model)"], "written": [*WRITES], "refused": [*REFUSED]}
    assert sorted(said) == sorted((outcome, habit) for outcome, habits in tried.items() for habit in habits)
    assert len(said) >= 30


def test_no_step_reads_a_parameter(one, monkeypatch):
    """Nothing in a step takes a parameter for its value: that would read it twice."""
    monkeypatch.setattr("gs_compile.model.residency.Residency.shown_value", None)
    one.train(2)


def test_a_step_runs_no_code_of_each_parameters_class(one, monkeypatch):
    """It takes long, and there may be tens of thousands of parameters; what `state` and `.grad` show has a class, too."""
    called, applied = [], offloaded._applied

    def asked(function, *given):
        called.append(function)
        return applied(function, *given)

    monkeypatch.setattr(offloaded, "_applied", asked)
    for kind in (offloaded.UnavailableGradient, optimizer_state.StoredState):
        monkeypatch.setattr(kind, "__torch_function__", staticmethod(lambda function, *_: called.append(function)))
    one.train(3)
    assert len(called) < 5 < len(list(one.model.parameters()))  # where the first one is


def test_no_code_of_pythons_runs_where_c_asks_for_overrides(one):
    """It takes an error for a no: a signal that ended the run there was lost, and the placeholder read."""
    parameter = next(one.model.parameters())
    called = []
    sys.setprofile(lambda frame, event, _: called.append(frame.f_code.co_name) if event == "call" else None)
    try:
        found = parameter.__torch_function__
    finally:
        sys.setprofile(None)
    assert found is type(parameter).__torch_function__
    assert not called
