"""The seconds of a compilation over the number of layers: Dynamo's tracing, our passes, the layers' code.

Layers of one class are compiled once, so the third must not grow. Each depth runs in a process of its own with
inductor's caches off.

    python benchmarks/compilation.py --output benchmarks/results/compilation-cpu.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

import torch
import transformers


def measure(layers: int, compiler: str) -> dict[str, float]:
    from gs_compile.codegen.compiled import compilations_of
    from gs_compile.model.backend import greedysnake

    transformers.logging.set_verbosity_error()
    config = transformers.GPT2Config(n_layer=layers, n_embd=256, n_head=4, n_positions=128, vocab_size=1024)
    config.bos_token_id = config.eos_token_id = 0
    model = transformers.GPT2LMHeadModel(config).train()
    options = {"outputs": "loss", "expert": {"compiler": compiler}}
    model.compile(backend=greedysnake, options=options)
    ids = torch.randint(0, 1024, (2, 128))
    start = time.perf_counter()
    model(input_ids=ids, labels=ids).loss.backward()
    whole = time.perf_counter() - start
    compilation = compilations_of[next(model.parameters())][0]
    layout = next(iter(compilation.models.values()))
    codes = {id(code): code for code in layout.codes.values()}
    compiled = sum(code.seconds for code in codes.values())
    return {"first_step": whole, "passes": compilation.seconds, "layer_code": compiled, "num_codes": len(codes)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depths", type=int, nargs="+", default=[6, 48])
    parser.add_argument("--compiler", default="inductor")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--only", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.only:
        print(json.dumps(measure(arguments.only, arguments.compiler)))
        return
    results = {}
    for depth in arguments.depths:
        command = [sys.executable, __file__, "--only", str(depth), "--compiler", arguments.compiler]
        caches_off = {**os.environ, "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
        done = subprocess.run(command, check=True, capture_output=True, text=True, env=caches_off)
        results[depth] = json.loads(done.stdout.strip().splitlines()[-1])
        print(f"{depth} layers: seconds", {k: round(v, 2) for k, v in results[depth].items()})
    shallow, deep = results[arguments.depths[0]], results[arguments.depths[-1]]
    ratio = deep["layer_code"] / shallow["layer_code"]
    print(f"layer code, {arguments.depths[-1]} layers against {arguments.depths[0]}: {ratio:.2f} x")
    if arguments.output:
        record = {
            "machine": {"processor": platform.processor() or platform.machine(), "threads": torch.get_num_threads()},
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
            "compiler": arguments.compiler,
            "seconds": results,
            "layer_code_ratio": ratio,
        }
        arguments.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
