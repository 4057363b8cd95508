"""Models by the ``config.json`` of Hugging Face: every family builds, trains and is planned; what is not known is refused."""

from __future__ import annotations

import dataclasses
import json
import warnings
from collections import Counter
from functools import cache

import paddle
import pytest
from gathers import MESH
from huggingface_configs import SMALL, small

from paddle_rbt_plugin.errors import ModelError, TunerError
from paddle_rbt_plugin.handover.pir.configs import config_graph
from paddle_rbt_plugin.handover.pir.trace import trace_layer
from paddle_rbt_plugin.model_reference import model_config, model_graph
from paddle_rbt_plugin.models import (
    LlamaConfig,
    ModelWarning,
    build,
    count_parameters,
    input_spec,
    load_config,
    load_huggingface,
    read_huggingface,
    sample_batch,
)
from paddle_rbt_plugin.models.huggingface import FAMILIES
from paddle_rbt_plugin.pattern.coverage import coverage
from paddle_rbt_plugin.plugins import load_plugins
from paddle_rbt_plugin.search import analyse

SEQ = 16
EVERY_FAMILY = pytest.mark.parametrize("family", SMALL)
UNMATCHED = {
    "deepseek_v2": {"q_b_proj", "kv_a_proj", "kv_b_proj"},
    "deepseek_v3": {"q_a_proj", "q_b_proj", "kv_a_proj", "kv_b_proj", "balance"},
    "glm4_moe": {"balance"},
    "ernie4_5_moe": {"balance"},
    "qwen2_moe": {"shared_gate"},
    "gpt_oss": {"sinks", "gate_weight", "up_weight", "down_weight", "gate_bias", "up_bias", "down_bias"},
}
"""What no pattern claims: latent attention, experts with biases, and vectors."""


@cache
def config(family):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ModelWarning)
        return read_huggingface(small(family), seq=SEQ)


@cache
def analysis(family):
    with paddle.LazyGuard():
        layer = build(config(family))
    return analyse(trace_layer(layer, input_spec(config(family), 4)).graph, load_plugins().patterns)


def write(tmp_path, content):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(content))
    return str(path)


# --- every family


def test_every_family_has_a_small_model():
    assert SMALL.keys() == FAMILIES.keys()


@EVERY_FAMILY
def test_a_small_model_learns_in_three_steps_and_every_parameter_has_a_gradient(family):
    paddle.seed(0)
    without_dropout = dataclasses.replace(config(family), dropout=0.0, attention_dropout=0.0)
    layer = build(without_dropout)
    optimizer = paddle.optimizer.AdamW(1e-2, parameters=layer.parameters())
    batch = {name: paddle.to_tensor(value) for name, value in sample_batch(without_dropout, 4, 0).items()}
    losses = []
    for _ in range(3):
        loss = layer(**batch)
        loss.backward()
        assert not [name for name, p in layer.named_parameters() if p.grad is None and not p.stop_gradient]
        optimizer.step()
        optimizer.clear_grad()
        losses.append(float(loss))
    assert losses[2] < losses[0]


@EVERY_FAMILY
def test_patterns_shard_the_blocks_on_two_and_four_ranks(family):
    found = analysis(family)
    for mp in (2, 4):
        mesh = MESH.__class__(("mp",), (mp,), tuple(range(mp)))
        assert found.indivisible({"mp": mp}) is None
        assert found.lost_sharding(found.complete(mesh)) is None
    covered = coverage(found.graph, found.layers, found.matches)
    unmatched = UNMATCHED.get(family, set())
    assert unmatched - {"balance", "shared_gate"} or covered.share("block") >= 0.985
    names = {c.tensor.structured_name.removesuffix(".weight").rsplit(".", 1)[-1] for c in covered.whole("")}
    assert names <= unmatched


@EVERY_FAMILY
def test_the_count_of_parameters_is_that_of_the_built_layer(family):
    layer = build(config(family))
    counted = count_parameters(config(family))
    assert counted.total == sum(p.size for p in layer.parameters())
    assert counted.active < counted.total if "moe" in family or "deepseek" in family else counted.active <= counted.total


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen3", {"num_hidden_layers": 6}),
        ("gemma2", {"num_hidden_layers": 10}),
        ("gemma3_text", {"num_hidden_layers": 15}),
        ("gemma3_text", {"num_hidden_layers": 14}),
        ("gpt_oss", {"num_hidden_layers": 8}),
        ("deepseek_v3", {"num_hidden_layers": 7, "first_k_dense_replace": 2}),
        ("qwen3_moe", {"num_hidden_layers": 8, "decoder_sparse_step": 2}),
        ("bert", {"num_hidden_layers": 5}),
        ("t5", {"num_layers": 5}),
    ],
)
def test_the_graph_of_a_deep_model_is_that_of_the_whole_trace(family, changes):
    from paddle.utils import unique_name

    deep = read_huggingface(small(family, **changes), seq=SEQ)
    with unique_name.guard(), paddle.LazyGuard():
        layer = build(deep)
    whole = trace_layer(layer, input_spec(deep, 4)).graph
    graph = config_graph(deep, 4)
    assert graph.signature == whole.signature
    assert [t.name for t in graph.params] == [t.name for t in whole.params]


