"""hf_language: causal language models of transformers, by the name of their configuration.

All sizes are given under the names that most configurations share; `CHANGES` has what one needs beside or instead, None
for a size that it must not be given.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from benchmarks.zoo.case import HEADS, LAYERS, VOCABULARY, WIDTH, Case, Example, ids, labels, returned

TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZES: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "head_dim": WIDTH // HEADS,
    **TOKENS,
}
EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
LATENT = {  # keys and values by way of a narrow vector
    "num_key_value_heads": HEADS,
    "head_dim": None,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}
GROUPS = {"n_group": 1, "topk_group": 1}
INDEXED = {"index_n_heads": 2, "index_head_dim": 16, "index_topk": 4}  # of what chooses the keys that attention reads
PLAIN = """
    apertus arcee biogpt bitnet bloom cohere cohere2 ctrl cwm diffllama doge ernie4_5 exaone4 falcon_mamba gemma
    gemma2 gemma3_text glm glm4 gpt2 gpt_neox granite granite_swa hunyuan_v1_dense jais2 lfm2 lfm3 llama mamba
    ministral ministral3 mistral modernbert-decoder mpt nemotron olmo olmo2 olmo3 openai-gpt opt phi phi3 qwen2
    qwen3 recurrent_gemma rwkv seed_oss smollm3 stablelm starcoder2 vaultgemma
""".split()
CHANGES: Mapping[str, Mapping[str, Any]] = {
    **{name: {} for name in PLAIN},
    "ctrl": {"dff": 48, "n_positions": 64},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": WIDTH},
    "lfm2": {"full_attn_idxs": [1], "conv_L_cache": 3},
    "phi": {"num_key_value_heads": HEADS},
    "nanochat": {},
    "phimoe": {**EXPERTS, "router_jitter_noise": 0.0},  # above that it draws experts, as dropout does values
    "nemotron_h": {
        "hybrid_override_pattern": "M*-",
        "mamba_num_heads": 4,
        "mamba_head_dim": 8,
        "ssm_state_size": 8,
        "n_groups": 1,
        "chunk_size": 4,
    },
    "falcon": {"head_dim": None, "num_kv_heads": 1, "num_key_value_heads": None},
    "gptj": {"rotary_dim": 4, "n_positions": 64},
    "codegen": {"rotary_dim": 4, "n_positions": 64},
    "gpt_neo": {"num_layers": LAYERS, "attention_types": [[["global", "local", "global"], 1]], "window_size": 4},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 4, "state_size": 4},
    "bamba": {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_chunk_size": 4, "attn_layer_indices": [1]},
    "jamba": {**EXPERTS, "attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
    "mixtral": EXPERTS,
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 16},
    "qwen3_moe": EXPERTS,
    "qwen3_next": {
        **EXPERTS,
        "shared_expert_intermediate_size": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    },
    "gpt_oss": EXPERTS,
    "olmoe": EXPERTS,
    "granitemoe": EXPERTS,
    "minimax": {**EXPERTS, "block_size": 4},
    "cohere2_moe": EXPERTS,
    "ernie4_5_moe": {**EXPERTS, "moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1},
    "glm4_moe": {**EXPERTS, **GROUPS, "first_k_dense_replace": 1},
    "exaone_moe": {**EXPERTS, **GROUPS},
    "dots1": {**EXPERTS, **GROUPS, "first_k_dense_replace": 1, "n_shared_experts": 1},
    "deepseek_v2": {**EXPERTS, **GROUPS, **LATENT, "first_k_dense_replace": 1, "topk_method": "greedy"},
    "deepseek_v3": {**EXPERTS, **GROUPS, **LATENT, "first_k_dense_replace": 1},
    "llama4_text": {**EXPERTS, "intermediate_size_mlp": 48},
    "hunyuan_v1_moe": {**EXPERTS, "moe_topk": 2},
    "gemma3n_text": {
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCABULARY,
        "laurel_rank": 4,
        "num_kv_shared_layers": 0,
        "altup_num_inputs": 2,
    },
    "granitemoehybrid": {
        **EXPERTS,
        "mamba_n_heads": 8,
        "mamba_d_head": 8,
        "mamba_chunk_size": 4,
        "layer_types": ["mamba", "attention", "mamba"],
        "shared_intermediate_size": 16,
    },
    "granitemoeshared": {**EXPERTS, "shared_intermediate_size": 16},
    "granitemoe_swa": EXPERTS,
    "falcon_h1": {
        "mamba_n_heads": 8,
        "mamba_d_head": 8,
        "mamba_d_ssm": 64,
        "mamba_chunk_size": 4,
        "mamba_d_state": 8,
    },
    "lfm2_moe": {
        **EXPERTS,
        "full_attn_idxs": [1],
        "conv_L_cache": 3,
        "layer_types": ["conv", "full_attention", "conv"],
        "num_dense_layers": 1,
    },
    "flex_olmo": EXPERTS,
    "olmo_hybrid": {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    },
    "qwen3_5_text": {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    },
    "afmoe": {**EXPERTS, "num_dense_layers": 1},
    "minimax_m2": EXPERTS,
    "glm4_moe_lite": {**EXPERTS, **GROUPS, **LATENT, "first_k_dense_replace": 1},
    "deepseek_v32": {**EXPERTS, **GROUPS, **LATENT, **INDEXED, "first_k_dense_replace": 1},
    "glm_moe_dsa": {**EXPERTS, **GROUPS, **LATENT, **INDEXED, "first_k_dense_replace": 1},
}


def make(name: str) -> Example:
    """A model of this configuration, which computes its loss."""
    from transformers import AutoConfig, AutoModelForCausalLM

    changed = {**SIZES, **CHANGES[name]}
    config = AutoConfig.for_model(name, **{key: value for key, value in changed.items() if value is not None})
    loss = returned(input_ids=ids, labels=lambda step: labels(ids(step)))
    return Example(AutoModelForCausalLM.from_config(config), loss, outputs="loss")


CASES = [Case("transformers", name, partial(make, name)) for name in sorted(CHANGES)]
