"""Fine-tune all 1.5 B parameters of a model with the shape of GPT-2 XL from SSD, with 6 GiB of host memory.

In fp32 with AdamW, parameters, gradients and moments would take 16 bytes per parameter, 25 GB in all. Here parameters
are bf16 with fp32 masters, and most data is on SSD; this needs about 22 GB of free disk. The script reads the help text
that ships with every CPython: as bytes for a model with random weights, or as tokens for a checkpoint given by
`--model`.

    python examples/bigger_than_memory.py --compiler eager --sequence 32 --micro-batches 2  34 s a step, 5.9 + 2.9 GiB
    python examples/bigger_than_memory.py --model /path/to/a/checkpoint --storage /path/on/an/nvme/drive

Measured 2026-11-21 on 2 cores with random tokens: wall-clock seconds; the most memory within the budget, and the most
that the process held beyond it (0.3 GiB before the model, the rest for computation). 15.8 GiB were on SSD.
"""

from __future__ import annotations

import argparse
import pydoc_data.topics
import re
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

import gs_compile
from gs_compile.machine import format_bytes

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = {  # layers, width, heads
    "gpt2": (12, 768, 12),
    "gpt2-medium": (24, 1024, 16),
    "gpt2-large": (36, 1280, 20),
    "gpt2-xl": (48, 1600, 25),
}


def memory_nbytes(name: str) -> int:
    """The bytes that the kernel counts of this process: "VmRSS", what it holds now; "VmHWM", the most it has held."""
    found = re.findall(rf"^{name}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(found[0]) << 10


def tokens(path: str | None) -> torch.Tensor:
    prose = "\n".join(pydoc_data.topics.topics.values())
    return torch.tensor(AutoTokenizer.from_pretrained(path)(prose)["input_ids"] if path else list(prose.encode()))


def build(size: str, sequence: int) -> GPT2LMHeadModel:
    layers, width, heads = SIZES[size]
    config = GPT2Config(n_layer=layers, n_embd=width, n_head=heads, n_positions=max(1024, sequence), use_cache=False)
    return GPT2LMHeadModel(config)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(SIZES), default="gpt2-xl")
    parser.add_argument("--model", help="the folder of a checkpoint of transformers, instead of --size")
    parser.add_argument("--host-memory", default="6GiB")
    parser.add_argument("--precision", choices=("model", "bf16"), default="bf16")
    parser.add_argument("--storage", type=Path, default=Path.home() / ".cache/greedysnake")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--compiler", choices=("auto", "inductor", "eager"), default="auto")
    arguments = parser.parse_args()

    idle = memory_nbytes("VmRSS")
    torch.manual_seed(0)
    start = time.perf_counter()
    if arguments.model:
        model = gs_compile.from_pretrained(AutoModelForCausalLM, arguments.model, storage=arguments.storage).train()
    else:
        model = gs_compile.init_on_storage(lambda: build(arguments.size, arguments.sequence), storage=arguments.storage)
    count = sum(parameter.numel() for parameter in model.parameters())
    print(f"{count / 1e6:.0f} M parameters built on storage in {time.perf_counter() - start:.0f} s")
    print(f"fp32 AdamW in memory would take {format_bytes(16 * count)}")

    options = {
        "micro_batch_size": 1,
        "outputs": "loss",
        "storage": arguments.storage,
        "host_memory": arguments.host_memory,
        "precision": arguments.precision,
        "expert": {"compiler": arguments.compiler},
    }
    model.to(DEVICE)  # moves no values: they are on storage
    model.compile(backend="greedysnake", options=options)
    optimizer = gs_compile.AdamW(model.parameters(), lr=1e-4)
    text, generator = tokens(arguments.model), torch.Generator().manual_seed(0)
    for step in range(arguments.steps):
        places = torch.randint(len(text) - arguments.sequence, (arguments.micro_batches,), generator=generator).tolist()
        ids = torch.stack([text[place : place + arguments.sequence] for place in places]).to(DEVICE)
        start = time.perf_counter()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.3f}, {time.perf_counter() - start:.1f} s")
        if step == 0:
            print(gs_compile.inspect(model).tiers)

    assert optimizer.last_step is not None
    print("seconds and bytes of each lane in the last step:")
    for lane, total in optimizer.last_step.lanes.items():
        print(f"  {lane:<9} {total.seconds:6.1f} s busy, {format_bytes(total.nbytes)}")
    print(f"peak memory {format_bytes(memory_nbytes('VmHWM'))}, {format_bytes(idle)} of it before the model")


if __name__ == "__main__":
    main()
