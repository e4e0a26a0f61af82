"""Several ranks commit a step together, or none does; they go on from one that all have."""

from __future__ import annotations

import os
import signal
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from frozen_models import gpt2_with_frozen
from launch import Fleet
from rank_learner import compiled, learner
from safetensors.torch import load_file
from saving import saving
from stored_run import save, stored_run
from tiered import gpt2, options, shared, step, tokens

import gs_compile
from gs_compile.cli.stored.export import export
from gs_compile.cli.stored.runs import found_in
from gs_compile.errors import LeftoverError, OptimizerError, OptionError, RankError
from gs_compile.model.resume import last_of
from gs_compile.options import Options
from gs_compile.placement.levels import Share
from gs_compile.planner.boundary import FIRST
from gs_compile.runtime.storage import manifest
from gs_compile.runtime.storage.folder import folder_in, folder_of

LAST = 5


def looks(info, tmp_path):
    """Two of several ranks look for the commit that both have; the others are not there."""
    group = dist.new_group([0, 1])
    if info.rank < 2:
        folder = folder_in(tmp_path)
        folder.mkdir(mode=0o700)
        save(folder, made := stored_run(folder, on_disk=False), manifest.NAME if info.rank else manifest.NEXT)
        if info.rank:
            save(folder, replace(made, step=made.step + 1), manifest.NEXT)
        assert last_of(Options(storage=tmp_path, group=group)) == made
        (folder / manifest.NEXT).unlink(missing_ok=True)
        save(folder, replace(made, together="ab"[info.rank] * 8))  # as where one machine has a drive of another run
        with pytest.raises(RankError, match="rank 0: 3 in commit 0 of run aaaaaaaa, rank 1: 3 in commit 0 of run bb"):
            last_of(Options(storage=tmp_path, group=group))


def look_by_mesh(info, tmp_path):
    """Two rows of ranks, which have the same model each: all look together."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    folder = folder_in(tmp_path / str(info.rank))
    folder.parent.mkdir()
    folder.mkdir(mode=0o700)
    save(folder, made := stored_run(folder, on_disk=False), manifest.NAME if info.rank else manifest.NEXT)
    if info.rank == 3:
        save(folder, replace(made, step=made.step + 1), manifest.NEXT)
    assert last_of(Options(storage=folder.parent, mesh=mesh)) == made


def test_ranks_of_a_group_look_alone_and_those_of_a_mesh_together(tmp_path):
    group, mesh = tmp_path / "group", tmp_path / "mesh"
    with Fleet(4) as fleet:
        for case, folder in ((looks, group), (look_by_mesh, mesh)):
            folder.mkdir()
            fleet.run(case, folder)


def looks_with_others(info, tmp_path):
    """Each rank trains a model of its own, and has not said so to `resume`."""
    alone = [dist.new_group([0]), dist.new_group([1])][info.rank]
    model = gpt2()
    optimizer = gs_compile.AdamW(model.parameters())
    given = options(tmp_path / str(info.rank), durability="step")
    model.compile(backend="greedysnake", options={**given, "group": alone})
    gs_compile.resume(model, optimizer, storage=given["storage"])
    words = "resume looked for the commit of ranks 0, 1, but .* the model is trained by one process: give resume the same group="
    with pytest.raises(OptionError, match=words):
        step(model, optimizer, tokens(0))
    gs_compile.resume(model, optimizer, storage=given["storage"], group=alone)
    step(model, optimizer, tokens(0))


def test_resume_looks_with_the_ranks_that_train_together(pair, tmp_path):
    pair.run(looks_with_others, tmp_path)


def looks_elsewhere(info, tmp_path):
    """Each rank is on the machine of the other, with its directory."""
    directory = tmp_path / str(info.rank)
    folder = folder_of(directory, 1 - info.rank)
    for path in (directory, folder):
        path.mkdir(mode=0o700)
    save(folder, stored_run(folder, on_disk=False))
    words = r"rank 0 has that of rank 1; rank 1 has that of rank 0: they have come to"
    with learner(info, directory, durability="step", resume="auto") as one, pytest.raises(LeftoverError, match=words):
        one.train(0)


def test_ranks_on_other_machines_than_before_do_not_begin_anew(pair, tmp_path):
    pair.run(looks_elsewhere, tmp_path)


def dies_in_commit(name, is_due=lambda: True):
    """Have this process be killed once it has prepared a commit that is due, or where it would make that the last."""
    call = manifest.system.rename

    def rename(old, new, folder_fd):
        if new == name and is_due():
            if name == manifest.NEXT:
                call(old, new, folder_fd)
            os.kill(os.getpid(), signal.SIGKILL)
        call(old, new, folder_fd)

    manifest.system.rename = rename


def trains(info, tmp_path, dies_at=None, saved=(), precision=()):
    """Steps until the last; a rank is killed after it has prepared the commit of a step, or has made it."""
    storage, harness = tmp_path / "storage", shared(*precision, dropout=0.1)
    torch.manual_seed(info.rank)
    with learner(info, storage, harness, durability="step") as one:
        run = gs_compile.resume(one.model, one.optimizer, storage=storage)
        if dies_at is not None and info.rank == 1:
            name, step = dies_at
            dies_in_commit(name, lambda: one.optimizer.num_steps == step)
        one.train(*range(run.step, LAST))
        values = one.values()
        placement = one.optimizer.engine.placement  # the first rank plans for all
        assert not saved or (placement.carried_values and placement.decision.shares == saved)
        assert manifest.read(folder_in(storage)).step == LAST - 1, "schedulers may move on after this"
        one.optimizer.commit()
        return run.step, values, manifest.read(folder_in(storage)).step


def trains_beside_encoded(info, tmp_path):
    one = compiled(info, tmp_path / "storage", lambda seed: gpt2_with_frozen(), frozen="nf4", durability="step")
    one.train(0)
    one.optimizer.commit()
    found = one.values()
    one.optimizer.engine.tiers.close()
    return found


def test_an_export_has_the_values_of_matrices_that_ranks_share_encoded(pair, tmp_path):
    """Fault: each rank's share was decoded by itself, and no value was right."""
    wanted, _ = pair.run(trains_beside_encoded, tmp_path)
    files = export(found_in(tmp_path / "storage"), tmp_path / "out")["files"]
    found = {name: each for file in files for name, each in load_file(tmp_path / "out" / file).items()}
    assert [name for name, each in found.items() if not torch.equal(each, wanted[name])] == []
    assert "transformer.h.0.up.weight" in found


