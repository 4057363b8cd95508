"""The roofline of single ops."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_rbt_plugin.cluster import ProcessMesh
from paddle_rbt_plugin.completion import Kernel, Placement, Value
from paddle_rbt_plugin.cost import DEFAULT
from paddle_rbt_plugin.cost.candidate import Precision
from paddle_rbt_plugin.cost.compute import ComputeDevice, KernelTable, Product
from paddle_rbt_plugin.cost.fusion import pass_traffic
from paddle_rbt_plugin.cost.sizes import Columns, Values
from paddle_rbt_plugin.graph import DTYPE_BYTES

MESH = ProcessMesh(("dp", "mp"), (1, 2), (0, 1))
A100 = ComputeDevice(312e12, 2039e9)
EDGE = st.integers(1, 20_000)


def value(name: str, *shape: int, dtype: str = "float32", sharded: int | None = None) -> Value:
    return Value(name, shape, dtype, Placement(tuple(1 if d == sharded else -1 for d in range(len(shape)))))


class Cost(NamedTuple):
    seconds: float
    nbytes: float
    products: tuple[Product, ...]
    attention_flop: float


def cost(
    kernel: Kernel,
    device: ComputeDevice = A100,
    precision: Precision = "fp16",
    float32: Collection[str] = (),
    scale: float = 1.0,
) -> Cost:
    """One kernel on one rank of ``MESH``."""
    values, table = Values(MESH.axes, precision), KernelTable()
    (traffic,) = pass_traffic([kernel], {v.name for v in kernel.inputs}, fused=False)
    table.add(kernel, traffic, Columns(values, float32))
    sizes = values.table()
    kernels, local = table.frozen(sizes), sizes.local(MESH, np.array([scale]), sequence_parallel=False)
    products = kernels.products(local)
    (seconds,) = kernels.seconds(local, products.seconds(device, DEFAULT), device, DEFAULT)[0]
    each = tuple(Product(*map(float, sides)) for sides in zip(*(side[0] for side in products), strict=True))
    return Cost(seconds, kernels.nbytes(local)[0, 0], each, kernels.attention_flop(local).sum())


def products(kernel: Kernel) -> tuple[Product, ...]:
    return cost(kernel).products


def matmul(x: Value, y: Value, *outputs: Value, type: str = "matmul", **attrs: bool) -> Kernel:
    return Kernel(type, "forward" if type == "matmul" else "backward", (x, y), outputs, attrs=attrs)


def test_a_linear_is_one_product_over_all_tokens_with_the_local_width() -> None:
    kernel = matmul(value("x", 2, 64, 32), value("w", 32, 96, sharded=1), value("out", 2, 64, 96, sharded=2))
    assert products(kernel) == (Product(1, 128, 48, 32),)


def test_scores_are_a_product_per_head() -> None:
    query, key = value("q", 2, 8, 64, 16, sharded=1), value("k", 2, 8, 64, 16, sharded=1)
    kernel = matmul(query, key, value("out", 2, 8, 64, 64, sharded=1), transpose_y=True)
    assert products(kernel) == (Product(8, 64, 64, 16),)


@pytest.mark.parametrize("transposed", [False, True])
def test_gradients_of_a_product_are_two_products_of_the_same_flop(transposed: bool) -> None:
    x, w = value("x", 2, 64, 32), value("w", 96, 32) if transposed else value("w", 32, 96)
    forward = products(matmul(x, w, value("out", 2, 64, 96), transpose_y=transposed))[0]
    gradients = (value("x@GRAD", *x.shape), value("w@GRAD", *w.shape))
    kernel = Kernel(
        "matmul_grad", "backward", (x, w, value("out@GRAD", 2, 64, 96)), gradients, attrs={"transpose_y": transposed}
    )
    left, right = products(kernel)
    assert left == Product(1, 128, 32, 96)
    assert right == Product(1, 32, 96, 128)
    assert left.flop == right.flop == forward.flop


def test_a_gradient_that_nobody_wants_is_no_product() -> None:
    x, w = value("x", 4, 8), value("w", 8, 16)
    kernel = Kernel("matmul_grad", "backward", (x, w, value("out@GRAD", 4, 16)), (value("w@GRAD", 8, 16),))
    assert products(kernel) == (Product(1, 8, 16, 4),)


def test_a_convolution_is_its_implicit_product() -> None:
    x, w, out = value("x", 4, 3, 32, 32), value("w", 64, 3, 7, 7), value("out", 4, 64, 16, 16)
    (product,) = products(Kernel("conv2d", "forward", (x, w), (out,), attrs={"groups": 1}))
    assert product.flop == 2 * 4 * 64 * 16 * 16 * 3 * 7 * 7


@given(EDGE, EDGE, EDGE, st.integers(1, 64))
def test_efficiency_is_a_share_of_the_peak_and_more_flop_take_longer(m: int, n: int, k: int, batch: int) -> None:
    product = Product(batch, m, n, k)
    assert 0 < product.efficiency(DEFAULT) <= DEFAULT.matmul_peak
    assert product.seconds(A100, DEFAULT) >= product.flop / A100.flops
    assert Product(batch, 2 * m, n, k).seconds(A100, DEFAULT) >= product.seconds(A100, DEFAULT)
    assert Product(batch, m, n, 2 * k).seconds(A100, DEFAULT) >= product.seconds(A100, DEFAULT)


@given(st.floats(1.0, 8.0), st.floats(1.0, 8.0))
def test_a_faster_device_is_never_slower(flops: float, bandwidth: float) -> None:
    kernel = matmul(value("x", 512, 512), value("w", 512, 512), value("out", 512, 512))
    faster = ComputeDevice(A100.flops * flops, A100.bandwidth * bandwidth)
    assert cost(kernel, device=faster).seconds <= cost(kernel).seconds


@pytest.mark.parametrize("type", ["rsqrt", "silu", "swiglu", "expand", "stack", "pow", "mean", "an_op_nobody_has_heard_of"])
def test_an_op_without_a_rule_costs_its_bytes(type: str) -> None:
    found = cost(Kernel(type, "forward", (value("x", 1024, 1024),), (value("out", 1024, 1024),)))
    assert found.nbytes == 2 * 2 * 1024 * 1024
    assert found.seconds == pytest.approx(found.nbytes / (A100.bandwidth * DEFAULT.memory_peak) + DEFAULT.kernel_gap_s)


@pytest.mark.parametrize("dtype", sorted(DTYPE_BYTES))
def test_every_dtype_has_its_size(dtype: str) -> None:
    kernel = Kernel("add", "forward", (value("x", 8, dtype=dtype), value("y", 8, dtype=dtype)), (value("out", 8, dtype=dtype),))
    stored = 2 if dtype == "float32" else DTYPE_BYTES[dtype]
    assert cost(kernel).nbytes == 3 * 8 * stored
    assert cost(kernel, precision="fp32").nbytes == 3 * 8 * DTYPE_BYTES[dtype]


@given(st.integers(1, 64))
def test_products_and_bytes_grow_with_the_batch(scale: int) -> None:
    x, out = (value(name, 2, 64, 32)._replace(batch_dim=0) for name in ("x", "out"))
    kernel = matmul(x, value("w", 32, 32), out)
    assert cost(kernel, scale=scale).products == (Product(1, scale * 128, 32, 32),)
    assert cost(kernel, scale=scale).nbytes == 2 * (scale * 2 * 2 * 64 * 32 + 32 * 32)


def test_fused_attention_never_writes_its_scores() -> None:
    q, k, v, out = (value(name, 1, 2048, 16, 128) for name in ("q", "k", "v", "out"))
    found = cost(Kernel("flash_attn", "forward", (q, k, v), (out,), attrs={"causal": True}))
    assert found.attention_flop == 2.0 * 16 * 2048 * 2048 * 128
    assert found.nbytes == 4 * 2 * 2048 * 16 * 128


def test_the_loss_works_in_float32() -> None:
    logits, labels = value("logits", 64, 1000), value("labels", 64, 1, dtype="int64")
    softmax, loss = value("softmax", 64, 1000), value("loss", 64, 1)
    kernel = Kernel("cross_entropy_with_softmax", "forward", (logits, labels), (softmax, loss))
    half = cost(kernel, float32={"softmax", "loss"})
    full = cost(kernel, precision="fp32")
    assert half.nbytes == full.nbytes + 64 * 1000 * (2 + 4)
