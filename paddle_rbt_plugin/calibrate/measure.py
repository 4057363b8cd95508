"""What each process of a calibration times, all of them at the same moment.

The processes of a CPU machine share its cores, caches and memory, and the devices of one machine its power and its links, so
what one alone could do says little about a training step. Therefore all begin at a barrier and repeat the same work for the
same while. All is done in several rounds, so that a moment in which something else ran spoils one of them only.

A line that is told is a dict with ``kind``, ``seconds`` of one repetition (mean over processes), and

    product      precision, batch, m, n, k
    traffic      op, bytes that its forward and backward pass read and write in memory
    launch       way, see ``LAUNCHES``
    collective   collective, ranks, bytes

or, in place of the seconds, with the reason why it was ``skipped``.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import paddle
import paddle.distributed as dist
from paddle.nn import functional as F

from paddle_rbt_plugin.errors import describe_error
from paddle_rbt_plugin.processes import work

ROUNDS = 5
"""How often everything is measured; the median counts."""
WINDOW_S = 0.08
"""Seconds of repetition: several time slices of a core that processes share."""
LONGEST_S = 0.05
"""Seconds above which work is not repeated in larger sizes."""

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
HIDDEN = (128, 256, 512, 1024, 2048, 4096, 8192)
"""Widths of the transformer layers whose matrix products are timed."""
ELEMENTS = tuple(2**n for n in (16, 19, 21, 23, 25, 27))
MESSAGE_BYTES = tuple(2**n for n in (10, 14, 17, 20, 22, 24, 26, 28))
WIDTH = 512
"""Elements of a row in ops that work on rows."""
TINY_OPS = 400
"""Ops in a row whose time is that of launching them."""

Work = Callable[[], Any]


def plan(ranks: int) -> list[dict[str, Any]]:
    """The measurements of one round of that many processes, in order: within each kind from small to large."""
    lines = [
        {"kind": "product", "precision": p, "batch": batch, "m": m, "n": n, "k": k}
        for p in DTYPES
        for h in HIDDEN
        for batch, m, n, k in _layer_products(h)
    ]
    lines += [
        {"kind": "traffic", "op": op, "elements": n, "bytes": 4 * passes * n}
        for op, (_, passes) in TRAFFIC.items()
        for n in ELEMENTS
    ]
    lines += [{"kind": "launch", "way": way} for way in LAUNCHES]
    groups = {ranks, 2} if ranks % 2 == 0 else {ranks}
    lines += [
        {"kind": "collective", "collective": name, "ranks": n, "bytes": nbytes}
        for n in sorted(groups - {1})
        for name in COLLECTIVES
        if name != "p2p" or n == 2
        for nbytes in MESSAGE_BYTES
    ]
    return lines


def measurements() -> Iterator[dict[str, Any]]:
    """Runs all rounds. What is like work that took too long, or that the device does not do, is skipped."""
    paddle.set_flags({"FLAGS_use_stride_kernel": False})  # as in programs, a transpose moves its operand
    groups = _groups()
    for _ in range(ROUNDS):
        yield from _round(groups)


def merged(told: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """One line per measurement: its median over the rounds, or why it was skipped in most of them."""
    rounds: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for line in told:
        rounds.setdefault(tuple((k, v) for k, v in line.items() if k not in ("seconds", "skipped")), []).append(line)
    lines = []
    for same in rounds.values():
        timed = sorted((line for line in same if "seconds" in line), key=lambda line: line["seconds"])
        lines.append(timed[len(timed) // 2] if 2 * len(timed) > len(same) else next(line for line in same if "skipped" in line))
    return lines


def _round(groups: dict[int, Any]) -> Iterator[dict[str, Any]]:
    over: dict[tuple[Any, ...], str] = {}
    for line in plan(dist.get_world_size()):
        family = tuple(line.get(key) for key in ("kind", "precision", "op", "way", "collective", "ranks"))
        if family in over:
            yield line | {"skipped": over[family]}
            continue
        try:
            seconds = _measure(line, groups)
        except RuntimeError as error:  # a kernel or a collective that Paddle lacks here
            over[family] = describe_error(error)
            yield line | {"skipped": over[family]}
            continue
        if seconds > LONGEST_S:
            over[family] = f"a smaller one took more than {LONGEST_S:g} s"
        yield line | {"seconds": seconds}


def _measure(line: dict[str, Any], groups: dict[int, Any]) -> float:
    if line["kind"] == "product":
        dtype = DTYPES[line["precision"]]
        x = paddle.cast(paddle.rand([line["batch"], line["m"], line["k"]]), dtype)
        y = paddle.cast(paddle.rand([line["batch"], line["k"], line["n"]]), dtype)
        return _together(lambda: paddle.matmul(x, y))
    if line["kind"] == "traffic":
        make, _ = TRAFFIC[line["op"]]
        return _together(make(line["elements"] // WIDTH))
    if line["kind"] == "launch":
        return LAUNCHES[line["way"]]()
    start = COLLECTIVES[line["collective"]]
    return _in_step(start(groups[line["ranks"]], line["bytes"] // 4 // line["ranks"] * line["ranks"]))


# --- timing


def _together(run: Work) -> float:
    """Seconds of one repetition while every process repeats it."""
    run()
    started = _now()
    run()
    batch = max(1, min(50, int(0.1 * WINDOW_S / (_now() - started))))  # so that waiting for the device weighs little

    _begin()
    started, count = _now(), 0
    while (elapsed := _now() - started) < WINDOW_S:
        for _ in range(batch):
            run()
        count += batch
    return _agreed(elapsed / count)


def _in_step(run: Work) -> float:
    """Seconds of one repetition of work that all processes must repeat equally often."""
    run()
    started = _now()
    run()
    repeats = max(2, min(200, int(WINDOW_S / _agreed(_now() - started))))
    _begin()
    started = _now()
    for _ in range(repeats):
        run()
    return _agreed((_now() - started) / repeats)


def _begin() -> None:
    """Waits for the other processes."""
    if dist.get_world_size() > 1:
        dist.barrier()


def _now() -> float:
    """The time when the device has done all it was given."""
    if paddle.is_compiled_with_cuda():
        paddle.device.synchronize()
    return time.perf_counter()


def _agreed(seconds: float) -> float:
    """The mean over all processes, the same in each."""
    if dist.get_world_size() == 1:
        return seconds
    value = paddle.to_tensor([seconds], "float32")
    dist.all_reduce(value)
    return value.item() / dist.get_world_size()


# --- what is timed


def _layer_products(h: int) -> tuple[tuple[int, int, int, int], ...]:
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
    few, many = (_together(_tiny_program(n)) for n in (TINY_OPS // 4, TINY_OPS))
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

    return _together(chain) / (2 * TINY_OPS)


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

    return max(0.0, _together(partial(after, TINY_OPS)) - _together(partial(after, 0))) / TINY_OPS


LAUNCHES = {"program": _program_op, "eager": _eager_op, "queued": _queued_op}
"""What a launch costs the host in a static program and in dygraph, and the device between two kernels."""


def _groups() -> dict[int, Any]:
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


if __name__ == "__main__":
    work(sys.argv[1], measurements())
