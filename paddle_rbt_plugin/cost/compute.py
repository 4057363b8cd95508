"""Time of kernels on one device: a roofline.

    seconds = max(FLOP / (peak * efficiency), bytes / (bandwidth * share)) + gap

FLOP are counted for matrix products, convolutions and fused attention, from the local shapes; every other op is its bytes:
what it reads and writes in memory (``fusion``). A product of m x k by k x n, ``batch`` times, takes

    (2 batch m' n' k / matmul_peak + matmul_fill_flop) / peak

where m' and n' are m and n padded to whole tiles and ``matmul_fill_flop`` is what the device could have done while it fills
and empties: small products are slow, large ones reach ``matmul_peak``. Backward products use the same formula with their own m,
n, k. An op type without a rule has the roofline of its bytes, in every dtype.

Kernels are read into a ``KernelTable`` once; times are arrays, a row per micro batch and a column per kernel.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from paddle_rbt_plugin.cluster import ProcessMesh
from paddle_rbt_plugin.completion.synchronised import BACKWARD_TRAFFIC, FORWARD_TRAFFIC, sums_statistics
from paddle_rbt_plugin.completion.work import Kernel
from paddle_rbt_plugin.cost.attention import AttentionCore
from paddle_rbt_plugin.cost.constants import Constants
from paddle_rbt_plugin.cost.fusion import Traffic
from paddle_rbt_plugin.cost.op_types import EMBEDDINGS, LOSS_OPS, MATMULS, forward_type, grad_name
from paddle_rbt_plugin.cost.sizes import Columns, Extent, LocalSizes, SizeTable, Term, Values

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


class Product(NamedTuple):
    """``batch`` matrix products of m x k by k x n; numbers, or arrays of them."""

    batch: Any
    m: Any
    n: Any
    k: Any

    @property
    def flop(self) -> Any:
        """A multiplication and an addition for each of batch m n k."""
        return 2.0 * self.batch * self.m * self.n * self.k

    def efficiency(self, c: Constants) -> Any:
        """Share of the peak FLOP/s that the product reaches, between 0 and ``matmul_peak``."""
        return c.matmul_peak * self.m * self.n / self._padded(c)

    def seconds(self, device: ComputeDevice, c: Constants) -> Any:
        """Time of the products, memory aside."""
        padded = 2.0 * self.batch * self._padded(c) * self.k
        return (padded / c.matmul_peak + c.matmul_fill_flop * (self.flop > 0)) / device.flops

    def _padded(self, c: Constants) -> Any:
        """m n with both padded to whole tiles."""
        return np.ceil(self.m / c.matmul_tile) * np.ceil(self.n / c.matmul_tile) * c.matmul_tile**2


class _Factors(NamedTuple):
    """The forward product of an op: operands of left and right matrices; ``lone`` where a single right one may serve all."""

    left: Extent
    right: Extent
    m: Extent
    n: Extent
    k: Extent
    lone: bool


_FORWARD, _BY_LEFT, _BY_RIGHT = (1, 2, 3), (1, 3, 2), (3, 2, 1)
"""Which of (batch, m, n, k) of the forward product are m, n and k of itself, and of the gradients of its two operands."""


class KernelTable:
    """Kernels, one after the other, to be ``frozen`` when all are there."""

    def __init__(self) -> None:
        self._factors: list[_Factors] = []
        self._products: list[tuple[int, int, tuple[int, int, int]]] = []
        """Kernel, factors, and what of them are m, n and k."""
        self._attention: list[tuple[int, Extent]] = []
        self._bytes: list[list[Term]] = []
        self._launched: list[bool] = []

    def add(self, kernel: Kernel, traffic: Traffic, columns: Columns) -> int:
        """Adds an op, no view, as one rank runs it; ``traffic`` says what goes through memory. Returns its column."""
        type = forward_type(kernel.type)
        if type in FUSED_ATTENTION:
            query, key = kernel.inputs[:2]
            q, k = columns[query], columns[key]
            over = [(q, d) for d in range(min(4, len(query.shape)))] + ([(k, 1)] if len(key.shape) > 1 else [])
            causal = bool(kernel.attrs.get("causal", kernel.attrs.get("is_causal")))
            return self._add_attention(q, k, Extent(tuple(over)), causal, type != kernel.type)
        for factors, roles in _products(kernel, columns):
            if not self._factors or self._factors[-1] != factors:
                self._factors.append(factors)
            self._products.append((len(self._bytes), len(self._factors) - 1, roles))
        self._bytes.append(_moved(kernel, traffic, columns))
        self._launched.append(traffic.launched)
        return len(self._bytes) - 1

    def add_core(self, core: AttentionCore, columns: Columns, backward: bool) -> int:
        """Adds an attention core that runs as one kernel; a decoder's mask is causal. Returns its column."""
        query, scores = columns[core.query], columns[core.scores]
        over = [(scores, d) for d in range(len(core.scores.shape))] + [(query, len(core.query.shape) - 1)]
        return self._add_attention(query, columns[core.key], Extent(tuple(over)), True, backward)

    def _add_attention(self, query: int, key: int, heads_by_scores_by_width: Extent, causal: bool, backward: bool) -> int:
        """Fused attention: two products of queries x keys x width for each head, half of them under a causal mask. Operands,
        result and in backward their gradients go through memory once."""
        times = 4.0 * (0.5 if causal else 1.0) * (FUSED_ATTENTION_BACKWARD if backward else 1.0)
        self._attention.append((len(self._bytes), heads_by_scores_by_width._replace(times=times)))
        moved = (2.0 if backward else 1.0) * 2.0
        self._bytes.append([Term(query, moved, stored=False), Term(key, moved, stored=False)])
        self._launched.append(True)
        return len(self._bytes) - 1

    def is_launched(self, kernel: int) -> bool:
        """Whether a kernel is launched, and does not run inside another one."""
        return self._launched[kernel]

    def products_of(self, kernel: int) -> list[int]:
        """The columns of the matrix products of a kernel."""
        return [i for i, (owner, _, _) in enumerate(self._products) if owner == kernel]

    def frozen(self, sizes: SizeTable) -> Kernels:
        """All of them as arrays."""
        return Kernels(sizes, self._factors, self._products, self._attention, self._bytes, self._launched)


