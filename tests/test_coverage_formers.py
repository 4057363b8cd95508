"""Unmodified models of PaddleFormers: traced, matched, planned and explained. Needs the extra ``formers``."""

from __future__ import annotations

import paddle
import pytest
from paddle.static import InputSpec

import paddle_rbt_plugin as rbt
from paddle_rbt_plugin.handover.pir.trace import trace_layer
from paddle_rbt_plugin.pattern.coverage import coverage
from paddle_rbt_plugin.plugins import load_plugins
from paddle_rbt_plugin.search import analyse

formers = pytest.importorskip("paddleformers.transformers", reason="pip install 'paddle-rbt-plugin[formers]'")

SMALL = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "use_cache": False,
    "tie_word_embeddings": False,
    # CPU wheels lack the fused kernels.
    "fuse_rms_norm": False,
    "fuse_swiglu": False,
}
SPEC = [InputSpec([4, 16], "int64", "input_ids"), InputSpec([4, 16], "int64", "labels")]
MODELS = {
    "LlamaForCausalLM": ("LlamaConfig", "qkv", "gated_ffn"),
    "Phi3ForCausalLM": ("Phi3Config", "fused_qkv", "fused_gated_ffn"),
    "Gemma3ForCausalLM": ("Gemma3TextConfig", "fused_qkv", "fused_gated_ffn"),
    "Ernie4_5ForCausalLM": ("Ernie4_5Config", "fused_qkv", "fused_gated_ffn"),
}


class Loss(paddle.nn.Layer):
    """The model's own loss, by the names of its arguments."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, labels):
        return self.model(input_ids=input_ids, labels=labels)[0]


def build(name: str) -> Loss:
    config = getattr(formers, MODELS[name][0])(**SMALL)
    config._attn_implementation = "sdpa"
    return Loss(getattr(formers, name)(config))


@pytest.mark.parametrize("name", MODELS)
def test_an_unmodified_model_is_covered(name):
    found = analyse(trace_layer(build(name), SPEC).graph, load_plugins().patterns)
    shares = coverage(found.graph, found.layers, found.matches)
    assert all(shares.share(place) >= 0.95 for place in ("block", "before", "after"))
    assert found.layers.count == 2 and not found.unmatched
    patterns = [m.pattern for m in found.matches.matches]
    assert all(patterns.count(expected) == 2 for expected in (*MODELS[name][1:], "row_matmul"))


@pytest.mark.parametrize("name", MODELS)
def test_an_unmodified_model_is_planned_and_explained(name):
    plan = rbt.tune(build(name), input_spec=SPEC, cluster="1x4:A100-80G", search_space={"mp": [2], "pp": [1]})
    assert plan.degrees == {"pp": 1, "dp": 2, "mp": 2}
    assert MODELS[name][1] in plan.explain()
