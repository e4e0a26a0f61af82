"""`greedysnake store verify | export`: every changed byte is found, and told by file, offset and parameters."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import resource
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from stored_run import RUN, name_of, part, save, stored_folders, stored_run, values
from test_store_command import names, printed, refused, run

from gs_compile.cli.stored import verify
from gs_compile.cli.stored.values import Values
from gs_compile.errors import ManifestError, StorageError
from gs_compile.runtime.storage import system
from gs_compile.runtime.storage.folder import LOCK, Folder
from gs_compile.runtime.storage.manifest import NAME, NEXT, read
from gs_compile.runtime.storage.store import Store

NAMES = {"wea": ["embedding.weight"], "w0b": ["layers.0.weight", "layers.0.bias"], "rest": ["layers.0.counts"]}


def flip(path, offset):
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x10
    path.write_bytes(data)


def reports(command, folder, code=0):
    result = run(command, folder.parent, "--json")
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)["runs"]


def test_a_sound_run_is_found_sound_and_nothing_changes(folders, commit):
    before = names(*folders)
    (report,) = reports("verify", folders[0])
    assert (report["bad"], report["nbytes"]) == ([], commit.nbytes)
    assert names(*folders) == before
    assert read(folders[0]) == commit


@pytest.mark.parametrize("value", ["wea", "w0b", "s0a", "s0b", "rest"])
def test_every_changed_byte_is_told_by_file_offset_and_parameter(folders, commit, value):
    numbers = np.random.default_rng(int.from_bytes(value.encode(), "big"))
    stored = next(each for each in commit.parts if each.value == value)
    drive = int(numbers.integers(2)) if stored.files[1].nbytes else 0
    for offset in numbers.integers(stored.files[drive].nbytes, size=3).tolist():
        flip(folders[drive] / name_of(value), offset)
        (bad,) = reports("verify", folders[1], code=5)[0]["bad"]
        assert bad["file"] == str(folders[drive] / name_of(value))
        assert bad["offset"] <= offset < bad["offset"] + bad["nbytes"]
        assert bad["parameters"]
        assert set(bad["parameters"]) <= set(NAMES.get(value, ["layers.0.weight", "layers.0.bias"]))
        assert bad["unit"] == {"wea": "e", "rest": ""}.get(value, "0")
        flip(folders[drive] / name_of(value), offset)
    assert "not the bytes" not in printed("verify", folders[0].parent)


def test_a_block_is_told_of_exactly(folders, commit):
    """The first of its part: masters of 2048 elements from the second half of the layer on, which is all weight."""
    flip(folders[0] / name_of("s0b"), 100)
    (bad,) = reports("verify", folders[0], code=5)[0]["bad"]
    place = {"file": str(folders[0] / name_of("s0b")), "offset": 0, "nbytes": 8192, "unit": "0"}
    assert bad == {**place, "parameters": ["layers.0.weight"], "reason": "not the bytes that were written"}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda path: path.unlink(), "No such file"),
        (lambda path: path.write_bytes(path.read_bytes()[:-4096]), "wrote"),
        (lambda path: path.chmod(0o644), "other users can access this file"),
        (lambda path: (path.rename(path.parent / "x"), path.symlink_to(path.parent / "x")), "symbolic links"),
        (lambda path: (path.unlink(), path.mkdir()), "directory"),
    ],
    ids=["gone", "short", "open to others", "a link", "a folder"],
)
def test_a_file_that_cannot_be_trusted_is_bad_as_a_whole(folders, commit, change, reason):
    change(folders[1] / name_of("wea"))
    (bad,) = reports("verify", folders[0], code=5)[0]["bad"]
    assert reason in bad["reason"]
    assert (bad["parameters"], bad["nbytes"]) == (["embedding.weight"], 16384)


def test_a_sound_run_without_one_of_its_manifests_is_read_and_goes_on_after_a_damaged_one_is_removed(folders, commit):
    (folders[0] / NAME).write_bytes(b"{}")
    refused(5, "the run goes on once this file is removed", "verify", folders[0].parent)
    (folders[0] / NAME).unlink()
    (report,) = reports("verify", folders[1])
    assert report["bad"] == []
    with Store([folder.parent for folder in folders], durable=True, resume=(), weights=(1, 1)) as store:
        assert store.former == commit


def test_a_run_that_goes_on_while_another_is_read_is_verified_as_it_is_then(folders, commit, monkeypatch):
    other = folders[0].with_name(f"{folders[0].name}.2")
    other.mkdir(mode=0o700)
    save(other, stored_run(other, run="ffffffff"))
    real = verify.bad_blocks

    def go_on(values):
        for path in [] if values.commit.run == "89abcdef" else other.iterdir():
            path.unlink()
        save(other, stored_run(other, run="89abcdef"))
        return real(values)

    monkeypatch.setattr(verify, "bad_blocks", go_on)
    found = verify.verify(folders[0].parent)
    assert [(each["run"], each["bad"]) for each in found] == [(commit.run, []), ("89abcdef", [])]


# export ---------------------------------------------------------------------------------------------------------------


def loaded(target, name="model"):
    """All tensors that an index names."""
    index = json.loads((target / f"{name}.safetensors.index.json").read_text())
    shards = {shard: load_file(target / shard) for shard in set(index["weight_map"].values())}
    found = {key: shards[shard][key] for key, shard in index["weight_map"].items()}
    assert sum(map(len, shards.values())) == len(found)
    assert index["metadata"]["total_size"] == sum(each.nbytes for each in found.values())
    return found


def of_layer(seed=0):
    """The layer's master and moments, 8192 elements each."""
    made = values(seed)
    parts = [torch.frombuffer(bytearray(made[name]), dtype=torch.float32).view(3, 4096) for name in ("s0a", "s0b")]
    return torch.cat(parts, 1)


