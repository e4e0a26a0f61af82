"""The seconds of a compilation over the number of layers: Dynamo's tracing, our passes, the layers' code.

Layers of one class are compiled once, so the third must not grow. Each depth runs in a process of its own with
inductor's caches off.

    python -m benchmarks.compilation --output benchmarks/results/compilation-cpu.json
"""

from __future__ import annotations

import argparse
import json
import time

import torch

from benchmarks.common import conditions, gpt2, in_process, parser_of, save, setting_of
from gs_compile.codegen.compiled import compilations_of

CACHES_OFF = {"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}


def measure(layers: int, compiler: str) -> dict[str, float]:
    model = gpt2(layers, 256, 128, 1024)
    options = {"outputs": "loss", "expert": {"compiler": compiler}}
    model.compile(backend="greedysnake", options=options)
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
    parser = parser_of(__doc__)
    parser.add_argument("--depths", type=int, nargs="+", default=[6, 48])
    parser.add_argument("--compiler", default="inductor")
    parser.add_argument("--only", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.only:
        print(json.dumps(measure(arguments.only, arguments.compiler)))
        return
    results = {}
    for depth in arguments.depths:
        asked = ("--only", depth, "--compiler", arguments.compiler)
        results[depth] = in_process("benchmarks.compilation", *asked, environment=CACHES_OFF)
        print(f"{depth} layers: seconds", {k: round(v, 2) for k, v in results[depth].items()})
    shallow, deep = results[arguments.depths[0]], results[arguments.depths[-1]]
    ratio = deep["layer_code"] / shallow["layer_code"]
    print(f"layer code, {arguments.depths[-1]} layers against {arguments.depths[0]}: {ratio:.2f} x")
    found = {**conditions(), "setting": setting_of(arguments), "seconds": results, "layer_code_ratio": ratio}
    save(found, arguments.output)


if __name__ == "__main__":
    main()
