"""Small models of every family, as config.json writes them; 2 and 4 divide what tensor parallelism divides."""

from __future__ import annotations

from typing import Any

_COMMON = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 128,
    "max_position_embeddings": 64,
}
_DEEPSEEK = {
    **_COMMON,
    "num_key_value_heads": 8,
    "num_hidden_layers": 4,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
}

SMALL: dict[str, dict[str, Any]] = {
    "llama": {**_COMMON},
    "mistral": {**_COMMON, "sliding_window": 4},
    "qwen2": {**_COMMON, "tie_word_embeddings": True},
    "qwen3": {**_COMMON, "head_dim": 16},
    "phi3": {**_COMMON, "partial_rotary_factor": 0.5},
    "glm4": {**_COMMON, "head_dim": 8},
    "ernie4_5": {**_COMMON, "head_dim": 16, "use_bias": False},
    "gemma": {**_COMMON, "head_dim": 16},
    "gemma2": {**_COMMON, "num_hidden_layers": 6, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 4},
    "gemma3": {
        "vision_config": {"hidden_size": 1152},
        "text_config": {**_COMMON, "num_hidden_layers": 9, "head_dim": 16, "sliding_window": 4, "sliding_window_pattern": 3},
    },
    "gemma3_text": {**_COMMON, "num_hidden_layers": 9, "head_dim": 16, "sliding_window": 4, "sliding_window_pattern": 3},
    "mixtral": {**_COMMON, "num_local_experts": 4},
    "qwen2_moe": {**_COMMON, "num_experts": 8, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64},
    "qwen3_moe": {**_COMMON, "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "deepseek_v2": {**_DEEPSEEK, "q_lora_rank": None, "topk_method": "greedy", "scoring_func": "softmax"},
    "deepseek_v3": {**_DEEPSEEK, "q_lora_rank": 32, "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    "glm4_moe": {
        **{k: v for k, v in _DEEPSEEK.items() if "lora" not in k and "_dim" not in k},
        "num_key_value_heads": 4,
        "head_dim": 16,
        "attention_bias": True,
        "use_qk_norm": True,
    },
    "ernie4_5_moe": {
        **_COMMON,
        "num_hidden_layers": 4,
        "moe_num_experts": 8,
        "moe_k": 2,
        "moe_intermediate_size": 32,
        "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1,
    },
    "gpt_oss": {
        **_COMMON,
        "num_hidden_layers": 6,
        "head_dim": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 4,
        "attention_bias": True,
    },
    "gpt2": {"n_embd": 64, "n_layer": 3, "n_head": 8, "n_positions": 64, "vocab_size": 128},
    "bert": {**{k: v for k, v in _COMMON.items() if "key_value" not in k}},
    "t5": {"d_model": 64, "d_kv": 8, "d_ff": 96, "num_layers": 3, "num_heads": 8, "vocab_size": 128},
}


def small(family: str, **changes: Any) -> dict[str, Any]:
    """The config.json of a small model of a family."""
    return {"model_type": family, **SMALL[family], **changes}
