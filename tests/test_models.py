"""The GPT and LLaMA that ship with the package, and their published sizes."""

import dataclasses
import re
import resource

import numpy as np
import paddle
import pytest

from paddle_rbt_plugin.errors import ModelError
from paddle_rbt_plugin.handover.pir.trace import trace_layer
from paddle_rbt_plugin.models import (
    GPTConfig,
    LlamaConfig,
    build,
    config_names,
    input_spec,
    load_config,
    named_config,
    sample_batch,
)
from paddle_rbt_plugin.models.llama import LlamaAttention, LlamaRMSNorm, rotary_tables, rotate

GPT = GPTConfig(layers=2, hidden=32, ffn=64, heads=4, vocab=64, seq=16)
LLAMA = LlamaConfig(layers=2, hidden=32, ffn=48, heads=4, kv_heads=2, vocab=64, seq=16)
SMALL = pytest.mark.parametrize("config", [GPT, dataclasses.replace(GPT, dropout=0.1), LLAMA], ids=["gpt", "dropout", "llama"])

# Millions of parameters, as the papers and model cards give them.
PUBLISHED = {
    "gpt-345m": 355,
    "gpt3-125m": 125,
    "gpt3-1.3b": 1_300,
    "gpt3-2.7b": 2_700,
    "gpt3-6.7b": 6_700,
    "gpt3-13b": 13_000,
    "gpt3-175b": 175_000,
    "gpt-39b": 39_100,
    "gpt-76b": 76_100,
    "llama-7b": 6_738,
    "llama-13b": 13_016,
    "llama2-7b": 6_738,
    "llama2-13b": 13_016,
    "llama2-70b": 68_977,
    "llama3-8b": 8_030,
    "llama3-70b": 70_554,
    "llama3-405b": 405_853,
}


def tensors(config, batch=2, seed=0):
    return {name: paddle.to_tensor(value) for name, value in sample_batch(config, batch, seed).items()}


def trace(config, batch):
    with paddle.LazyGuard():
        layer = build(config)
    return trace_layer(layer, input_spec(config, batch)).graph


def resident_bytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# --- configs


def test_every_published_gpt_and_llama_has_a_config_and_nothing_else_has():
    assert {name for name in config_names() if named_config(name).arch in ("gpt", "llama")} == set(PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_named_config_says_where_its_numbers_come_from(name):
    assert "arXiv" in named_config(name).source or "Megatron" in named_config(name).source


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_named_config_builds_a_model_of_the_published_size_without_allocating_it(name):
    config = named_config(name)
    before = resident_bytes()
    with paddle.LazyGuard():
        layer = build(config)
    parameters = sum(np.prod(p.shape) for p in layer.parameters())
    assert parameters / 1e6 == pytest.approx(PUBLISHED[name], rel=0.03)
    assert resident_bytes() - before < 500e6


def test_an_unknown_name_is_answered_with_the_nearest_ones():
    with pytest.raises(ModelError, match=r"no model is named 'gpt3-1\.3B'; did you mean gpt3-1\.3b"):
        named_config("gpt3-1.3B")


def test_a_name_like_no_other_is_answered_with_all_of_them():
    with pytest.raises(ModelError, match=r"known: deepseek-v2, .*gpt-345m, .*llama3-8b"):
        named_config("zzz")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 5}, r"heads must divide hidden, but hidden = 32 and heads = 5; near it: \[1, 2, 4, 8\]"),
        ({"layers": 0}, "layers must be a whole number from 1 to 1024, not 0"),
        ({"vocab": 1.5}, "vocab must be a whole number"),
        ({"heads": True}, "heads must be a whole number"),
        ({"source": 3}, "source must be text, not 3"),
        ({"dropout": 1.0}, "dropout must be a number of at least 0 and less than 1, not 1.0"),
    ],
)
def test_a_gpt_that_cannot_be_names_the_wrong_field(change, message):
    with pytest.raises(ModelError, match=message):
        dataclasses.replace(GPT, **change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_heads": 3}, "kv_heads must divide heads, but heads = 4 and kv_heads = 3"),
        ({"hidden": 36, "heads": 4}, "hidden / heads must be even for rotary positions, not 36 / 4"),
        ({"ffn": -1}, "ffn must be a whole number from 1 to 16777216, not -1"),
    ],
)
def test_a_llama_that_cannot_be_names_the_wrong_field(change, message):
    with pytest.raises(ModelError, match=message):
        dataclasses.replace(LLAMA, **change)


YAML = "arch: gpt\nlayers: 2\nhidden: 32\nffn: 64\nheads: 4\nvocab: 64\nseq: 16\n"


