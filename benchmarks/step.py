"""Step time and peak memory of the resident step against plain PyTorch, side by side in one run.

Plain: the same model with per-layer activation checkpointing and gradient accumulation over the same micro-batches,
compiled by the same inner compiler. Time is the median over rounds in which the two run one after the other; memory is
the peak resident set of a process of its own for each, over what it held before the model was built.

    python -m benchmarks.step --compiler eager inductor --output benchmarks/results/step-cpu.json
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import GPT2LMHeadModel

from benchmarks.common import (
    NO_DROPOUT,
    conditions,
    gpt2,
    in_process,
    in_turns,
    medians,
    memory_nbytes,
    parser_of,
    reset_peak,
    save,
    setting_of,
)
from benchmarks.race.plain import accumulate, checkpoint_blocks
from gs_compile.model.backend import greedysnake

# Memory goes back to the system when it is freed, so that the resident set is what is in use.
GIVES_BACK = {"MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "2"}


def build(arguments: argparse.Namespace) -> GPT2LMHeadModel:
    return gpt2(arguments.layers, arguments.hidden, arguments.sequence, **NO_DROPOUT)


def batch(arguments: argparse.Namespace) -> torch.Tensor:
    size = arguments.micro_batch_size * arguments.micro_batches
    return torch.randint(0, 50257, (size, arguments.sequence), generator=torch.Generator().manual_seed(1))


def plain_step(arguments: argparse.Namespace, compiler: str) -> Callable[[], float]:
    model = build(arguments)
    checkpoint_blocks(model, {})
    if compiler == "inductor":
        model.compile()
    micro_batches = batch(arguments).split(arguments.micro_batch_size)

    def step() -> float:
        model.zero_grad()
        return accumulate(model, micro_batches)

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
    seconds = in_turns(arguments.rounds, {name: partial(seconds_of, step) for name, step in steps.items()})
    middle = medians(seconds)
    return {
        "seconds": seconds,
        "median_seconds": middle,
        "time_ratio": middle["greedysnake"] / middle["plain"],
        "losses": losses,
    }


def seconds_of(step: Callable[[], float]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def measure_memory(arguments: argparse.Namespace, compiler: str) -> dict[str, Any]:
    peaks = {}
    for name in STEPS:
        asked = (*sys.argv[1:], "--only", name, "--compiler", compiler)
        peaks[name] = in_process("benchmarks.step", *asked, environment=GIVES_BACK)
    size = arguments.micro_batch_size * arguments.micro_batches
    stored = (arguments.layers + 1) * size * arguments.sequence * arguments.hidden * 4
    return {
        "peak_bytes": peaks,
        "stored_layer_inputs_bytes": stored,
        "memory_ratio": (peaks["greedysnake"] - stored) / peaks["plain"],
    }


def peak_of_one(arguments: argparse.Namespace, name: str, compiler: str) -> int:
    """The peak resident bytes of two warm steps, over the process before the model."""
    before = memory_nbytes("VmRSS")
    step = STEPS[name](arguments, compiler)
    step()
    gc.collect()
    reset_peak()
    step()
    step()
    return memory_nbytes("VmHWM") - before


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--micro-batch-size", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--compiler", nargs="+", default=["eager", "inductor"])
    parser.add_argument("--only", choices=list(STEPS), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.only:
        print(peak_of_one(arguments, arguments.only, arguments.compiler[0]))
        return
    results: dict[str, Any] = {**conditions(), "setting": setting_of(arguments)}
    for compiler in arguments.compiler:
        results[compiler] = {**measure_time(arguments, compiler), **measure_memory(arguments, compiler)}
        ratios = {k: round(results[compiler][k], 3) for k in ("time_ratio", "memory_ratio")}
        print(compiler, ratios, results[compiler]["median_seconds"], results[compiler]["peak_bytes"])
    save(results, arguments.output)


if __name__ == "__main__":
    main()
