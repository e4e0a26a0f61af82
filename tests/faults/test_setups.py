"""Set-ups that are wrong: each is named before a step, costs no value of the model, and trains once it is put right."""

from __future__ import annotations

import errno
import os
import re
import resource
from pathlib import Path

import pytest
import torch
from setups import BATCH, WORDS, Block, SetUp, Tiny, adamw, ids, same, values
from tiered import another_run, our_threads
from torch import nn

import gs_compile
from gs_compile import errors
from gs_compile.runtime import slab
from gs_compile.runtime.storage import system
from gs_compile.runtime.storage.stored import FOLDER


@pytest.fixture(scope="module")
def once(tmp_path_factory):
    """What a step makes of the model that nobody has spoilt."""
    return SetUp(tmp_path_factory.mktemp("once")).train()


# What is refused ------------------------------------------------------------------------------------------------------

REFUSED = {}  # name: how it is spoilt, the error, its words


def refused(error, words):
    def known(spoil):
        REFUSED[spoil.__name__.replace("_", " ")] = spoil, error, words
        return spoil

    return known


def failing(number):
    def call(*_, **__):
        raise OSError(number, os.strerror(number))

    return call


@refused(errors.StorageError, r"open failed: No such file.*storage= has to be a directory in which this user may make")
def a_path_that_cannot_be_made(setup):
    setup.options["storage"] = "/proc/nowhere/else"


@refused(errors.StorageError, "open failed: Read-only file system; storage= has to be")
def a_drive_that_is_read_only(setup):
    setup.patch(system, "make_folder", failing(errno.EROFS))


@refused(errors.StorageError, "open failed: Not a directory; storage= has to be")
def a_file_in_the_place_of_the_directory(setup):
    setup.storage.write_text("not to be lost")


@refused(errors.StorageError, "open failed: Not a directory")
def a_link_in_the_place_of_the_folder(setup):
    setup.storage.mkdir()
    (setup.storage / FOLDER).symlink_to(setup.folder)


@refused(errors.StorageError, "open failed: File name too long")
def a_name_of_256_bytes(setup):
    setup.options["storage"] = setup.folder / ("é" * 128)


@refused(errors.StorageFullError, r"\d \w*B are needed and [\d.]+ \w*B are free \(No space left on device\): make room")
def a_full_drive(setup):
    setup.patch(system, "fallocate", failing(errno.ENOSPC))


@refused(errors.StorageFullError, r"\d \w*B are needed and [\d.]+ \w*B are free \(Disk quota exceeded\): make room")
def a_quota(setup):
    setup.patch(system, "fallocate", failing(errno.EDQUOT))


@refused(errors.StorageError, "creation of .* failed: File too large")
def a_limit_of_file_sizes(setup):
    setup.limit(resource.RLIMIT_FSIZE, 4096)


@refused(
    errors.StorageError,
    r"the run needs \d+ files, and this process may have \d+ open, of which it has \d+: .* raise the limit \(ulimit -Hn\)",
)
def a_limit_of_open_files(setup):
    setup.patch(system, "allow_files", lambda: None)  # the system allows no more
    setup.limit(resource.RLIMIT_NOFILE, len(list(Path("/proc/self/fd").iterdir())) + system.SPARE_FILES + 5)


@refused(
    errors.StorageError, "other users can access this folder, but storage holds weights: .*chmod -R go= .* or choose"
)
def a_folder_of_others(setup):
    setup.made("w0", mode=0o777)


@refused(errors.LeftoverError, r"notes\.txt in this folder is of no run: move it, or choose another storage=")
def a_file_of_others_in_the_folder(setup):
    setup.made("notes.txt")


@refused(errors.StorageLockedError, "another run uses this folder, pid 1, started just now: wait for its end or choose")
def a_folder_in_use(setup):
    setup.undo.enter_context(another_run(setup.storage))


@refused(errors.OptionError, "storage names a directory twice")
def one_directory_twice(setup):
    setup.options["storage"] = [setup.storage, str(setup.storage)]