# --- fields


def test_a_llama_by_its_config_is_the_llama_by_name():
    by_name = LlamaConfig(layers=2, hidden=64, ffn=96, heads=8, kv_heads=4, vocab=128, seq=SEQ)
    by_config = read_huggingface(small("llama", num_hidden_layers=2), seq=SEQ)
    a, b = config_graph(by_config, 4), config_graph(by_name, 4)
    assert Counter(op.type for op in a) == Counter(op.type for op in b)
    assert [t.shape for t in a.params] == [t.shape for t in b.params]


@pytest.mark.parametrize(
    ("family", "changes", "grows"),
    [
        ("llama", {"attention_bias": True}, 3 * (64 + 32 + 32 + 64)),
        ("llama", {"mlp_bias": True}, 3 * (96 + 96 + 64)),
        ("llama", {"tie_word_embeddings": True}, -128 * 64),
        ("llama", {"head_dim": 16}, 3 * 8 * 64 * (2 * 8 + 2 * 4)),
        ("llama", {"num_key_value_heads": None}, 3 * 2 * 64 * 32),
        ("gemma2", {"num_hidden_layers": 7}, 4 * 64 + 64 * 16 * (2 * 8 + 2 * 4) + 3 * 64 * 96),
        ("mixtral", {"num_local_experts": 5}, 3 * (3 * 64 * 96 + 64)),
        ("qwen3_moe", {"mlp_only_layers": [0]}, 3 * 64 * 96 - 8 * 3 * 64 * 32 - 8 * 64),
        ("qwen2_moe", {"shared_expert_intermediate_size": 0}, -3 * (3 * 64 * 64 + 64)),
        ("deepseek_v3", {"first_k_dense_replace": 0}, 9 * 3 * 64 * 32 + 8 * 64 + 8 - 3 * 64 * 96),
        ("deepseek_v3", {"n_shared_experts": 2}, 3 * 3 * 64 * 32),
        ("deepseek_v3", {"q_lora_rank": None}, 4 * (64 * 96 - 64 * 32 - 32 - 32 * 96)),
        ("glm4_moe", {"use_qk_norm": False}, -4 * 2 * 16),
        ("ernie4_5_moe", {"moe_num_shared_experts": 0}, -3 * 3 * 64 * 32),
        ("ernie4_5", {"use_bias": True}, 3 * (128 + 64 + 64 + 64 + 96 + 96 + 64)),
        ("gpt2", {"n_inner": 100}, 3 * (2 * 64 + 1) * (100 - 256)),
        ("gpt2", {"n_positions": 65}, 64),
        ("bert", {"type_vocab_size": 3}, 64),
        ("t5", {"feed_forward_proj": "gated-gelu"}, 6 * 64 * 96),
        ("t5", {"num_decoder_layers": 2}, -(3 * 64 + 8 * 64 * 64 + 2 * 64 * 96)),
        ("t5", {"tie_word_embeddings": False}, 128 * 64),
    ],
)
def test_a_field_that_changes_the_size_changes_it(family, changes, grows):
    changed = read_huggingface(small(family, **changes), seq=SEQ)
    assert count_parameters(changed).total - count_parameters(config(family)).total == grows


def test_layers_have_the_windows_that_their_family_gives_them():
    assert config("mistral").windows == (4,)
    assert [config("gemma2").window(i) for i in range(6)] == [4, 0, 4, 0, 4, 0]
    assert [config("gemma3").window(i) for i in range(6)] == [4, 4, 0, 4, 4, 0]
    assert [config("gpt_oss").window(i) for i in range(4)] == [4, 0, 4, 0]
    types = ["full_attention", "sliding_attention", "full_attention"]
    assert read_huggingface(small("qwen3", layer_types=types, sliding_window=4), seq=SEQ).windows == (0, 4, 0)
    qwen = small("qwen2", use_sliding_window=True, sliding_window=4, max_window_layers=2)
    assert read_huggingface(qwen, seq=SEQ).windows == (0, 0, 4)
    assert config("qwen2").windows == (0,)
    assert read_huggingface(small("qwen2", sliding_window=4, max_window_layers=2), seq=SEQ).windows == (0,)


