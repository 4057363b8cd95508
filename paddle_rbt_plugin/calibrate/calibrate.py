"""The whole way from the devices at hand to their profile."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import paddle

from paddle_rbt_plugin.calibrate import measure
from paddle_rbt_plugin.calibrate.fit import DeviceFit, fit
from paddle_rbt_plugin.calibrate.profile import device_profile, profile_text
from paddle_rbt_plugin.cluster import Cluster, parse_cluster
from paddle_rbt_plugin.errors import TunerError
from paddle_rbt_plugin.processes import Processes
from paddle_rbt_plugin.spelling import counted


@dataclass(frozen=True)
class Calibration:
    """What was measured, and what was made of it."""

    samples: tuple[dict[str, Any], ...]
    """See ``calibrate.measure``."""
    fit: DeviceFit
    profile: dict[str, Any]
    """A cluster description, as in a cluster file."""

    @property
    def cluster(self) -> Cluster:
        """The cluster that the profile describes."""
        return parse_cluster(self.profile)

    @property
    def text(self) -> str:
        """The profile as the text of a cluster file."""
        return profile_text(self.profile, self.fit)


def calibrate(
    processes: int | None = None,
    timeout: float = 600,
    progress: Callable[[int, int], None] | None = None,
    rounds: int = measure.ROUNDS,
) -> Calibration:
    """Measures ``processes`` devices of this machine at the same time: CUDA devices where there are any, else CPU processes
    that share the cores; all devices, or one process per core, by default.

    ``progress`` is told how many of how many measurements are done. Everything is measured ``rounds`` times, and medians count:
    fewer rounds take less time and give a rougher profile. Raises TunerError for more processes than devices, and
    where a process fails or all together take longer than ``timeout`` seconds; none outlives the call."""
    gpus = paddle.device.cuda.device_count() if paddle.is_compiled_with_cuda() else 0
    count = processes or gpus or os.cpu_count() or 1
    if gpus and count > gpus:
        raise TunerError(f"this machine has {counted(gpus, 'CUDA device')}, {count} processes cannot have one each")
    expected = rounds * len(measure.plan(count))
    with Processes("the calibration", count, expected, "measurements", timeout) as running:
        running.start(measure.__file__, str(rounds), gpus=gpus > 0)
        while not running.ended:
            running.check()
            if progress:
                progress(len(running.lines), expected)
            time.sleep(0.1)
        samples = tuple(measure.merged(running.lines))
    found = fit(samples)
    return Calibration(samples, found, device_profile(found, count, gpus > 0))
