"""Time of one op on one device: a roofline.

    seconds = max(FLOP / (peak * efficiency), bytes / (bandwidth * share)) + gap

FLOP are counted for matrix products, convolutions and fused attention, from the local shapes; every other op is its bytes:
what it reads and writes in memory (``fusion``). A product of m x k by k x n, ``batch`` times, takes

    (2 batch m' n' k / matmul_peak + matmul_fill_flop) / peak

where m' and n' are m and n padded to whole tiles and ``matmul_fill_flop`` is what the device could have done while it fills
and empties: small products are slow, large ones reach ``matmul_peak``. Backward products use the same formula with their own m,
n, k. An op type without a rule has the roofline of its bytes, in every dtype.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, prod

from paddle_rbt_plugin.completion.work import Kernel, Value
from paddle_rbt_plugin.cost.constants import Constants
from paddle_rbt_plugin.cost.fusion import Traffic
from paddle_rbt_plugin.cost.sizes import EMBEDDINGS, LOSS_OPS, MATMULS, VIEWS, Sizes, forward_type, grad_name

CONVOLUTIONS = frozenset({"conv2d", "conv3d", "depthwise_conv2d", "conv2d_transpose"})
FUSED_ATTENTION = frozenset(
    {"flash_attn", "flash_attention", "flash_attn_unpadded", "memory_efficient_attention", "fused_attention"}
)
FUSED_ATTENTION_BACKWARD = 2.5
"""FLOP of a fused attention's backward over its forward: five products for two (arXiv 2307.08691, section 4)."""


@dataclass(frozen=True)
class ComputeDevice:
    """What the roofline needs of a device: FLOP/s in the training precision, bytes/s of its memory."""

    flops: float
    bandwidth: float


@dataclass(frozen=True)
class Product:
    """``batch`` matrix products of m x k by k x n."""

    batch: float
    m: float
    n: float
    k: float

    @property
    def flop(self) -> float:
        """A multiplication and an addition for each of batch m n k."""
        return 2.0 * self.batch * self.m * self.n * self.k

    def efficiency(self, c: Constants) -> float:
        """Share of the peak FLOP/s that the product reaches, between 0 and ``matmul_peak``."""
        tile = c.matmul_tile
        padded = ceil(self.m / tile) * ceil(self.n / tile) * tile**2
        return c.matmul_peak * self.m * self.n / padded

    def seconds(self, device: ComputeDevice, c: Constants) -> float:
        """Time of the products, memory aside."""
        if not self.flop:
            return 0.0
        return self.flop / (device.flops * self.efficiency(c)) + c.matmul_fill_flop / device.flops


@dataclass(frozen=True)
class KernelCost:
    """FLOP, bytes moved and seconds of one op on one device; ``launches`` is 0 for an op that moves nothing."""

    flop: float
    nbytes: float
    seconds: float
    launches: int


NOTHING = KernelCost(0.0, 0.0, 0.0, 0)


def kernel_cost(kernel: Kernel, traffic: Traffic, sizes: Sizes, device: ComputeDevice, c: Constants) -> KernelCost:
    """Cost of one op as one rank runs it; ``traffic`` says what goes through memory."""
    type = forward_type(kernel.type)
    if type in VIEWS:
        return NOTHING
    if type in FUSED_ATTENTION:
        query, key = kernel.inputs[:2]
        batch, queries, heads, width = (*sizes.shape(query), 1, 1, 1, 1)[:4]
        keys = (*sizes.shape(key), 1, 1)[1]
        flop = attention_flop(
            batch * heads, queries, keys, width, bool(kernel.attrs.get("causal", kernel.attrs.get("is_causal")))
        )
        return fused_attention_cost(query, key, flop, sizes, device, c, backward=type != kernel.type)
    work = products(kernel, sizes)
    flop = sum(p.flop for p in work)
    busy = sum(p.seconds(device, c) for p in work)
    nbytes = moved_bytes(kernel, traffic, sizes)
    seconds = max(busy, nbytes / (device.bandwidth * c.memory_peak))
    return KernelCost(flop, nbytes, seconds + c.kernel_gap_s * traffic.launched, int(traffic.launched))


