"""The head and its loss, or a layer, in pieces of tokens beside all tokens at a time: memory and time of a backward.

Each measurement is a process of its own, where each tensor has memory of its own: what is alive at most beyond what is
given to the code (parameters, x, a layer's dy) and the parameters' gradient, as the kernel counts it, beside what a
plan counts; and seconds. The head runs forward and backward in one go, a layer its forward again and its backward. What
both give is compared, or with `--exact` each with what the whole gives in float64.

    python -m benchmarks.pieces --tokens 8192 --output benchmarks/results/pieces.json
    python -m benchmarks.pieces --unit layer --tokens 32768 --threads 2 --output benchmarks/results/pieces-layer.json
    python -m benchmarks.pieces --unit layer --experts 8 --width 512 --tokens 32768 --vocabulary 1024
"""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

from benchmarks.common import conditions, in_process, memory_nbytes, parser_of, reset_peak, save
from gs_compile.capture.call import captured_call
from gs_compile.capture.inductor import Generator
from gs_compile.capture.off_meta import off_meta
from gs_compile.codegen.compiled import Compilation
from gs_compile.codegen.pieces import LEAST, InPieces
from gs_compile.options import Options
from gs_compile.planner.in_pieces import SIZES

MIB = 2**20
HEAD = 64  # elements of a head of attention
OWN_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "65536"}  # what ends is given back, not held in glibc's heap for others
UNITS = {"head": (-1, "both", LEAST), "layer": (1, "backward", min(SIZES))}  # which, its function, tokens of a piece


class Layer(nn.Module):
    """A layer as GPT-2's, or with experts as Mixtral's; no mask of all pairs of tokens is an input of it."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.read, self.write = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.inner = experts_of(width, experts) if experts else feed_forward(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.read(self.before(x)).unflatten(-1, (3, -1, HEAD)).permute(2, 0, 3, 1, 4).unbind()
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.write(mixed.transpose(1, 2).flatten(-2))
        inner: torch.Tensor = self.inner(self.after(x))
        return x + inner


def feed_forward(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))


def experts_of(width: int, number: int) -> nn.Module:
    """Of which each token has two, with gates, 3.5 times as wide inside."""
    sizes = {"hidden_size": width, "intermediate_size": 7 * width // 2, "num_local_experts": number}
    config = MixtralConfig(**sizes, num_experts_per_tok=2)
    config._experts_implementation = "grouped_mm"
    return MixtralSparseMoeBlock(config)


class Model(nn.Module):
    """Two layers and a head."""

    def __init__(self, width: int, vocabulary: int, experts: int) -> None:
        super().__init__()
        self.words, self.norm = nn.Embedding(vocabulary, width), nn.RMSNorm(width)
        self.layers = nn.ModuleList(Layer(width, experts) for _ in range(2))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def code_of(arguments: argparse.Namespace, tokens: int) -> InPieces:
    """The code of a unit, its x [1, tokens, width]."""
    with torch.device("meta"):
        model = Model(arguments.width, arguments.vocabulary, arguments.experts).to(getattr(torch, arguments.dtype))
        ids = torch.zeros(2, tokens, dtype=torch.long)
    captured, sizes = captured_call(model, {"ids": ids})
    compilation = Compilation(captured, Options.of({"outputs": "loss"}))
    units = compilation.specialized(1, sizes, alone=False).split.units
    generator = Generator(arguments.compiler)
    return InPieces(off_meta(units[UNITS[arguments.unit][0]]), generator, None, (), arguments.piece)


def inputs_of(code: InPieces, name: str, arguments: argparse.Namespace) -> list[torch.Tensor]:
    """Values for a function of the code."""
    torch.manual_seed(0)
    inputs = []
    given = [code.unit.result_specs[index] for index in code.unit.differentiated] if name == "backward" else []
    for spec in (*code.unit.specs, *given):
        if spec.dtype.is_floating_point:
            values = torch.randn(spec.shape) * 0.02 if spec.shape else torch.tensor(float(arguments.tokens))
            inputs.append(values.to(spec.dtype))
        else:
            inputs.append(torch.randint(0, arguments.vocabulary, spec.shape))
    return inputs


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """In this process: two pieces to warm up, where there are pieces, and the call that counts."""
    torch.set_num_threads(arguments.threads)
    name = UNITS[arguments.unit][1]
    if arguments.piece:
        few = code_of(arguments, 2 * arguments.piece)
        with torch.no_grad():
            few.function(name)(*inputs_of(few, name, arguments))
    code = code_of(arguments, arguments.tokens)
    function, inputs = code.function(name), inputs_of(code, name, arguments)
    num_results = len(code.unit.results) if name == "both" else 0
    ctypes.CDLL(None).malloc_trim(0)  # what was freed is given back
    before = memory_nbytes("VmRSS")
    reset_peak()
    wall, start = time.perf_counter(), time.process_time()
    with torch.no_grad():
        outcome = [each if isinstance(each, torch.Tensor) else each.dense() for each in function(*inputs)]
    seconds = time.process_time() - start
    wall = time.perf_counter() - wall
    gradients = [
        gradient.nbytes
        for index, gradient in zip(code.unit.differentiable, outcome[num_results:], strict=True)
        if code.unit.sources[index].kind == "input"
    ]
    x = next(i for i, index in enumerate(code.unit.differentiable) if code.unit.sources[index].kind == "x")
    planned = code.cost(name).nbytes
    if arguments.results:
        torch.save(outcome, arguments.results)
    return {
        "tokens_per_piece": code.tokens_per_piece,
        "peak_mib": (memory_nbytes("VmHWM") - before - sum(gradients)) / MIB,
        "dx_mib": outcome[num_results:][x].nbytes / MIB,  # a result: in the peak, and not in what is planned
        "planned_mib": (planned - sum(gradients)) / MIB,
        "cpu_seconds": seconds,
        "seconds": wall,
    }


def distance(found: torch.Tensor, right: torch.Tensor) -> float:
    """The relative error in the 2-norm."""
    return float((found.double() - right.double()).norm() / right.double().norm())


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--unit", choices=UNITS, default="head")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--vocabulary", type=int, default=151936)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--experts", type=int, default=0, help="of a layer")
    parser.add_argument("--compiler", choices=("inductor", "eager"), default="inductor")
    parser.add_argument("--dtype", default="float32", help=argparse.SUPPRESS)
    parser.add_argument("--exact", action="store_true", help="compare with float64")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--piece", type=int, help="tokens of a piece, 0: all; without it both are run, and compared")
    parser.add_argument("--results", type=Path, help="a file for all that was computed")
    arguments = parser.parse_args()
    if arguments.piece is not None:
        print(json.dumps(measure(arguments)))
        return
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        results = {}

        def run(name: str, *given: object) -> Any:
            file = Path(folder, name)
            found = in_process("benchmarks.pieces", *sys.argv[1:], *given, "--results", file, environment=OWN_MEMORY)
            results[name] = torch.load(file)
            return found

        for _ in range(arguments.rounds):
            for name, piece in (("pieces", UNITS[arguments.unit][2]), ("whole", 0)):
                rows.append(run(name, "--piece", piece))
                print(json.dumps(rows[-1]), flush=True)
        if arguments.exact:
            run("exact", "--piece", 0, "--dtype", "float64")
        right = results.pop("exact" if arguments.exact else "whole")
        apart = {name: max(map(distance, found, right)) for name, found in results.items()}
    print(f"results and gradients differ by {apart}")
    save({**conditions(), "apart": apart, "rows": rows}, arguments.output)


if __name__ == "__main__":
    main()
