"""What state dicts and `optimizer.state` have given, and a script has changed, is refused, also where torch counts no change."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from learner import learner

from gs_compile.errors import OptimizerError, ReleasedParameterError
from gs_compile.model import files
from gs_compile.model.given import Given

KEEPS_CAPTURES = True
CHANGES = {
    "by data": lambda value: value.data.mul_(2),
    "by an array": lambda value: value.numpy().fill(0),
    "by what is left of it": lambda value: value.data[-1].zero_(),
    "in the middle": lambda value: value.data[len(value) // 2].add_(1),
}


@pytest.mark.parametrize("how", CHANGES)
def test_a_change_that_torch_does_not_count_is_refused_where_it_would_be_lost(how, tmp_path):
    """Fault: it was lost, without a word."""
    with learner(tmp_path) as one:
        one.train(0)
        for given in (
            lambda: one.model.state_dict()["transformer.wte.weight"],  # of 8960 bytes
            lambda: one.optimizer.state_dict()["state"][0]["exp_avg"],
        ):
            CHANGES[how](given())
            with pytest.raises(ReleasedParameterError, match="was changed in place"):
                one.train(1)
            one.train(1)


def test_another_tensor_in_a_state_dict_is_refused_where_it_would_be_lost(tmp_path):
    """torch's state dicts have its states' own dicts. Fault: it was lost, without a word. An equal one changes nothing,
    and neither does a copy of the dicts.
    """
    with learner(tmp_path) as one:
        one.train(0)
        for name in ("exp_avg", "exp_avg_sq"):
            shape = one.optimizer.param_groups[0]["params"][0].shape
            one.optimizer.state_dict()["state"][0][name] = torch.zeros(shape)
            with pytest.raises(ReleasedParameterError, match="another one was assigned there"):
                one.train(1)
            one.train(1)
        found = one.optimizer.state_dict()
        state = found["state"][0]
        state["exp_avg"] = state["exp_avg"].clone()
        one.train(2)
        state["exp_avg"] = state["exp_avg"] * 2
        one.optimizer.load_state_dict(found)
        one.train(3)
        states = one.optimizer.state_dict()["state"]
        copies = [{name: each * 2 if each.dim() else each for name, each in state.items()} for state in states.values()]
        del states, state
        one.train(4)
        assert len(copies) > 4


@pytest.mark.parametrize("use", ["the parameter", "a step", "an evaluation", "a state dict"])
def test_a_change_of_a_state_dicts_value_is_refused_where_it_would_be_lost(use, tmp_path):
    """Fault: torch has changed the model by then, as own loaders of a part of the values do; here it was lost."""
    with learner(tmp_path, precision="bf16") as one:
        one.train(0)
        refused_once(one, use)


def refused_once(one, use):
    model, name = one.model, "transformer.h.0.ln_1.weight"
    uses = {"the parameter": lambda: +dict(model.named_parameters())[name], "a step": lambda: one.train(1)}
    uses |= {"an evaluation": torch.no_grad()(lambda: one.loss(1)), "a state dict": model.state_dict}
    model.state_dict()[name].mul_(2)
    with pytest.raises(ReleasedParameterError, match=r"shape \(\d+,\) was changed in place.* in a value\.clone\(\)"):
        uses[use]()
    uses[use]()  # told once
    changed = model.state_dict()
    changed[name].mul_(2)
    model.load_state_dict(changed)
    assert torch.equal(model.state_dict()[name], changed[name])
    changed[name].div_(2)
    with torch.no_grad():
        dict(model.named_parameters())[name].copy_(changed[name])
    uses[use]()


def test_other_memory_for_a_state_dicts_value_is_not_the_parameters(tmp_path):
    """As ``value.data = value.data.half()``. Fault: as long as the value lived, the parameter was read there."""
    with learner(tmp_path) as one:
        one.train(0)
        parameter = one.model.transformer.h[0].ln_1.weight
        wanted, found = parameter.clone(), one.model.state_dict()
        found["transformer.h.0.ln_1.weight"].data = torch.zeros(2)
        assert torch.equal(parameter, wanted)
        assert torch.equal(one.model.state_dict()["transformer.h.0.ln_1.weight"], wanted)


def test_what_a_state_dict_was_given_keeps_no_file(tmp_path):
    """Its file goes with its value, or with what shares that one's memory."""

    def num_files():
        return Path("/proc/self/maps").read_text().count(str(tmp_path))

    def value():
        return files.mapped(
            (files.SMALL_NBYTES,), torch.float32, tmp_path, lambda start, stop: torch.ones(stop - start)
        )

    given = Given(own := value())
    assert num_files() == 1
    del own
    assert (num_files(), given.is_changed) == (0, False)
    given = Given(own := value())
    data = own.data
    del own
    assert (num_files(), given.is_changed) == (1, False)
    data.mul_(2)
    assert given.is_changed


def test_a_number_of_steps_that_is_changed_is_refused(tmp_path):
    """Fault: torch corrects its moments by it; here it was lost, without a word. Sent elsewhere it is the same one."""
    with learner(tmp_path) as one:
        one.train(0)
        for state in one.optimizer.state.values():
            state["step"] = state["step"].clone()
        one.train(1)
        assert {float(state["step"]) for state in one.optimizer.state.values()} == {2.0}
        state["step"].zero_()
        with pytest.raises(OptimizerError, match=r"or its step.* optimizer\.load_state_dict\(\)"):
            one.optimizer.begin_step()
        state["step"].fill_(2.0)
        state["step"] = 0
        with pytest.raises(OptimizerError, match="or its step"):
            one.optimizer.begin_step()
