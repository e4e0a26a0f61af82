"""Set-ups that are odd and work, and loops that do a thing wrong: the run says so, and goes on."""

from __future__ import annotations

import copy
import math
import os
import re
import resource
import time
from pathlib import Path

import pytest
import torch
from setups import SetUp, ids, same, values
from tiered import our_threads
from torch import nn

import gs_compile
from gs_compile import errors
from gs_compile.runtime.storage.stored import FOLDER

KEEPS_CAPTURES = True  # of the run that is misused; each set-up captures its own


# What is odd, and works -----------------------------------------------------------------------------------------------

WORKS = {}


def works(spoil):
    WORKS[spoil.__name__.replace("_", " ")] = spoil
    return spoil


@works
def a_path_that_is_not_there_yet(setup):
    setup.options["storage"] = setup.folder / "a" / "b" / "c"


@works
def a_relative_path_of_255_bytes_and_a_space(setup):
    setup.undo.callback(os.chdir, Path.cwd())
    os.chdir(setup.folder)
    setup.options["storage"] = "a " + "漢" * 84 + "b"


@works
def a_link_to_the_directory(setup):
    (setup.folder / "elsewhere").mkdir()
    setup.storage.symlink_to(setup.folder / "elsewhere")


@works
def files_of_the_future(setup):
    setup.made("w0")
    os.utime(setup.storage / FOLDER / "w0", (2**33, 2**33))
    setup.patch(time, "time", lambda: 10.0)


@works
def one_core_and_no_locked_memory(setup):
    cores = os.sched_getaffinity(0)
    setup.undo.callback(os.sched_setaffinity, 0, cores)
    os.sched_setaffinity(0, {min(cores)})
    setup.limit(resource.RLIMIT_MEMLOCK, 0)
    setup.expert["separate_device"] = True


@works
def few_open_files(setup):
    setup.limit(resource.RLIMIT_NOFILE, len(list(Path("/proc/self/fd").iterdir())) + 5)


@works
def variables_of_a_launcher_that_is_not_there(setup):
    setup.say(RANK="5", WORLD_SIZE="2", LOCAL_WORLD_SIZE="many")


@works
def parameters_with_gaps(setup):
    for each in (setup.model.head, setup.model.words.weight):
        each.data = each.data.T.contiguous().T


@works
def tied_parameters(setup):
    setup.model.head = setup.model.words.weight


@works
def frozen_parameters(setup):
    for each in (setup.model.words.weight, *(block.bias for block in setup.model.blocks)):
        each.requires_grad_(False)


@works
def one_row(setup):
    setup.batch = ids()[:1]


@works
def an_optimizer_of_torch_that_finds_no_gradients(setup):
    other = torch.optim.Adam(setup.model.parameters())
    sgd = setup.make

    def make(parameters):
        found = sgd(parameters)
        found.register_step_post_hook(lambda *_: (found.zero_grad(), other.step()))
        return found

    setup.make = make


SLOW = ("a path that is not there yet", "one row", "files of the future")  # as others are


@pytest.mark.parametrize("name", [pytest.param(each, marks=[pytest.mark.slow] * (each in SLOW)) for each in WORKS])
def test_an_odd_set_up_learns_what_torch_does(name, tmp_path):
    """To rounding: the loss of a batch is summed over micro-batches."""
    setup = SetUp(tmp_path, make=lambda parameters: gs_compile.SGD(parameters, lr=0.1))
    with setup.undo:
        WORKS[name](setup)
        plain = copy.deepcopy(setup.model)
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
        plain(setup.batch).backward()
        optimizer.step()
        found = setup.train()
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(found[key], value, rtol=0, atol=1e-6)
    assert our_threads() == []


def test_a_parameter_that_is_not_a_number_is_told(tmp_path):
    """It is skipped, as any step whose loss is not finite."""
    setup = SetUp(tmp_path)
    setup.model.head.data[1, 2] = math.nan
    before = values(setup.model)
    with pytest.warns(errors.NonFiniteWarning, match="the loss is not finite: step 1 was skipped"):
        found = setup.train()
    assert found["head"][1, 2].isnan()
    same(
        {name: each.nan_to_num() for name, each in found.items()}, {k: each.nan_to_num() for k, each in before.items()}
    )


# What a training loop does wrong --------------------------------------------------------------------------------------

MISUSED = {}


def misused(error, words):
    def known(misuse):
        MISUSED[misuse.__name__.replace("_", " ")] = misuse, error, words
        return misuse

    return known


@misused(errors.OptimizerError, r"a torch\.amp\.GradScaler multiplies the loss.* Nothing was updated")
def a_scaler_of_torch(setup, loss):
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss).backward()


@misused(
    errors.ReleasedParameterError, r"torch\.autograd\.grad: a parameter that lives on the tiers gives its gradient"
)
def gradients_asked_for(setup, loss):
    torch.autograd.grad(loss, [setup.model.head])


@misused(
    errors.OptimizerError, r"autograd\.grad or backward\(inputs=\.\.\.\) leaves out parameters .* Nothing was updated"
)
def a_backward_of_some_parameters(setup, loss):
    loss.backward(inputs=[setup.model.head])


@misused(errors.StepOrderError, "dropped when the model was called again: call backward before that, or pass")
def two_forwards_before_a_backward(setup, loss):
    setup.model(ids())
    loss.backward()


@misused(errors.StepOrderError, r"comes to 2 calls of the model\. .* Nothing was updated\. .*accumulate")
def the_sum_of_two_losses(setup, loss):
    (loss + setup.model(ids())).backward()


@misused(errors.StepOrderError, r"a backward has run and optimizer\.step\(\) has not")
def a_forward_before_the_step(setup, loss):
    loss.backward()
    setup.model(ids())


@misused(RuntimeError, "backward through the graph a second time")
def a_second_backward(setup, loss):
    loss.backward(retain_graph=True)
    loss.backward()


@misused(errors.ReleasedParameterError, r"cannot be clipped or used from outside.* Use max_grad_norm=")
def clipping_by_torch(setup, loss):
    loss.backward()
    nn.utils.clip_grad_norm_(setup.model.parameters(), 1.0)


@misused(errors.ReleasedParameterError, r"gradients of parameters that live on the tiers cannot be")
def the_step_of_an_optimizer_of_torch(setup, loss):
    loss.backward()
    torch.optim.Adam(setup.model.parameters()).step()


@misused(errors.NoBatchInputError, "the batch has no rows")
def a_last_batch_without_rows(setup, loss):
    setup.model(ids()[:0])


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    setup = SetUp(tmp_path_factory.mktemp("running"))
    setup.call().backward()  # the first step has one
    setup.optimizer.step()
    setup.optimizer.zero_grad()
    yield setup
    setup.optimizer.engine.tiers.close()


@pytest.mark.parametrize("name", MISUSED)
def test_a_misuse_is_refused_and_the_run_goes_on(name, running):
    """Before a backward nothing has changed; after it the step is to be closed, and learns what it would have."""
    misuse, error, words = MISUSED[name]
    before = values(running.model)
    loss = running.model(ids())
    with pytest.raises(error) as caught:
        misuse(running, loss)
    assert re.search(words, str(caught.value), re.S), caught.value
    if running.optimizer.engine.record is None:
        same(values(running.model), before)
        running.model(ids()).backward()
    running.optimizer.step()
    running.optimizer.zero_grad()
    assert running.optimizer.num_steps > 0
    found = values(running.model)
    assert all(not torch.equal(found[each], before[each]) for each in before)
