"""A dampened momentum of SGD that begins after the first step is refused, also in a run that goes on."""

from __future__ import annotations

import copy

import pytest
from learner import learner

import gs_compile
from gs_compile.errors import OptimizerError

KEEPS_CAPTURES = True


def test_a_dampened_momentum_that_begins_late_is_refused(tmp_path):
    """Fault: the gradient that it begins with was dampened, which torch does not."""

    def make(groups):
        return gs_compile.SGD([groups[0], {**groups[1], "momentum": 0.0}], lr=0.1, momentum=0.9)

    with learner(tmp_path, make) as one:
        one.train(0)
        (group := one.optimizer.param_groups[1]).update(momentum=0.9, dampening=0.5)
        with pytest.raises(OptimizerError, match="torch does not dampen the gradient that a momentum begins with"):
            one.train(1)
        group["dampening"] = 0.0
        one.train(2)
        group["dampening"] = 0.5
        one.train(3)


@pytest.mark.parametrize("how", ["a state dict", "a commit"])
def test_a_dampened_momentum_that_begins_late_in_a_run_that_goes_on_is_refused(how, tmp_path):
    """Fault: what had no momentum before the state dict, or the commit, was taken to have had one, without a word."""

    def make(groups):
        return gs_compile.SGD([groups[0], {**groups[1], "momentum": 0.0}], lr=0.1, momentum=0.9)

    options = {"durability": "step"} if how == "a commit" else {}
    with learner(tmp_path, make, **options) as one:
        one.train(0, 1)
        state = copy.deepcopy(one.optimizer.state_dict())
        if options:
            one.optimizer.commit()
    with learner(tmp_path, make, **options) as one:
        if options:
            gs_compile.resume(one.model, one.optimizer, storage=tmp_path)
        else:
            one.optimizer.load_state_dict(state)
        one.optimizer.param_groups[1].update(momentum=0.9, dampening=0.5)
        with pytest.raises(OptimizerError, match="torch does not dampen the gradient that a momentum begins with"):
            one.train(2)
        one.optimizer.param_groups[1].update(momentum=0.0)
        one.train(2)