def test_a_window_as_long_as_the_sequence_is_none():
    assert read_huggingface(small("mistral", sliding_window=16), seq=16).window(0) == 0


def test_the_base_of_rotary_frequencies_is_read_in_both_of_its_places():
    old = read_huggingface(small("llama", rope_theta=500000.0), seq=SEQ)
    new = read_huggingface(small("llama", rope_parameters={"rope_theta": 500000.0, "rope_type": "default"}), seq=SEQ)
    assert old == new
    assert old.rope_theta == 500000.0
    by_type = {"full_attention": {"rope_theta": 2e6}, "sliding_attention": {"rope_theta": 3e4}}
    gemma = read_huggingface(small("gemma3_text", rope_parameters=by_type), seq=SEQ)
    assert (gemma.rope_theta, gemma.window_rope_theta) == (2e6, 3e4)


def test_the_language_model_of_a_model_with_images_is_built_and_said():
    with pytest.warns(ModelWarning, match=r"gemma3: the vision tower \(vision_config\) is left out"):
        found = read_huggingface(small("gemma3"), seq=SEQ)
    assert found.layers == 9
    assert count_parameters(found) == count_parameters(config("gemma3_text"))


def test_multi_token_prediction_is_left_out_and_said():
    with pytest.warns(ModelWarning, match=r"deepseek_v3: multi-token prediction \(num_nextn_predict_layers 1\) is left out"):
        found = read_huggingface(small("deepseek_v3", num_nextn_predict_layers=1), seq=SEQ)
    assert found == config("deepseek_v3")


def test_a_length_is_assumed_where_nobody_says_one_and_said():
    with pytest.warns(ModelWarning, match="64 tokens are assumed, --seq"):
        assert read_huggingface(small("llama")).seq == 64
    with pytest.warns(ModelWarning, match="4096 tokens are assumed"):
        assert read_huggingface(small("llama", max_position_embeddings=131072)).seq == 4096
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read_huggingface(small("llama"), seq=128).seq == 128


# --- what is refused


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"model_type": "mamba"}, r"model_type 'mamba' is no family that is supported; supported: bert, deepseek_v2, .*t5"),
        ({"model_type": "qwen3_mo"}, r"'qwen3_mo' is no family that is supported; supported: bert, .*qwen3_moe"),
        ({"hidden_size": 64}, r"model_type nothing is no family that is supported; supported: bert"),
        ({"model_type": ["llama"]}, r"model_type \['llama'\] is no family"),
        ({"model_type": "llama"}, "llama also needs hidden_size"),
        (small("llama", num_experts=4), r"llama has no field 'num_experts' that is supported, .* is unknown"),
        (small("llama", hiden_size=4), r"llama has no field 'hiden_size'.*did you mean hidden_size"),
        (small("llama", hidden_size="64"), "llama: hidden_size must be a whole number from 1 to 16777216, not '64'"),
        (small("llama", num_attention_heads=7, num_key_value_heads=7), "num_attention_heads must divide hidden_size"),
        (small("llama", hidden_act="xielu"), "llama: hidden_act 'xielu' is not supported; supported: silu, swish, gelu"),
        (small("llama", num_key_value_heads=3), "there are 3 and 8"),
        (small("llama", num_hidden_layers=0), "num_hidden_layers must be a whole number from 1 to 1024, not 0"),
        (small("qwen3", layer_types=["linear_attention"] * 3), "type 'linear_attention' is not supported; supported: sliding"),
        (small("qwen3", layer_types=["full_attention"]), "layer_types must be a list of 3 types of layers"),
        (small("qwen3_moe", mlp_only_layers=[1]), r"mlp_only_layers must be the first layers, such as \[0, 1\], not \[1\]"),
        (small("deepseek_v3", scoring_func="softmax"), "scoring_func 'softmax' is not supported; supported: 'sigmoid'"),
        (small("deepseek_v3", num_experts_per_tok=9), "sent to at most 8 experts, as many as there are, not 9"),
        (small("ernie4_5_moe", moe_layer_end_index=2), "moe_layer_end_index 2 is not supported; supported: null or -1 or 3"),
        (small("ernie4_5_moe", use_bias=True), "use_bias True is not supported; supported: false"),
        (small("gpt_oss", swiglu_limit=5.0), "swiglu_limit 5.0 is not supported; supported: 7.0"),
        (small("gpt2", scale_attn_by_inverse_layer_idx=True), "scale_attn_by_inverse_layer_idx True is not supported"),
        (small("bert", position_embedding_type="relative_key"), "position_embedding_type 'relative_key' is not supported"),
        (small("bert", add_cross_attention=True), "add_cross_attention True is not supported; supported: false"),
        (small("t5", feed_forward_proj="gated-relu"), "feed_forward_proj 'gated-relu' is not supported; supported: relu"),
        (small("t5", is_encoder_decoder=False), "is_encoder_decoder False is not supported"),
        (small("t5", tie_encoder_decoder=True), "tie_encoder_decoder True is not supported; supported: false"),
        (small("qwen3", is_encoder_decoder=True), "is_encoder_decoder True is not supported; supported: false"),
        (small("gemma3", audio_config={}), "gemma3 has no field 'audio_config' that is supported"),
        (small("gemma3", text_config=3), "text_config must be an object of fields, not 3"),
        (small("llama", rope_theta=0), "llama: rope_theta must be a number above 1"),
    ],
)
def test_what_cannot_be_built_is_refused_by_family_and_field(tmp_path, content, message):
    with pytest.raises(ModelError, match=message) as error:
        load_huggingface(write(tmp_path, content), seq=SEQ)
    assert isinstance(error.value, TunerError)
    assert "config.json: " in str(error.value)


