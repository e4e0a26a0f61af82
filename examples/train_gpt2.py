"""Train a byte-level GPT-2 (about 10 M parameters) on English prose, layer by layer over micro-batches.

The prose is the help text that ships with every CPython. With --check, the gradients of the first step are compared
with plain PyTorch's first.

    python examples/train_gpt2.py --check
"""

from __future__ import annotations

import argparse
import copy
import pydoc_data.topics
import sys
import time

import torch
from tqdm import trange
from transformers import GPT2Config, GPT2LMHeadModel

SEQUENCE = 128
BATCH = 16
MICRO_BATCH = 4


def text_as_bytes() -> torch.Tensor:
    prose = "\n".join(pydoc_data.topics.topics.values())
    return torch.tensor(list(prose.encode()), dtype=torch.long)


def build() -> GPT2LMHeadModel:
    sizes = {"vocab_size": 256, "n_positions": SEQUENCE, "n_embd": 384, "n_layer": 6, "n_head": 6}
    return GPT2LMHeadModel(GPT2Config(**sizes, use_cache=False, bos_token_id=0, eos_token_id=0))


def sample(text: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    starts = torch.randint(len(text) - SEQUENCE, (BATCH,), generator=generator)
    return torch.stack([text[start : start + SEQUENCE] for start in starts.tolist()])


def check(model: GPT2LMHeadModel, options: dict[str, object], ids: torch.Tensor) -> float:
    """The largest relative difference of a gradient from plain PyTorch's, dropout off."""
    plain, ours = copy.deepcopy(model).eval(), copy.deepcopy(model).eval()
    ours.compile(backend="greedysnake", options=options)
    for one in (plain, ours):
        one(input_ids=ids, labels=ids).loss.backward()
    pairs = zip(plain.parameters(), ours.parameters(), strict=True)
    return max(float((p.grad - q.grad).norm() / p.grad.norm()) for p, q in pairs)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--check", action="store_true", help="compare the first step's gradients with plain PyTorch")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    text, model = text_as_bytes(), build()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(
        f"{parameters / 1e6:.1f} M parameters, {len(text) / 1e3:.0f} kB of text, {BATCH // MICRO_BATCH} micro-batches"
    )
    options = {"micro_batch_size": MICRO_BATCH, "outputs": "loss"}

    if arguments.check:
        difference = check(model, options, sample(text, generator))
        print(f"gradients differ from plain PyTorch's by {difference:.1e} at most (relative norm per parameter)")
        if not difference < 1e-5:
            print("that is more than rounding: please report it", file=sys.stderr)
            return 1

    model.compile(backend="greedysnake", options=options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model.train()
    losses, start = [], time.perf_counter()
    with trange(arguments.steps, unit="step") as bar:
        for step in bar:
            ids = sample(text, generator)
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if step == 0:
                start = time.perf_counter()  # the first step compiles
            else:
                speed = step * BATCH * SEQUENCE / (time.perf_counter() - start)
                bar.set_postfix_str(f"loss {losses[-1]:.3f}, {speed:.0f} tokens/s")
    first, last = losses[0], sum(losses[-10:]) / len(losses[-10:])
    print(f"loss {first:.3f} at the first step, {last:.3f} over the last ten")
    return 0


if __name__ == "__main__":
    sys.exit(main())
