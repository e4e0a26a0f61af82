"""Whatever a power loss leaves of what was not synced, a commit is found, and every byte of it.

A recorder notes what a run asks of the system, one call after the other. After each come images of what an unkind
filesystem may have at that moment:

names     made, renamed or removed since their folder was synced: each for itself as it is now, or as it was
blocks    written since their file was synced: each for itself as it is now, as it was at any time, or zeros
"""

from __future__ import annotations

import os
import random
import shutil
import threading
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import xxhash
from children import MAX_NORM
from stored_run import save, stored_folders, stored_run
from tiered import adamw, options, outcome, step, tokens

from gs_compile.runtime.storage import manifest, system
from gs_compile.runtime.storage.grid import Grid
from gs_compile.runtime.storage.last_commit import step_of
from gs_compile.runtime.storage.manifest import decoded
from gs_compile.runtime.storage.store import Store

KEEPS_CAPTURES = True
BLOCK = 4096
NUM_STEPS = 3
WAYS = {
    "on storage": {"alpha": 0.5},
    "mixed": {"alpha": 0.3, "clip": "speculative", "ratios": {"optimizer": 0.4, "parameter": 0.3}},
}
CALLS = ("open_file", "fallocate", "pwritev", "datasync", "sync_folder", "rename", "unlink", "make_folder")


@dataclass
class Inode:
    """A file as it is and as it was synced; of each block that was written since then, what it was after each write."""

    now: bytearray = field(default_factory=bytearray)
    synced: bytes = b""
    blocks: dict[int, list[bytes]] = field(default_factory=dict)
    sizes: list[int] = field(default_factory=list)

    def grow(self, nbytes: int) -> None:
        self.now.extend(bytes(max(0, nbytes - len(self.now))))
        self.sizes.append(len(self.now))

    def write(self, data: bytes, offset: int) -> None:
        self.grow(offset + len(data))
        self.now[offset : offset + len(data)] = data
        for start in range(offset - offset % BLOCK, offset + len(data), BLOCK):
            self.blocks.setdefault(start, []).append(bytes(self.now[start : start + BLOCK]))

    def sync(self) -> None:
        self.synced, self.blocks, self.sizes = bytes(self.now), {}, []

    def image(self, numbers: random.Random, kindness: float) -> bytes:
        """kindness: how probably each of its blocks and its size are as they are now."""
        if not self.blocks and not self.sizes:
            return self.synced
        found = self.now.copy()
        for start, contents in self.blocks.items():
            if numbers.random() >= kindness:
                before = numbers.choice([self.synced[start : start + BLOCK], b"", *contents])
                end = min(start + BLOCK, len(found))
                found[start:end] = before[: end - start].ljust(end - start, b"\0")
        is_as_now = numbers.random() < kindness
        return bytes(found[: len(found) if is_as_now else numbers.choice([len(self.synced), *self.sizes])])


class Recorder:
    """The files of a run as a system has them that may lose its power; `at_moment` is called after each call."""

    def __init__(self, monkeypatch, at_moment) -> None:
        self.names: dict[Path, list[Inode | str | None]] = {}  # as synced, and then after each change
        self.at_moment = at_moment
        self._fds: dict[int, Inode] = {}
        self._guard = threading.RLock()
        for name in CALLS:
            monkeypatch.setattr(system, name, partial(self._call, name, getattr(system, name)))

    def _call(self, name, real, *arguments):
        with self._guard:
            found = real(*arguments)
            getattr(self, f"_{name}")(found, *arguments)
            self.at_moment()
            return found

    def _change(self, path: Path, to: Inode | str | None) -> None:
        self.names.setdefault(path, [None]).append(to)

    def _open_file(self, fd, name, flags, folder_fd):
        self._fds.pop(fd, None)
        if name.startswith(".") and name != manifest.BESIDE:
            return  # of no commit
        path = _path(folder_fd) / name
        if flags & os.O_CREAT:
            self._change(path, Inode())
        if (now := self.names.get(path, [None])[-1]) is not None:
            self._fds[fd] = now

    def _fallocate(self, _, fd, nbytes):
        if fd in self._fds:
            self._fds[fd].grow(nbytes)

    def _pwritev(self, count, fd, memory, offset):
        if fd in self._fds:
            self._fds[fd].write(memory[:count].tobytes(), offset)

    def _datasync(self, _, fd):
        self._fds[fd].sync()

    def _sync_folder(self, _, folder_fd):
        for path, contents in self.names.items():
            if path.parent == _path(folder_fd):
                del contents[:-1]

    def _rename(self, _, name, to, folder_fd):
        folder = _path(folder_fd)
        self._change(folder / to, self.names[folder / name][-1])
        self._change(folder / name, None)

    def _unlink(self, _, name, folder_fd):
        if (path := _path(folder_fd) / name) in self.names:
            self._change(path, None)

    def _make_folder(self, _, folder):
        self._change(folder, "folder")

    def image(self, numbers: random.Random) -> dict[Path, bytes]:
        """What may be left now, by path."""
        with self._guard:  # other threads open and write files meanwhile
            kindness = numbers.choice((0.0, 0.5, 0.9, 1.0))
            left = {
                path: contents[-1] if numbers.random() < kindness else numbers.choice(contents)
                for path, contents in self.names.items()
            }
            return {
                path: now.image(numbers, kindness)
                for path, now in left.items()
                if isinstance(now, Inode) and all(left.get(above, above) is not None for above in path.parents)
            }


