"""Fine-tune a Llama with transformers' Trainer, its parameters and states on SSD; with --lora, adapters of PEFT alone.

The model is small and made here, and reads the bytes of the help text that ships with every CPython: no network, about
a minute. In a script of your own, the line with `attach` is all that is new.

    python examples/finetune_trainer.py
    python examples/finetune_trainer.py --lora --storage /path/on/an/nvme/drive
    torchrun --nproc-per-node 2 examples/finetune_trainer.py
"""

from __future__ import annotations

import argparse
import pydoc_data.topics
import tempfile
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import gs_compile.hf

SEQUENCE = 128


def build() -> LlamaForCausalLM:
    sizes = {"vocab_size": 256, "hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 4}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=6, max_position_embeddings=SEQUENCE))


def with_adapters(model: LlamaForCausalLM) -> torch.nn.Module:
    import peft

    return peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))


def samples(number: int) -> list[dict[str, torch.Tensor]]:
    prose = "\n".join(pydoc_data.topics.topics.values()).encode()
    text = torch.tensor(list(prose[: number * SEQUENCE]), dtype=torch.long).view(-1, SEQUENCE)
    return [{"input_ids": ids, "labels": ids} for ids in text]


def train(storage: Path, *, lora: bool, max_steps: int) -> float:
    """The last loss that Trainer has logged."""
    torch.manual_seed(0)
    args = TrainingArguments(
        output_dir=str(storage / "checkpoints"),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=4,
        learning_rate=1e-2 if lora else 2e-3,
        max_steps=max_steps,
        logging_steps=5,
        save_strategy="no",
        dataloader_pin_memory=torch.cuda.is_available(),
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
    )
    model = with_adapters(build()) if lora else build()
    trainer = Trainer(model, args, train_dataset=samples(1000))
    everything_on_ssd = {"ratios": {"parameter": 0.0, "checkpoint": 0.0, "optimizer": 0.0}}
    gs_compile.hf.attach(trainer, storage=storage / "tiers", expert=everything_on_ssd)
    trainer.train()
    trainer.save_model(str(storage / "saved"))
    if trainer.is_world_process_zero():
        print(f"saved: {sorted(path.name for path in (storage / 'saved').iterdir())}")
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry][-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--storage", type=Path, help="a directory on a fast SSD (default: a temporary one)")
    parser.add_argument("--lora", action="store_true", help="train adapters alone; the model's own weights are frozen")
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.storage) as folder:
        train(Path(folder), lora=args.lora, max_steps=args.steps)


if __name__ == "__main__":
    main()
