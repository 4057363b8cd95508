"""Seconds of work that all processes of a calibration repeat at the same time: each begins when all are ready.

The processes of a CPU machine share its cores, caches and memory, and the devices of one machine its power and its links, so
what one alone could do says little about a training step.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import paddle
import paddle.distributed as dist

WINDOW_S = 0.08
"""Seconds of repetition: several time slices of a core that processes share."""

Work = Callable[[], Any]


def together(run: Work) -> float:
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


def in_step(run: Work) -> float:
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
