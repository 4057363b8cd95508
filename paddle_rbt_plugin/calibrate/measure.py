"""What each process of a calibration times, all of them at the same moment.

All is done in several rounds, so that a moment in which something else ran spoils one of them only.

A line that is told is a dict with ``kind``, ``seconds`` of one repetition (mean over processes), and

    product      precision, batch, m, n, k
    traffic      op, bytes that its forward and backward pass read and write in memory
    launch       way, see ``workloads.LAUNCHES``
    collective   collective, ranks, bytes

or, in place of the seconds, with the reason why it was ``skipped``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

import paddle
import paddle.distributed as dist

from paddle_rbt_plugin.calibrate.timing import in_step, together
from paddle_rbt_plugin.calibrate.workloads import COLLECTIVES, LAUNCHES, TRAFFIC, WIDTH, groups_by_size, layer_products
from paddle_rbt_plugin.errors import describe_error
from paddle_rbt_plugin.patching import Flag, Setting, paddle_change
from paddle_rbt_plugin.processes import work

ROUNDS = 5
"""How often everything is measured by default; the median counts."""
LONGEST_S = 0.05
"""Seconds above which work is not repeated in larger sizes."""

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
HIDDEN = (128, 256, 512, 1024, 2048, 4096, 8192)
"""Widths of the transformer layers whose matrix products are timed."""
ELEMENTS = tuple(2**n for n in (16, 19, 21, 23, 25, 27))
MESSAGE_BYTES = tuple(2**n for n in (10, 14, 17, 20, 22, 24, 26, 28))


def plan(ranks: int) -> list[dict[str, Any]]:
    """The measurements of one round of that many processes, in order: within each kind from small to large."""
    lines = [
        {"kind": "product", "precision": p, "batch": batch, "m": m, "n": n, "k": k}
        for p in DTYPES
        for h in HIDDEN
        for batch, m, n, k in layer_products(h)
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


def measurements(rounds: int) -> Iterator[dict[str, Any]]:
    """Runs all rounds. What is like work that took too long, or that the device does not do, is skipped."""
    with transposes_move_data.apply():
        groups = groups_by_size()
        for _ in range(rounds):
            yield from _round(groups)


@paddle_change(">=2.6,<3.4")
def transposes_move_data() -> Iterator[Setting]:
    """Lets a transpose of dygraph move its operand, as it does in programs.

    Reason: dygraph makes a view instead, so that a transpose would be measured as free.
    """
    yield Flag("FLAGS_use_stride_kernel", False)


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
        return together(lambda: paddle.matmul(x, y))
    if line["kind"] == "traffic":
        make, _ = TRAFFIC[line["op"]]
        return together(make(line["elements"] // WIDTH))
    if line["kind"] == "launch":
        return LAUNCHES[line["way"]]()
    start = COLLECTIVES[line["collective"]]
    return in_step(start(groups[line["ranks"]], line["bytes"] // 4 // line["ranks"] * line["ranks"]))


if __name__ == "__main__":
    work(sys.argv[1], measurements(int(sys.argv[2])))
