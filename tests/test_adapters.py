"""Low-rank adapters follow the projections beside which they are; anything else that is added to one is no adapter."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import paddle
import pytest
from paddle import nn
from paddle.nn import functional as F
from paddle.static import InputSpec

from paddle_rbt_plugin.graph import Graph
from paddle_rbt_plugin.handover.pir.trace import trace_layer
from paddle_rbt_plugin.pattern import Match, match_all
from paddle_rbt_plugin.pattern.adapters import find_adapters
from paddle_rbt_plugin.plugins import load_plugins

HIDDEN, WIDE, RANK = 32, 64, 4
Sum = Callable[["Adapted", Any], Any]


class Adapted(nn.Layer):
    """A projection with parts for adapters; ``total`` says how they are added."""

    def __init__(self, inputs: int, outputs: int, total: Sum, rank: int = RANK) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs)
        self.down, self.up = nn.Linear(inputs, rank, bias_attr=False), nn.Linear(rank, outputs, bias_attr=False)
        self.down2, self.up2 = nn.Linear(inputs, rank, bias_attr=False), nn.Linear(rank, outputs, bias_attr=False)
        self.total = total

    def forward(self, x: Any) -> Any:
        return self.total(self, x)


WRITTEN: dict[str, Sum] = {
    "plain": lambda p, x: p.base(x) + p.up(p.down(x)),
    "adapter first": lambda p, x: p.up(p.down(x)) + p.base(x),
    "scaled": lambda p, x: p.base(x) + p.up(p.down(x)) * 0.5,
    "dropped out": lambda p, x: p.base(x) + p.up(p.down(F.dropout(x, 0.1))) * 0.5,
    "scaled in between": lambda p, x: p.base(x) + p.up(p.down(x) * 2.0),
    "before the bias": lambda p, x: x.matmul(p.base.weight) + p.up(p.down(x)) + p.base.bias,
    "in half precision": lambda p, x: p.base(x) + p.up(p.down(x.astype("bfloat16").astype("float32"))),
}
OTHERS: dict[str, Sum] = {
    "another input": lambda p, x: p.base(x) + p.up(p.down(F.relu(x))),
    "an activation between": lambda p, x: p.base(x) + p.up(F.relu(p.down(x))),
    "one product": lambda p, x: p.base(x) + x.matmul(p.base.weight),
    "the input again": lambda p, x: p.base(x) + paddle.concat([x, x], axis=-1)[..., : p.base.weight.shape[1]],
}


class Network(nn.Layer):
    def __init__(self, total: Sum, rank: int = RANK) -> None:
        super().__init__()
        self.up, self.down = Adapted(HIDDEN, WIDE, total, rank), Adapted(WIDE, HIDDEN, total, rank)

    def forward(self, x: Any) -> Any:
        return self.down(F.gelu(self.up(x))).square().mean()


def traced(total: Sum, rank: int = RANK) -> Graph:
    return trace_layer(Network(total, rank), [InputSpec([2, 8, HIDDEN], "float32", "x")]).graph


@cache
def patterns() -> Any:
    return load_plugins().patterns


def specs(graph: Graph) -> dict[str, Any]:
    """The specs of weights by their paths."""
    claims = match_all(graph, patterns()).claims
    return {graph.tensors[t].structured_name: spec for t, (spec, _) in claims.items() if graph.tensors[t].ndim == 2}


@pytest.mark.parametrize("total", WRITTEN.values(), ids=WRITTEN)
def test_an_adapter_is_sharded_as_its_projection(total: Sum) -> None:
    graph = traced(total)
    found = specs(graph)
    assert len(find_adapters(graph)) == 2
    assert found["up.base.weight"] == (None, "mp") and found["down.base.weight"] == ("mp", None)
    assert (found["up.down.weight"], found["up.up.weight"]) == ((None, None), (None, "mp"))
    assert (found["down.down.weight"], found["down.up.weight"]) == (("mp", None), (None, None))


def test_several_adapters_of_one_projection_are_all_sharded() -> None:
    found = specs(traced(lambda p, x: p.base(x) + p.up(p.down(x)) + p.up2(p.down2(x))))
    assert found["up.up.weight"] == found["up.up2.weight"] == (None, "mp")
    assert found["down.down.weight"] == found["down.down2.weight"] == ("mp", None)


@pytest.mark.parametrize("total", OTHERS.values(), ids=OTHERS)
def test_other_sums_are_no_adapters(total: Sum) -> None:
    assert find_adapters(traced(total)) == ()


def test_a_product_of_full_rank_is_no_adapter() -> None:
    assert find_adapters(traced(WRITTEN["plain"], rank=WIDE)) == ()


def test_a_match_holds_the_adapters_with_their_ops_and_the_names_of_their_dimensions() -> None:
    graph = traced(WRITTEN["scaled"])
    (match,) = match_all(graph, patterns()).matches
    assert isinstance(match, Match) and match.pattern == "ffn"
    (up, down) = find_adapters(graph)
    assert {*up.ops, *down.ops} <= set(match.ops)
    assert match.dim_name(up.up, 1) == match.dim_name(up.weight, 1)
