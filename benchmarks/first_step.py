"""Seconds to the end of a first step: a tiny GPT-2, or GPT-2, with torch.compile's inductor, and with this backend.

Each runs in a process of its own, first without caches on disk, inductor's and this package's, then with those that it
has left. CPU seconds are of the process and of those that it starts, as C++ compilers; no seconds are of imports or of
the model.

    python -m benchmarks.first_step --output benchmarks/results/first_step.json
    python -m benchmarks.first_step --size gpt2 --threads 2 --output benchmarks/results/first_step-gpt2.json
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time

import torch

import gs_compile
from benchmarks.common import ON_SSD, conditions, gpt2, in_process, parser_of, save, setting_of, step

BOUND = 2.0  # of the seconds that torch.compile takes
BACKENDS = ("inductor", "greedysnake", "greedysnake on SSD")
SIZES = {  # layers, width, heads, vocabulary, and the lengths of the steps
    "tiny": (4, 128, 4, 1024, (64, 48, 57, 33)),
    "gpt2": (12, 768, 12, 50257, (128, 128)),
}


def cpu_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def measure(backend: str, size: str) -> dict[str, dict[str, float]]:
    """Seconds to the first step, and then of a step with each of the further lengths: by the CPU's clock, and all."""
    layers, width, heads, vocabulary, lengths = SIZES[size]
    model = gpt2(layers, width, max(lengths), vocabulary, n_head=heads)
    clocks, found = {"cpu_seconds": cpu_seconds, "seconds": time.perf_counter}, {}
    with tempfile.TemporaryDirectory() as storage:
        before = {name: clock() for name, clock in clocks.items()}
        if backend == "inductor":
            optimizer = torch.optim.AdamW(model.parameters())
            model.compile()
        else:
            optimizer = gs_compile.AdamW(model.parameters())
            options = {"micro_batch_size": 2, "outputs": "loss", "storage": storage}
            if backend == "greedysnake on SSD":
                options["expert"] = {"ratios": ON_SSD, "alpha": 0.0}
            model.compile(backend="greedysnake", options=options)
        for number, length in enumerate(lengths):
            step(model, optimizer, torch.randint(0, vocabulary, (4, length)))
            now = {name: clock() for name, clock in clocks.items()}
            for name, end in now.items():
                key = f"length_{length}" if number else "first_step"
                found.setdefault(name, {})[key] = round(end - before[name], 3)
            before = now
        del model, optimizer
    return found


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--size", choices=list(SIZES), default="tiny")
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=BACKENDS)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.only:
        print(json.dumps(measure(arguments.only, arguments.size)))
        return
    seconds: dict[str, dict[str, dict[str, dict[str, float]]]] = {
        kind: {"cold": {}, "warm": {}} for kind in ("cpu_seconds", "seconds")
    }
    for backend in arguments.backends:
        with tempfile.TemporaryDirectory() as cache:
            settings = {"TORCHINDUCTOR_CACHE_DIR": cache, "TORCHINDUCTOR_COMPILE_THREADS": str(arguments.threads)}
            settings |= {"OMP_NUM_THREADS": str(arguments.threads), "XDG_CACHE_HOME": cache}
            for caches in ("cold", "warm"):
                asked = ("--size", arguments.size, "--only", backend)
                found = in_process("benchmarks.first_step", *asked, environment=settings)
                for kind, each in found.items():
                    seconds[kind][caches][backend] = each
                    print(f"{caches}, {backend}, {kind}:", each)
    ratios = {
        f"{caches}, {backend}": found[backend]["first_step"] / found["inductor"]["first_step"]
        for caches, found in seconds["cpu_seconds"].items()
        for backend in found
        if backend != "inductor" and "inductor" in found
    }
    for name, ratio in ratios.items():
        print(f"{name}: {ratio:.2f} x the CPU seconds of torch.compile to a first step (bound {BOUND:g})")
    save({**conditions(), "setting": setting_of(arguments), **seconds, "ratios": ratios}, arguments.output)


if __name__ == "__main__":
    main()
