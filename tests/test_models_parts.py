"""The parts that transformers are made of compute what their papers say."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import paddle
import pytest
from huggingface_configs import small
from paddle.nn import functional as F

from paddle_rbt_plugin.errors import ModelError
from paddle_rbt_plugin.models import build, read_huggingface, sample_batch
from paddle_rbt_plugin.models.attention import Core, GroupedAttention
from paddle_rbt_plugin.models.encoder_decoder import Stack
from paddle_rbt_plugin.models.experts import Mixture, group_of
from paddle_rbt_plugin.models.latent import LatentAttention
from paddle_rbt_plugin.models.masks import banded, block_of, causal
from paddle_rbt_plugin.models.rotary import rotary_tables, rotate
from paddle_rbt_plugin.models.transformer import Experts, Heads, period

SEQ = 16


def random(*shape, seed=0):
    return paddle.to_tensor(np.random.default_rng(seed).standard_normal(shape).astype("float32"))


def close(a, b, tolerance=1e-5):
    np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=tolerance, atol=tolerance)


def randomised(layer, seed=1):
    """The layer with every parameter drawn anew, biases and scales of norms as well."""
    for i, p in enumerate(layer.parameters()):
        p.set_value(random(*p.shape, seed=seed + i) * 0.3)
    return layer


# --- attention


@pytest.mark.parametrize("window", [1, 3, 4])
@pytest.mark.parametrize("seq", [SEQ, 24])
def test_a_window_cut_in_blocks_is_the_window_over_the_whole_sequence(window, seq):
    block = block_of(seq, window)
    assert block >= window
    q, k, v = (random(2, seq, heads, 4, seed=s) for s, heads in enumerate((4, 2, 2)))
    whole = Core(0.5)(q, k, v, causal(seq, window, 0), None)
    close(Core(0.5, block=block)(q, k, v, banded(seq, window, 0), None), whole)


def test_a_window_reads_as_many_tokens_back_as_it_says():
    (mask,) = causal(6, 3, 0)
    assert (mask.numpy() == 0).tolist() == [[i - 3 < j <= i for j in range(6)] for i in range(6)]


@pytest.mark.parametrize("block", [0, 4])
def test_a_sink_is_one_more_score_that_reads_nothing(block):
    q, k, v = (random(2, SEQ, 4, 4, seed=s) for s in range(3))
    sink = random(4, 1, 1, seed=9)
    (mask,) = causal(SEQ, 3, 0)
    scores = paddle.matmul(*(x.transpose([0, 2, 1, 3]) for x in (q, k)), transpose_y=True) * 0.5 + mask
    weights = F.softmax(paddle.concat([scores, paddle.expand(sink, [2, 4, SEQ, 1])], axis=-1))[..., :-1]
    expected = paddle.matmul(weights, v.transpose([0, 2, 1, 3])).transpose([0, 2, 1, 3]).reshape([2, SEQ, 16])
    masks = banded(SEQ, 3, 1) if block else causal(SEQ, 3, 1)
    close(Core(0.5, block=block)(q, k, v, masks, sink), expected)


def test_a_window_is_cut_in_blocks_only_where_that_saves_work():
    assert block_of(4096, 1024) == 1024
    assert block_of(4096, 128) == 128
    assert block_of(4096, 2048) == 0  # two blocks, the second reads all
    assert block_of(4096, 0) == 0
    assert block_of(4096, 1000) == 1024
    assert block_of(4099, 128) == 0  # a prime


def test_scores_are_capped_before_they_are_masked():
    q, k, v = (random(1, 4, 1, 4, seed=s) * 9 for s in range(3))
    scores = paddle.matmul(*(x.transpose([0, 2, 1, 3]) for x in (q, k)), transpose_y=True)
    expected = paddle.matmul(F.softmax(5 * paddle.tanh(scores / 5) + causal(4, 0, 0)[0]), v.transpose([0, 2, 1, 3]))
    close(Core(1.0, softcap=5.0)(q, k, v, causal(4, 0, 0), None), expected.transpose([0, 2, 1, 3]).reshape([1, 4, 4]))


def test_rotary_positions_turn_a_part_of_a_head_and_leave_the_rest():
    x = random(1, 6, 2, 8)
    turned = rotate(x, *rotary_tables(6, 4, 10000.0))
    close(turned[..., 4:], x[..., 4:])
    close(turned[..., :4], rotate(x[..., :4], *rotary_tables(6, 4, 10000.0)))
    close(turned[:, 0], x[:, 0])


def test_heads_are_normalised_before_they_are_turned():
    config = read_huggingface(small("qwen3"), seq=SEQ)
    layer = randomised(GroupedAttention(config, config.attention))
    x, tables = random(2, SEQ, 64), rotary_tables(SEQ, 16, 1e4)
    seen = {}
    layer.core.register_forward_pre_hook(lambda _, inputs: seen.update(q=inputs[0]))
    layer(x, tables, causal(SEQ, 0, 0))
    heads = layer.q_proj(x).reshape([2, SEQ, 8, 16])
    normal = heads / paddle.sqrt((heads**2).mean(-1, keepdim=True) + 1e-6) * layer.q_norm.weight
    close(seen["q"], rotate(normal, *tables))


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_latent_attention_is_attention_with_the_keys_and_values_of_the_narrow_vector(family):
    config = read_huggingface(small(family), seq=SEQ)
    part = config.attention
    layer = randomised(LatentAttention(config, part))
    x, tables, masks = random(2, SEQ, 64), rotary_tables(SEQ, part.rotary_dim, 1e4), causal(SEQ, 0, 0)
    narrow = layer.q_a_norm(layer.q_a_proj(x)) if part.query_rank else x
    latent, turning = paddle.split(layer.kv_a_proj(x), [part.kv_rank, part.rotary_dim], axis=-1)
    kv = layer.kv_b_proj(layer.kv_a_norm(latent)).reshape([2, SEQ, 8, 16])
    turned = rotate(turning.reshape([2, SEQ, 1, part.rotary_dim]), *tables)[:, :, 0]
    contexts = []
    for h in range(part.heads):
        q = layer.q_b_proj(narrow).reshape([2, SEQ, 8, part.head_dim])[:, :, h]
        q = paddle.concat([q[..., : part.plain_dim], rotate(q[:, :, None, part.plain_dim :], *tables)[:, :, 0]], axis=-1)
        k = paddle.concat([kv[:, :, h, : part.plain_dim], turned], axis=-1)
        scores = paddle.matmul(q, k, transpose_y=True) / math.sqrt(part.head_dim) + masks[0]
        contexts.append(paddle.matmul(F.softmax(scores), kv[:, :, h, part.plain_dim :]))
    close(layer(x, tables, masks), layer.o_proj(paddle.concat(contexts, axis=-1)), 1e-4)


# --- experts


def mixture(family, **changes):
    config = read_huggingface(small(family), seq=SEQ)
    config = dataclasses.replace(config, experts=dataclasses.replace(config.experts, **changes))
    return randomised(Mixture(config, config.experts)), config.experts


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3", "glm4_moe", "gpt_oss"])
def test_a_mixture_is_the_weighted_sum_of_the_chosen_experts_where_all_find_room(family):
    layer, experts = mixture(family)
    layer.room = SEQ
    x = random(2, SEQ, 64)
    scores = layer.router(x)
    scores = F.softmax(scores) if experts.scores == "softmax" else F.sigmoid(scores)
    expected = np.zeros([2, SEQ, 64], "float32")
    for b in range(2):
        for t in range(SEQ):
            ranked = scores[b, t] + layer.balance if experts.balanced else scores[b, t]
            chosen = np.argsort(-ranked.numpy())[: experts.chosen]
            weights = scores[b, t].numpy()[chosen]
            weights = weights / weights.sum() if experts.renormalise else weights
            for e, w in zip(chosen, weights, strict=True):
                gated, up = x[b, t] @ layer.gate_weight[e], x[b, t] @ layer.up_weight[e]
                if experts.bias:
                    gated, up = (gated + layer.gate_bias[e, 0]).clip(max=7), (up + layer.up_bias[e, 0]).clip(-7, 7) + 1
                    wide = gated * F.sigmoid(1.702 * gated) * up
                else:
                    wide = F.silu(gated) * up
                down = wide @ layer.down_weight[e] + (layer.down_bias[e, 0] if experts.bias else 0)
                expected[b, t] += experts.scaling * w * down.numpy()
    if experts.shared_width:
        shared = layer.shared(x) * (F.sigmoid(layer.shared_gate(x)) if experts.shared_gate else 1)
        expected += shared.numpy()
    np.testing.assert_allclose(layer(x).numpy(), expected, rtol=2e-3, atol=2e-4)


def test_an_expert_takes_no_more_tokens_of_a_group_than_it_has_room_for():
    layer, _ = mixture("mixtral")
    layer.room = 2
    chosen = paddle.zeros([1, 5, 4])
    chosen[0, :, 1] = 1.0
    slots = layer.slots(chosen)
    assert slots.shape == [1, 5, 4, 2]
    assert slots[0, :, 1].tolist() == [[1, 0], [0, 1], [0, 0], [0, 0], [0, 0]]
    assert float(slots.sum()) == 2


def test_a_balancing_bias_changes_the_choice_and_no_weight_and_is_not_trained():
    layer, _ = mixture("deepseek_v3")
    tokens = random(1, 1, 64)
    before = F.sigmoid(layer.router(tokens))[0, 0]
    worst = int(before.argmin())
    balance = np.zeros(8, "float32")
    balance[worst] = 9
    layer.balance.set_value(paddle.to_tensor(balance))
    weights, chosen = layer.weights(tokens)
    best = int(before.argmax())
    assert chosen[0, 0, worst] == 1
    assert float(weights[0, 0, worst] / weights[0, 0, best]) == pytest.approx(float(before[worst] / before[best]), rel=1e-4)
    assert layer.balance.stop_gradient


def test_groups_of_tokens_divide_the_sequence_and_fill_the_experts():
    experts = Experts(count=256, chosen=8, width=64, activation="silu")
    assert group_of(4096, experts) == 128
    assert group_of(4096, dataclasses.replace(experts, count=160, chosen=6)) % 128 == 0
    assert group_of(16, experts) == 16
    assert 4095 % group_of(4095, experts) == 0


def test_layers_of_one_kind_are_found_whatever_comes_before_and_how_they_alternate():
    assert period("dddd") == (0, 1)
    assert period("dmmmm") == (1, 1)
    assert period("wfwfwf") == (0, 2)
    assert period("wwfwwfww") == (0, 3)
    assert period("abc") == (0, 3)


# --- other parts


def test_distances_fall_into_buckets_that_grow_with_the_logarithm():
    config = read_huggingface(small("t5"), seq=SEQ)
    both, back = Stack(config, decodes=False).buckets(300), Stack(config, decodes=True).buckets(300)
    assert both[0, :9].tolist() == [0, 17, 18, 19, 20, 21, 22, 23, 24]
    assert both[8:9, 0].tolist() == [8]
    assert int(both[0, 299]) == 31
    assert back[0, :3].tolist() == [0, 0, 0]
    assert back[16:18, 0].tolist() == [16, 16]
    assert int(back[299, 0]) == 31
    assert (both >= 0).all()
    assert (both < 32).all()


def test_no_token_of_a_decoder_sees_a_later_one():
    for family in ("gemma3_text", "gpt_oss", "deepseek_v3", "gpt2"):
        model = build(read_huggingface(small(family), seq=SEQ))
        model.eval()
        tokens = paddle.to_tensor(sample_batch(read_huggingface(small(family), seq=SEQ), 1, 0)["input_ids"])
        changed = tokens.clone()
        changed[0, -1] = (int(tokens[0, -1]) + 1) % 128
        close(model.model(tokens)[:, :-1], model.model(changed)[:, :-1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_heads": 3}, "heads of keys and values must divide those of queries, but there are 3 and 4"),
        ({"head_dim": 0}, "head_dim must be a whole number from 1"),
        ({"scaling": 0.0}, "scaling must be a number above 0"),
    ],
)
def test_heads_that_cannot_be_name_the_wrong_field(change, message):
    with pytest.raises(ModelError, match=message):
        Heads(**{"heads": 4, "kv_heads": 2, "head_dim": 8, **change})


def test_learned_positions_limit_the_sequence():
    with pytest.raises(ModelError, match="seq must be at most 64, the positions that the model has learned, not 65"):
        read_huggingface(small("gpt2"), seq=65)
