"""common: what benchmarks share: their command line and results, a small GPT-2 and its step, turns, memory, processes.

Results go to `--output` as JSON, with the machine and the versions that they were measured with.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:  # contestants of the race, in environments of their own, need neither
    import torch
    from transformers import GPT2LMHeadModel

    from gs_compile.planner.step_plan import StepPlan

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
FIGURES = ROOT / "docs" / "figures"
IN_MEMORY: dict[str, float] = {"parameter": 1.0, "checkpoint": 1.0, "optimizer": 1.0}
ON_SSD = dict.fromkeys(IN_MEMORY, 0.0)
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}

T = TypeVar("T")


# Command line and results ---------------------------------------------------------------------------------------------


def parser_of(words: str | None) -> argparse.ArgumentParser:
    """A parser with the option that all have; words: the docstring of the benchmark."""
    parser = argparse.ArgumentParser(description=words, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="JSON to write")
    return parser


def setting_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """What was asked for, but for the places of files."""
    return {name: value for name, value in vars(arguments).items() if name not in ("output", "storage", "only")}


def conditions() -> dict[str, Any]:
    """The command line, the machine as it is now, and the versions."""
    versions = {"python": platform.python_version(), **{name: version(name) for name in ("torch", "transformers")}}
    return {"command": command_line(), "machine": machine_facts(), "versions": versions}


def command_line() -> str:
    """The command line, for the results; files of the checkout as seen from its root."""
    program, *arguments = (word.replace(f"{ROOT}/", "") for word in sys.argv)
    return shlex.join(["python", "-m", ".".join(Path(program).with_suffix("").parts), *arguments])


def machine_facts() -> dict[str, Any]:
    """The machine that results were measured on, for people."""
    import torch

    from gs_compile.machine import processor, usable_cores, usable_memory

    return {
        "processor": processor(),
        "cores": usable_cores(),
        "threads": torch.get_num_threads(),
        "memory_bytes": usable_memory(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "kernel": platform.release(),
        "load": os.getloadavg()[0],
        "date": time.strftime("%Y-%m-%d"),
    }


def save(found: Any, output: Path | None) -> None:
    """All of it or nothing: a run that is interrupted goes on with what was there. None: nowhere."""
    from gs_compile.planner.measure.machines import write_whole

    if output is not None:
        write_whole(output, json.dumps(found, indent=1, default=str) + "\n")


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Rows of cells as Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)


def gains(found: StepPlan) -> dict[str, str]:
    """What limits a plan's step, and what more of it would bring; without what would bring nothing."""
    pairs = (each.rpartition(": ") for each in found.binding)
    return {what: gain for what, _, gain in pairs if gain != "nothing"}


# Models and steps -----------------------------------------------------------------------------------------------------


def gpt2(
    layers: int, hidden: int, sequence: int, vocabulary: int = 50257, *, seed: int = 0, **fields: Any
) -> GPT2LMHeadModel:
    """A GPT-2 in training, with heads of 64, and the values that a seed draws. fields: others of its config."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(seed)
    sizes = {"n_layer": layers, "n_embd": hidden, "n_head": hidden // 64, "n_positions": sequence}
    rest = {"vocab_size": vocabulary, "use_cache": False, "bos_token_id": 0, "eos_token_id": 0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**{**sizes, **rest, **fields})).train()


def step(model: Any, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> torch.Tensor:
    """A step of a language model; its loss."""
    loss: torch.Tensor = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def library(*modules: ModuleType) -> torch.Tensor:
    """A text to learn: the bytes of Python's own library, of the folders that these modules are in."""
    import torch

    folders = (Path(module.__file__ or "").parent for module in modules)
    sources = sorted(path for folder in folders for path in folder.glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in sources)), dtype=torch.uint8).long()


def sample(text: torch.Tensor, size: int, sequence: int, generator: torch.Generator) -> torch.Tensor:
    """Pieces of a text, (size, sequence)."""
    import torch

    starts = torch.randint(len(text) - sequence, (size,), generator=generator)
    return torch.stack([text[start : start + sequence] for start in starts.tolist()])


# Measuring ------------------------------------------------------------------------------------------------------------


def in_turns(rounds: int, works: Mapping[str, Callable[[], T]]) -> dict[str, list[T]]:
    """What each work gives, round by round; they take turns in being first."""
    found: dict[str, list[T]] = {name: [] for name in works}
    for number in range(rounds):
        for name in list(works)[:: -1 if number % 2 else 1]:
            gc.collect()
            found[name].append(works[name]())
    return found


def medians(found: Mapping[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(values) for name, values in found.items()}


def ratio_of_rounds(one: list[float], other: list[float]) -> float:
    """The median of the rounds' ratios: what stands next to each other in time is compared."""
    return statistics.median(a / b for a, b in zip(one, other, strict=True))


def memory_nbytes(name: str) -> int:
    """The bytes that the kernel counts of this process: "VmRSS", what it holds now; "VmHWM", the most it has held."""
    found = re.findall(rf"^{name}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(found[0]) << 10


def reset_peak() -> None:
    """The most that this process has held is what it holds now."""
    Path("/proc/self/clear_refs").write_text("5")


def in_process(module: str, *arguments: object, environment: Mapping[str, str] | None = None) -> Any:
    """What a benchmark prints last, as JSON, in a process of its own with these arguments."""
    command = [sys.executable, "-m", module, *map(str, arguments)]
    given = {**os.environ, **(environment or {})}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=given)
    return json.loads(done.stdout.strip().splitlines()[-1])
