"""export: the values of a commit as safetensors, one shard after the other.

A shard is no larger than the largest tensor, so memory holds about one tensor, or two if ranks' shares are combined,
from the commits of all ranks.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gs_compile.cli.stored.runs import Found, look
from gs_compile.cli.stored.values import Values, nbytes_of, unchanged
from gs_compile.errors import OptionError, StorageError
from gs_compile.machine import in_groups
from gs_compile.runtime.codecs import dense
from gs_compile.runtime.formats import narrow
from gs_compile.runtime.storage.last_commit import common_step, step_of
from gs_compile.runtime.storage.stored import BUFFER, Manifest


@dataclass(frozen=True)
class Entry:
    """A tensor of some number of bytes, which is read when it is written."""

    name: str
    nbytes: int
    read: Callable[[], Tensor]


def export(runs: Sequence[Found], target: Path, *, masters: bool = False, states: bool = False) -> dict[str, Any]:
    """Write the run's values to a new directory: parameters, and optimizer states if they are asked for.

    Returns what was written. Raises OptionError if `runs` is not exactly one complete run, if the directory is not
    empty, or safetensors is missing; StorageError; and CorruptionError before a wrong byte is written.
    """
    commits = _one_run(runs)
    _save_file()
    with unchanged(commits, lambda: _one_run([look(each.folder) for each in runs])) as ranks:
        _make(target)
        found = _save(target, "model", list(_parameters(ranks, masters=masters)))
        if states:
            found |= _save(target, "optimizer", list(_states(ranks)))
    facts = {name: getattr(ranks[0].commit, name) for name in ("run", "step", "optimizer")}
    return {**facts, "directory": str(target), "files": found}


def _one_run(runs: Sequence[Found]) -> list[Manifest]:
    """The commits of all ranks of the only run; one for ranks that have the same shard."""
    shards = {(each.known[0].together or each.known[0].run, each.known[0].rank): each for each in runs if each.known}
    ranks = sorted(shards.values(), key=lambda each: each.known[0].rank)
    words = ", ".join(
        f"run {each.run} of rank {each.rank} of {each.world} at step {each.step}"
        for found in ranks
        for each in found.known
    )
    worlds = [(each.rank, each.world) for found in ranks for each in found.known[:1]]
    if not ranks or worlds != [(rank, len(ranks)) for rank in range(len(ranks))]:
        raise OptionError(
            f"an export is of the commits of one run, with those of all its ranks, but here is {words or 'none'}: name "
            "a directory with these alone, or the folder of a run in it"
        )
    step = common_step([{step_of(each): each is found.commit for each in found.known} for found in ranks])
    return [each for found in ranks for each in found.known if step_of(each) == step]


def _make(target: Path) -> None:
    target.mkdir(mode=0o700, parents=True, exist_ok=True)
    if any(target.iterdir()):
        raise OptionError(f"{target} is not empty: name a new directory")


def _parameters(ranks: Sequence[Values], *, masters: bool) -> Iterator[Entry]:
    first = ranks[0]
    for name, span in first.spans.items():
        dtype = first.dtype(span, master=masters)
        nbytes = span.numel * dtype.itemsize

        def read(span: Any = span, dtype: torch.dtype = dtype) -> Tensor:
            if span.codec:  # a rank's share cannot be decoded alone
                return dense(span.view(_whole(each.read_any(span.elements, None) for each in ranks)))
            found = _whole(each.read(span, master=True) for each in ranks)
            return found if found.dtype == dtype else narrow(found, dtype)

        yield Entry(name, nbytes, read)
    for each in first.commit.rest:
        name = each.name.removeprefix(BUFFER)
        yield Entry(name, nbytes_of(each), lambda each=each: first.beside(each))  # type: ignore[misc]


def _states(ranks: Sequence[Values]) -> Iterator[Entry]:
    first = ranks[0]
    trained = (each.name for each in first.commit.parameters if each.trained)
    for name in trained:
        span = first.spans[name]
        nbytes = span.numel * first.setting.wide(span.unit).itemsize
        for number, component in enumerate(span.components or first.commit.components):

            def read(span: Any = span, number: int = number) -> Tensor:
                return _whole(each.component(span, number) for each in ranks)

            yield Entry(f"{name}.{component}", nbytes, read)


def _whole(shares: Iterator[Tensor]) -> Tensor:
    """The sum of all ranks' shares: each has its own elements, and zeros elsewhere; two are in memory at a time."""
    whole = next(shares)
    for each in shares:
        whole.view(torch.uint8).bitwise_or_(each.view(torch.uint8))
        del each  # before the next one is read
    return whole


def _save(target: Path, name: str, tensors: Sequence[Entry]) -> dict[str, int]:
    """Write shards and their index, with HuggingFace's names. Returns the bytes of each file."""
    save_file = _save_file()
    shards = list(in_groups(tensors, max((each.nbytes for each in tensors), default=0)))
    places: dict[str, str] = {}
    written = {}
    for number, shard in enumerate(shards, 1):
        path = target / f"{name}-{number:05d}-of-{len(shards):05d}.safetensors"
        path.touch(0o600, exist_ok=False)
        save_file({each.name: each.read().contiguous() for each in shard}, path)
        places |= dict.fromkeys((each.name for each in shard), path.name)
        written[path.name] = path.stat().st_size
    index = {"metadata": {"total_size": sum(each.nbytes for each in tensors)}, "weight_map": places}
    path = target / f"{name}.safetensors.index.json"
    path.touch(0o600, exist_ok=False)
    path.write_text(json.dumps(index, indent=2))
    return written


def _save_file() -> Callable[[Mapping[str, Tensor], Path], None]:
    try:
        from safetensors import SafetensorError
        from safetensors.torch import save_file
    except ImportError as error:
        raise OptionError("export needs safetensors: pip install 'greedysnake[hf]'") from error

    def save(tensors: Mapping[str, Tensor], path: Path) -> None:
        try:
            save_file(dict(tensors), path, metadata={"format": "pt"})
        except SafetensorError as error:  # a full disk, among others
            raise StorageError(errno.EIO, f"writing failed: {error}", str(path)) from error

    return save