def commits_again(info, tmp_path):
    """What has changed since the commit of a step, before and after the next process has taken that up."""
    found = []
    for number in range(2):
        with learner(info, tmp_path / "storage", durability="step") as one:
            run = gs_compile.resume(one.model, one.optimizer, storage=tmp_path / "storage")
            one.train(0) if number == 0 else one.call()
            for each in range(2):
                one.optimizer.kept.user = [number, each]
                one.optimizer.commit()
                made = manifest.read(folder_in(tmp_path / "storage"))
                found.append((run.step, run.user, made.step, made.user))
    return found


def test_a_step_is_committed_again_with_what_has_changed_since(pair, tmp_path):
    """Fault: a second `commit()` of a step did nothing on ranks, and none did before a resumed run's first step."""
    for found in pair.run(commits_again, tmp_path):
        first, again = (0, None, 1), (1, [0, 1], 1)
        assert found == [(*first, [0, 0]), (*first, [0, 1]), (*again, [1, 0]), (*again, [1, 1])]


def commits_what_is_new(info, tmp_path, dies_at=None):
    """A step is committed once more with another value; there a rank is killed, and the next processes go on."""
    with learner(info, tmp_path / "storage", durability="step") as one:
        run = gs_compile.resume(one.model, one.optimizer, storage=tmp_path / "storage")
        weight = one.model.lm_head.weight
        if dies_at is None:
            one.call()
            made = manifest.read(folder_in(tmp_path / "storage"))
            assert all((folder_in(tmp_path / "storage") / each.name).exists() for each in made.files())
            return run.user, weight.detach().clone()
        one.train(0)
        for each in ("one", "other"):
            with torch.no_grad():
                weight.fill_(len(each))
            one.optimizer.kept.user = each
            if info.rank and each == "other":
                dies_in_commit(dies_at)
            one.optimizer.commit()
        return None


@pytest.mark.parametrize("dies_at", [pytest.param(manifest.NEXT, marks=pytest.mark.slow), manifest.NAME])
def test_ranks_go_on_from_one_of_two_commits_of_a_step(dies_at, pair, tmp_path):
    """Fault: one rank took the first and another the second, or all the first, whose files were then all that stayed,
    under the name of the second.
    """
    _, killed = pair.outcomes(commits_what_is_new, tmp_path, dies_at=dies_at)
    assert f"ended with -{signal.SIGKILL.value}" in killed.failure
    (user, weight), (other, same) = pair.run(commits_what_is_new, tmp_path)
    assert user == other == "other" or dies_at == manifest.NEXT
    assert torch.equal(weight, same)
    assert bool((weight == len(user)).all())


def keeps_what_no_commit_can(info, tmp_path, how):
    with learner(info, tmp_path / "storage", durability="step") as one:
        one.train(0)
        dist.barrier()  # else rank 1 may fail while another is within this step
        if info.rank:
            one.optimizer.kept.user = {"best": torch.zeros(1)}
        with pytest.raises(OptimizerError if info.rank else RankError) as caught:
            one.optimizer.commit() if how == "commit()" else one.train(1)
    return str(caught.value)


@pytest.mark.parametrize("how", ["commit()", "the next call"])
def test_what_one_rank_alone_cannot_commit_ends_all(how, pair, tmp_path):
    """Fault: in `commit()` the others waited for it, and it for them if it went on."""
    told, own = pair.run(keeps_what_no_commit_can, tmp_path, timeout=60, how=how)
    assert own.startswith("a commit cannot keep this: user.best: Tensor")
    assert "rank 1 has failed: OptimizerError: a commit cannot keep this: user.best: Tensor" in told


def saves(info, tmp_path, dies_at=None):
    """The same with saved activations, parameters that are kept from step to step, and split masters."""
    saved = Share(1, "host", 0.4), Share(2, "ssd", 0.3)
    with saving(*saved, carried=FIRST):
        return trains(info, tmp_path, dies_at, saved, ["bf16"])


@pytest.mark.parametrize(
    ("case", "dies_at", "known"),
    [
        (trains, (manifest.NEXT, 3), {2, 3}),
        pytest.param(trains, (manifest.NAME, 3), {3}, marks=pytest.mark.slow),
        pytest.param(saves, (manifest.NEXT, 3), {2, 3}, marks=pytest.mark.slow),
    ],
)
def test_ranks_go_on_from_a_step_that_all_have(case, dies_at, known, pair, tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    for folder in (whole, broken):
        folder.mkdir()
    expected = pair.run(case, whole)
    killed = pair.outcomes(case, broken, dies_at=dies_at)
    assert "was killed" in killed[0].failure
    found = pair.run(case, broken)
    for (start, values, committed), (_, wanted, _) in zip(found, expected, strict=True):
        assert start in known
        assert (start, committed) == (start, LAST)
        assert values.keys() == wanted.keys()
        assert all(torch.equal(values[name], wanted[name]) for name in wanted)