class Kernels:
    """Kernels as arrays."""

    def __init__(
        self,
        sizes: SizeTable,
        factors: Sequence[_Factors],
        products: Sequence[tuple[int, int, tuple[int, int, int]]],
        attention: Sequence[tuple[int, Extent]],
        nbytes: Sequence[Sequence[Term]],
        launched: Sequence[bool],
    ):
        self.launched = np.array(launched, bool)
        self._factors = sizes.extents([side for f in factors for side in f[:5]])
        self._lone = np.array([f.lone for f in factors], bool)
        owners = np.array([owner for owner, _, _ in products], int)
        self._owners, self._starts = np.unique(owners, return_index=True)
        self._of = np.array([f for _, f, _ in products], int)
        self._roles = np.array([roles for _, _, roles in products], int).reshape(-1, 3)
        self._attention = sizes.extents([extent for _, extent in attention])
        self._attending = np.array([owner for owner, _ in attention], int)
        self._bytes = sizes.sums(nbytes)

    def products(self, local: LocalSizes) -> Product:
        """The matrix products, micro batches x products."""
        left, right, m, n, k = np.moveaxis(local.extents(self._factors).reshape(len(local.dims), -1, 5), 2, 0)
        lone = self._lone & (right == 1)  # one weight for all rows
        sides = np.stack((np.where(lone, 1.0, np.maximum(left, right)), np.where(lone, left * m, m), n, k))
        return Product(sides[0][:, self._of], *(sides[self._roles[:, i], :, self._of].T for i in range(3)))

    def nbytes(self, local: LocalSizes) -> np.ndarray:
        """Bytes that each kernel reads and writes in device memory, micro batches x kernels."""
        return local.sums(self._bytes)

    def attention_flop(self, local: LocalSizes) -> np.ndarray:
        """FLOP of each fused attention."""
        return local.extents(self._attention)

    def by_kernel(self, of_products: np.ndarray) -> np.ndarray:
        """Sums what is per matrix product for each kernel."""
        found = np.zeros((len(of_products), len(self.launched)))
        if len(self._owners):
            found[:, self._owners] = np.add.reduceat(of_products, self._starts, axis=1)
        return found

    def seconds(self, local: LocalSizes, of_products: np.ndarray, device: ComputeDevice, c: Constants) -> np.ndarray:
        """Time of each kernel, where its matrix products take ``of_products``; micro batches x kernels."""
        busy = self.by_kernel(of_products)
        busy[:, self._attending] += self.attention_flop(local) / (device.flops * c.fused_attention_peak)
        moving = self.nbytes(local) / (device.bandwidth * c.memory_peak)
        found: np.ndarray = np.maximum(busy, moving) + c.kernel_gap_s * self.launched
        return found


