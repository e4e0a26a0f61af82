"""What is learned with optimizer states in bfloat16 and in 8 bits, beside float32: the losses of each run, by step.

A small GPT-2 learns the bytes of Python's own library. All runs have the same values at first and the same batches;
parameters are computed with in bf16, masters are fp32.

    python benchmarks/states.py --output benchmarks/results/states.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import gs_compile
from gs_compile.runtime.formats import StateType

STATES: dict[str, StateType] = {"float32": None, "bfloat16": torch.bfloat16, "8bit": "8bit"}


def text() -> torch.Tensor:
    """The bytes of a package of the standard library."""
    sources = sorted(Path(asyncio.__file__).parent.glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in sources)), dtype=torch.uint8).long()


def losses(arguments: argparse.Namespace, state_dtype: StateType, storage: str) -> list[float]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    sizes = {"n_layer": arguments.layers, "n_embd": arguments.hidden, "n_head": arguments.hidden // 32}
    rest = {"vocab_size": 256, "use_cache": False, "bos_token_id": 0, "eos_token_id": 0}
    rest |= dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), 0.0)
    model = GPT2LMHeadModel(GPT2Config(n_positions=arguments.sequence, **sizes, **rest)).train()
    optimizer = gs_compile.AdamW(model.parameters(), lr=1e-3, max_grad_norm=1.0, state_dtype=state_dtype)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 50))
    ratios = dict.fromkeys(("parameter", "checkpoint", "optimizer"), 1.0)
    expert = {"compiler": "eager", "ratios": ratios}
    options = {"micro_batch_size": 8, "outputs": "loss", "storage": storage, "precision": "bf16", "expert": expert}
    model.compile(backend="greedysnake", options=options)
    data, generator, found = text(), torch.Generator().manual_seed(1), []
    for _ in range(arguments.steps):
        starts = torch.randint(len(data) - arguments.sequence, (8,), generator=generator)
        ids = torch.stack([data[start : start + arguments.sequence] for start in starts])
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        found.append(round(float(loss.detach()), 4))
    assert optimizer.engine is not None
    optimizer.engine.tiers.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--sequence", type=int, default=64)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    curves = {}
    for name, state_dtype in STATES.items():
        with tempfile.TemporaryDirectory() as storage:
            curves[name] = losses(arguments, state_dtype, storage)
        parts = [statistics.mean(curves[name][start : start + 50]) for start in range(0, arguments.steps, 50)]
        print(f"{name}: means of 50 steps {[round(mean, 3) for mean in parts]}", flush=True)
    if arguments.output:
        setting = {key: value for key, value in vars(arguments).items() if key != "output"}
        result = {"versions": {"torch": torch.__version__}, "setting": setting, "losses": curves}
        arguments.output.write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