@pytest.mark.parametrize("value", [".nan", ".inf", "-.inf", "0", "-1.0e-6", "yes", "[1]", "null", "nan"])
@pytest.mark.parametrize("field", ["norm_eps", "init_std", "rope_theta"])
def test_numbers_that_make_no_model_are_refused_by_file_field_and_what_would_be_right(tmp_path, field, value):
    path = tmp_path / "mine.yaml"
    path.write_text(YAML.replace("gpt", "llama") + f"kv_heads: 2\n{field}: {value}\n")
    with pytest.raises(ModelError, match=rf"mine\.yaml: {field} must be a number above [01]"):
        load_config(path)


def test_a_file_of_ones_own_loads_like_a_named_config(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(YAML)
    assert load_config(path) == GPT


def test_a_float_may_be_written_as_yaml_does_not_understand_it(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(YAML + "norm_eps: 1e-6\n")
    assert load_config(path).norm_eps == 1e-6


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (YAML.replace("gpt", "bert"), "arch must be one of gpt, llama, not 'bert'"),
        (YAML + "hiden: 3\n", "gpt has no field 'hiden'; did you mean hidden"),
        (YAML.replace("vocab: 64\n", ""), "gpt also needs vocab"),
        (YAML.replace("vocab: 64", "vocab: many"), "vocab must be a whole number from 1 to 16777216, not 'many'"),
        (YAML + "norm_eps: small\n", "norm_eps must be a number above 0 and less than 1, not 'small'"),
        ("- gpt\n", "a model config is a mapping of fields, not list"),
        ("a: [\n", "cannot read the model config"),
        (YAML + "seq: 32\n", "'seq' occurs twice"),
        (YAML.replace("arch: gpt", "arch: [gpt]"), "arch must be one of"),
        *((YAML.replace("seq: 16", f"seq: {n}"), "seq must be a whole number from 1 to 16777216") for n in (2**63, 3 * 10**9)),
        *(
            (re.sub(rf"{name}: \d+", f"{name}: {10**30}", YAML), f"{name} must be a whole number from 1 to")
            for name in ("layers", "hidden", "vocab")
        ),
        (YAML.replace("seq: 16", "seq: " + "9" * 5000), "cannot read the model config"),
        (YAML + f"norm_eps: {10**400}\n", "norm_eps must be a number above 0 and less than 1"),
    ],
)
def test_a_file_that_is_no_config_says_what_is_wrong_and_where(tmp_path, text, message):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(ModelError, match=message) as caught:
        load_config(path)
    assert str(path) in str(caught.value)


def test_sizes_that_are_too_large_together_are_named():
    longest = dataclasses.replace(GPT, seq=2**24)
    with pytest.raises(ModelError, match=r"batch x heads x seq x seq = .* batch 1024, heads 4, seq 16777216"):
        input_spec(longest, 1024)


def test_a_missing_file_is_a_model_error(tmp_path):
    with pytest.raises(ModelError, match="cannot read the model config"):
        load_config(tmp_path / "none.yaml")


# --- inputs


@SMALL
def test_sample_batches_fit_the_input_spec(config):
    batch = sample_batch(config, 3, seed=1)
    specs = input_spec(config, 3)
    assert [s.name for s in specs] == list(batch)
    for spec, value in zip(specs, batch.values(), strict=True):
        assert (list(spec.shape), spec.dtype) == (list(value.shape), getattr(paddle, value.dtype.name))


@SMALL
def test_labels_are_the_next_tokens_and_a_seed_repeats_them(config):
    batch, again, other = (sample_batch(config, 3, seed) for seed in (1, 1, 2))
    tokens = batch.get("tokens", batch.get("input_ids"))
    np.testing.assert_array_equal(tokens[:, 1:], batch["labels"][:, :-1])
    for name, value in batch.items():
        np.testing.assert_array_equal(value, again[name])
    assert (batch["labels"] != other["labels"]).any()


# --- training


@SMALL
def test_the_models_learn_in_dygraph(config):
    paddle.seed(0)
    model = build(config)
    optimizer = paddle.optimizer.AdamW(1e-2, parameters=model.parameters())
    losses = []
    for step in range(40):
        loss = model(**tensors(config, batch=8, seed=step % 2))
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        losses.append(float(loss))
    assert losses[0] == pytest.approx(np.log(config.vocab), rel=0.1)
    assert losses[-1] < 0.5 * losses[0]


