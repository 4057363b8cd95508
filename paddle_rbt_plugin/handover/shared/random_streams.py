"""Random streams of a job: equal for replicas of a tensor, different for every shard.

All ranks share one number, the seed of rank 0, which ``paddle.seed`` has set or which was drawn. All other seeds are hashed
from it, so no rank depends on what another rank has drawn, nor on what its own script draws between two steps:

    seed of a stream = hash(common seed, which op, coordinates of this rank along the axes that shard the result, step)

``Streams`` holds the streams that the program of an engine reads. Before each run it sets them, and the generator of the
device, for the step; it restores the generator afterwards. Ops that draw from that generator draw whole tensors.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import paddle
import paddle.distributed as dist
from paddle.base import core

from paddle_rbt_plugin.cluster.mesh import ProcessMesh
from paddle_rbt_plugin.completion.placement import Placement
from paddle_rbt_plugin.patching import Flag, Setting, paddle_change

PREFIX = "rule_based_tuner"
"""How the names of generators begin."""
_DEVICE = "device"
_registered: set[str] = set()
"""Names in Paddle's table of generators, which cannot be queried."""


def hashed(*parts: Any) -> int:
    """A seed from numbers and names, the same in every process; never 0, which Paddle takes for no seed, and of 32 bits, which
    is all that its generators use."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % (2**31 - 1) + 1


def common_seed() -> int:
    """The seed of rank 0, on all ranks, which must all call this; with a single process, its own seed."""
    seed = device_generator().initial_seed() % 2**62
    if not dist.is_initialized() or dist.get_world_size() < 2:
        return int(seed)
    with paddle.base.dygraph.guard():
        shared = paddle.to_tensor([seed], dtype="int64")
        dist.broadcast(shared, src=0)
        return int(shared.item())


def device_generator() -> Any:
    """The generator that ops on the device of this process draw from."""
    expected = paddle.framework._current_expected_place()
    place = core.Place()
    place.set_place(expected)
    if place.is_gpu_place():
        return core.default_cuda_generator(place.gpu_device_id())
    if place.is_xpu_place():
        return core.default_xpu_generator(place.xpu_device_id())
    if place.is_custom_place():
        return core.default_custom_device_generator(expected)
    return core.default_cpu_generator()


@contextmanager
def seeded(generator: Any, seed: int) -> Iterator[None]:
    """Makes a generator draw from ``seed``; its state is restored afterwards."""
    before = generator.get_state()
    generator.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(before)


def coordinates(placement: Placement, mesh: ProcessMesh, rank: int) -> str:
    """The shard of a tensor that a rank holds, such as ``dp=1,mp=0``; empty if it holds the whole tensor."""
    sharding = sorted({axis for axis in placement.dims_mapping if axis >= 0 and mesh.shape[axis] > 1})
    return ",".join(f"{mesh.axes[axis]}={mesh.coordinate(rank, mesh.axes[axis])}" for axis in sharding)


def stream_name(number: int, shard: str) -> str:
    """The name of the generator of the random op with this number in its program, for one shard of its result."""
    return f"{PREFIX}/{number}/{shard}"


def register(names: Sequence[str], seed: int, step: int = 0) -> None:
    """Seeds the generators of these names for a step, and creates missing ones."""
    for name in names:
        if name not in _registered:
            _registered.add(name)
            with suppress(RuntimeError):  # somebody has made it
                core.set_random_seed_generator(name, 1)
        core.get_random_seed_generator(name).manual_seed(hashed(seed, name, step))


@dataclass
class Source:
    """What the streams of an engine are hashed from in a step. If both numbers are restored, training continues with the random
    numbers that it would have drawn."""

    seed: int
    step: int = 0


@dataclass
class Streams:
    """The random streams of one program. The programs of an engine share a source, so they never use a seed twice."""

    source: Source
    names: tuple[str, ...]
    device: str | None = None
    """The shard computed by ops that draw from the generator of the device; None if there are none."""

    @contextmanager
    def of_next_step(self) -> Iterator[None]:
        """Sets the streams for a run of the program, with any number of micro batches."""
        seed, step = self.source.seed, self.source.step
        self.source.step += 1
        register(self.names, seed, step)
        if self.device is None:
            yield
            return
        with ops_run_in_order.apply(), seeded(device_generator(), hashed(seed, _DEVICE, self.device, step)):
            yield


@paddle_change(">=2.6,<3.4")
def ops_run_in_order() -> Iterator[Setting]:
    """Makes the executor run ops sequentially.

    Reason: on CPUs it starts several threads, which draw in any order; Paddle orders only some of the ops that read the
    generator of the device.
    """
    yield Flag("FLAGS_enable_pir_in_executor_trace_run", True)
