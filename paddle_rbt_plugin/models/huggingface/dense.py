"""Decoders with one feed-forward network per layer: LLaMA and what is wired like it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from paddle_rbt_plugin.errors import ModelError
from paddle_rbt_plugin.models.huggingface.fields import Fields
from paddle_rbt_plugin.models.transformer import DecoderConfig, FeedForward, Heads, Norm


def llama(f: Fields, seq: int) -> DecoderConfig:
    """LLaMA (arXiv 2302.13971, 2307.09288, 2407.21783)."""
    bias = f.switch("attention_bias", False)
    return decoder(f, seq, heads={"qkv_bias": bias, "out_bias": bias}, ffn_bias=f.switch("mlp_bias", False))


def mistral(f: Fields, seq: int) -> DecoderConfig:
    """Mistral (arXiv 2310.06825)."""
    return decoder(f, seq, kv_heads=8, windows=(f.size("sliding_window", 0),))


def qwen2(f: Fields, seq: int) -> DecoderConfig:
    """Qwen2 and Qwen2.5 (arXiv 2407.10671, 2412.15115): biases of queries, keys and values."""
    return decoder(f, seq, heads={"qkv_bias": True}, kv_heads=32, windows=qwen_windows(f))


def qwen3(f: Fields, seq: int) -> DecoderConfig:
    """Qwen3 (arXiv 2505.09388): norms of queries and keys."""
    return decoder(f, seq, heads=qwen3_heads(f), kv_heads=32, head_dim=128, windows=qwen_windows(f))


def phi3(f: Fields, seq: int) -> DecoderConfig:
    """Phi-3 (arXiv 2404.14219). Its fused projections are built as projections of their own, which are as large."""
    f.ignore("original_max_position_embeddings", "embd_pdrop")
    share = f.scale("partial_rotary_factor", 1.0)
    config = decoder(f, seq, heads={"rotary_share": share}, eps=1e-5, windows=(f.size("sliding_window", 0),))
    return replace(config, dropout=f.rate("resid_pdrop", 0.0))


def glm4(f: Fields, seq: int) -> DecoderConfig:
    """GLM-4-0414: norms before and after each half, rotary positions of half a head. Gate and up are built as projections of
    their own."""
    heads = {"qkv_bias": f.switch("attention_bias", True), "rotary_share": f.scale("partial_rotary_factor", 0.5)}
    return replace(decoder(f, seq, heads=heads, kv_heads=2, head_dim=128, eps=1.5625e-7), norm_after=True)


def ernie4_5(f: Fields, seq: int) -> DecoderConfig:
    """ERNIE 4.5, dense (ERNIE 4.5 Technical Report, 2025)."""
    return decoder(f, seq, **ernie_parts(f), head_dim=128)


def ernie_parts(f: Fields) -> dict[str, Any]:
    """What dense and sparse ERNIE 4.5 have in common."""
    bias = f.switch("use_bias", False)
    f.ignore("compression_ratio", "freq_allocation", "ignored_index", "max_sequence_length", "rope_3d", "weight_share_add_bias")
    return {"heads": {"qkv_bias": bias, "out_bias": bias}, "ffn_bias": bias, "eps": 1e-5, "theta": 500000.0, "tied": True}


def qwen3_heads(f: Fields) -> dict[str, Any]:
    """Attention of dense and sparse Qwen3."""
    bias = f.switch("attention_bias", False)
    return {"qkv_bias": bias, "out_bias": bias, "qk_norm": True}


def qwen_windows(f: Fields) -> tuple[int, ...]:
    """Qwen's windows: none unless ``use_sliding_window``, and then of the layers from ``max_window_layers`` on."""
    layers, window = f.layers("num_hidden_layers"), f.size("sliding_window", 4096)
    first = f.count("max_window_layers", 28)
    used = f.switch("use_sliding_window", False)
    return f.windows(layers, [used and i >= first for i in range(layers)] if used else None, window)


def decoder(
    f: Fields,
    seq: int,
    *,
    heads: dict[str, Any] | None = None,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    ffn_bias: bool = False,
    activation: str = "hidden_act",
    default_activation: str = "silu",
    windows: tuple[int, ...] = (0,),
    eps: float = 1e-6,
    plus_one: bool = False,
    theta: float = 10000.0,
    tied: bool = False,
) -> DecoderConfig:
    """A decoder by the fields that nearly all families share; arguments are the family's own parts and defaults."""
    hidden = f.size("hidden_size")
    return DecoderConfig(
        arch=f.family,
        layers=f.layers("num_hidden_layers"),
        hidden=hidden,
        vocab=f.size("vocab_size"),
        seq=seq,
        attention=grouped(f, hidden, kv_heads, head_dim, **(heads or {})),
        ffn_part=FeedForward(
            width=f.size("intermediate_size"), activation=f.activation(activation, default_activation), bias=ffn_bias
        ),
        norm=Norm(eps=f.eps("rms_norm_eps", eps), plus_one=plus_one),
        tied=f.switch("tie_word_embeddings", tied),
        attention_dropout=f.rate("attention_dropout", 0.0),
        init_std=f.init_std(),
        windows=windows,
        rope_theta=f.theta(theta),
    )


def grouped(f: Fields, hidden: int, kv_heads: int | None, head_dim: int | None, **parts: Any) -> Heads:
    """Grouped attention by the usual fields."""
    heads = f.size("num_attention_heads")
    width = f.size("head_dim", head_dim or 0)
    if not width and hidden % heads:
        raise ModelError(f"{f.family}: num_attention_heads must divide hidden_size, but they are {heads} and {hidden}")
    return Heads(
        heads=heads, kv_heads=f.size("num_key_value_heads", kv_heads or heads), head_dim=width or hidden // heads, **parts
    )