@refused(errors.OptionError, "storage cannot be here: .*No such file.*; name another directory")
def a_relative_path_from_nowhere(setup):
    (gone := setup.folder / "gone").mkdir()
    setup.undo.callback(os.chdir, Path.cwd())
    os.chdir(gone)
    gone.rmdir()
    setup.options["storage"] = "here"


@refused(errors.MemoryBudgetError, r"host_memory is 1\.0 KiB; this step needs .* \(\d+ bytes\) of it at least")
def too_little_host_memory(setup):
    setup.options["host_memory"] = "1KiB"


@refused(errors.MemoryBudgetError, "the system refuses .* of host memory: .*Cannot allocate memory. Raise what limits")
def a_limit_of_addresses(setup):
    setup.patch(slab, "Pages", failing(errno.ENOMEM))


@refused(errors.MemoryBudgetError, r"device_memory is 1\.0 KiB; this step keeps .* there")
def too_little_device_memory(setup):
    setup.options["device_memory"], setup.expert["separate_device"] = "1KiB", True


@refused(errors.OptionError, "unknown option colour; known: micro_batch_size, outputs")
def an_unknown_option(setup):
    setup.options["colour"] = 3


@refused(errors.OptionError, r"unknown option expert\.alfa; did you mean expert\.alpha\?")
def a_misspelt_option(setup):
    setup.expert["alfa"] = 1


@refused(errors.OptionError, "micro_batch_size must be a whole number of samples, 1 or more; got '2'")
def an_option_of_the_wrong_type(setup):
    setup.options["micro_batch_size"] = "2"


@refused(errors.OptionError, "machine is 'a100', whose device has memory of its own, and this model is on the cpu")
def a_machine_of_another_kind(setup):
    setup.options["machine"], setup.expert["recompute"] = "a100", "auto"


@refused(errors.OptionError, 'precision="bf16" keeps fp32 masters, so it needs an optimizer of gs_compile')
def bf16_with_an_optimizer_of_torch(setup):
    setup.options["precision"], setup.make = "bf16", torch.optim.AdamW


@refused(errors.OptionError, r"durability needs an optimizer of gs_compile .* that was made before the call")
def durable_steps_of_an_optimizer_of_torch(setup):
    setup.options["durability"], setup.make = "step", torch.optim.AdamW


@refused(errors.OptionError, "RANK=5 of WORLD_SIZE=2, which is not possible: start the ranks with torchrun")
def a_rank_that_there_is_not(setup):
    setup.say(RANK="5", WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT="1")


@refused(errors.OptionError, "RANK=0 of WORLD_SIZE=two, which is not possible")
def a_world_size_that_is_no_number(setup):
    setup.say(RANK="0", WORLD_SIZE="two", MASTER_ADDR="localhost", MASTER_PORT="1")


@refused(errors.GraphBreakError, r"the model's forward is not one graph: Dynamo breaks it at .*test_setups\.py")
def a_graph_break(setup):
    plain = Tiny.forward

    def forward(self, ids):
        print(end="")  # noqa: T201  what breaks it
        return plain(self, ids)

    setup.patch(Tiny, "forward", forward)


@refused(errors.NothingRequiresGradError, "no parameter requires a gradient: unfreeze what is to be trained")
def nothing_to_train(setup):
    setup.model.requires_grad_(False)
    setup.undo.callback(setup.model.requires_grad_)


def other_parameters(setup, make):
    """Others in the place of one of each block, until the set-up is put right."""
    for block in setup.model.blocks:
        setup.undo.callback(setattr, block, "weight", block.weight)
        block.weight = make(block.weight.detach())


@refused(
    errors.CaptureError, r"parameters of torch\.float32, torch\.float64, which do not go together: .*\.to\(dtype\)"
)
def two_dtypes_in_a_block(setup):
    other_parameters(setup, lambda weight: nn.Parameter(weight.double()))
    setup.patch(Block, "forward", lambda self, x: x + x @ self.weight.float() + self.bias)


