"""Run where the package is installed: the pattern is found, matches RWKV's block, changes the plan, and keeps the loss."""

import paddle
import pytest
from paddle import nn
from paddle.nn import functional as F
from paddle.static import InputSpec

import paddle_rbt_plugin as rbt
from paddle_rbt_plugin.plugins import load_plugins
from paddle_rbt_plugin.testing import assert_consistent, assert_matches, assert_same_loss

SPEC = [InputSpec([8, 16], "int64", name) for name in ("tokens", "labels")]
WEIGHTS = ("key.weight", "value.weight", "receptance.weight")


class ChannelMix(nn.Layer):
    def __init__(self, hidden, wide):
        super().__init__()
        self.mix_key, self.mix_receptance = (self.create_parameter([hidden]) for _ in range(2))
        self.key, self.value = nn.Linear(hidden, wide, bias_attr=False), nn.Linear(wide, hidden, bias_attr=False)
        self.receptance = nn.Linear(hidden, hidden, bias_attr=False)
        self.gate = F.sigmoid

    def forward(self, x):
        before = paddle.concat([x[:, :1] * 0, x[:, :-1]], axis=1)
        key = x * self.mix_key + before * (1 - self.mix_key)
        receptance = x * self.mix_receptance + before * (1 - self.mix_receptance)
        return self.gate(self.receptance(receptance)) * self.value(paddle.square(F.relu(self.key(key))))


class Model(nn.Layer):
    def __init__(self, layers=2, hidden=64, wide=256, vocab=128):
        super().__init__()
        self.words, self.head = nn.Embedding(vocab, hidden), nn.Linear(hidden, vocab, bias_attr=False)
        self.blocks = nn.LayerList([ChannelMix(hidden, wide) for _ in range(layers)])
        self.norms = nn.LayerList([nn.LayerNorm(hidden) for _ in range(layers)])

    def forward(self, tokens, labels):
        x = self.words(tokens)
        for norm, block in zip(self.norms, self.blocks, strict=True):
            x = x + block(norm(x))
        return F.cross_entropy(self.head(x), labels.unsqueeze(2))


def build():
    return Model(), SPEC


def plan(**settings):
    space = {"mp": [2], "pp": [1]}
    return rbt.tune(Model(), input_spec=SPEC, cluster="1x4:A100-80G", search_space=space, **settings)


def placed(found):
    """Dims mapping on [dp, mp] of the weights of the first block."""
    by_path = {t.structured_name: t for t in found.tensors.values()}
    return [by_path[f"blocks.0.{name}"].dims_mapping for name in WEIGHTS]


def test_the_plugin_is_found():
    (row,) = [row for row in load_plugins().rows if row.distribution == "rbt-rwkv-pattern"]
    assert (row.name, row.version, row.state) == ("rwkv_channel_mix", "0.1.0", "active")


@pytest.mark.parametrize("layers", [1, 3])
def test_the_pattern_matches_every_block_and_asks_for_what_fits_it(layers):
    assert_matches("rwkv_channel_mix", Model(layers), SPEC, count=layers)
    assert_consistent("rwkv_channel_mix", Model(layers), SPEC, degrees={"dp": 2, "mp": 4})


def test_a_gate_of_another_kind_is_another_block():
    class Linear(Model):
        def __init__(self):
            super().__init__()
            for block in self.blocks:
                block.gate = F.tanh

    report = assert_matches("rwkv_channel_mix", Linear(), SPEC, count=0)
    assert report.near_miss.objection == "it is tanh, not sigmoid"


def test_the_plan_shards_what_the_pattern_says():
    found = plan()
    assert placed(found) == [(-1, 1), (1, -1), (-1, -1)]
    assert found.patterns["rwkv_channel_mix"] == {"distribution": "rbt-rwkv-pattern", "version": "0.1.0", "matches": 2}
    assert not found.unmatched


def test_without_the_plugin_nothing_of_the_block_is_sharded():
    found = plan(blocked_plugins=["rwkv_channel_mix"])
    assert placed(found) == [(-1, -1)] * 3
    assert len(found.unmatched) == 6


def test_training_under_the_plan_gives_the_loss_of_one_process():
    assert_same_loss(build, "rwkv_channel_mix")
