"""A LoRA step over frozen matrices in a codec beside the same over bf16, with everything on a drive that binds.

Each run: a model of GPT-2's shape with frozen bf16 matrices and adapters of rank 16, all of it on SSD, a batch of one
micro-batch. A run with the codec's bytes in host memory has to give the same losses, bit for bit. Before that, what
decoding takes: nanoseconds of a core for each element. Linux, as root: the drive is slowed by `slow_drive`.

    python -m benchmarks.frozen --drive-bytes-per-second 200e6 --output benchmarks/results/frozen.json
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import tempfile
import time
from collections.abc import Mapping
from typing import Any

import peft
import torch

import gs_compile
from benchmarks.common import IN_MEMORY, ON_SSD, conditions, gpt2, parser_of, save, setting_of, step
from benchmarks.slow_drive import add_drive_argument, rates_of, slowed
from gs_compile.runtime.codecs import CODECS

SHAPES = {"gpt2": (12, 768), "gpt2-medium": (24, 1024), "gpt2-xl": (48, 1600)}  # layers, width


def built(shape: str, tokens: int) -> Any:
    with contextlib.ExitStack() as stack:
        torch.set_default_dtype(torch.bfloat16)
        stack.callback(torch.set_default_dtype, torch.float32)
        model = gpt2(*SHAPES[shape], tokens)
    adapters = peft.LoraConfig(r=16, target_modules=["c_attn", "c_proj", "c_fc"], fan_in_fan_out=True)
    return peft.get_peft_model(model, adapters)


def run(
    arguments: argparse.Namespace, frozen: str | None, ratios: Mapping[str, float], rates: tuple[float, float] | None
) -> dict[str, Any]:
    """Losses and the median step, without the first; rates: of the drive, once the model is on it."""
    torch._dynamo.reset()
    model = built(arguments.shape, arguments.tokens)
    optimizer = gs_compile.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-3)
    losses, seconds = [], []
    with tempfile.TemporaryDirectory(dir=arguments.storage) as storage, contextlib.ExitStack() as stack:
        options = {
            "outputs": "loss",
            "storage": storage,
            "host_memory": arguments.host_memory,
            "frozen": frozen,
            "expert": {"compiler": arguments.compiler, "ratios": ratios, "recompute": "all", "alpha": 0.0},
        }
        model.compile(backend="greedysnake", options=options)
        for number in range(1 + arguments.steps):
            ids = torch.randint(0, 50257, (1, arguments.tokens), generator=torch.Generator().manual_seed(number))
            begin = time.perf_counter()
            loss = step(model, optimizer, ids)
            optimizer.synchronize()
            losses.append(loss.item())
            seconds.append(time.perf_counter() - begin)
            if number == 0 and rates is not None:
                stack.enter_context(slowed(storage, read=rates[0], write=rates[1]))
        lanes = optimizer.last_step.lanes
        read = lanes["ssd_read"].nbytes if "ssd_read" in lanes else 0
        del model, optimizer
    return {"losses": losses, "seconds": statistics.median(seconds[1:]), "ssd_read_nbytes": read}


def decoding(numel: int = 1 << 24) -> dict[str, float]:
    """Nanoseconds of CPU time for each bfloat16."""
    found = {}
    for name, codec in CODECS.items():
        shape = (numel // 4096, 4096)
        stored = codec.encode(torch.randn(shape))
        codec.decode(stored, shape, torch.bfloat16)
        begin = time.process_time()
        codec.decode(stored, shape, torch.bfloat16)
        found[name] = 1e9 * (time.process_time() - begin) / numel
    return found


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="gpt2-xl")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--codecs", nargs="+", choices=CODECS, default=["nf4"])
    parser.add_argument("--compiler", default="eager")
    parser.add_argument("--host-memory", default="4GiB")
    parser.add_argument("--storage", default=tempfile.gettempdir())
    add_drive_argument(parser)
    arguments = parser.parse_args()
    rates = rates_of(arguments)
    found: dict[str, Any] = {
        **conditions(),
        "setting": setting_of(arguments),
        "drive_bytes_per_second": rates,
        "decoding_ns": decoding(),
        "bf16": run(arguments, None, ON_SSD, rates),
    }
    for name in arguments.codecs:
        found[name] = run(arguments, name, ON_SSD, rates)
        resident = run(arguments, name, IN_MEMORY, None)
        found[name]["equal_to_resident"] = resident["losses"] == found[name]["losses"]
        found[name]["resident_seconds"] = resident["seconds"]
        found[name]["times_as_fast"] = found["bf16"]["seconds"] / found[name]["seconds"]
    print(json.dumps(found, indent=1))
    save(found, arguments.output)


if __name__ == "__main__":
    main()
