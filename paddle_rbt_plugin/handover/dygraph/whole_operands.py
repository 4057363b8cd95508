"""Ops that dygraph computes wrongly, or not at all, on operands sharded in a dimension that they reduce or move.

Measured on Paddle 3.3.1 (``tests/workers/dygraph_wholes.py`` measures it again):

- ``p_norm`` and ``logsumexp`` of a dimension that is sharded are called the sum of those of the parts, which they are not: a
  norm of two halves comes out 1.4 times too large, and so do ``F.normalize``, distances, and penalties on sharded weights.
- ``einsum`` of distributed operands is refused; it is spelt in products, as Paddle did before it had an op for it.
- A product of operands whose gradients are summands on each rank hands those on, to gradient ops whose rules are wrong for
  them (``concat``, ``divide``, ``expand``).
- ``concat`` along a sharded dimension sends all to all, and a product of two operands that are sharded in dimensions that do
  not meet, as of a batch with itself, reduces and scatters a gradient: CPUs have a kernel for neither.

The functions here gather such operands first, or finish such sums, and let Paddle compute. Nothing else changes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import paddle

from paddle_rbt_plugin.handover.dygraph.local_tensors import whole_along, with_whole_gradient


def p_norm(
    original: Callable[..., Any],
    x: Any,
    porder: float = 2.0,
    axis: int = -1,
    epsilon: float = 1e-12,
    keepdim: bool = False,
    as_vector: bool = False,
) -> Any:
    """The norm along ``axis``, or of all elements."""
    gathered = _whole_in(x, range(x.ndim) if as_vector else [axis])
    return None if gathered is x else original(gathered, porder, axis, epsilon, keepdim, as_vector)


def logsumexp(original: Callable[..., Any], x: Any, axis: Any = None, *rest: Any, **named: Any) -> Any:
    """The logarithm of the sum of exponentials along some dimensions, or of all elements."""
    dims = [axis] if isinstance(axis, int) else list(axis or ())
    everything = not dims or True in rest[1:] or named.get("reduce_all", False)
    gathered = _whole_in(x, range(x.ndim) if everything else dims)
    if gathered is x:
        return None
    return original(gathered, *rest, **named) if axis is None else original(gathered, axis, *rest, **named)


def concat(original: Callable[..., Any], x: Sequence[Any], axis: Any = 0, **named: Any) -> Any:
    """On CPUs, where one of the tensors is sharded along ``axis``."""
    if paddle.is_compiled_with_cuda() or not isinstance(axis, int) or not any(map(_is_distributed, x)):
        return None
    gathered = [_whole_in(t, [axis]) for t in x]
    return None if all(a is b for a, b in zip(gathered, x, strict=True)) else original(gathered, axis, **named)


def matmul(
    original: Callable[..., Any], x: Any, y: Any, transpose_x: bool = False, transpose_y: bool = False, *rest: Any, **named: Any
) -> Any:
    """A product and its gradients are whole sums. On CPUs, where a mesh axis shards dimensions of ``x`` and ``y`` that do not
    meet, ``y`` is gathered."""
    if not (_is_distributed(x) and _is_distributed(y)):
        return None
    y = whole_along(y, _apart(x, y, transpose_x, transpose_y))
    with_whole_gradient(x)
    with_whole_gradient(y)
    product = original(x, y, transpose_x, transpose_y, *rest, **named)
    return whole_along(product, [axis for axis, p in enumerate(product.placements) if p.is_partial()])


def _apart(x: Any, y: Any, transpose_x: bool, transpose_y: bool) -> list[int]:
    """The mesh axes that shard dimensions of two factors that do not meet, on CPUs, which lack a kernel for their gradients."""
    if paddle.is_compiled_with_cuda() or min(x.ndim, y.ndim) < 2:
        return []
    inner_x, inner_y = -2 if transpose_x else -1, -1 if transpose_y else -2
    apart = []
    for axis, (p, q) in enumerate(zip(x.placements, y.placements, strict=True)):
        if p.is_shard() and q.is_shard():
            a, b = p.get_dim() - x.ndim, q.get_dim() - y.ndim
            if (a, b) != (inner_x, inner_y) and not (a == b < -2):
                apart.append(axis)
    return apart


def matmul_operator(original: Callable[..., Any], x: Any, y: Any) -> Any:
    """``x @ y``, which does not pass by where other products do."""
    return paddle.matmul(x, y) if _is_distributed(x) and _is_distributed(y) else None


def convolution(original: Callable[..., Any], x: Any, weight: Any, *rest: Any, **named: Any) -> Any:
    """The gradients of a convolution are whole sums, see ``matmul``."""
    with_whole_gradients(x, weight)


def elementwise(original: Callable[..., Any], x: Any, y: Any, *rest: Any, **named: Any) -> Any:
    """The gradient of a smaller operand, which is a sum over what the other one has more of, is whole."""
    if _is_distributed(x) and _is_distributed(y) and x.shape != y.shape:
        with_whole_gradients(x, y)


def with_whole_gradients(*tensors: Any) -> None:
    """Lets the ops that made distributed tensors, as those that normalize a weight, read their gradients as whole sums."""
    for tensor in tensors:
        if tensor is not None and _is_distributed(tensor):
            with_whole_gradient(tensor)


CONVOLUTIONS = ("conv2d", "conv3d", "depthwise_conv2d", "conv2d_transpose", "conv3d_transpose")
ELEMENTWISE = (
    *((paddle._C_ops, name) for name in ("add", "subtract", "multiply", "divide")),
    *((paddle.Tensor, f"__{name}__") for name in ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv")),
)
"""Where Paddle keeps ops of two operands that broadcast."""


def bmm(original: Callable[..., Any], x: Any, y: Any, **named: Any) -> Any:
    """As ``matmul``."""
    return matmul(lambda x, y, *_: original(x, y, **named), x, y)


def einsum(original: Callable[..., Any], equation: str, *operands: Any) -> Any:
    """Where an operand is distributed."""
    given = operands[0] if len(operands) == 1 and isinstance(operands[0], (list, tuple)) else operands
    if not any(map(_is_distributed, given)) or os.environ.get(_NEW) == "0":
        return None
    before = os.environ.get(_NEW)
    os.environ[_NEW] = "0"
    try:
        return sys.modules[EINSUM].einsum(equation, *given)
    finally:
        if before is None:
            del os.environ[_NEW]
        else:
            os.environ[_NEW] = before


EINSUM = "paddle.tensor.einsum"
"""The module, which a function of its name hides."""
_NEW = "FLAGS_new_einsum"


def _is_distributed(x: Any) -> bool:
    return isinstance(x, paddle.Tensor) and x.is_dist()


def _whole_in(x: Any, dims: Iterable[int]) -> Any:
    """``x`` with some of its dimensions whole on every rank, and nothing partial; ``x`` itself where that is so."""
    if not _is_distributed(x):
        return x
    reduced = {d % x.ndim for d in dims} if x.ndim else set()
    axes = [i for i, p in enumerate(x.placements) if p.is_partial() or (p.is_shard() and p.get_dim() in reduced)]
    return whole_along(x, axes) if axes else x
