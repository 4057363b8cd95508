"""Decoders with mixtures of experts."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

from paddle_rbt_plugin.errors import ModelError
from paddle_rbt_plugin.models.huggingface.dense import decoder, ernie_parts, qwen3_heads, qwen_windows
from paddle_rbt_plugin.models.huggingface.fields import Fields, ModelWarning
from paddle_rbt_plugin.models.transformer import DecoderConfig, Experts, FeedForward, Latent, Norm
from paddle_rbt_plugin.validation import shown


def mixtral(f: Fields, seq: int) -> DecoderConfig:
    """Mixtral (arXiv 2401.04088)."""
    config = decoder(f, seq, kv_heads=8, eps=1e-5, theta=1e6, windows=(f.size("sliding_window", 0),))
    experts = Experts(
        count=f.size("num_local_experts", 8),
        chosen=f.size("num_experts_per_tok", 2),
        width=config.ffn_part.width,
        activation=config.ffn_part.activation,
    )
    return replace(config, experts=experts)


def qwen2_moe(f: Fields, seq: int) -> DecoderConfig:
    """Qwen1.5-MoE and Qwen2-MoE (arXiv 2407.10671, section 2.2.2): a shared expert with a gate of its own."""
    config = decoder(f, seq, heads={"qkv_bias": f.switch("qkv_bias", True)}, kv_heads=16, windows=qwen_windows(f))
    shared = f.count("shared_expert_intermediate_size", 5632)
    return replace(config, experts=_qwen_experts(f, config, 60, 4, 1408, shared_width=shared, shared_gate=shared > 0))


def qwen3_moe(f: Fields, seq: int) -> DecoderConfig:
    """Qwen3-MoE (arXiv 2505.09388)."""
    f.ignore("max_window_layers")
    config = decoder(f, seq, heads=qwen3_heads(f), kv_heads=4, windows=qwen_windows(f))
    return replace(config, experts=_qwen_experts(f, config, 128, 8, 768))


def _qwen_experts(f: Fields, config: DecoderConfig, count: int, chosen: int, width: int, **parts: Any) -> Experts:
    dense = f.values.get("mlp_only_layers") or []
    f.ignore("mlp_only_layers")
    if not isinstance(dense, list) or sorted(dense) != list(range(len(dense))):
        raise ModelError(f"{f.family}: mlp_only_layers must be the first layers, such as [0, 1], not {shown(dense)}")
    return Experts(
        count=f.size("num_experts", count),
        chosen=f.size("num_experts_per_tok", chosen),
        width=f.size("moe_intermediate_size", width),
        activation=config.ffn_part.activation,
        renormalise=f.switch("norm_topk_prob", False),
        first=len(dense),
        every=f.size("decoder_sparse_step", 1),
        **parts,
    )


def deepseek_v2(f: Fields, seq: int) -> DecoderConfig:
    """DeepSeek-V2 (arXiv 2405.04434)."""
    f.ignore("topk_method")  # which experts, not how many
    f.only("scoring_func", "softmax")
    f.only("mlp_bias", False)
    return _deepseek(f, seq, scores="softmax", balanced=False, renormalise=False, scaling=1.0)


def deepseek_v3(f: Fields, seq: int) -> DecoderConfig:
    """DeepSeek-V3 (arXiv 2412.19437), without its multi-token prediction."""
    f.ignore("rope_interleave", "topk_method")
    f.only("scoring_func", "sigmoid")
    return _deepseek(f, seq, scores="sigmoid", balanced=True, renormalise=True, scaling=2.5)


def _deepseek(f: Fields, seq: int, *, scores: str, balanced: bool, renormalise: bool, scaling: float) -> DecoderConfig:
    f.ignore("n_group", "topk_group", "head_dim", "qk_head_dim", "num_key_value_heads")  # keys and values are latent
    without_prediction(f)
    activation = f.activation("hidden_act", "silu")
    heads = f.size("num_attention_heads")
    config = DecoderConfig(
        arch=f.family,
        layers=f.layers("num_hidden_layers"),
        hidden=f.size("hidden_size"),
        vocab=f.size("vocab_size"),
        seq=seq,
        attention=Latent(
            heads=heads,
            query_rank=_query_rank(f),
            kv_rank=f.size("kv_lora_rank", 512),
            plain_dim=f.size("qk_nope_head_dim", 128),
            rotary_dim=f.size("qk_rope_head_dim", 64),
            value_dim=f.size("v_head_dim", 128),
            bias=f.switch("attention_bias", False),
        ),
        ffn_part=FeedForward(width=f.size("intermediate_size"), activation=activation),
        norm=Norm(eps=f.eps("rms_norm_eps", 1e-6)),
        tied=f.switch("tie_word_embeddings", False),
        attention_dropout=f.rate("attention_dropout", 0.0),
        init_std=f.init_std(),
        rope_theta=f.theta(10000.0),
    )
    experts = _routed(
        f, activation, scores=scores, balanced=balanced, renormalise=f.switch("norm_topk_prob", renormalise), scaling=scaling
    )
    return replace(config, experts=experts)


def _query_rank(f: Fields) -> int:
    """Missing and null differ: null says that queries are projected at once."""
    rank = f.size("q_lora_rank", 1536)
    return 0 if "q_lora_rank" in f.values and f.values["q_lora_rank"] is None else int(rank)


def _routed(f: Fields, activation: str, *, scaling: float, **parts: Any) -> Experts:
    """Experts by the fields that DeepSeek and GLM share."""
    f.only("moe_layer_freq", 1)
    width = f.size("moe_intermediate_size")
    return Experts(
        count=f.size("n_routed_experts"),
        chosen=f.size("num_experts_per_tok"),
        width=width,
        activation=activation,
        shared_width=width * f.count("n_shared_experts", 0),
        scaling=f.scale("routed_scaling_factor", scaling),
        first=f.count("first_k_dense_replace", 0),
        **parts,
    )


def glm4_moe(f: Fields, seq: int) -> DecoderConfig:
    """GLM-4.5 (arXiv 2508.06471), without its multi-token prediction."""
    f.ignore("n_group", "topk_group")
    without_prediction(f)
    heads = {
        "qkv_bias": f.switch("attention_bias", False),
        "qk_norm": f.switch("use_qk_norm", False),
        "rotary_share": f.scale("partial_rotary_factor", 0.5),
    }
    config = decoder(f, seq, heads=heads, kv_heads=8, eps=1e-5)
    experts = _routed(
        f,
        config.ffn_part.activation,
        scores="sigmoid",
        balanced=True,
        renormalise=f.switch("norm_topk_prob", True),
        scaling=1.0,
    )
    return replace(config, experts=experts)


def ernie4_5_moe(f: Fields, seq: int) -> DecoderConfig:
    """ERNIE 4.5 with experts (ERNIE 4.5 Technical Report, 2025), without its multi-token prediction."""
    f.ignore(
        "moe_capacity", "moe_gate", "moe_gate_act", "moe_norm_min", "moe_use_aux_free", "moe_multimodal_dispatch_use_allgather"
    )
    f.ignore("moe_aux_loss_lambda", "moe_orthogonal_loss_lambda", "moe_z_loss_lambda", "moe_group", "moe_all_to_all_dropout")
    without_prediction(f)
    config = decoder(f, seq, **ernie_parts(f))
    f.only("moe_layer_end_index", None, -1, config.layers - 1)
    f.only("use_bias", False)
    start = f.count("moe_layer_start_index", 1)
    width = f.size("moe_intermediate_size")
    experts = Experts(
        count=f.size("moe_num_experts"),
        chosen=f.size("moe_k", 2),
        width=width,
        activation=config.ffn_part.activation,
        shared_width=width * f.count("moe_num_shared_experts", 2),
        balanced=True,
        first=start,
        every=f.size("moe_layer_interval", 1),
    )
    return replace(config, experts=experts)


def gpt_oss(f: Fields, seq: int) -> DecoderConfig:
    """GPT-OSS (arXiv 2508.10925): every other layer has a window, each head a sink, and everything a bias."""
    layers = f.layers("num_hidden_layers")
    windows = f.windows(layers, (True, False), f.size("sliding_window", 128))
    bias = f.switch("attention_bias", True)
    f.only("swiglu_limit", 7.0)
    f.ignore("experts_per_token")  # says num_experts_per_tok again
    heads = {"qkv_bias": bias, "out_bias": bias, "sinks": True}
    config = decoder(f, seq, heads=heads, kv_heads=8, head_dim=64, eps=1e-5, theta=150000.0, windows=windows)
    if config.ffn_part.activation != "silu":
        raise ModelError(f"{f.family}: hidden_act {shown(f.values['hidden_act'])} is not supported; supported: silu")
    experts = Experts(
        count=f.size("num_local_experts", 128),
        chosen=f.size("num_experts_per_tok", 4),
        width=config.ffn_part.width,
        activation="clamped_swish",
        bias=True,
        router_bias=True,
    )
    return replace(config, experts=experts)


def without_prediction(f: Fields) -> None:
    """Says that layers which predict tokens further ahead are left out."""
    layers = f.count("num_nextn_predict_layers", 0)
    if layers:
        warnings.warn(
            f"{f.family}: multi-token prediction (num_nextn_predict_layers {layers}) is left out; the model is the main one",
            ModelWarning,
            stacklevel=5,
        )