@EVERY_FAMILY
def test_no_family_takes_a_field_that_it_does_not_know(family):
    with pytest.raises(ModelError, match="has no field 'num_widgets'"):
        read_huggingface(small(family, num_widgets=2), seq=SEQ)


@EVERY_FAMILY
@pytest.mark.filterwarnings("ignore::paddle_rbt_plugin.models.ModelWarning")
def test_fields_of_text_generation_and_files_are_of_no_influence(family):
    stray = {
        "architectures": ["Any"],
        "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0",
        "bos_token_id": 1,
        "eos_token_id": [1, 2],
        "use_cache": True,
        "pruned_heads": {},
        "tie_encoder_decoder": False,
        "add_cross_attention": False,
        "rope_scaling": None,
        "quantization_config": {"quant_method": "fp8"},
        "task_specific_params": {},
    }
    assert read_huggingface({**small(family), **stray}, seq=SEQ) == config(family)


def test_a_file_that_is_no_json_object_is_refused(tmp_path):
    path = tmp_path / "config.json"
    path.write_text("[1]")
    with pytest.raises(ModelError, match="a model config is an object of fields, not list"):
        load_huggingface(path)
    path.write_text("{")
    with pytest.raises(ModelError, match="cannot read the model config"):
        load_huggingface(path)
    with pytest.raises(ModelError, match="cannot read the model config"):
        load_huggingface(tmp_path / "none.json")


# --- the doors


def test_a_config_is_a_model_of_the_command_line(tmp_path):
    path = write(tmp_path, small("qwen3"))
    assert model_config(path, 32) == read_huggingface(small("qwen3"), seq=32)
    assert model_graph(path, 4, seq=32).tensor("input_ids").shape == (4, 32)


def test_a_config_without_a_family_is_refused_as_a_config(tmp_path):
    with pytest.raises(ModelError, match="model_type nothing is no family"):
        model_graph(write(tmp_path, {"architectures": ["LlamaForCausalLM"]}), 4)


def test_another_json_file_is_still_a_program(tmp_path):
    path = tmp_path / "program.json"
    path.write_text('{"base_code": 1}')
    with pytest.raises(ModelError, match="is not a PIR program"):
        model_graph(str(path), 4)


def test_a_yaml_file_holds_the_fields_of_a_config(tmp_path):
    path = tmp_path / "mine.yaml"
    fields = "".join(f"  {name}: {value}\n" for name, value in small("llama").items())
    path.write_text(f"huggingface:\n{fields}seq: 32\nsource: mine\n")
    assert load_config(path) == read_huggingface(small("llama"), seq=32, source="mine")
    path.write_text(f"huggingface:\n{fields}sek: 32\n")
    with pytest.raises(ModelError, match=r"a config with huggingface has no field 'sek'; did you mean seq\?"):
        load_config(path)
    path.write_text("huggingface: 3\n")
    with pytest.raises(ModelError, match=r"mine\.yaml: huggingface must be the fields of a config\.json, not int"):
        load_config(path)
