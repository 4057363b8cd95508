"""Channel mixing of RWKV (arXiv 2305.13048, equations 12 to 14): sigmoid(r Wr) * (relu(k Wk)^2 Wv).

Key and value are a feed-forward network, column and then row parallel along ``mp``. The gate multiplies the whole result, so
its weight stays whole: divided, it would have to be gathered at once.
"""

from paddle_rbt_plugin import Pattern, hookimpl


class RWKVChannelMix(Pattern):
    """Feed-forward network with a squared ReLU and a gate on its result."""

    name = "rwkv_channel_mix"

    def build(self, g):
        key = g.linear(g.tensor("key"), g.param("key_weight", ndim=2))
        wide = g.op({"square", "pow"}, g.op("relu", key))
        value = g.linear(wide, g.param("value_weight", ndim=2))
        gate = g.op("sigmoid", g.linear(g.tensor("receptance"), g.param("receptance_weight", ndim=2)))
        g.op("multiply", gate, value)

    shard = {
        "key": ("dp", ..., None),
        "receptance": ("dp", ..., None),
        "key_weight": (None, "mp"),
        "value_weight": ("mp", None),
        "receptance_weight": (None, None),
    }

    dim_names = {
        "key_weight": ("hidden size", "feed-forward size"),
        "value_weight": ("feed-forward size", "hidden size"),
    }


@hookimpl
def register_patterns(register):
    register(RWKVChannelMix)