@pytest.mark.parametrize("masters", [False, True])
def test_export_has_the_parameters_and_states_by_name(folders, commit, tmp_path, masters):
    target = tmp_path / "out"
    printed("export", folders[0].parent, target, "--states", *(["--masters"] if masters else []))
    state = of_layer()
    found = loaded(target)
    assert found.keys() == {"embedding.weight", "layers.0.weight", "layers.0.bias", "layers.0.counts"}
    assert found["embedding.weight"].numpy().tobytes() == values()["wea"]
    weight = state[0, :6400].view(64, 100)
    assert torch.equal(found["layers.0.weight"], weight if masters else weight.bfloat16())
    assert torch.equal(
        found["layers.0.bias"].float(), (state[0] if masters else state[0].bfloat16().float())[6400:6464]
    )
    assert found["layers.0.counts"].tolist() == [[0, 1, 2], [3, 4, 5]]
    states = loaded(target, "optimizer")
    assert torch.equal(states["layers.0.weight.exp_avg"], state[1, :6400].view(64, 100))
    assert torch.equal(states["layers.0.bias.exp_avg_sq"], state[2, 6400:6464])
    assert {path.stat().st_mode & 0o777 for path in target.iterdir()} == {0o600}
    assert len(list(target.glob("model-*"))) == 2  # as the embedding is the largest, and the rest fits one of its size


def test_export_puts_the_shares_of_ranks_together(folders, commit, tmp_path):
    """Both ranks have the same here, but for the seed: pieces of 2048 of the layer, of each rank in turn."""
    second = folders[0].with_name("greedysnake-run-1")
    second.mkdir(mode=0o700)
    parameters = tuple(replace(each, offset=each.offset and 12800) for each in commit.parameters)
    mine = stored_run(folders[0], world=2, parameters=parameters)
    save(folders[0], mine)
    save(second, stored_run(second, seed=1, run="89abcdef", world=2, rank=1, parameters=parameters))
    refused(2, "here is run 0123abcd of rank 0 of 2 at step 3", "export", folders[0], tmp_path / "none")
    printed("export", folders[0].parent, tmp_path / "out", "--masters")
    shares = of_layer()[0].view(4, 2048), of_layer(1)[0].view(4, 2048)
    whole = torch.stack(shares, 1).flatten()
    found = loaded(tmp_path / "out")
    assert torch.equal(found["layers.0.weight"].flatten(), whole[:6400])
    assert torch.equal(found["layers.0.bias"], whole[12800:12864])


