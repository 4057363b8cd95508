"""Run where the package is installed: the pattern is found, matches RWKV's block, and changes the plan."""

import paddle
from paddle import nn
from paddle.nn import functional as F
from paddle.static import InputSpec

import paddle_rbt_plugin as rbt
from paddle_rbt_plugin.plugins import load_plugins

WEIGHTS = ("key.weight", "value.weight", "receptance.weight")


class ChannelMix(nn.Layer):
    def __init__(self, hidden, wide):
        super().__init__()
        self.mix_key, self.mix_receptance = (self.create_parameter([hidden]) for _ in range(2))
        self.key, self.value = nn.Linear(hidden, wide, bias_attr=False), nn.Linear(wide, hidden, bias_attr=False)
        self.receptance = nn.Linear(hidden, hidden, bias_attr=False)

    def forward(self, x):
        before = paddle.concat([x[:, :1] * 0, x[:, :-1]], axis=1)
        key = x * self.mix_key + before * (1 - self.mix_key)
        receptance = x * self.mix_receptance + before * (1 - self.mix_receptance)
        return F.sigmoid(self.receptance(receptance)) * self.value(paddle.square(F.relu(self.key(key))))


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


def plan(**settings):
    spec = [InputSpec([8, 16], "int64", name) for name in ("tokens", "labels")]
    space = {"mp": [2], "pp": [1]}
    return rbt.tune(Model(), input_spec=spec, cluster="1x4:A100-80G", search_space=space, **settings)


def placed(found):
    """Dims mapping on [dp, mp] of the weights of the first block."""
    by_path = {t.structured_name: t for t in found.tensors.values()}
    return [by_path[f"blocks.0.{name}"].dims_mapping for name in WEIGHTS]


def test_the_plugin_is_found():
    (row,) = [row for row in load_plugins().rows if row.distribution == "rbt-rwkv-pattern"]
    assert (row.name, row.version, row.state) == ("rwkv_channel_mix", "0.1.0", "active")


def test_the_plan_shards_what_the_pattern_says():
    found = plan()
    assert placed(found) == [(-1, 1), (1, -1), (-1, -1)]
    assert found.patterns["rwkv_channel_mix"] == {"distribution": "rbt-rwkv-pattern", "version": "0.1.0", "matches": 2}
    assert not found.unmatched


def test_without_the_plugin_nothing_of_the_block_is_sharded():
    found = plan(blocked_plugins=["rwkv_channel_mix"])
    assert placed(found) == [(-1, -1)] * 3
    assert len(found.unmatched) == 6
