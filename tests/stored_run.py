"""A small durable run on two drives, made by hand: its manifest, and its files with their checksums."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import torch
import xxhash

from gs_compile.placement.slab import rounded
from gs_compile.runtime.storage.grid import Grid, lengths
from gs_compile.runtime.storage.manifest import NAME, write
from gs_compile.runtime.storage.store import Stripe
from gs_compile.runtime.storage.stored import (
    FOLDER,
    FORMAT,
    REST,
    Manifest,
    StoredFile,
    StoredGroup,
    StoredParameter,
    StoredPart,
    StoredRange,
    StoredTensor,
    StoredUnit,
)

RUN = "0123abcd"
CHUNK = 8192


def name_of(value: str, version: int = 0, run: str = RUN) -> str:
    return f"{run}-00ff-{REST if value == REST else f'{value[:-1]}-{value[-1]}'}.{version}"


def part(folders, value: str, data: bytes, *, version: int = 0, run: str = RUN, on_disk: bool = True) -> StoredPart:
    """A part in rows of two pages for each folder, and its files if `on_disk`."""
    stripe = Stripe((CHUNK,) * len(folders), -(-len(data) // (CHUNK * len(folders))))
    files, name = [], name_of(value, version, run)
    for drive, (folder, nbytes) in enumerate(zip(folders, lengths(len(data), stripe.chunks), strict=True)):
        pieces = [each for each in stripe.pieces(0, len(data)) if each.drive == drive]
        mine = b"".join(data[each.begin : each.begin + each.nbytes] for each in pieces)
        cuts = Grid.of(nbytes, CHUNK).cut(0, nbytes)
        sums = "".join(xxhash.xxh3_64_hexdigest(mine[start:stop]) for start, stop in cuts)
        if on_disk:
            (folder / name).touch(0o600)
            (folder / name).write_bytes(mine.ljust(rounded(nbytes), b"\0"))
        files.append(StoredFile(str(folder), name, nbytes, sums))
    return StoredPart(value, len(data), stripe.chunks, stripe.num_rows, tuple(files))


def values(seed: int = 0) -> dict[str, bytes]:
    """The bytes of the parts: the narrow parameters on storage are their rounded masters."""
    numbers = np.random.default_rng(seed)
    state = {name: torch.tensor(numbers.standard_normal((3, 4096), np.float32)) for name in ("s0a", "s0b")}
    return {
        "wea": numbers.standard_normal(8192, np.float32).tobytes(),
        "w0b": state["s0b"][0].bfloat16().view(torch.uint8).numpy().tobytes(),
        **{name: each.numpy().tobytes() for name, each in state.items()},
        REST: np.arange(6, dtype=np.int64).tobytes(),
    }


def stored_run(*folders: Path, on_disk: bool = True, seed: int = 0, run: str = RUN, **changes) -> Manifest:
    """A commit of step 3: an embedding in fp32 that is frozen, and a layer in bf16 whose state has a master and two
    moments, half of it late.
    """
    made = values(seed)
    units = (
        StoredUnit(
            "e",
            "float32",
            (StoredGroup("a", "never", (StoredRange("a", "host", 0, 8192),), ()),),
            4,
            4,
            8,
            False,
            ("float32",) * 2,
        ),
        StoredUnit(
            0,
            "bfloat16",
            (
                StoredGroup("a", "early", (StoredRange("a", "host", 0, 4096),), (StoredRange("a", "ssd", 0, 4096),)),
                StoredGroup("b", "late", (StoredRange("b", "ssd", 4096, 8192),), (StoredRange("b", "host", 0, 4096),)),
            ),
            itemsize=2,
            gradient_itemsize=4,
            state_itemsize=12,
            has_master=True,
            state=("float32",) * 3,
        ),
    )
    parameters = (
        StoredParameter("embedding.weight", "e", 0, (64, 128), False),
        StoredParameter("layers.0.weight", 0, 0, (64, 100), True),
        StoredParameter("layers.0.bias", 0, 6400, (64,), True),
    )
    fields = {
        "format": FORMAT,
        "run": run,
        "step": 3,
        "num_skipped": 1,
        "written": "2026-01-02T03:04:05+00:00",
        "versions": {"greedysnake": "0.2.0", "torch": "2.13.0"},
        "optimizer": "AdamW",
        "components": ("exp_avg", "exp_avg_sq"),
        "groups": ({"lr": 1e-3, "betas": [0.9, 0.999], "max": float("inf")},),
        "random": {"cpu": "00ff"},
        "states": {"scheduler": {"last_epoch": 3}},
        "user": {"sample": 17, "note": "naïve ☃"},
        "plan": {"alpha": 0.5},
        "units": units,
        "parameters": parameters,
        "parts": tuple(part(folders, value, data, run=run, on_disk=on_disk) for value, data in made.items()),
        "rest": (StoredTensor("layers.0.counts", "int64", (2, 3), 0),),
        "rank": 0,
        "world": 1,
        "never": ("layers.0.bias",),
    }
    return Manifest(**{**fields, **changes})


def stored_folders(parent: Path, *names: str) -> tuple[Path, ...]:
    """The run folders in directories of these names."""
    found = []
    for name in names:
        folder = parent / name / FOLDER
        folder.parent.mkdir(mode=0o700)
        folder.mkdir(mode=0o700)
        found.append(folder)
    return tuple(found)


def save(folder: Path, manifest: Manifest, name: str = NAME) -> None:
    folder_fd = os.open(folder, os.O_RDONLY)
    try:
        write(folder, folder_fd, manifest, name)
    finally:
        os.close(folder_fd)
