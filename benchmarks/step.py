"""Step time and peak memory of the resident step against plain PyTorch, side by side in one run.

Plain: the same model with per-layer activation checkpointing and gradient accumulation over the same micro-batches,
compiled by the same inner compiler. Time is the median over rounds in which the two run one after the other; memory is
the peak resident set of a process of its own for each, over what it held before the model was built.

    python benchmarks/step.py --compiler eager inductor --output benchmarks/results/step-cpu.json
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import GPT2Config, GPT2LMHeadModel

from gs_compile.model.backend import greedysnake


def build(arguments: argparse.Namespace) -> GPT2LMHeadModel:
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=arguments.layers,
        n_embd=arguments.hidden,
        n_head=8,
        n_positions=arguments.sequence,
        use_cache=False,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return GPT2LMHeadModel(config).train()


def batch(arguments: argparse.Namespace) -> torch.Tensor:
    size = arguments.micro_batch_size * arguments.micro_batches
    return torch.randint(0, 50257, (size, arguments.sequence), generator=torch.Generator().manual_seed(1))


def plain_step(arguments: argparse.Namespace, compiler: str) -> Callable[[], float]:
    model = build(arguments)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if compiler == "inductor":
        model.compile()
    slices = batch(arguments).split(arguments.micro_batch_size)

    def step() -> float:
        model.zero_grad()
        total = 0.0
        for ids in slices:
            loss = model(input_ids=ids, labels=ids).loss / len(slices)
            loss.backward()
            total += loss.item()
        return total

    return step


def greedysnake_step(arguments: argparse.Namespace, compiler: str) -> Callable[[], float]:
    model = build(arguments)
    options = {
        "micro_batch_size": arguments.micro_batch_size,
        "outputs": "loss",
        "expert": {"compiler": compiler},
    }
    model.compile(backend=greedysnake, options=options)
    ids = batch(arguments)

    def step() -> float:
        model.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        return float(loss.item())

    return step


STEPS = {"plain": plain_step, "greedysnake": greedysnake_step}


def measure_time(arguments: argparse.Namespace, compiler: str) -> dict[str, Any]:
    steps = {name: make(arguments, compiler) for name, make in STEPS.items()}
    losses = {name: step() for name, step in steps.items()}  # also compiles
    for step in steps.values():
        step()
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(arguments.rounds):
        for name, step in steps.items():
            gc.collect()
            start = time.perf_counter()
            step()
            seconds[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        "seconds": seconds,
        "median_seconds": medians,
        "time_ratio": medians["greedysnake"] / medians["plain"],
        "losses": losses,
    }


def measure_memory(arguments: argparse.Namespace, compiler: str) -> dict[str, Any]:
    peaks = {}
    for name in STEPS:
        command = [sys.executable, __file__, *sys.argv[1:], "--only", name, "--compiler", compiler]
        done = subprocess.run(command, check=True, capture_output=True, text=True, env=_environment())
        peaks[name] = int(done.stdout.strip().splitlines()[-1])
    size = arguments.micro_batch_size * arguments.micro_batches
    stored = (arguments.layers + 1) * size * arguments.sequence * arguments.hidden * 4
    return {
        "peak_bytes": peaks,
        "stored_layer_inputs_bytes": stored,
        "memory_ratio": (peaks["greedysnake"] - stored) / peaks["plain"],
    }


def _environment() -> dict[str, str]:
    """Memory goes back to the system when it is freed, so that the resident set is what is in use."""
    return {**os.environ, "MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "2"}


def peak_of_one(arguments: argparse.Namespace, name: str, compiler: str) -> int:
    """The peak resident bytes of two warm steps, over the process before the model."""
    before = _status("VmRSS")
    step = STEPS[name](arguments, compiler)
    step()
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM to the present
    step()
    step()
    return _status("VmHWM") - before


def _status(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--micro-batch-size", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--compiler", nargs="+", default=["eager", "inductor"])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--only", choices=list(STEPS), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.only:
        print(peak_of_one(arguments, arguments.only, arguments.compiler[0]))
        return
    results: dict[str, Any] = {
        "machine": {"processor": platform.processor() or platform.machine(), "threads": torch.get_num_threads()},
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "setting": {k: v for k, v in vars(arguments).items() if k not in ("output", "only", "compiler")},
    }
    for compiler in arguments.compiler:
        results[compiler] = {**measure_time(arguments, compiler), **measure_memory(arguments, compiler)}
        ratios = {k: round(results[compiler][k], 3) for k in ("time_ratio", "memory_ratio")}
        print(compiler, ratios, results[compiler]["median_seconds"], results[compiler]["peak_bytes"])
    if arguments.output:
        arguments.output.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
