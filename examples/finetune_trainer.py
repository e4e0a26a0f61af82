"""Fine-tune a Llama with transformers' Trainer, with parameters and states on SSD; with --lora only PEFT's adapters.

The script creates a small model that reads the bytes of the help text that ships with every CPython; `--model` uses a
checkpoint of transformers and its tokenizer. In your own script, only the line with `attach` is new. Under torchrun
each rank has its shard of the model and its share of each step's samples.

    python examples/finetune_trainer.py  44 s, 0.75 GiB, loss 4.54 to 3.21
    python examples/finetune_trainer.py --lora
    torchrun --nproc-per-node 2 examples/finetune_trainer.py
    python examples/finetune_trainer.py --model /path/to/a/checkpoint --storage /path/on/an/nvme/drive

Measured 2026-11-26 on 2 cores with other work, with code that was compiled before: processor seconds (one thread,
including imports), the most memory that the process held, and the losses of the first and the last five steps.
"""

from __future__ import annotations

import argparse
import pydoc_data.topics
import resource
import tempfile
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import gs_compile.hf

SEQUENCE = 128


def build(path: str | None, storage: Path) -> torch.nn.Module:
    if path:
        return gs_compile.from_pretrained(AutoModelForCausalLM, path, storage=storage)
    sizes = {"vocab_size": 256, "hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 4}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=6, max_position_embeddings=SEQUENCE))


def with_adapters(model: torch.nn.Module) -> torch.nn.Module:
    import peft

    return peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))


def samples(path: str | None, number: int) -> list[dict[str, torch.Tensor]]:
    """At most `number` of them, of SEQUENCE tokens each."""
    prose = "\n".join(pydoc_data.topics.topics.values())
    tokens = AutoTokenizer.from_pretrained(path)(prose)["input_ids"] if path else list(prose.encode())
    rows = torch.tensor(tokens[: len(tokens) // SEQUENCE * SEQUENCE]).view(-1, SEQUENCE)[:number]
    return [{"input_ids": ids, "labels": ids} for ids in rows]


def train(path: str | None, storage: Path, *, lora: bool, max_steps: int) -> float:
    """The last loss that Trainer has logged."""
    torch.manual_seed(0)
    start = time.perf_counter()
    learning_rate = (2e-4 if lora else 1e-5) if path else (1e-2 if lora else 2e-3)
    args = TrainingArguments(
        output_dir=str(storage / "checkpoints"),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=4,
        learning_rate=learning_rate,
        max_steps=max_steps,
        logging_steps=5,
        save_strategy="no",
        dataloader_pin_memory=torch.cuda.is_available(),
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
    )
    model = build(path, storage / "tiers")
    trainer = Trainer(with_adapters(model) if lora else model, args, train_dataset=samples(path, 1000))
    everything_on_ssd = {"ratios": {"parameter": 0.0, "checkpoint": 0.0, "optimizer": 0.0}}
    gs_compile.hf.attach(trainer, storage=storage / "tiers", expert=everything_on_ssd)
    trainer.train()
    trainer.save_model(str(storage / "saved"))
    if trainer.is_world_process_zero():
        print(f"saved: {sorted(path.name for path in (storage / 'saved').iterdir())}")
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(f"{time.perf_counter() - start:.0f} s, peak memory {peak:.2f} GiB, torch and transformers included")
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry][-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", help="the folder of a checkpoint of transformers (default: a small Llama, untrained)"
    )
    parser.add_argument("--storage", type=Path, help="a directory on a fast SSD (default: a temporary one)")
    parser.add_argument("--lora", action="store_true", help="train only adapters; the weights of the model are frozen")
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.storage) as folder:
        train(args.model, Path(folder), lora=args.lora, max_steps=args.steps)


if __name__ == "__main__":
    main()
