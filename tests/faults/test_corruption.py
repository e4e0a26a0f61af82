"""Bytes that storage got wrong are found before anything uses them: damage to every file of a training run."""

from __future__ import annotations

import os
import random
import threading
from collections import Counter
from functools import partial
from itertools import product

import pytest
from saving import saving
from test_step import assert_over, whole_steps
from tiered import adamw, options, outcome, step, tokens

from gs_compile.errors import CorruptionError, LaneError, StorageError
from gs_compile.runtime.storage import grid, ssd

KEEPS_CAPTURES = True
UNDAMAGED = range(3)  # of nine writes: what others are swapped with
KINDS = ("flipped", "zeroed", "replayed", "truncated", "swapped with a block", "swapped with a file")


@pytest.fixture(autouse=True)
def blocks_of_a_page(monkeypatch):
    """So that files of a tiny model have several."""
    monkeypatch.setattr(grid, "BLOCK", grid.PAGE)
    monkeypatch.setattr(grid, "SMALL_BLOCK", grid.PAGE)


class Drives:
    """What is written is damaged at once, mostly, each time in another way; what is read is compared, and repaired if refused.

    truth: by path and number of a block, what was written there last; damaged: which of them storage has got wrong.
    """

    def __init__(self, monkeypatch, seed=0):
        self.random = random.Random(seed)
        self.truth, self.older, self.damaged, self.found = {}, {}, {}, Counter()
        self.turns = {}  # by label: kinds of damage, each as often as the others, and not always to the same block
        self.files = {}
        self.armed = False
        self._write, self._read = ssd._write, ssd._read
        self._one_by_one = threading.RLock()
        monkeypatch.setattr(ssd, "_write", self.write)
        monkeypatch.setattr(ssd, "_read", self.read)

    def write(self, file, block, whole, memory, offset, label):
        self._write(file, block, whole, memory, offset, label)
        if label.startswith("."):
            return
        with self._one_by_one:
            key = file.path, block.number
            self.files[file.path] = file
            self.older[key] = self.true(file, block)
            self.truth[key] = whole.tobytes()
            self.damaged.pop(key, None)
            if self.armed:
                turns = self.turns.setdefault(label, [])
                if not turns:
                    turns += self.random.sample((*KINDS, *UNDAMAGED), len(KINDS) + len(UNDAMAGED))
                if (kind := turns.pop()) not in UNDAMAGED:
                    self.damage(file, block, kind)

    def read(self, file, block, memory, label):
        try:
            self._read(file, block, memory, label)
        except StorageError as error:
            self.repair(file, block, label, error)
            self._read(file, block, memory, label)
        assert memory.tobytes() == self.true(file, block), f"{label}: other bytes than were written"

    def repair(self, file, block, label, error):
        assert isinstance(error, CorruptionError) or "the file ended" in str(error)
        assert f"read of {label} " in str(error)
        assert f" bytes at offset {block.start}" in str(error)
        assert error.filename == str(file.path)
        with self._one_by_one:
            kind = self.damaged.pop((file.path, block.number))
            self.found[kind, label] += 1
            self.put(file, block, self.true(file, block))

    def true(self, file, block):
        return self.truth.get((file.path, block.number), bytes(block.nbytes))

    def damage(self, file, block, kind):
        """Do it where nobody else works on what it concerns; flip a bit where that or nothing would come of it."""
        others = self.concerned(file, block, kind)
        locks = [other.locks[each.number] for other, each in others]
        taken = [lock for lock in locks if lock.acquire(blocking=False)]
        if len(taken) == len(locks) and self.done(file, block, kind, others):
            self.damaged.update({(other.path, each.number): kind for other, each in others})
        elif (file.path, block.number) not in self.damaged:
            kind = "flipped"
            content = bytearray(self.true(file, block))
            content[self.random.randrange(len(content))] ^= 1 << self.random.randrange(8)
            self.put(file, block, content)
        self.damaged[file.path, block.number] = kind
        for lock in taken:
            lock.release()

    def concerned(self, file, block, kind):
        """The other blocks that change."""
        if kind == "truncated":
            cut = (file.grid.at(start) for start, _ in file.grid.cut(0, file.grid.nbytes))
            return [(file, each) for each in cut if each.number > block.number]
        if kind == "swapped with a block":
            start = (block.start + grid.PAGE) % (file.grid.nbytes // grid.PAGE * grid.PAGE or grid.PAGE)
            return [(file, file.grid.at(start))] if start != block.start else []
        if kind == "swapped with a file":
            found = [each for each in self.files.values() if each is not file and each.grid.nbytes > block.start]
            return [(each, each.grid.at(block.start)) for each in self.random.sample(found, min(1, len(found)))]
        return []

    def done(self, file, block, kind, others):
        """Whether the bytes have changed."""
        mine = self.true(file, block)
        if kind == "truncated":
            os.truncate(file.path, block.start)
            return True
        if kind in ("zeroed", "replayed"):
            content = bytes(len(mine)) if kind == "zeroed" else self.older[file.path, block.number]
            self.put(file, block, content)
            return content != mine
        for other, each in others:
            theirs = self.true(other, each)
            if len(theirs) == len(mine) and theirs != mine and (other.path, each.number) not in self.damaged:
                self.put(file, block, theirs)
                self.put(other, each, mine)
                return True
        return False

    def put(self, file, block, content):
        """Change what is on the drive, past all that knows of it."""
        fd = os.open(file.path, os.O_RDWR)
        try:
            os.truncate(fd, max(os.fstat(fd).st_size, -(-file.grid.nbytes // grid.PAGE) * grid.PAGE))
            os.pwrite(fd, content, block.start)
        finally:
            os.close(fd)


def train(harness, directories, drives, num_steps):
    """Every update is run beside the backward, and confirmed: shadow copies come to be read, too."""
    chosen = {"alpha": 0.3, "clip": "speculative"}
    with harness.fresh(partial(adamw, max_grad_norm=1e6), options(directories, **chosen)) as optimizer:
        losses = []
        for number in range(num_steps):
            losses.append(step(harness.model, optimizer, tokens(number)))
            optimizer.synchronize()
            drives.armed = True
        drives.armed = False
        return outcome(harness.model, optimizer, losses, [])


@pytest.mark.parametrize(
    ("num_steps", "num_found"),
    [(5, 60), pytest.param(120, 5000, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])],
    ids=["some", "5000"],
)
def test_damage_of_every_kind_is_found_before_it_is_used(harness, monkeypatch, tmp_path, num_steps, num_found):
    """Whoever reads compares with what was written: what is not refused has to be that."""
    drives = Drives(monkeypatch)
    train(harness, [tmp_path / "a", tmp_path / "b"], drives, num_steps)
    labels = {file.path.name for file in drives.files.values()}
    assert {label for _, label in drives.found} == labels
    assert {kind for kind, _ in drives.found} == set(KINDS)
    assert drives.found.total() >= num_found
    if num_steps > 5:
        assert drives.found.keys() >= set(product(KINDS[:4], labels))  # a file of one block has none to swap it with


@pytest.mark.parametrize("kind", ["w", "s", "x"])
def test_damage_ends_the_run_and_is_named(harness, monkeypatch, tmp_path, kind):
    with saving(), harness.fresh(adamw, options(tmp_path)) as optimizer:  # nothing stays in memory: all is read
        step(harness.model, optimizer, tokens(0))
        optimizer.synchronize()
        drives, damaged = Drives(monkeypatch), []

        def write(file, block, whole, memory, offset, label):
            drives._write(file, block, whole, memory, offset, label)
            if label.startswith(f"{kind}1") and not damaged:
                damaged.append((str(file.path), label, block))
                drives.put(file, block, (whole ^ 1).tobytes())

        monkeypatch.setattr(ssd, "_write", write)
        monkeypatch.setattr(ssd, "_read", drives._read)
        with pytest.raises(LaneError) as caught:
            whole_steps(harness.model, optimizer, 2)
        ((path, label, block),) = damaged
        error = caught.value.__cause__
        assert isinstance(error, CorruptionError)
        assert error.filename == path
        assert f"read of {label} found {block.nbytes} bytes at offset {block.start} that are not those" in str(error)
        assert_over(harness.model, optimizer, tmp_path)
