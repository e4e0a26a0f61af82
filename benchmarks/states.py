"""What is learned with optimizer states in bfloat16 and in 8 bits, beside float32: the losses of each run, by step.

A small GPT-2 learns the bytes of Python's own library. All runs have the same values at first and the same batches;
parameters are computed with in bf16, masters are fp32.

    python -m benchmarks.states --output benchmarks/results/states.json
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile

import torch

import gs_compile
from benchmarks.common import (
    IN_MEMORY,
    NO_DROPOUT,
    conditions,
    gpt2,
    library,
    parser_of,
    sample,
    save,
    setting_of,
    step,
)
from gs_compile.runtime.formats import StateType

STATES: dict[str, StateType] = {"float32": None, "bfloat16": torch.bfloat16, "8bit": "8bit"}


def losses(arguments: argparse.Namespace, state_dtype: StateType, storage: str) -> list[float]:
    torch._dynamo.reset()
    fields = {"n_head": arguments.hidden // 32, **NO_DROPOUT}
    model = gpt2(arguments.layers, arguments.hidden, arguments.sequence, 256, **fields)
    optimizer = gs_compile.AdamW(model.parameters(), lr=1e-3, max_grad_norm=1.0, state_dtype=state_dtype)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 50))
    expert = {"compiler": "eager", "ratios": IN_MEMORY}
    options = {"micro_batch_size": 8, "outputs": "loss", "storage": storage, "precision": "bf16", "expert": expert}
    model.compile(backend="greedysnake", options=options)
    data, generator, found = library(asyncio), torch.Generator().manual_seed(1), []
    for _ in range(arguments.steps):
        found.append(round(float(step(model, optimizer, sample(data, 8, arguments.sequence, generator))), 4))
        schedule.step()
    assert optimizer.engine is not None
    optimizer.engine.tiers.close()
    return found


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--sequence", type=int, default=64)
    parser.add_argument("--steps", type=int, default=500)
    arguments = parser.parse_args()
    curves = {}
    for name, state_dtype in STATES.items():
        with tempfile.TemporaryDirectory() as storage:
            curves[name] = losses(arguments, state_dtype, storage)
        parts = [statistics.mean(curves[name][start : start + 50]) for start in range(0, arguments.steps, 50)]
        print(f"{name}: means of 50 steps {[round(mean, 3) for mean in parts]}", flush=True)
    save({**conditions(), "setting": setting_of(arguments), "losses": curves}, arguments.output)


if __name__ == "__main__":
    main()
