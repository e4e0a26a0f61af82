"""Tensors that share a parameter's memory before its first call: they show its value, or somebody is told."""

from __future__ import annotations

import io

import pytest
import torch
from tiered import adamw, gpt2, options, step, tokens, two_groups

from gs_compile.errors import OptimizerError, ReleasedParameterError, SharedMemoryWarning
from gs_compile.model.offloaded import Alias
from gs_compile.model.residency import residency_of, stash

KEEPS_CAPTURES = True


def made(folder, model=None):
    model = model or gpt2()
    optimizer = adamw(two_groups(model))
    model.compile(backend="greedysnake", options=options(folder))
    return model, optimizer


def test_what_was_taken_before_the_first_call_is_what_the_model_has_learned(tmp_path):
    """As in plain PyTorch, where a state dict is live: a checkpoint of one that was made once is of the moment."""
    model, optimizer = made(tmp_path)
    kept, weight = model.state_dict(), model.lm_head.weight
    data, rows = [each.data for each in model.parameters()], weight.data.T[:, 2:4]
    for number in range(2):
        step(model, optimizer, tokens(number))
    now = {name: each.clone() for name, each in model.state_dict().items()}
    file = io.BytesIO()
    torch.save(kept, file)
    file.seek(0)
    saved = torch.load(file)
    assert all(torch.equal(saved[name], each) for name, each in now.items())
    assert all(map(torch.equal, data, model.parameters()))
    assert torch.equal(rows, now["lm_head.weight"].T[:, 2:4])
    assert rows.stride() == (1, weight.shape[1])

    rows.mul_(2)  # and what is written to it is the model's
    assert torch.equal(weight[2:4], 2 * now["lm_head.weight"][2:4])
    assert torch.equal(kept["lm_head.weight"], weight)
    with pytest.raises(
        ReleasedParameterError, match=r"data_ptr: this tensor shows a parameter.*has no memory of its own"
    ):
        rows.data_ptr()


def test_what_follows_a_parameter_is_no_value_of_it():
    """As of a state dict that an earlier run has made, and that is still there when the next one begins."""
    parameter = torch.nn.Parameter(torch.arange(4.0))
    stash(parameter)
    kept = residency_of(parameter).shown_value(parameter, parameter.device)
    Alias.follow(kept, parameter, 0)
    assert kept.tolist() == parameter.tolist() == [0, 1, 2, 3]


def test_after_a_first_call_that_fails_they_are_true(tmp_path):
    model, optimizer = made(tmp_path)
    kept = model.state_dict()
    with pytest.raises(IndexError):
        step(model, optimizer, tokens(0) + 10**6)
    assert torch.equal(kept["lm_head.weight"], model.lm_head.weight)


def test_arrays_are_told_of_and_keep_their_memory(tmp_path):
    model, optimizer = made(tmp_path)
    array = model.lm_head.weight.detach().numpy()
    before = array.copy()
    with pytest.warns(SharedMemoryWarning, match="1 tensors or arrays, the first of shape"):
        step(model, optimizer, tokens(0))
    step(model, optimizer, tokens(1))
    assert (array == before).all()
    with pytest.raises(ValueError, match="read-only"):  # nobody would learn of it
        model.lm_head.weight.detach().numpy()[:] = 0


@pytest.mark.parametrize("how", ["data", "set_"])
def test_a_parameter_that_is_given_the_memory_of_another_one_is_told_of(how, tmp_path):
    """Fault: plain PyTorch ties both, and here each went on alone, without a word."""
    model, optimizer = made(tmp_path, gpt2(tied=False))
    step(model, optimizer, tokens(0))
    words, head = model.transformer.wte.weight, model.lm_head.weight
    with pytest.warns(SharedMemoryWarning, match="given the memory of another one"), torch.no_grad():
        setattr(head, "data", words.data) if how == "data" else head.set_(words)
    assert torch.equal(head, words)
    own = head.data
    head.data = own  # as a script that swaps values has it
    step(model, optimizer, tokens(1))
    assert not torch.equal(head, words)


@pytest.mark.parametrize("other", ["parameter", "buffer"])
def test_one_memory_for_two_tensors_of_a_model_is_refused(other, tmp_path):
    model = gpt2(tied=False)
    if other == "parameter":
        model.lm_head.weight.data = model.transformer.wte.weight.data
    else:
        norm = model.transformer.ln_f
        norm.register_buffer("shown", norm.weight.data)
        norm.register_forward_hook(lambda module, args, out: out + module.shown)
    model, optimizer = made(tmp_path, model)
    with pytest.raises(
        OptimizerError, match="are two tensors in the same memory, but on the tiers each would have its own"
    ):
        step(model, optimizer, tokens(0))