def _path(folder_fd: int) -> Path:
    return Path(f"/proc/self/fd/{folder_fd}").readlink()


def committed(image):
    """The step of the commit that is found in an image, 0 without one, after a look at every byte of it; its files."""
    found = [decoded(data) for path, data in image.items() if path.name == manifest.NAME]
    if not found:
        return 0, {}
    newest = max(found, key=lambda each: each.step)
    files = {}
    for part in newest.parts:
        for file, chunk in zip(part.files, part.chunks, strict=True):
            data = image[Path(file.folder) / file.name]
            grid = Grid.of(file.nbytes, chunk)
            sums = [xxhash.xxh3_64_hexdigest(data[begin:end]) for begin, end in grid.cut(0, file.nbytes)]
            assert "".join(sums) == file.sums, f"step {newest.step}: {file.name} has other bytes"
            files[part.value, file.folder] = data[: file.nbytes]
    return newest.step, files


class Losses:
    """Power losses after each call of a run; `kept` are some of the images."""

    def __init__(self, monkeypatch, count: int, seed: int) -> None:
        self.numbers, self.count = random.Random(seed), count
        self.num_images, self.promised, self.made = 0, 0, {0: {}}
        self.kept: list[dict[Path, bytes]] = []
        self.found: set[int] = set()
        self.recorder = Recorder(monkeypatch, self.look)
        real = Store.commit

        def commit(*arguments):
            real(*arguments)
            self.promised, self.made[self.promised] = committed(self.recorder.image(SimpleNamespace(**NOW)))

        monkeypatch.setattr(Store, "commit", commit)

    def look(self) -> None:
        for _ in range(self.count):
            self.num_images += 1
            image = self.recorder.image(self.numbers)
            number, files = committed(image)
            assert number in (self.promised, self.promised + 1), f"step {number}, and {self.promised} was promised"
            assert files == self.made.setdefault(number, files)  # a manifest whose name was not synced may count, too
            self.found.add(number)
            if self.numbers.random() < 3 / 400 / self.count:
                self.kept.append(image)


def test_what_one_rank_has_prepared_alone_does_not_come_back(monkeypatch, tmp_path):
    """Fault: it did, without its files, if the power was lost while the others had prepared that step anew: as theirs
    has its number, all would have gone on from it.
    """
    (folder,) = stored_folders(tmp_path, "storage")
    save(folder, made := replace(stored_run(folder), world=2))
    save(folder, replace(made, step=made.step + 1, number=made.number + 1), manifest.NEXT)
    recorder = Recorder(monkeypatch, lambda: None)
    recorder.names[folder / manifest.NEXT] = [Inode()]
    with Store([folder.parent], durable=True, resume=(), agree=lambda own: [own, {step_of(made): True}]) as store:
        assert store.former == made
        assert recorder.names[folder / manifest.NEXT] == [None]


NOW = {"random": lambda: 0.0, "choice": max}  # kindness 1: all is as it is now


MODEL = {"width": 16, "dropout": 0.1}
MAKE = partial(adamw, max_grad_norm=MAX_NORM)


@pytest.mark.parametrize(
    "count", [1, pytest.param(30, marks=[pytest.mark.slow, pytest.mark.timeout(900)])], ids=["some", "all"]
)
@pytest.mark.parametrize("way", [pytest.param("on storage", marks=pytest.mark.slow), "mixed"])
def test_every_image_has_a_commit_of_which_nothing_is_lost(harness, monkeypatch, tmp_path, way, count):
    """More than 10,000 images in all, of which some are gone on from for real."""
    directories = [tmp_path / "a" / "new", tmp_path / "b"]
    given = {**options(directories, **WAYS[way]), "durability": "step", "resume": "auto"}
    wanted = harness.train(MAKE, options(tmp_path / "usual", **WAYS[way]), num_steps=NUM_STEPS + 1)
    torch.manual_seed(1)
    with monkeypatch.context() as patched:
        losses = Losses(patched, count, seed=random.randrange(1 << 32) if count > 1 else 0)
        with harness.fresh(MAKE, given) as optimizer:
            for number in range(NUM_STEPS):
                step(harness.model, optimizer, tokens(number))
            optimizer.commit()
            losses.count = 0  # what ends a run is killed elsewhere
    assert losses.found == {*range(NUM_STEPS + 1)}
    assert losses.num_images > 180 * count
    for image in losses.kept[:: max(1, len(losses.kept) // (3 if count == 1 else 6))]:
        for directory in directories:
            shutil.rmtree(directory, ignore_errors=True)
        for path, data in image.items():
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.touch(0o600)
            path.write_bytes(data)
        torch.manual_seed(1)
        with harness.fresh(MAKE, given) as optimizer:
            for number in range(committed(image)[0], NUM_STEPS + 1):
                step(harness.model, optimizer, tokens(number))
            found = outcome(harness.model, optimizer, wanted.losses, wanted.norms)
        assert not found.differences(wanted)
