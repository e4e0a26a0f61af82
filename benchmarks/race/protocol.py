"""protocol: what every contestant of the race shares: the case, the batches, the process it lives in.

A contestant is one system that trains the case's model. It is a process of its own, for systems need environments of
their own, and it lives through the whole race: repetitions are interleaved across contestants while all but one sleep.
Standard input has commands, one a line; standard output has one line of JSON for each, and nothing else (what libraries
print goes to standard error):

    (start)          {"ready": NAME, "settings": ..., "versions": ..., ...}, or {"cannot": NAME, "why": ...} and exit 3
    step K           {"step": K, "seconds": s, "loss": l}: training step K on batch K, with all that belongs to it done
    steps K COUNT    {"steps": K, "count": COUNT, "seconds": s, "losses": [...]}: timed as a whole, all done at the end
    steps K COUNT L  the same of steps among others: L more come first, untimed, and leave to do what the last one does
    stats            {"peak_rss": bytes, "peak_device": bytes, "read_bytes": bytes, "write_bytes": bytes}, counted from
                     the start; of a device, what torch's allocator has reserved
    reset_peak       {"reset_peak": true}: peaks begin again at what is there now
    weights PATH     {"weights": PATH}: fp32 parameters by name, saved with torch.save
    quit             {"quit": true}

What fails after the start is {"error": ..., "where": the command}, and exit 1.

    python -m benchmarks.race.plain --case 25m --storage /path/on/a/drive

`--case` is a preset's name or the JSON of a Case. Start contestants with ENVIRONMENT: threads that wait actively would
slow the others down.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
import traceback
from abc import ABC, abstractmethod
from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, ClassVar, Literal

from benchmarks.common import NO_DROPOUT, gpt2, memory_nbytes, reset_peak

if TYPE_CHECKING:
    import torch
    from transformers import GPT2LMHeadModel

ENVIRONMENT = {"OMP_WAIT_POLICY": "passive", "TOKENIZERS_PARALLELISM": "false"}
BETAS, EPSILON, WEIGHT_DECAY = (0.9, 0.999), 1e-8, 0.01  # AdamW of every contestant, on every parameter

CANNOT, FAILED = 3, 1  # exit codes


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model and its data: the same for every contestant."""

    layers: int
    hidden: int
    heads: int
    vocabulary: int = 50257
    sequence: int = 256
    micro_batch_size: int = 1
    micro_batches: int = 1
    precision: Literal["fp32", "bf16"] = "fp32"  # bf16: parameters and computation; masters and moments are fp32
    lr: float = 3e-4
    seed: int = 0
    max_grad_norm: float | None = None
    device: str = "cpu"  # that computes
    ranks: int = 1  # each with micro_batches of its own; plain has all of them
    tokens: str | None = None  # a .npy file of token numbers in a row: real text; without it they are drawn evenly

    @classmethod
    def parse(cls, text: str) -> Case:
        """A preset's name, or the JSON of a case; JSON with a `preset` changes that one."""
        if text in PRESETS:
            return PRESETS[text]
        data = json.loads(text)
        preset = data.pop("preset", None)
        unknown = set(data) - {field.name for field in fields(cls)}
        if unknown:
            raise ValueError(f"a case has no {', '.join(sorted(unknown))}")
        return replace(PRESETS[preset], **data) if preset else cls(**data)

    def json(self) -> str:
        return json.dumps(asdict(self))

    @property
    def samples(self) -> int:
        """Of all ranks."""
        return self.micro_batch_size * self.micro_batches * self.ranks


PRESETS = {
    "25m": Case(layers=6, hidden=512, heads=8, vocabulary=12288),
    "110m": Case(layers=12, hidden=768, heads=12),  # GPT-2
    "350m": Case(layers=24, hidden=1024, heads=16),  # GPT-2 medium
}


def build_model(case: Case) -> GPT2LMHeadModel:
    """The case's model in fp32, with the weights its seed draws: the same bits for every contestant."""
    import torch

    sizes = (case.layers, case.hidden, case.sequence, case.vocabulary)
    with torch.device("meta") if case.device == "meta" else nullcontext():
        model = gpt2(*sizes, n_head=case.heads, seed=case.seed, **NO_DROPOUT)
    return model.to(case.device)


def batch(case: Case, step: int) -> torch.Tensor:
    """The token numbers of one step, (samples, sequence); micro-batch i has rows i * micro_batch_size and on.

    A process that is one of several ranks gets its share of the rows.
    """
    rows = _rows(case, step)
    return rows.chunk(case.ranks)[int(os.environ["RANK"])] if "RANK" in os.environ else rows


def _rows(case: Case, step: int) -> torch.Tensor:
    """The batch of all ranks."""
    import numpy
    import torch

    generator = torch.Generator().manual_seed(case.seed * 1_000_003 + step)
    if case.tokens is None:
        return torch.randint(case.vocabulary, (case.samples, case.sequence), generator=generator).to(case.device)
    text = numpy.load(case.tokens, mmap_mode="r")
    starts = torch.randint(len(text) - case.sequence, (case.samples,), generator=generator)
    rows = [torch.from_numpy(text[s : s + case.sequence].astype(numpy.int64)) for s in starts.tolist()]
    return torch.stack(rows).to(case.device)


def wait_for_device(case: Case) -> None:
    """Until the device has done what was launched on it."""
    if case.device != "cpu":
        import torch

        torch.accelerator.synchronize()


class Cannot(Exception):  # noqa: N818  the contestant's word, not an error of ours
    """This contestant does not run here; says why."""