@refused(
    errors.CaptureError, r"trained parameters of torch\.complex64, .*nn\.Parameter\(torch\.view_as_real\(value\)\)"
)
def complex_parameters(setup):
    other_parameters(setup, lambda weight: nn.Parameter(weight.to(torch.complex64)))
    setup.patch(Block, "forward", lambda self, x: x + (x.to(torch.complex64) @ self.weight).real)  # none that are real


@refused(errors.GraphBreakError, r"Dynamo breaks it at .*setups\.py:\d+: return .*self\.head")
def sparse_parameters(setup):
    setup.undo.callback(setattr, setup.model, "head", setup.model.head)
    setup.model.head = nn.Parameter(setup.model.head.detach().to_sparse())


@refused(errors.CaptureError, r"makes a sparse gradient, which greedysnake cannot sum, at .*: leave sparse=True out")
def sparse_gradients(setup):
    setup.model.words.sparse = True
    setup.undo.callback(setattr, setup.model.words, "sparse", False)


@refused(errors.OptimizerError, "has a hook on its gradient, .* Remove the hook")
def a_hook_on_a_gradient(setup):
    setup.undo.callback(setup.model.head.register_hook(print).remove)


@refused(errors.NoBatchInputError, "the batch has no rows, so there is no loss and no gradient: leave it out")
def an_empty_batch(setup):
    setup.batch = ids()[:0]


@refused(IndexError, "index out of range in self")  # as in PyTorch
def a_word_that_the_model_has_not(setup):
    setup.batch = ids().index_fill(1, torch.tensor([2]), WORDS)


@refused(RuntimeError, r"size=\(\w+, 9, 8\)")  # Dynamo's own, before any backend is asked
def a_sequence_longer_than_the_models(setup):
    setup.batch = ids(BATCH, 9)


@refused(RuntimeError, "Tensor on device meta is not on the expected device cpu")  # as above
def a_batch_on_another_device(setup):
    setup.batch = ids().to("meta")


@refused(errors.OptimizerError, "is trained, but the gs_compile optimizer does not have it; give the optimizer all")
def a_parameter_that_no_optimizer_has(setup):
    setup.make = lambda parameters: adamw(parameters[1:])


@refused(errors.OptimizerError, "the parameters of this model belong to 2 gs_compile optimizers; they need one")
def two_optimizers_that_share_a_model(setup):
    def make(parameters):
        setup.other = adamw(parameters[4:])
        return adamw(parameters[:4])

    setup.make = make


@refused(errors.OptimizerError, "AdamW: lr must not be negative, and finite; got -1")
def a_negative_learning_rate(setup):
    setup.make = lambda parameters: gs_compile.AdamW(parameters, lr=-1)


SLOW = """a drive that is read only, a link in the place of the folder, a name of 256 bytes, a limit of open files,
one directory twice, an option of the wrong type, a world size that is no number, complex parameters,
a negative learning rate, a parameter that no optimizer has, a quota, a limit of file sizes, a folder of others,
a path that cannot be made, a file of others in the folder""".replace("\n", " ").split(", ")  # as others are
assert {*SLOW} <= REFUSED.keys()


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in REFUSED])
def test_a_bad_set_up_is_refused_and_costs_no_values(name, once, tmp_path):
    spoil, error, words = REFUSED[name]
    setup = SetUp(tmp_path)
    before = values(setup.model)
    with setup.undo:
        spoil(setup)
        spoilt = values(setup.model)
        with pytest.raises(error) as caught:
            setup.train()
        assert re.search(words, str(caught.value), re.S), caught.value
        same(values(setup.model), spoilt)
    same(values(setup.model), before)
    if our_threads():  # an error of the model itself costs only that call
        same(setup.end(setup.model(ids())), once)
    else:
        same(SetUp(tmp_path / "again", setup.model).train(), once)
    assert our_threads() == []


def test_what_stays_in_memory_is_told(tmp_path, caplog):
    """Of an optimizer of torch, where budgets and places were given."""
    SetUp(tmp_path, make=torch.optim.AdamW).call()
    (told,) = [record.getMessage() for record in caplog.records if record.name == "gs_compile.model.backend"]
    assert "stay in memory, and storage and host_memory have no effect" in told
