"""What the batch of a program is, and what grows with it."""

from __future__ import annotations

import paddle
import pytest
from hypothesis import given
from hypothesis import strategies as st
from paddle import nn
from paddle.static import InputSpec

import paddle_rbt_plugin as rbt
from paddle_rbt_plugin.completion import complete_by_batch, find_batch_dims
from paddle_rbt_plugin.errors import TunerError
from paddle_rbt_plugin.graph import Batch, Graph
from paddle_rbt_plugin.graph.batch import OPEN, find_batch, find_batches
from paddle_rbt_plugin.handover.pir.trace import trace_layer, with_batch
from paddle_rbt_plugin.layers import cluster_layers

SHAPES = st.lists(st.lists(st.sampled_from([OPEN, 1, 2, 8, 16]), max_size=3).map(tuple), min_size=1, max_size=5)


class Masked(nn.Layer):
    """A network that adds the sum of a mask, given before or after the samples."""

    def __init__(self, mask_first: bool):
        super().__init__()
        self.up, self.down, self.mask_first = nn.Linear(16, 32), nn.Linear(32, 16), mask_first

    def forward(self, a: paddle.Tensor, b: paddle.Tensor) -> paddle.Tensor:
        mask, x = (a, b) if self.mask_first else (b, a)
        return self.down(nn.functional.gelu(self.up(x)) + mask.sum()).mean()


class Transposed(nn.Layer):
    """A product with a transposed weight of 32 x 64, and one with a table that is computed from it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = self.create_parameter([32, 64])

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return paddle.matmul(x, paddle.transpose(self.weight, [1, 0]) * 2.0).mean()


def grown(graph: Graph) -> dict[str, int]:
    """By name, the dimension that grows with the batch."""
    dims = find_batch_dims(graph, complete_by_batch(graph, cluster_layers(graph), graph.batch)[0])
    return {graph.tensors[t].name: dim for t, dim in dims.items()}


@given(SHAPES, st.randoms())
def test_the_order_of_inputs_does_not_count(shapes: list[tuple[int, ...]], random) -> None:
    named = {f"x{i}": shape for i, shape in enumerate(shapes)}
    order = random.sample(sorted(named), len(named))
    shuffled = {name: named[name] for name in order}
    assert find_batches(named) == find_batches(shuffled)
    assert find_batch(named, [(8, 2), (16,)]) == find_batch(shuffled, [(8, 2), (16,)])


@given(SHAPES)
def test_dimensions_that_are_open_are_the_batch_and_no_others(shapes: list[tuple[int, ...]]) -> None:
    named = {f"x{i}": shape for i, shape in enumerate(shapes)}
    left_open = frozenset(name for name, shape in named.items() if shape[:1] == (OPEN,))
    if left_open:
        assert find_batches(named) == [Batch(OPEN, left_open)]


@pytest.mark.parametrize(
    ("shapes", "size"),
    [
        ({"x": (8, 16), "mask": (1, 1)}, 8),
        ({"tokens": (8, 64), "positions": (64,)}, 8),
        ({"x": (8, 64, 16), "mask": (64, 64)}, 8),
        ({"x": (8, 16), "y": (8, 1), "table": (16, 16)}, 8),
        ({"x": (1, 16), "y": (1,)}, 1),
    ],
)
def test_sizes_say_what_the_batch_is(shapes: dict[str, tuple[int, ...]], size: int) -> None:
    rows = frozenset(name for name, shape in shapes.items() if shape[0] == size)
    assert find_batches(shapes) == [Batch(size, rows)]


def test_what_the_shapes_of_inputs_leave_undecided_the_results_decide() -> None:
    shapes = {"x": (8, 64), "mask": (64, 64)}
    assert [b.size for b in find_batches(shapes)] == [8, 64]
    assert find_batch(shapes, [(8, 64, 16), (8, 64), (64, 64)]) == Batch(8, frozenset({"x"}))


def test_a_global_batch_for_undecided_inputs_is_an_error_that_says_how_to_decide() -> None:
    specs = [InputSpec([8, 64], "float32", "x"), InputSpec([64, 64], "float32", "mask")]
    with pytest.raises(TunerError, match=r"x \[8, 64\], mask \[64, 64\].*use None as the first dimension"):
        with_batch(specs, [], 32)
    assert with_batch(specs, [], 8)[2] == Batch(8, frozenset({"x"}))
    assert with_batch(specs, [], None)[2] is None


def test_an_open_dimension_tells_samples_from_a_mask_of_the_same_size() -> None:
    specs = [InputSpec([8, 8], "float32", "mask"), InputSpec([None, 8], "float32", "x")]
    inputs, _, batch = with_batch(specs, [], 8)
    graph = trace_layer(_Product(), inputs, batch=batch).graph
    assert graph.batch == Batch(8, frozenset({"x"}))
    assert "mask" not in grown(graph)


class _Product(nn.Layer):
    def forward(self, mask: paddle.Tensor, x: paddle.Tensor) -> paddle.Tensor:
        return paddle.matmul(x, mask).mean()


@pytest.mark.parametrize(("size", "options"), [(8, {}), (None, {"global_batch": 8})])
def test_a_mask_given_first_changes_neither_batch_nor_plan(size: int | None, options: dict[str, int]) -> None:
    x, mask = InputSpec([size, 16], "float32", "x"), InputSpec([1, 1], "float32", "mask")
    plans = [
        rbt.tune(Masked(first), input_spec=[mask, x] if first else [x, mask], cluster="1x2:A100-80G", **options)
        for first in (False, True)
    ]
    assert plans[0].degrees == plans[1].degrees == {"pp": 1, "dp": 2, "mp": 1}
    assert {plan.global_batch for plan in plans} == {8}
    assert {plan.tensors["mask"].shape for plan in plans} == {(1, 1)}


@pytest.mark.parametrize("batch", [62, 64, 66])
def test_what_is_computed_from_weights_does_not_grow_with_a_batch_of_their_size(batch: int) -> None:
    graph = trace_layer(Transposed(), [InputSpec([batch, 64], "float32", "x")]).graph
    assert set(grown(graph)) == {"x", "matmul_0.out"}
