"""Teach an encoder-decoder (T5) to put the vowels back into a text, with everything on SSD.

The source is a line of prose without its vowels, the target the line itself, both from the help text that ships with
every CPython. The script creates a small model whose tokens are bytes; `--model` uses a checkpoint of transformers (T5,
BART and similar) and its tokenizer.

    python examples/encoder_decoder.py  44 s, 0.60 GiB, loss 6.31 to 2.27
    python examples/encoder_decoder.py --model /path/to/a/checkpoint --storage /path/on/an/nvme/drive

Measured 2026-11-26 on 2 cores with other work, in eager code: processor seconds (one thread, including imports), the
most memory that the process held, and the losses of the first and the last step.
"""

from __future__ import annotations

import argparse
import pydoc_data.topics
import resource
import tempfile
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, T5Config, T5ForConditionalGeneration

import gs_compile

LENGTH, BATCH, IGNORED = 64, 16, -100
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WITHOUT_VOWELS = str.maketrans("", "", "aeiouAEIOU")


def encoder_of(path: str | None) -> tuple[Callable[[str], list[int]], int]:
    """From a text to its tokens, and the token that fills up; without a checkpoint bytes, moved by one, and 0."""
    if path:
        tokenizer = AutoTokenizer.from_pretrained(path)
        return lambda text: tokenizer(text)["input_ids"], tokenizer.pad_token_id
    return lambda text: [byte + 1 for byte in text.encode()], 0


def samples(path: str | None) -> dict[str, torch.Tensor]:
    """What the model is given of all lines: rows of LENGTH tokens, filled up; labels that are to be ignored say so."""
    encode, padding = encoder_of(path)
    lines = [line for topic in pydoc_data.topics.topics.values() for line in textwrap.wrap(topic, LENGTH)]

    def rows(texts: list[str], filler: int) -> torch.Tensor:
        return torch.tensor([(encode(text) + [filler] * LENGTH)[:LENGTH] for text in texts])

    sources = rows([line.translate(WITHOUT_VOWELS) for line in lines], padding)
    return {"input_ids": sources, "attention_mask": sources != padding, "labels": rows(lines, IGNORED)}


def build(path: str | None, storage: Path) -> torch.nn.Module:
    if path:
        return gs_compile.from_pretrained(AutoModelForSeq2SeqLM, path, storage=storage)
    sizes = {"vocab_size": 257, "d_model": 192, "d_kv": 32, "d_ff": 512, "num_layers": 3, "num_heads": 6}
    return T5ForConditionalGeneration(T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0, use_cache=False))


def train(path: str | None, storage: Path, num_steps: int) -> None:
    torch.manual_seed(0)
    data, model = samples(path), build(path, storage).to(DEVICE).train()
    optimizer = gs_compile.AdamW(model.parameters(), lr=1e-4 if path else 2e-3, max_grad_norm=1.0)
    everything_on_ssd = {"ratios": {"parameter": 0.0, "checkpoint": 0.0, "optimizer": 0.0}}
    options = {"micro_batch_size": 4, "outputs": "loss", "storage": storage, "expert": everything_on_ssd}
    model.compile(backend="greedysnake", options=options)
    start = time.perf_counter()
    for step in range(num_steps):
        rows = torch.randint(len(data["labels"]), (BATCH,))
        loss = model(**{name: each[rows].to(DEVICE) for name, each in data.items()}).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.3f}, {time.perf_counter() - start:.1f} s since the start")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"peak memory {peak:.2f} GiB, torch and transformers included")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="the folder of a checkpoint of transformers (default: a small T5, untrained)")
    parser.add_argument("--storage", type=Path, help="a directory on a fast SSD (default: a temporary one)")
    parser.add_argument("--steps", type=int, default=40)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.storage) as folder:
        train(arguments.model, Path(folder), arguments.steps)


if __name__ == "__main__":
    main()
