"""BERT."""

from __future__ import annotations

from paddle_rbt_plugin.errors import ModelError
from paddle_rbt_plugin.models.huggingface.fields import Fields
from paddle_rbt_plugin.models.transformer import EncoderConfig, FeedForward, Heads, Norm


def bert(f: Fields, seq: int) -> EncoderConfig:
    """BERT (arXiv 1810.04805) with the heads that it is trained with."""
    f.ignore("pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers", "pooler_size_per_head", "pooler_type")
    f.only("position_embedding_type", "absolute")
    f.only("tie_word_embeddings", True)
    hidden, heads = f.size("hidden_size"), f.size("num_attention_heads")
    if hidden % heads:
        raise ModelError(f"{f.family}: num_attention_heads must divide hidden_size, but they are {heads} and {hidden}")
    return EncoderConfig(
        arch=f.family,
        layers=f.layers("num_hidden_layers"),
        hidden=hidden,
        vocab=f.size("vocab_size"),
        seq=seq,
        attention=Heads(heads=heads, kv_heads=heads, head_dim=hidden // heads, qkv_bias=True, out_bias=True),
        ffn_part=FeedForward(
            width=f.size("intermediate_size"), activation=f.activation("hidden_act", "gelu"), gated=False, bias=True
        ),
        norm=Norm(kind="layer", eps=f.eps("layer_norm_eps", 1e-12)),
        positions=f.size("max_position_embeddings", 512),
        dropout=f.rate("hidden_dropout_prob", 0.1),
        attention_dropout=f.rate("attention_probs_dropout_prob", 0.1),
        init_std=f.init_std(),
        token_types=f.size("type_vocab_size", 2),
    )
