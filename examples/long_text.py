"""Train on long texts: 8,192 tokens per sample, with less host memory than their activations need.

Long texts need memory for activations. Here the inputs of layers go to SSD, the head runs on some tokens at a time, and
with `layer_tokens` so does everything in a layer except attention. The script creates a small model that reads the
bytes of the help text that ships with every CPython; `--model` uses a checkpoint of transformers and its tokenizer.

    python examples/long_text.py --steps 1  45 s, 0.75 GiB, loss 5.58 at the first step
    python examples/long_text.py
    python examples/long_text.py --model /path/to/a/checkpoint --tokens 32768 --storage /path/on/an/nvme/drive

Measured 2026-11-26 on 2 cores with other work, in eager code: processor seconds (one thread, including imports), the
most memory that the process held, and the loss.
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

SAMPLES = 2  # a step's
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def tokens(path: str | None) -> torch.Tensor:
    prose = "\n".join(pydoc_data.topics.topics.values())
    return torch.tensor(AutoTokenizer.from_pretrained(path)(prose)["input_ids"] if path else list(prose.encode()))


def build(path: str | None, storage: Path, length: int) -> torch.nn.Module:
    if path:
        return gs_compile.from_pretrained(AutoModelForCausalLM, path, storage=storage)
    sizes = {"vocab_size": 256, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, max_position_embeddings=length))


def train(path: str | None, storage: Path, length: int, host_memory: str, num_steps: int) -> None:
    torch.manual_seed(0)
    text, model = tokens(path), build(path, storage, length).to(DEVICE).train()
    optimizer = gs_compile.AdamW(model.parameters(), lr=1e-5 if path else 2e-3, max_grad_norm=1.0)
    on_ssd = {"ratios": {"parameter": 0.0, "checkpoint": 0.0, "optimizer": 0.0}}
    options = {
        "micro_batch_size": 1,
        "outputs": "loss",
        "storage": storage,
        "host_memory": host_memory,
        "expert": {"layer_tokens": 1024, "recompute": "all", **on_ssd},
    }
    model.compile(backend="greedysnake", options=options)
    for step in range(num_steps):
        places = torch.randint(len(text) - length, (SAMPLES,)).tolist()
        ids = torch.stack([text[place : place + length] for place in places]).to(DEVICE)
        start = time.perf_counter()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds = time.perf_counter() - start
        print(f"step {step}: loss {loss.item():.3f}, {seconds:.1f} s, {SAMPLES * length / seconds:.0f} tokens/s")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"peak memory {peak:.2f} GiB, torch and transformers included")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", help="the folder of a checkpoint of transformers (default: a small Llama, untrained)"
    )
    parser.add_argument("--storage", type=Path, help="a directory on a fast SSD (default: a temporary one)")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens per sample")
    parser.add_argument("--host-memory", default="192MiB")
    parser.add_argument("--steps", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.storage) as folder:
        train(arguments.model, Path(folder), arguments.tokens, arguments.host_memory, arguments.steps)


if __name__ == "__main__":
    main()
