"""The head and its loss in pieces of tokens beside all tokens at a time: memory and time of one forward and backward.

Each measurement is a process of its own: what is alive at most beyond the head's parameters, their gradient and x, as
the kernel counts it, beside what a plan counts; and processor seconds. The gradients of both have to agree.

    python -m benchmarks.pieces --tokens 8192 --output benchmarks/results/pieces.json
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

import torch
import transformers

from benchmarks.common import conditions, in_process, memory_nbytes, parser_of, reset_peak, save
from gs_compile.capture.call import captured_call
from gs_compile.capture.inductor import Generator
from gs_compile.capture.off_meta import off_meta
from gs_compile.codegen.compiled import Compilation
from gs_compile.codegen.pieces import LEAST, InPieces
from gs_compile.options import Options

MIB = 2**20


def code_of(arguments: argparse.Namespace) -> InPieces:
    """The code of the head of a Llama, its x [1, tokens, width]."""
    config = transformers.LlamaConfig(
        hidden_size=arguments.width,
        intermediate_size=4 * arguments.width,
        num_hidden_layers=2,
        num_attention_heads=arguments.width // 64,
        num_key_value_heads=arguments.width // 64,
        vocab_size=arguments.vocabulary,
        max_position_embeddings=arguments.tokens,
        use_cache=False,
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
        ids = torch.zeros(2, arguments.tokens, dtype=torch.long)
    captured, sizes = captured_call(model, {"input_ids": ids, "labels": ids})
    compilation = Compilation(captured, Options.of({"outputs": "loss"}))
    units = compilation.specialized(1, sizes, alone=False).split.units
    generator = Generator(arguments.compiler)
    return InPieces(off_meta(units[-1]), generator, None, (), arguments.piece)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """In this process: one call to warm up on a part of the memory it takes, and one that counts."""
    torch.set_num_threads(arguments.threads)
    code = code_of(arguments)
    function = code.function("both")
    torch.manual_seed(0)
    inputs = []
    for spec in code.unit.specs:
        if spec.dtype.is_floating_point:
            inputs.append(torch.randn(spec.shape) * 0.02 if spec.shape else torch.tensor(float(arguments.tokens)))
        else:
            inputs.append(torch.randint(0, arguments.vocabulary, spec.shape))
    results = code.unit.results
    before = memory_nbytes("VmRSS")
    reset_peak()
    wall, start = time.perf_counter(), time.process_time()
    with torch.no_grad():
        outcome = [each if isinstance(each, torch.Tensor) else each.dense() for each in function(*inputs)]
    seconds = time.process_time() - start
    wall = time.perf_counter() - wall
    gradients = [
        gradient.nbytes
        for index, gradient in zip(code.unit.differentiable, outcome[len(results) :], strict=True)
        if code.unit.sources[index].kind == "input"
    ]
    planned = code.cost("both").nbytes
    return {
        "tokens_per_piece": code.tokens_per_piece,
        "peak_mib": (memory_nbytes("VmHWM") - before - sum(gradients)) / MIB,
        "planned_mib": (planned - sum(gradients)) / MIB,
        "cpu_seconds": seconds,
        "seconds": wall,
        "loss": float(outcome[0]),
        "norms": [float(each.double().norm()) for each in outcome[1:]],
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--vocabulary", type=int, default=151936)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--compiler", choices=("inductor", "eager"), default="inductor")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--piece", type=int, help="tokens of a piece, 0: all; without it both are run")
    arguments = parser.parse_args()
    if arguments.piece is not None:
        print(json.dumps(measure(arguments)))
        return
    rows = []
    for _ in range(arguments.rounds):
        for piece in (LEAST, 0):
            rows.append(in_process("benchmarks.pieces", *sys.argv[1:], "--piece", piece))
            print(json.dumps(rows[-1]), flush=True)
    command = " ".join(["python -m benchmarks.pieces", *sys.argv[1:]])
    save({**conditions(), "command": command, "rows": rows}, arguments.output)


if __name__ == "__main__":
    main()