def test_export_takes_one_of_ranks_that_have_the_same_shard(folders, commit, tmp_path):
    """As of a mesh with replicas. Fault: these were taken for ranks of two runs, and no directory has those of one."""
    for rank in range(2):
        folder = folders[0].with_name(f"greedysnake-run-{rank}" if rank else folders[0].name)
        folder.mkdir(mode=0o700, exist_ok=True)
        save(folder, stored_run(folder, run=f"89abcde{rank}", together="0123abcd"))
    printed("export", folders[0].parent, tmp_path / "out", "--masters")
    assert torch.equal(loaded(tmp_path / "out")["layers.0.weight"], of_layer()[0, :6400].view(64, 100))


def test_export_reads_the_shares_of_ranks_one_after_the_other(folders, commit, tmp_path, monkeypatch):
    """Fault: it held as many times the largest tensor as there were ranks."""
    parameters = tuple(replace(each, offset=each.offset and 12800) for each in commit.parameters)
    for rank in range(4):
        folder = folders[0].with_name(f"greedysnake-run-{rank}" if rank else folders[0].name)
        folder.mkdir(mode=0o700, exist_ok=True)
        of_rank = {"run": f"89abcde{rank}", "world": 4, "rank": rank, "parameters": parameters}
        save(folder, stored_run(folder, seed=rank, **of_rank))
    read_one, made, most = Values.read, [], []

    def read_and_count(*args, **kwargs):
        made.append(weakref.ref(found := read_one(*args, **kwargs)))
        most.append(sum(each() is not None for each in made))
        return found

    monkeypatch.setattr(Values, "read", read_and_count)
    printed("export", folders[0].parent, tmp_path / "out", "--masters")
    assert len(made) == 3 * 4
    assert max(most) == 3  # a bias is put together in the shard of its weight


def test_export_takes_the_step_that_all_ranks_have(folders, commit, tmp_path):
    """One rank was killed before it had committed what it had prepared; the other has."""
    second = folders[0].with_name("greedysnake-run-1")
    second.mkdir(mode=0o700)
    parameters = tuple(replace(each, offset=each.offset and 12800) for each in commit.parameters)
    save(folders[0], stored_run(folders[0], step=4, world=2, parameters=parameters))
    other = stored_run(second, seed=1, run="89abcdef", step=4, world=2, rank=1, parameters=parameters)
    save(second, replace(other, step=3))
    refused(1, "RankError", "export", folders[0].parent, tmp_path / "out")
    save(second, other, NEXT)
    printed("gc", folders[0].parent)
    assert "step 4" in printed("export", folders[0].parent, tmp_path / "out")
    assert [report["step"] for report in reports("verify", folders[0])] == [4, 3, 4]


def test_export_takes_one_of_two_commits_of_a_step(folders, commit, tmp_path):
    """Fault: where a rank had prepared the second, the run was refused, as if a process had it."""
    changed = part(folders, "wea", values(1)["wea"], version=1)
    newer = replace(commit, number=2, parts=(changed, *commit.parts[1:]))
    for folder in folders:
        save(folder, newer, NEXT)
    printed("export", folders[0].parent, tmp_path / "out")
    found = loaded(tmp_path / "out")["embedding.weight"]
    assert found.numpy().tobytes() == values(1)["wea"]


