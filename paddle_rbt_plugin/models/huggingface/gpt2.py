"""GPT-2."""

from __future__ import annotations

from paddle_rbt_plugin.errors import ModelError
from paddle_rbt_plugin.models.huggingface.fields import Fields
from paddle_rbt_plugin.models.transformer import DecoderConfig, FeedForward, Heads, Norm


def gpt2(f: Fields, seq: int) -> DecoderConfig:
    """GPT-2 (Radford et al. 2019). Its fused projection of queries, keys and values is built as three, which are as large."""
    f.ignore("n_ctx", "embd_pdrop", "summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type")
    f.ignore("summary_use_proj")
    f.only("scale_attn_weights", True)
    f.only("scale_attn_by_inverse_layer_idx", False)
    hidden, heads = f.size("n_embd"), f.size("n_head")
    if hidden % heads:
        raise ModelError(f"{f.family}: n_head must divide n_embd, but they are {heads} and {hidden}")
    width = f.size("n_inner", 4 * hidden)
    return DecoderConfig(
        arch=f.family,
        layers=f.layers("n_layer"),
        hidden=hidden,
        vocab=f.size("vocab_size"),
        seq=seq,
        attention=Heads(heads=heads, kv_heads=heads, head_dim=hidden // heads, qkv_bias=True, out_bias=True),
        ffn_part=FeedForward(width=width, activation=f.activation("activation_function", "gelu_new"), gated=False, bias=True),
        norm=Norm(kind="layer", eps=f.eps("layer_norm_epsilon", 1e-5)),
        positions=f.size("n_positions", 1024),
        tied=f.switch("tie_word_embeddings", True),
        dropout=f.rate("resid_pdrop", 0.1),
        attention_dropout=f.rate("attn_pdrop", 0.1),
        init_std=f.init_std(),
    )
