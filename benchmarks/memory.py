"""Peak memory of training within a budget of host memory, against the process before the model.

The budget bounds what is on the host tier: parameters, gradients, states and checkpoints. On top come what the process
takes before the model (torch, transformers), and what a layer computes with: activations, and the gradient of one unit
for one micro-batch, which for the embedding is as large as the embedding. Peaks are those of the kernel (VmHWM), reset
after the first step, which traces and moves the parameters home.

    python -m benchmarks.memory --size gpt2-medium --host-memory 1GiB --precision model --storage /path/on/a/drive
    python -m benchmarks.memory --config benchmarks/models/qwen3-4b.json --host-memory 8GiB
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import gs_compile
from benchmarks.common import conditions, memory_nbytes, parser_of, reset_peak, save, setting_of, step
from examples.bigger_than_memory import SIZES, build
from gs_compile.machine import format_bytes, parse_bytes


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    idle = memory_nbytes("VmRSS")
    torch.manual_seed(0)
    start = time.perf_counter()
    model = cast("PreTrainedModel", gs_compile.init_on_storage(lambda: built(arguments), storage=arguments.storage))
    building = time.perf_counter() - start
    numel = sum(parameter.numel() for parameter in model.parameters())
    after_building = memory_nbytes("VmHWM")
    options = {
        "micro_batch_size": 1,
        "outputs": "loss",
        "storage": arguments.storage,
        "host_memory": arguments.host_memory,
        "precision": arguments.precision,
        "expert": {"compiler": arguments.compiler},
    }
    model.compile(backend="greedysnake", options=options)
    optimizer = gs_compile.AdamW(model.parameters(), lr=1e-4)
    generator = torch.Generator().manual_seed(0)
    seconds, losses = [], []
    for number in range(arguments.steps):
        ids = torch.randint(model.config.vocab_size, (arguments.micro_batches, arguments.sequence), generator=generator)
        start = time.perf_counter()
        loss = step(model, optimizer, ids)
        seconds.append(time.perf_counter() - start)
        losses.append(loss.item())
        if number == 0:
            first_step = memory_nbytes("VmHWM")
            gc.collect()
            reset_peak()
    peak = memory_nbytes("VmHWM")
    assert optimizer.engine is not None
    assert optimizer.last_step is not None
    host_nbytes = optimizer.engine.tiers.slab.nbytes
    lanes = {lane: {"seconds": t.seconds, "bytes": t.nbytes} for lane, t in optimizer.last_step.lanes.items()}
    return {
        "parameters": numel,
        "building_seconds": building,
        "budget_bytes": parse_bytes(arguments.host_memory),
        "idle_bytes": idle,
        "peak_while_building_bytes": after_building,
        "peak_with_first_step_bytes": first_step,
        "peak_of_later_steps_bytes": peak,
        "host_tier_peak_bytes": host_nbytes,
        "compute_workspace_bytes": peak - idle - host_nbytes,
        "fp32_adamw_in_memory_bytes": 16 * numel,
        "tiers": gs_compile.inspect(model).tiers.splitlines(),
        "step_seconds": seconds,
        "losses": losses,
        "lanes_of_the_last_step": lanes,
    }


def built(arguments: argparse.Namespace) -> PreTrainedModel:
    """A model of a size, or of a config, with values as they are drawn."""
    if arguments.config is None:
        return build(arguments.size, arguments.sequence)
    config = AutoConfig.for_model(**json.loads(arguments.config.read_text()), use_cache=False)
    return AutoModelForCausalLM.from_config(config).train()


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--size", choices=list(SIZES), default="gpt2-medium")
    parser.add_argument("--config", type=Path, help="a model by a config of transformers, in the place of --size")
    parser.add_argument("--host-memory", default="1GiB")
    parser.add_argument("--precision", choices=("model", "bf16"), default="model")
    parser.add_argument("--compiler", choices=("auto", "inductor", "eager"), default="eager")
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--micro-batches", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--storage", type=Path, default=Path.home() / ".cache/greedysnake")
    arguments = parser.parse_args()
    result = {**conditions(), "setting": setting_of(arguments), **measure(arguments)}
    for key, value in result.items():
        print(f"{key}: {format_bytes(value) if key.endswith('_bytes') else value}")
    save(result, arguments.output)


if __name__ == "__main__":
    main()