@pytest.mark.parametrize("is_another_there", [False, True])
def test_a_run_that_was_copied_here_is_verified_and_exported(tmp_path, is_another_there):
    """From another machine, say, or from a directory that has another run by now."""
    (one,) = stored_folders(tmp_path, "one")
    save(one, stored_run(one))
    (tmp_path / "one").rename(tmp_path / "copy")
    if is_another_there:
        (one,) = stored_folders(tmp_path, "one")
        save(one, stored_run(one, seed=1, run="89abcdef"))
    (report,) = reports("verify", tmp_path / "copy" / one.name)
    assert (report["bad"], report["run"]) == ([], RUN)
    printed("export", tmp_path / "copy", tmp_path / "out", "--masters")
    assert torch.equal(loaded(tmp_path / "out")["layers.0.weight"], of_layer()[0, :6400].view(64, 100))
    before = names(tmp_path / "copy" / one.name)
    printed("gc", tmp_path / "copy")
    assert names(tmp_path / "copy" / one.name) == before


def test_export_refuses_before_it_writes(folders, commit, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    refused(2, "is not empty: name a new directory", "export", folders[0].parent, tmp_path / "full")
    refused(2, "here is none", "export", tmp_path / "full", tmp_path / "out")
    flip(folders[0] / name_of("s0a"), 0)
    refused(5, "CorruptionError", "export", folders[0].parent, tmp_path / "out")


@pytest.mark.parametrize("command", ["verify", "export"])
def test_a_run_that_goes_on_before_it_is_read_is_read_as_it_is_then(folders, commit, tmp_path, monkeypatch, command):
    """It has committed and ended between the look at it and its lock."""
    real = Folder.take

    def take(path):
        if read(folders[0]) == commit:
            for folder in folders:
                for name in names(folder):
                    (folder / name).unlink()
            later = stored_run(*folders, seed=1, step=4)
            for folder in folders:
                save(folder, later)
        return real(path)

    monkeypatch.setattr(Folder, "take", take)
    if command == "verify":
        assert [(each["step"], each["bad"]) for each in reports("verify", folders[0])] == [(4, [])]
        return
    assert "step 4" in printed("export", folders[0].parent, tmp_path / "out")
    embedding = torch.frombuffer(bytearray(values(1)["wea"]), dtype=torch.float32)
    assert torch.equal(loaded(tmp_path / "out")["embedding.weight"].flatten(), embedding)


def test_export_to_a_full_disk(folders, commit, tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        refused(5, "writing failed: ", "export", folders[0].parent, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("command", [("verify",), ("export", "out")])
def test_a_run_in_use_or_damaged_is_refused(folders, used, command, tmp_path):
    name, *target = command
    refused(6, "another run uses this folder, pid 1", name, folders[0].parent, *[tmp_path / each for each in target])
    (folders[0] / NAME).write_bytes(b"[]")
    refused(5, ManifestError.__name__, name, folders[0].parent, *[tmp_path / each for each in target])


@pytest.mark.parametrize("is_left", [False, True])
def test_a_run_on_a_drive_that_cannot_be_written(folders, commit, tmp_path, monkeypatch, is_left):
    """As after its errors, or from another container. Fault: it was refused, as its lock could not be written.

    is_left: the lock of a run that was killed.
    """
    real, lock = system.open_file, folders[0] / LOCK

    def refuse(*_):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    def open_file(name, flags, folder_fd):
        return refuse() if flags & (os.O_RDWR | os.O_CREAT) else real(name, flags, folder_fd)

    if is_left:
        lock.touch(0o600)
    before = names(*folders)
    with monkeypatch.context() as patch:
        patch.setattr(system, "is_read_only", lambda fd: True, raising=False)
        patch.setattr(system, "open_file", open_file)
        for name in ("unlink", "remove_folder"):
            patch.setattr(system, name, refuse)
        (report,) = reports("verify", folders[0])
        assert report["bad"] == []
        printed("export", folders[0].parent, tmp_path / "out")
        assert loaded(tmp_path / "out")["embedding.weight"].numpy().tobytes() == values()["wea"]
        refused(5, "Read-only file system", "gc", folders[0].parent, "--all")
        with pytest.raises(StorageError, match="open failed: Read-only file system"):
            Store([folders[0].parent], resume=())
        assert names(*folders) == before
        with lock.open("a") as used:
            fcntl.flock(used, fcntl.LOCK_EX)
            refused(6, "another run uses this folder", "verify", folders[0].parent)
