"""The work that a calibration times: the products and the memory-bound ops of a transformer layer, launches, collectives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import paddle
import paddle.distributed as dist
from paddle.nn import functional as F

from paddle_rbt_plugin.calibrate.timing import Work, together

WIDTH = 512
"""Elements of a row in ops that work on rows."""
TINY_OPS = 400
"""Ops in a row whose time is that of launching them."""


def layer_products(h: int) -> tuple[tuple[int, int, int, int], ...]:
    """batch, m, n, k of a projection, both halves of the feed-forward network, and scores and context of attention with heads
    of 64, 32 and 16."""
    tokens, heads = 2 * h, h // 64
    context = (heads, 256, 64, 256), (2 * heads, 256, 32, 256), (4 * heads, 256, 16, 256)
    return (1, tokens, h, h), (1, tokens, 4 * h, h), (1, tokens, h, 4 * h), (heads, 256, 256, 64), *context


def _with_gradient(function: Callable[..., paddle.Tensor], *inputs: paddle.Tensor) -> Work:
    for value in inputs:
        value.stop_gradient = False
    gradient = paddle.rand(function(*inputs).shape)
    return lambda: paddle.grad(function(*inputs), inputs, gradient)


def _rows(rows: int) -> paddle.Tensor:
    return paddle.rand([rows, WIDTH])


def _add(rows: int) -> Work:
    return _with_gradient(paddle.add, _rows(rows), _rows(rows))


def _bias(rows: int) -> Work:
    return _with_gradient(paddle.add, _rows(rows), paddle.rand([WIDTH]))


def _gelu(rows: int) -> Work:
    return _with_gradient(partial(F.gelu, approximate=True), _rows(rows))


def _softmax(rows: int) -> Work:
    return _with_gradient(F.softmax, _rows(rows))


def _layer_norm(rows: int) -> Work:
    normalise = lambda x, weight, bias: F.layer_norm(x, WIDTH, weight, bias)  # noqa: E731
    return _with_gradient(normalise, _rows(rows), paddle.rand([WIDTH]), paddle.rand([WIDTH]))


def _transpose(rows: int) -> Work:
    swap = partial(paddle.transpose, perm=[1, 0, 2])
    return _with_gradient(swap, paddle.rand([rows, WIDTH // 64, 64]))


def _cross_entropy(rows: int) -> Work:
    labels = paddle.zeros([rows, 1], "int64")
    return _with_gradient(lambda x: F.cross_entropy(x, labels, reduction="none"), _rows(rows))


def _adamw(rows: int) -> Work:
    weight = paddle.create_parameter([rows, WIDTH], "float32")
    optimizer = paddle.optimizer.AdamW(1e-3, parameters=[weight])
    paddle.sum(weight).backward()
    return optimizer.step


TRAFFIC: dict[str, tuple[Callable[[int], Work], int]] = {
    "add": (_add, 3 + 3),
    "bias": (_bias, 2 + 2),
    "gelu": (_gelu, 2 + 3),
    "softmax": (_softmax, 2 + 3),
    "layer_norm": (_layer_norm, 2 + 3),
    "transpose": (_transpose, 2 + 2),
    "cross_entropy": (_cross_entropy, 2 + 2),
    "adamw": (_adamw, 7),
}
"""Ops that are bound by memory: what makes one, with its gradient, of a number of rows, and how often forward and backward
read or write a tensor of that many rows, as ``cost.fusion`` counts it without fusion."""


def _program_op() -> float:
    """Seconds of a tiny op in a static program: what more of them add to a run."""
    few, many = (together(_tiny_program(n)) for n in (TINY_OPS // 4, TINY_OPS))
    return max(0.0, many - few) / (TINY_OPS - TINY_OPS // 4)


def _tiny_program(ops: int) -> Work:
    program = paddle.static.Program()
    with _static_mode(), paddle.static.program_guard(program):
        x = paddle.full([8], 1.0)
        for _ in range(ops):
            x = x + x
    executor = paddle.static.Executor()

    def run() -> None:
        with _static_mode():
            executor.run(program, fetch_list=[x])

    return run


@contextmanager
def _static_mode() -> Iterator[None]:
    paddle.enable_static()
    try:
        yield
    finally:
        paddle.disable_static()


def _eager_op() -> float:
    """Seconds of a tiny op in dygraph, half of them gradients."""
    x = paddle.ones([8])
    x.stop_gradient = False

    def chain() -> None:
        y = x
        for _ in range(TINY_OPS):
            y = y + x
        paddle.grad(y, x, retain_graph=False)

    return together(chain) / (2 * TINY_OPS)


def _queued_op() -> float:
    """Seconds of a tiny op on the device when it waits in the queue behind long work; on a CPU, which has no queue, as long as
    launching it takes."""
    x, long = paddle.ones([8]), paddle.rand([4096, 4096])

    def after(ops: int) -> None:
        if paddle.is_compiled_with_cuda():
            for _ in range(8):
                paddle.matmul(long, long)
        for _ in range(ops):
            x + x

    return max(0.0, together(partial(after, TINY_OPS)) - together(partial(after, 0))) / TINY_OPS


LAUNCHES = {"program": _program_op, "eager": _eager_op, "queued": _queued_op}
"""What a launch costs the host in a static program and in dygraph, and the device between two kernels."""


def groups_by_size() -> dict[int, Any]:
    """This process's group by its size: all processes, and the pair it belongs to."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    if ranks == 1:
        return {}
    groups = {ranks: dist.get_group()}
    if ranks % 2 == 0 and ranks > 2:
        pairs = [dist.new_group([first, first + 1]) for first in range(0, ranks, 2)]
        groups[2] = pairs[rank // 2]
    return groups


def _all_reduce(group: Any, elements: int) -> Work:
    message = paddle.ones([elements])
    return lambda: dist.all_reduce(message, group=group)


def _all_gather(group: Any, elements: int) -> Work:
    part = paddle.ones([elements // group.nranks])
    return lambda: dist.all_gather([], part, group=group)


def _reduce_scatter(group: Any, elements: int) -> Work:
    whole, part = paddle.ones([elements]), paddle.empty([elements // group.nranks])
    return lambda: dist.reduce_scatter(part, whole, group=group)


def _p2p(group: Any, elements: int) -> Work:
    """There and back again: twice the message, one after the other."""
    message = paddle.ones([elements])
    first, second = group.ranks
    send, receive = (partial(f, message, group=group) for f in (dist.send, dist.recv))

    def ping_pong() -> None:
        if dist.get_rank() == first:
            send(dst=second)
            receive(src=second)
        else:
            receive(src=first)
            send(dst=first)

    return ping_pong


COLLECTIVES = {"all_reduce": _all_reduce, "all_gather": _all_gather, "reduce_scatter": _reduce_scatter, "p2p": _p2p}
