"""Train a byte-level GPT-2 (about 10 M parameters) on English prose, with parameters, checkpoints and states on SSD.

The prose is the help text that ships with every CPython. The model is small, so that plain PyTorch can be compared:
with --check, plain PyTorch takes the first steps as well. The script removes all its files from the storage.

    python examples/train_gpt2.py --check  4 minutes, 88 MiB in the budget, loss 5.52 to 3.2
    python examples/train_gpt2.py --storage /path/on/an/nvme/drive
    torchrun --nproc-per-node 2 examples/train_gpt2.py  # one model, half of it on each rank, each with its own batches

Measured 2026-11-25 on 2 cores: wall-clock time, and the losses of the first step and of the last ten.
"""

from __future__ import annotations

import argparse
import copy
import gc
import os
import pydoc_data.topics
import sys
import tempfile
import time
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import GPT2Config, GPT2LMHeadModel

import gs_compile
from gs_compile.machine import format_bytes

RANK = int(os.environ.get("RANK", 0))
SEQUENCE = 128
BATCH = 16
MICRO_BATCH = 4
HOST_MEMORY = "88MiB"  # parameters, gradients and moments take 165 MiB
LEARNING_RATE = 1e-3
CHECKED_STEPS = 3
GRADIENTS_APART = 1e-5  # rounding of sums in another order
LEARNED_APART = 1e-3  # Adam divides a gradient by its size: where it is nearly zero, its rounding counts in full


def text_as_bytes() -> torch.Tensor:
    prose = "\n".join(pydoc_data.topics.topics.values())
    return torch.tensor(list(prose.encode()), dtype=torch.long)


def build() -> GPT2LMHeadModel:
    sizes = {"vocab_size": 256, "n_positions": SEQUENCE, "n_embd": 384, "n_layer": 6, "n_head": 6}
    return GPT2LMHeadModel(GPT2Config(**sizes, use_cache=False, bos_token_id=0, eos_token_id=0))


def sample(text: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    starts = torch.randint(len(text) - SEQUENCE, (BATCH,), generator=generator)
    return torch.stack([text[start : start + SEQUENCE] for start in starts.tolist()])


def options(storage: Path) -> dict[str, object]:
    """Everything lives on SSD; by default, what fits into host memory would stay there, and this model fits."""
    ratios = {"parameter": 0.0, "checkpoint": 0.0, "optimizer": 0.0}
    return {
        "micro_batch_size": MICRO_BATCH,
        "outputs": "loss",
        "storage": storage,
        "host_memory": HOST_MEMORY,
        "expert": {"ratios": ratios, "alpha": 0.25},
    }


def step(model: GPT2LMHeadModel, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> float:
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def check(model: GPT2LMHeadModel, storage: Path, batches: list[torch.Tensor]) -> tuple[float, float]:
    """How far we are from plain PyTorch, dropout off: in the first step's gradients, and in the parameters at the end.

    Gradients of parameters on the tiers are never in p.grad. They are read off the first moment, which after one step
    is 1 - beta1 times the gradient. Both are relative: to each gradient's norm, and to that of what was learned.
    """
    plain, ours = copy.deepcopy(model).eval(), copy.deepcopy(model).eval()
    theirs = torch.optim.AdamW(plain.parameters(), lr=LEARNING_RATE)
    optimizer = gs_compile.AdamW(ours.parameters(), lr=LEARNING_RATE)
    ours.compile(backend="greedysnake", options=options(storage))
    gradients = 0.0
    for number, ids in enumerate(batches):
        step(plain, theirs, ids)
        step(ours, optimizer, ids)
        if number == 0:
            moments = ([s["exp_avg"] for s in o.state_dict()["state"].values()] for o in (theirs, optimizer))
            gradients = max(float((p - q).norm() / p.norm()) for p, q in zip(*moments, strict=True))
    start, wanted, found = (flat(each.state_dict()) for each in (model, plain, ours))
    return gradients, float((found - wanted).norm() / (wanted - start).norm())


def flat(state: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([value.flatten() for value in state.values()])


def train(model: GPT2LMHeadModel, storage: Path, batches: list[torch.Tensor]) -> None:
    optimizer = gs_compile.AdamW(model.parameters(), lr=LEARNING_RATE)
    model.compile(backend="greedysnake", options=options(storage))
    model.train()
    losses, start = [], time.perf_counter()
    with tqdm(batches, unit="step", disable=RANK > 0) as bar:
        for number, ids in enumerate(bar):
            losses.append(step(model, optimizer, ids))
            if number == 0:
                start = time.perf_counter()  # the first step compiles
            else:
                speed = number * BATCH * SEQUENCE / (time.perf_counter() - start)
                bar.set_postfix_str(f"loss {losses[-1]:.3f}, {speed:.0f} tokens/s")
    if RANK:
        return
    first, last = losses[0], sum(losses[-10:]) / len(losses[-10:])
    print(f"loss {first:.3f} at the first step, {last:.3f} over the last ten")
    print(f"\nwhere data is stored:\n{gs_compile.inspect(model).tiers}\n\nthe last step, lane by lane:")
    assert optimizer.last_step is not None
    for lane, total in optimizer.last_step.lanes.items():
        print(f"  {lane:<9}  {total.seconds:5.2f} s busy  {format_bytes(total.nbytes):>9}")


def run(storage: Path, num_steps: int, checked: bool) -> int:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(RANK)
    text, model = text_as_bytes(), build()
    numbers = sum(parameter.numel() for parameter in model.parameters()) / 1e6, len(text) / 1e3, BATCH // MICRO_BATCH
    if not RANK:
        print("{:.1f} M parameters, {:.0f} kB of text, {} micro-batches".format(*numbers))
    if checked:
        gradients, learned = check(model, storage, [sample(text, generator) for _ in range(CHECKED_STEPS)])
        print(f"gradients differ from plain PyTorch's by {gradients:.1e} at most (relative norm per parameter)")
        print(f"what {CHECKED_STEPS} steps have learned differs by {learned:.1e} (relative norm of all parameters)")
        if not (gradients < GRADIENTS_APART and learned < LEARNED_APART):
            print("that is more than rounding: please report it", file=sys.stderr)
            return 1
        gc.collect()  # the checked model ends, and its files with it: a storage directory serves one run at a time
    train(model, storage, [sample(text, generator) for _ in range(num_steps)])
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--storage", type=Path, help="a directory on an SSD (default: a temporary one)")
    parser.add_argument("--check", action="store_true", help="compare gradients and parameters with plain PyTorch's")
    arguments = parser.parse_args()
    if arguments.check and "RANK" in os.environ:
        parser.error("--check is for one process: plain PyTorch has all samples in one")
    with tempfile.TemporaryDirectory() as temporary:
        status = run(arguments.storage or Path(temporary), arguments.steps, arguments.check)
        gc.collect()
    return status


if __name__ == "__main__":
    sys.exit(main())
