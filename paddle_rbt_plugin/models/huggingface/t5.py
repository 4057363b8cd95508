"""T5."""

from __future__ import annotations

from paddle_rbt_plugin.models.huggingface.fields import Fields
from paddle_rbt_plugin.models.transformer import EncoderDecoderConfig, FeedForward, Heads, Norm

_FEED_FORWARD = {"relu": "relu", "gelu": "gelu", "gated-gelu": "gelu_tanh", "gated-silu": "silu"}


def t5(f: Fields, seq: int) -> EncoderDecoderConfig:
    """T5 (arXiv 1910.10683) and T5 1.1, whose feed-forward network is gated."""
    f.only("is_encoder_decoder", True)
    f.ignore("n_positions", "is_gated_act", "dense_act_fn")  # both follow from feed_forward_proj
    activation = f.choice("feed_forward_proj", _FEED_FORWARD, "relu")
    heads, layers = f.size("num_heads"), f.layers("num_layers")
    dropout = f.rate("dropout_rate", 0.1)
    return EncoderDecoderConfig(
        arch=f.family,
        layers=layers,
        decoder_layers=f.layers("num_decoder_layers", layers),
        hidden=f.size("d_model"),
        vocab=f.size("vocab_size"),
        seq=seq,
        attention=Heads(heads=heads, kv_heads=heads, head_dim=f.size("d_kv", 64), scaling=1.0),
        ffn_part=FeedForward(
            width=f.size("d_ff"),
            activation=activation,
            gated=str(f.values.get("feed_forward_proj", "relu")).startswith("gated-"),
        ),
        norm=Norm(eps=f.eps("layer_norm_epsilon", 1e-6)),
        tied=f.switch("tie_word_embeddings", True),
        dropout=dropout,
        attention_dropout=dropout,
        buckets=f.size("relative_attention_num_buckets", 32),
        max_distance=f.size("relative_attention_max_distance", 128),
    )