def product_flop(kernels: Iterable[Kernel], mesh: ProcessMesh) -> np.ndarray:
    """FLOP of the matrix products of each kernel as a rank of the mesh runs them, on the batch of the traced program."""
    values, table = Values(mesh.axes, "fp32"), KernelTable()
    columns = Columns(values)
    for kernel in kernels:
        table.add(kernel, Traffic((), (), launched=True), columns)
    sizes = values.table()
    found = table.frozen(sizes)
    products = found.products(sizes.local(mesh, np.ones(1), sequence_parallel=False))
    return found.by_kernel(products.flop)[0]


def _products(kernel: Kernel, columns: Columns) -> list[tuple[_Factors, tuple[int, int, int]]]:
    """The matrix products that an op consists of; none for an op that is its bytes."""
    type = forward_type(kernel.type)
    if type in MATMULS and len(kernel.inputs) > 1:
        factors = _matmul(kernel, columns)
    elif type in CONVOLUTIONS and len(kernel.inputs) > 1:
        factors = _convolution(kernel, columns)
    else:
        return []
    if type == kernel.type:
        return [(factors, _FORWARD)]
    left, right = grad_name(kernel.inputs[0].name), grad_name(kernel.inputs[1].name)
    wanted = [out.name for out in kernel.outputs if out.name in (left, right) or len(kernel.outputs) <= 2]
    return [(factors, _BY_LEFT if name == left else _BY_RIGHT) for name in wanted]


def _matmul(kernel: Kernel, columns: Columns) -> _Factors:
    x, y = kernel.inputs[:2]
    left, right = ([(columns[v], d) for d in range(len(v.shape))] for v in (x, y))
    transpose_x = bool(kernel.attrs.get("transpose_x", kernel.attrs.get("trans_x", False)))
    transpose_y = bool(kernel.attrs.get("transpose_y", kernel.attrs.get("trans_y", False)))
    rows, inner = ([], left) if len(left) < 2 else (left[-1:], left[-2:-1]) if transpose_x else (left[-2:-1], left[-1:])
    outer = [] if len(right) < 2 else right[-2:-1] if transpose_y else right[-1:]
    batches, others, m, n, k = (Extent(tuple(side)) for side in (left[:-2], right[:-2], rows, outer, inner))
    return _Factors(batches, others, m, n, k, lone=not transpose_x)


def _convolution(kernel: Kernel, columns: Columns) -> _Factors:
    """As the implicit matrix product: output positions x output channels x (input channels of a group x filter size)."""
    weight, out = kernel.inputs[1], kernel.outputs[0] if kernel.type in CONVOLUTIONS else kernel.inputs[-1]
    w, o = columns[weight], columns[out]
    groups = Extent(times=float(kernel.attrs.get("groups", 1) or 1))
    positions = Extent(tuple((o, d) for d in range(len(out.shape))), ((w, 0),))
    channels = Extent(((w, 0),), times=1.0 / groups.times)
    filters = Extent(tuple((w, d) for d in range(1, len(weight.shape))))
    return _Factors(groups, groups, positions, channels, filters, lone=False)


def _times_moved(kernel: Kernel, type: str) -> float:
    """How often an op reads and writes what it needs: more than once where it is several ops."""
    if not sums_statistics(type, kernel.attrs, [v.placement for v in kernel.inputs[:1]]):
        return 1.0
    return FORWARD_TRAFFIC if type == kernel.type else BACKWARD_TRAFFIC


def _moved(kernel: Kernel, traffic: Traffic, columns: Columns) -> list[Term]:
    """What an op reads and writes in device memory."""
    type = forward_type(kernel.type)
    if type in EMBEDDINGS:
        # Only the rows that are looked up are read; backward clears the whole gradient, then adds to those rows.
        if type == kernel.type:
            return [Term(columns[v], 2.0) for v in kernel.outputs]
        arriving = [Term(columns[v], 3.0) for v in kernel.inputs if v.name.endswith("@GRAD")]
        return [Term(columns[v], stored=False) for v in kernel.outputs] + arriving
    moved = (*traffic.reads, *traffic.writes)
    if type in LOSS_OPS and columns.half:
        # In float32, with the casts to and from it of what is stored in two bytes.
        return [Term(columns[v], (2 + 4 + 4) / 2 if columns.is_halved(v) else 1.0, stored=False) for v in moved]
    if type in MATMULS:
        again = kernel.inputs[-1:] if len(kernel.outputs) > 1 else ()  # both products of a gradient read it
        return [Term(columns[v], stored=False) for v in (*moved, *again)]
    times = _times_moved(kernel, type)
    return [Term(columns[v], times) for v in moved]
