"""Checkpoints of tiny models, in the forms of `frozen`, and adapters that are trained over what is read of them."""

from __future__ import annotations

import peft
import torch
import transformers
from packed_checkpoints import llama, rewritten
from tiered import options
from transformers import AutoModelForCausalLM

import gs_compile
from gs_compile.runtime.codecs import CODECS

EXPERTS = ("gate_up_proj", "down_proj")
LORA = {"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM", "init_lora_weights": False}


def wide():
    """Matrices of whole blocks and tiles."""
    return llama(128, max_position_embeddings=64)


def is_encoded(name, values, skipped=()):
    return ".layers." in name and values.ndim > 1 and not any(f".{each}." in name for each in skipped)


def read(folder, storage, **given):
    return gs_compile.from_pretrained(AutoModelForCausalLM, folder, storage=storage, **given)


def of_fp8(source, folder):
    """A checkpoint with blocks of 128 x 128, as DeepSeek's and Qwen's are."""
    form = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    with rewritten(source, folder, form) as tensors:
        for name in [name for name, each in tensors.items() if is_encoded(name, each)]:
            found = CODECS["fp8"].quantized(tensors[name])
            tensors[name] = found["weight"]
            tensors[f"{name}_scale_inv"] = found["weight_scale_inv"].reshape(-(-len(tensors[name]) // 128), -1)


def of_mxfp4(folder):
    """A tiny gpt-oss whose experts are in blocks of 32 elements of 4 bits with a scale of 8, as OpenAI's are."""
    config = transformers.GptOssConfig(
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=2,
        num_experts_per_tok=1,
        vocab_size=96,
        layer_types=["full_attention"] * 2,
    )
    torch.manual_seed(0)
    skipped = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    form = {"quant_method": "mxfp4", "modules_to_not_convert": skipped}
    with rewritten(transformers.GptOssForCausalLM(config).bfloat16(), folder, form) as tensors:
        for name in [name for name in tensors if name.endswith(EXPERTS)]:
            number, columns, rows = tensors.pop(name).shape
            tensors[f"{name}_blocks"] = torch.randint(0, 256, (number, rows, columns // 32, 16), dtype=torch.uint8)
            tensors[f"{name}_scales"] = torch.randint(115, 122, (number, rows, columns // 32), dtype=torch.uint8)


def learned(model, *, storage=None, targets=("q_proj", "down_proj"), **given):
    """Losses of three steps of adapters, and what they are then. More targets take Dynamo longer."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = peft.get_peft_model(model, peft.LoraConfig(**{**LORA, "target_modules": targets}, **given))
    trained = [each for each in model.parameters() if each.requires_grad]
    if storage is None:
        optimizer = torch.optim.AdamW(trained, lr=1e-2, eps=1e-4)
    else:
        optimizer = gs_compile.AdamW(trained, lr=1e-2, eps=1e-4)
        model.compile(backend="greedysnake", options={**options(storage["storage"]), **storage})
    losses = []
    for number in range(3):
        ids = torch.randint(0, 96, (4, 12), generator=torch.Generator().manual_seed(number))
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, losses, {name: each.clone() for name, each in peft.get_peft_model_state_dict(model).items()}
