"""Fine-tune a Llama in your own loop with accelerate, with parameters and states on SSD.

The script creates a small model that reads the bytes of the help text that ships with every CPython; `--model` uses a
checkpoint of transformers and its tokenizer. Two lines differ from accelerate's guides: the optimizer's and that of
`prepare`.

    python examples/finetune_accelerate.py --steps 10  25 s, 0.63 GiB, loss 5.59 to 3.35
    python examples/finetune_accelerate.py
    torchrun --nproc-per-node 2 examples/finetune_accelerate.py
    python examples/finetune_accelerate.py --model /path/to/a/checkpoint --storage /path/on/an/nvme/drive

Measured 2026-11-26 on 2 cores with other work, in eager code: processor seconds (one thread, including imports), the
most memory that the process held, and the losses of the first and the last step.
"""

from __future__ import annotations

import argparse
import pydoc_data.topics
import resource
import tempfile
import time
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import gs_compile.hf

SEQUENCE = 128


def build(path: str | None, storage: Path) -> torch.nn.Module:
    if path:
        return gs_compile.from_pretrained(AutoModelForCausalLM, path, storage=storage)
    sizes = {"vocab_size": 256, "hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 4}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=6, max_position_embeddings=SEQUENCE))


def samples(path: str | None, number: int) -> list[dict[str, torch.Tensor]]:
    """At most `number` of them, of SEQUENCE tokens each."""
    prose = "\n".join(pydoc_data.topics.topics.values())
    tokens = AutoTokenizer.from_pretrained(path)(prose)["input_ids"] if path else list(prose.encode())
    rows = torch.tensor(tokens[: len(tokens) // SEQUENCE * SEQUENCE]).view(-1, SEQUENCE)[:number]
    return [{"input_ids": ids, "labels": ids} for ids in rows]


def train(path: str | None, storage: Path, *, num_steps: int) -> float:
    """The last step's loss."""
    torch.manual_seed(0)
    start = time.perf_counter()
    accelerator = Accelerator(gradient_accumulation_steps=4, cpu=not torch.cuda.is_available())
    model = build(path, storage / "tiers")
    optimizer = gs_compile.AdamW(model.parameters(), lr=1e-5 if path else 2e-3, max_grad_norm=1.0)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, num_steps)
    loader = DataLoader(samples(path, 16 * num_steps), batch_size=4, shuffle=True)
    everything_on_ssd = {"ratios": {"parameter": 0.0, "checkpoint": 0.0, "optimizer": 0.0}}
    model, optimizer, loader, scheduler = gs_compile.hf.prepare(
        accelerator, model, optimizer, loader, scheduler, storage=storage / "tiers", expert=everything_on_ssd
    )
    model.train()
    for number, batch in enumerate(loader):  # each batch has the samples of a whole step
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        accelerator.print(f"step {number}: loss {loss.item():.3f}, gradient norm {norm.item():.3f}")
    accelerator.save_state(str(storage / "state"))
    accelerator.save_model(model, str(storage / "saved"))
    if accelerator.is_main_process:
        print(f"saved: {sorted(path.name for path in (storage / 'saved').iterdir())}")
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(f"{time.perf_counter() - start:.0f} s, peak memory {peak:.2f} GiB, torch and transformers included")
    return loss.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", help="the folder of a checkpoint of transformers (default: a small Llama, untrained)"
    )
    parser.add_argument("--storage", type=Path, help="a directory on a fast SSD (default: a temporary one)")
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.storage) as folder:
        train(args.model, Path(folder), num_steps=args.steps)


if __name__ == "__main__":
    main()
