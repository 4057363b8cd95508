"""Gemma: the embedding is scaled, norms multiply by 1 + weight, and later ones read nearby tokens in most layers."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from paddle_rbt_plugin.errors import ModelError
from paddle_rbt_plugin.models.huggingface.dense import decoder
from paddle_rbt_plugin.models.huggingface.fields import Fields, ModelWarning
from paddle_rbt_plugin.models.sizes import BASE
from paddle_rbt_plugin.models.transformer import DecoderConfig
from paddle_rbt_plugin.validation import shown

_OF_IMAGES = (
    "vision_config",
    "mm_tokens_per_image",
    "boi_token_index",
    "eoi_token_index",
    "image_token_index",
    "image_token_id",
)
_TEXT_DEFAULTS = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
"""Of Gemma 3's ``text_config``, which published files leave out in part."""


def gemma(f: Fields, seq: int) -> DecoderConfig:
    """Gemma (arXiv 2403.08295)."""
    f.ignore("hidden_act")
    return _gemma(f, seq, kv_heads=16, scalar=0, windows=(0,), heads=_bias(f))


def gemma2(f: Fields, seq: int) -> DecoderConfig:
    """Gemma 2 (arXiv 2408.00118): every other layer has a window, scores and logits are capped."""
    f.ignore("hidden_act", "cache_implementation")
    layers = f.layers("num_hidden_layers")
    windows = f.windows(layers, (True, False), f.size("sliding_window", 4096))
    heads = _bias(f) | {"softcap": f.scale("attn_logit_softcapping", 50.0)}
    config = _gemma(f, seq, kv_heads=4, scalar=256, windows=windows, heads=heads)
    return replace(config, norm_after=True, logit_softcap=f.scale("final_logit_softcapping", 30.0))


def gemma3(f: Fields, seq: int) -> DecoderConfig:
    """Gemma 3 (arXiv 2503.19786): five layers with a window to one without, norms of queries and keys."""
    layers = f.layers("num_hidden_layers")
    cycle = f.size("sliding_window_pattern", f.size("_sliding_window_pattern", 6))
    windows = f.windows(layers, [(i + 1) % cycle != 0 for i in range(cycle)], f.size("sliding_window", 4096))
    f.only("use_bidirectional_attention", False)
    heads = _bias(f) | {"qk_norm": True, "softcap": f.scale("attn_logit_softcapping", 0.0)}
    config = _gemma(f, seq, kv_heads=4, scalar=256, windows=windows, heads=heads, theta=1e6)
    local = f.theta(10000.0, "sliding_attention") if "rope_parameters" in f.values else 10000.0
    return replace(
        config,
        norm_after=True,
        logit_softcap=f.scale("final_logit_softcapping", 0.0),
        window_rope_theta=f.read("rope_local_base_freq", BASE, local),
    )


def language_model(f: Fields) -> Fields:
    """The fields of the language model of a config that also has a vision tower; says that the tower is left out."""
    text = f.values["text_config"]
    if not isinstance(text, Mapping):
        raise ModelError(f"{f.family}: text_config must be an object of fields, not {shown(text)}")
    f.ignore("text_config", *_OF_IMAGES, "initializer_range", "tie_word_embeddings")
    f.check_rest()
    if f.values.get("vision_config"):
        warnings.warn(
            f"{f.family}: the vision tower (vision_config) is left out; the model is the language model of text_config",
            ModelWarning,
            stacklevel=4,
        )
    return Fields(f.family, _TEXT_DEFAULTS | dict(text))


def _bias(f: Fields) -> dict[str, Any]:
    bias = f.switch("attention_bias", False)
    return {"qkv_bias": bias, "out_bias": bias}


def _gemma(
    f: Fields, seq: int, *, kv_heads: int, scalar: int, windows: tuple[int, ...], heads: dict[str, Any], theta: float = 1e4
) -> DecoderConfig:
    scalar = f.size("query_pre_attn_scalar", scalar) if scalar else 0
    config = decoder(
        f,
        seq,
        heads=heads | ({"scaling": scalar**-0.5} if scalar else {}),
        kv_heads=kv_heads,
        head_dim=256,
        activation="hidden_activation",
        default_activation="gelu_pytorch_tanh",
        windows=windows,
        plus_one=True,
        theta=theta,
        tied=True,
    )
    return replace(config, embedding_scale=math.sqrt(config.hidden))