class Contestant(ABC):
    """One system. `build` may raise Cannot; after it, `step` runs any number of times."""

    name: ClassVar[str]
    packages: ClassVar[tuple[str, ...]] = ("torch", "transformers")  # whose versions are reported

    def __init__(self, case: Case, storage: Path, settings: dict[str, Any]) -> None:
        self.case, self.storage, self.settings = case, storage, settings

    @abstractmethod
    def build(self) -> dict[str, Any]:
        """Makes everything ready; returns its exact settings."""

    @abstractmethod
    def step(self, ids: torch.Tensor) -> float:
        """One training step on the whole batch, optimizer included; returns the loss, the mean over micro-batches."""

    @abstractmethod
    def weights(self) -> dict[str, torch.Tensor]:
        """fp32 parameters (masters where there are) by the model's own names, tied ones once."""

    def settle(self) -> None:  # noqa: B027  most have nothing to do
        """Finishes what a step left for the next one; a time ends after it."""

    def other(self, command: str, *arguments: str) -> dict[str, Any]:
        """Answers what this contestant alone can be asked."""
        raise ValueError(f"no such command: {command}")

    def close(self) -> None:  # noqa: B027
        """Gives back files, threads and processes."""


def main(contestant: type[Contestant]) -> None:
    """Lives through the race: builds, then does what standard input says."""
    parser = argparse.ArgumentParser(description=contestant.__doc__)
    parser.add_argument("--case", type=Case.parse, default=PRESETS["25m"], help="a preset, or the JSON of a case")
    parser.add_argument("--storage", type=Path, default=Path("race-storage"), help="a directory on a fast drive")
    parser.add_argument("--settings", type=json.loads, default={}, help="the contestant's own settings, as JSON")
    arguments = parser.parse_args()
    answers = _claim_stdout()
    runner = contestant(arguments.case, arguments.storage, arguments.settings)
    status = _serve(runner, sys.stdin, answers)
    answers.flush()
    sys.exit(status)


def _claim_stdout() -> IO[str]:
    """Standard output for our answers alone: what others write to it goes to standard error."""
    sys.stdout.flush()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return answers


def _serve(runner: Contestant, commands: IO[str], answers: IO[str]) -> int:
    """The life of a contestant, from build to quit; its exit status."""

    def answer(**data: Any) -> None:
        answers.write(json.dumps(data) + "\n")

    idle, start, words = memory_nbytes("VmRSS"), time.perf_counter(), ["build"]
    try:
        settings = runner.build()
        answer(
            ready=runner.name,
            case=asdict(runner.case),
            settings=settings,
            versions=_versions(runner.packages),
            omp_wait_policy=os.environ.get("OMP_WAIT_POLICY", ""),
            build_seconds=time.perf_counter() - start,
            idle_rss=idle,
        )
        for line in commands:
            words = line.split() or [""]
            if words[0] == "quit":
                break
            answer(**_obey(runner, *words))
    except Cannot as reason:
        answer(cannot=runner.name, why=str(reason))
        return CANNOT
    except Exception as error:  # noqa: BLE001  whatever a peer raises is its result
        traceback.print_exc()
        answer(error=f"{type(error).__name__}: {error}", where=" ".join(words))
        return FAILED
    runner.close()
    answer(quit=True)
    return 0


def _obey(runner: Contestant, command: str, *arguments: str) -> dict[str, Any]:
    if command == "step":
        seconds, losses = _timed(runner, int(arguments[0]), 1)
        return {"step": int(arguments[0]), "seconds": seconds, "loss": losses[0]}
    if command == "steps":
        first, count, *lead = map(int, arguments)
        seconds, losses = _timed(runner, first, count, *lead)
        return {"steps": first, "count": count, "seconds": seconds, "losses": losses}
    if command == "stats":
        return {"peak_rss": memory_nbytes("VmHWM"), "peak_device": _peak_device(runner.case), **_disk_bytes()}
    if command == "reset_peak":
        reset_peak()
        _peak_device(runner.case, reset=True)
        return {"reset_peak": True}
    if command == "weights":
        import torch

        torch.save(runner.weights(), arguments[0])
        return {"weights": arguments[0]}
    return runner.other(command, *arguments)


def _timed(runner: Contestant, first: int, count: int, lead: int = 0) -> tuple[float, list[float]]:
    batches = [batch(runner.case, first + i) for i in range(lead + count)]
    losses = [runner.step(ids) for ids in batches[:lead]]
    wait_for_device(runner.case)
    start = time.perf_counter()
    losses += [runner.step(ids) for ids in batches[lead:]]
    if not lead:
        runner.settle()
    wait_for_device(runner.case)
    seconds = time.perf_counter() - start
    if lead:
        runner.settle()
    return seconds, losses


def _peak_device(case: Case, *, reset: bool = False) -> int:
    """The most bytes of the device that torch's allocator has reserved; 0 without one. `reset`: from now on."""
    if case.device == "cpu":
        return 0
    import torch

    if reset:
        torch.accelerator.empty_cache()
        torch.accelerator.reset_peak_memory_stats()
    return int(torch.accelerator.max_memory_reserved())


def _disk_bytes() -> dict[str, int]:
    """Bytes that this process and ended children have moved to and from drives, by the kernel's count."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return {"read_bytes": int(lines["read_bytes"]), "write_bytes": int(lines["write_bytes"])}


def _versions(packages: tuple[str, ...]) -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "missing"
    return found
