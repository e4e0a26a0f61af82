"""CPU seconds to the end of a first step: a tiny GPT-2, or GPT-2, with torch.compile's inductor, and with this backend.

Each runs in a process of its own, first without inductor's caches on disk, then with those that it has left. Seconds
are of the process and of the C++ compilers that it starts, with one thread, and without imports and the model.

    python benchmarks/first_step.py --output benchmarks/results/first_step.json
    python benchmarks/first_step.py --size gpt2 --backends "greedysnake on SSD"
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

BOUND = 2.0  # of the seconds that torch.compile takes
BACKENDS = ("inductor", "greedysnake", "greedysnake on SSD")
SIZES = {  # fields of GPT2Config, and the lengths of the steps
    "tiny": ({"n_layer": 4, "n_embd": 128, "n_head": 4, "n_positions": 128, "vocab_size": 1024}, (64, 48, 57, 33)),
    "gpt2": ({}, (128, 128)),
}


def cpu_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def measure(backend: str, size: str) -> dict[str, float]:
    """Seconds to the first step, and then of a step with each of the further lengths."""
    import torch
    import transformers

    import gs_compile

    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    fields, lengths = SIZES[size]
    config = transformers.GPT2Config(**fields, bos_token_id=0, eos_token_id=0)
    model = transformers.GPT2LMHeadModel(config).train()
    with tempfile.TemporaryDirectory() as storage:
        start = cpu_seconds()
        if backend == "inductor":
            optimizer = torch.optim.AdamW(model.parameters())
            model.compile()
        else:
            optimizer = gs_compile.AdamW(model.parameters())
            options = {"micro_batch_size": 2, "outputs": "loss", "storage": storage}
            if backend == "greedysnake on SSD":
                options["expert"] = {"ratios": {"parameter": 0.0, "checkpoint": 0.0, "optimizer": 0.0}, "alpha": 0.0}
            model.compile(backend="greedysnake", options=options)
        found = {}
        for number, length in enumerate(lengths):
            ids = torch.randint(0, config.vocab_size, (4, length))
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found[f"length_{length}" if number else "first_step"] = cpu_seconds() - start
            start = cpu_seconds()
        del model, optimizer
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
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
                command = [sys.executable, __file__, "--size", arguments.size, "--only", backend]
                done = subprocess.run(
                    command, check=True, capture_output=True, text=True, env={**os.environ, **settings}
                )
                found[backend] = json.loads(done.stdout.strip().splitlines()[-1])
                print(f"{caches}, {backend}: CPU seconds", {k: round(v, 1) for k, v in found[backend].items()})
    ratios = {
        f"{caches}, {backend}": found[backend]["first_step"] / found["inductor"]["first_step"]
        for caches, found in seconds.items()
        for backend in found
        if backend != "inductor" and "inductor" in found
    }
    for name, ratio in ratios.items():
        print(f"{name}: {ratio:.2f} x the CPU seconds of torch.compile to a first step (bound {BOUND:g})")
    if arguments.output:
        versions = {"python": platform.python_version()}
        for name in ("torch", "transformers"):
            versions[name] = __import__(name).__version__
        record = {"machine": platform.machine(), "versions": versions, "cpu_seconds": seconds, "ratios": ratios}
        arguments.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
