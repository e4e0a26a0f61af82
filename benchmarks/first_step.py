"""CPU seconds to the end of a first step: a tiny GPT-2, or GPT-2, with torch.compile's inductor, and with this backend.

Each runs in a process of its own, first without inductor's caches on disk, then with those that it has left. Seconds
are of the process and of the C++ compilers that it starts, with one thread, and without imports and the model.

    python -m benchmarks.first_step --output benchmarks/results/first_step.json
    python -m benchmarks.first_step --size gpt2 --backends "greedysnake on SSD"
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile

import torch

import gs_compile
from benchmarks.common import ON_SSD, conditions, gpt2, in_process, parser_of, save, step

BOUND = 2.0  # of the seconds that torch.compile takes
BACKENDS = ("inductor", "greedysnake", "greedysnake on SSD")
SIZES = {  # layers, width, heads, vocabulary, and the lengths of the steps
    "tiny": (4, 128, 4, 1024, (64, 48, 57, 33)),
    "gpt2": (12, 768, 12, 50257, (128, 128)),
}


def cpu_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def measure(backend: str, size: str) -> dict[str, float]:
    """Seconds to the first step, and then of a step with each of the further lengths."""
    layers, width, heads, vocabulary, lengths = SIZES[size]
    model = gpt2(layers, width, max(lengths), vocabulary, n_head=heads)
    with tempfile.TemporaryDirectory() as storage:
        start = cpu_seconds()
        if backend == "inductor":
            optimizer = torch.optim.AdamW(model.parameters())
            model.compile()
        else:
            optimizer = gs_compile.AdamW(model.parameters())
            options = {"micro_batch_size": 2, "outputs": "loss", "storage": storage}
            if backend == "greedysnake on SSD":
                options["expert"] = {"ratios": ON_SSD, "alpha": 0.0}
            model.compile(backend="greedysnake", options=options)
        found = {}
        for number, length in enumerate(lengths):
            step(model, optimizer, torch.randint(0, vocabulary, (4, length)))
            found[f"length_{length}" if number else "first_step"] = cpu_seconds() - start
            start = cpu_seconds()
        del model, optimizer
    return found


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--size", choices=list(SIZES), default="tiny")
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=BACKENDS)
    parser.add_argument("--only", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.only:
        print(json.dumps(measure(arguments.only, arguments.size)))
        return
    seconds: dict[str, dict[str, dict[str, float]]] = {"cold": {}, "warm": {}}
    for backend in arguments.backends:
        with tempfile.TemporaryDirectory() as cache:
            settings = {"TORCHINDUCTOR_CACHE_DIR": cache, "TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"}
            for caches, found in seconds.items():
                asked = ("--size", arguments.size, "--only", backend)
                found[backend] = in_process("benchmarks.first_step", *asked, environment=settings)
                print(f"{caches}, {backend}: CPU seconds", {k: round(v, 1) for k, v in found[backend].items()})
    ratios = {
        f"{caches}, {backend}": found[backend]["first_step"] / found["inductor"]["first_step"]
        for caches, found in seconds.items()
        for backend in found
        if backend != "inductor" and "inductor" in found
    }
    for name, ratio in ratios.items():
        print(f"{name}: {ratio:.2f} x the CPU seconds of torch.compile to a first step (bound {BOUND:g})")
    save({**conditions(), "cpu_seconds": seconds, "ratios": ratios}, arguments.output)


if __name__ == "__main__":
    main()