def test_gpt_does_not_look_ahead():
    model, batch = build(GPT), tensors(GPT)
    inputs = batch["tokens"], batch["position_ids"], batch["attention_mask"]
    changed = inputs[0].clone()
    changed[:, 10:] = 0
    before, after = model.gpt(*inputs), model.gpt(changed, *inputs[1:])
    np.testing.assert_allclose(before[:, :10].numpy(), after[:, :10].numpy(), atol=1e-6)
    assert not np.allclose(before[:, 10:].numpy(), after[:, 10:].numpy(), atol=1e-3)


def test_gpt_counts_only_the_tokens_that_the_loss_mask_keeps():
    model, batch = build(GPT), tensors(GPT)
    batch["loss_mask"][:, 5:] = 0
    loss = model(**batch)
    batch["labels"][:, 5:] = 0
    assert float(model(**batch)) == pytest.approx(float(loss))


def test_the_head_of_gpt_is_its_word_embedding():
    assert not any("head" in name for name, _ in build(GPT).named_parameters())


def test_llama_does_not_look_ahead():
    model, ids = build(LLAMA), tensors(LLAMA)["input_ids"]
    changed = ids.clone()
    changed[:, 10:] = 0
    before, after = model.llama(ids), model.llama(changed)
    np.testing.assert_allclose(before[:, :10].numpy(), after[:, :10].numpy(), atol=1e-6)


def test_rms_norm_leaves_a_root_mean_square_of_one():
    x = paddle.randn([2, 3, LLAMA.hidden]) * 7
    y = LlamaRMSNorm(LLAMA)(x).numpy()
    np.testing.assert_allclose(np.sqrt((y**2).mean(-1)), 1.0, rtol=1e-4)


def test_rotated_queries_and_keys_meet_by_their_distance_alone():
    cos, sin = rotary_tables(16, 8, 10000.0)
    query, key = (rotate(paddle.expand(paddle.randn([1, 1, 1, 8]), [1, 16, 1, 8]), cos, sin)[0, :, 0] for _ in range(2))
    scores = paddle.matmul(query, key, transpose_y=True).numpy()
    for distance in range(16):
        np.testing.assert_allclose(np.diagonal(scores, distance), scores[0, distance], atol=1e-4)


def test_grouped_keys_and_values_equal_full_ones_with_shared_weights():
    grouped = LlamaAttention(LLAMA)
    full = LlamaAttention(dataclasses.replace(LLAMA, kv_heads=LLAMA.heads))
    copies, head = LLAMA.heads // LLAMA.kv_heads, LLAMA.head_dim
    for name, weight in grouped.state_dict().items():
        if name.startswith(("k_proj", "v_proj")):
            heads = weight.reshape([LLAMA.hidden, LLAMA.kv_heads, head])
            weight = paddle.repeat_interleave(heads, copies, axis=1).reshape([LLAMA.hidden, LLAMA.hidden])
        full.state_dict()[name].set_value(weight)
    x = paddle.randn([2, LLAMA.seq, LLAMA.hidden])
    tables = *rotary_tables(LLAMA.seq, head, LLAMA.rope_theta), paddle.zeros([LLAMA.seq, LLAMA.seq])
    np.testing.assert_allclose(grouped(x, *tables).numpy(), full(x, *tables).numpy(), atol=1e-5)


# --- tracing


@SMALL
def test_the_batch_size_is_no_part_of_a_reshape(config):
    graph = trace(config, batch=7)
    assert not [op.name for op in graph if op.type == "reshape" and 7 in op.attrs["shape"]]


def test_gpt_traces_to_plain_ops():
    assert {op.type for op in trace(GPT, 2)} == {
        "embedding", "add", "layer_norm", "matmul", "reshape", "transpose", "scale", "softmax", "gelu",
        "unsqueeze", "cross_entropy_with_softmax", "multiply", "sum", "divide",
    }  # fmt: skip


def test_llama_traces_to_plain_ops():
    assert {op.type for op in trace(LLAMA, 2)} == {
        "embedding", "full", "arange", "scale", "elementwise_pow", "reshape", "multiply", "concat", "cos", "sin", "triu",
        "pow", "mean", "rsqrt", "matmul", "slice", "add", "unsqueeze", "tile", "transpose", "softmax", "silu",
        "cross_entropy_with_softmax",
    }  # fmt: skip


@SMALL
def test_traced_graphs_know_inputs_and_loss(config):
    graph = trace(config, 2)
    assert [t.name for t in graph.data] == [s.name for s in input_spec(config, 2)]
    assert graph.tensors[graph.loss].shape == ()


@pytest.mark.slow
def test_a_model_larger_than_memory_traces_without_growing():
    before = resident_bytes()
    graph = trace(named_config("gpt3-13b"), batch=1)
    assert sum(t.nbytes for t in graph.params) > 50e9
    assert resident_bytes() - before < 1e9
