"""Train in an existing loop that accumulates over four backwards a step, with everything on SSD.

Only two lines differ from plain PyTorch: the optimizer's and `compile`. The first step detects that there are several
backwards, and starts again. The script creates a small model that reads the bytes of the help text that ships with
every CPython; `--model` uses a checkpoint of transformers and its tokenizer.

    python examples/own_loop.py  65 s, 0.63 GiB, loss 5.57 to 3.19
    python examples/own_loop.py --model /path/to/a/checkpoint --storage /path/on/an/nvme/drive

Measured 2026-11-26 on 2 cores with other work, including the first compilation: processor seconds (one thread,
including imports), the most memory that the process held, and the losses of the first and the last step.
"""

from __future__ import annotations

import argparse
import pydoc_data.topics
import resource
import tempfile
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import gs_compile

SEQUENCE, BATCH, BATCHES_PER_STEP = 128, 8, 4
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def tokens(path: str | None) -> torch.Tensor:
    prose = "\n".join(pydoc_data.topics.topics.values())
    return torch.tensor(AutoTokenizer.from_pretrained(path)(prose)["input_ids"] if path else list(prose.encode()))


def build(path: str | None, storage: Path) -> torch.nn.Module:
    if path:
        return gs_compile.from_pretrained(AutoModelForCausalLM, path, storage=storage)
    sizes = {"vocab_size": 256, "hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 4}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=6, max_position_embeddings=SEQUENCE))


def train(path: str | None, storage: Path, num_steps: int) -> None:
    torch.manual_seed(0)
    text, model = tokens(path), build(path, storage).to(DEVICE).train()
    optimizer = gs_compile.AdamW(model.parameters(), lr=1e-5 if path else 2e-3, max_grad_norm=1.0)
    everything_on_ssd = {"ratios": {"parameter": 0.0, "checkpoint": 0.0, "optimizer": 0.0}}
    options = {"micro_batch_size": 4, "outputs": "loss", "storage": storage, "expert": everything_on_ssd}
    model.compile(backend="greedysnake", options=options)
    start = time.perf_counter()
    for step in range(num_steps):
        total = 0.0
        for _ in range(BATCHES_PER_STEP):
            places = torch.randint(len(text) - SEQUENCE, (BATCH,)).tolist()
            ids = torch.stack([text[place : place + SEQUENCE] for place in places]).to(DEVICE)
            loss = model(input_ids=ids, labels=ids).loss / BATCHES_PER_STEP
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {total:.3f}, {time.perf_counter() - start:.1f} s since the start")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"peak memory {peak:.2f} GiB, torch and transformers included")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", help="the folder of a checkpoint of transformers (default: a small Llama, untrained)"
    )
    parser.add_argument("--storage", type=Path, help="a directory on a fast SSD (default: a temporary one)")
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.storage) as folder:
        train(arguments.model, Path(folder), arguments.steps)


if __name__ == "__main__":
    main()