def products(kernel: Kernel, sizes: Sizes) -> tuple[Product, ...]:
    """The matrix products that an op consists of; none for an op that is its bytes."""
    type = forward_type(kernel.type)
    if type in MATMULS and len(kernel.inputs) > 1:
        forward = _matmul(kernel, sizes)
    elif type in CONVOLUTIONS and len(kernel.inputs) > 1:
        forward = _convolution(kernel, sizes)
    else:
        return ()
    if type == kernel.type:
        return (forward,)
    by_left = Product(forward.batch, forward.m, forward.k, forward.n)
    by_right = Product(forward.batch, forward.k, forward.n, forward.m)
    left, right = grad_name(kernel.inputs[0].name), grad_name(kernel.inputs[1].name)
    return tuple(
        by_left if out.name == left else by_right
        for out in kernel.outputs
        if out.name in (left, right) or len(kernel.outputs) <= 2
    )


def attention_flop(heads: float, queries: float, keys: float, width: float, causal: bool) -> float:
    """FLOP of the forward pass of fused attention: two products of queries x keys x width for each of ``heads`` (all of
    them, batch included), half of them under a causal mask."""
    return 4.0 * heads * queries * keys * width * (0.5 if causal else 1.0)


def fused_attention_cost(
    query: Value, key: Value, flop: float, sizes: Sizes, device: ComputeDevice, c: Constants, backward: bool
) -> KernelCost:
    """Cost of fused attention: operands, result and in backward their gradients go through memory once."""
    flop *= FUSED_ATTENTION_BACKWARD if backward else 1.0
    nbytes = (2.0 if backward else 1.0) * 2.0 * (sizes.nbytes(query) + sizes.nbytes(key))
    seconds = max(flop / (device.flops * c.fused_attention_peak), nbytes / (device.bandwidth * c.memory_peak))
    return KernelCost(flop, nbytes, seconds + c.kernel_gap_s, 1)


def moved_bytes(kernel: Kernel, traffic: Traffic, sizes: Sizes) -> float:
    """Bytes that an op reads and writes in device memory."""
    type = forward_type(kernel.type)
    if type in EMBEDDINGS:
        # Only the rows that are looked up are read; backward clears the whole gradient, then adds to those rows.
        if type == kernel.type:
            return 2.0 * sum(map(sizes.stored, kernel.outputs))
        arriving = sum(sizes.stored(v) for v in kernel.inputs if v.name.endswith("@GRAD"))
        return sum(map(sizes.nbytes, kernel.outputs)) + 3.0 * arriving
    values = (*traffic.reads, *traffic.writes)
    if type in LOSS_OPS and sizes.half:
        return sum(_as_float32(v, sizes) for v in values)
    if type in MATMULS:
        again = sizes.nbytes(kernel.inputs[-1]) if len(kernel.outputs) > 1 else 0  # both products of a gradient read it
        return float(sum(map(sizes.nbytes, values)) + again)
    return float(sum(map(sizes.stored, values)))


def _as_float32(value: Value, sizes: Sizes) -> float:
    """Bytes that an op in float32 moves for one value, casts of half precision values to and from float32 included."""
    if value.dtype != "float32" or sizes.itemsize(value) == 4:
        return float(sizes.nbytes(value))
    return sizes.numel(value) * (2 + 4 + 4)


def _matmul(kernel: Kernel, sizes: Sizes) -> Product:
    x, y = sizes.shape(kernel.inputs[0]), sizes.shape(kernel.inputs[1])
    transpose_x = bool(kernel.attrs.get("transpose_x", kernel.attrs.get("trans_x", False)))
    transpose_y = bool(kernel.attrs.get("transpose_y", kernel.attrs.get("trans_y", False)))
    if len(x) < 2:
        m, k = 1.0, x[0] if x else 1.0
    else:
        m, k = (x[-1], x[-2]) if transpose_x else (x[-2], x[-1])
    n = 1 if len(y) < 2 else (y[-2] if transpose_y else y[-1])
    left, right = prod(x[:-2], start=1.0), prod(y[:-2], start=1.0)
    if right == 1 and not transpose_x:  # one weight for all rows
        return Product(1, left * m, n, k)
    return Product(max(left, right), m, n, k)


def _convolution(kernel: Kernel, sizes: Sizes) -> Product:
    """As the implicit matrix product: output positions x output channels x (input channels of a group x filter size)."""
    weight = sizes.shape(kernel.inputs[1])
    forward = kernel.type in CONVOLUTIONS
    out = sizes.shape(kernel.outputs[0] if forward else kernel.inputs[-1])
    groups = int(kernel.attrs.get("groups", 1) or 1)
    positions = prod(out, start=1.0) / weight[0]
    return Product(groups, positions, weight[0] / groups, prod(weight[1:], start=1.0))
