"""Random streams of a job: alike where a tensor is replicated, different for every shard.

All ranks agree on one number, the seed that rank 0 was given by ``paddle.seed``, or has drawn itself. Everything else is
hashed from it, so no rank depends on what another one has drawn, nor on what its own script draws between two steps:

    seed of a stream = hash(common seed, which op, coordinates of this rank along the axes that shard the result, step)

``Streams`` holds the streams that the program of an engine reads. Before each run it sets all of them for the step, and the
generator of the device with them, which it gives back afterwards. Ops that draw from that generator draw whole tensors.
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
"""Names that Paddle's table of generators holds, which cannot be asked for them."""


def hashed(*parts: Any) -> int:
    """A seed from numbers and names, the same in every process; never 0, which Paddle takes for none, and 32 bits, which is
    what its generators read of a seed."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % (2**31 - 1) + 1


def common_seed() -> int:
    """The seed of rank 0, which all ranks that call this get; that of this process where there is no other."""
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
    """Lets a generator draw from ``seed``; it goes on as before afterwards."""
    before = generator.get_state()
    generator.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(before)


def coordinates(placement: Placement, mesh: ProcessMesh, rank: int) -> str:
    """Which shard of a tensor a rank holds, such as ``dp=1,mp=0``; empty where it holds the whole."""
    sharding = sorted({axis for axis in placement.dims_mapping if axis >= 0 and mesh.shape[axis] > 1})
    return ",".join(f"{mesh.axes[axis]}={mesh.coordinate(rank, mesh.axes[axis])}" for axis in sharding)


def stream_name(number: int, shard: str) -> str:
    """The name of the generator of the random op with this number in its program, for one shard of its result."""
    return f"{PREFIX}/{number}/{shard}"


def register(names: Sequence[str], seed: int, step: int = 0) -> None:
    """Seeds the generators of these names for a step; makes them where they are not there yet."""
    for name in names:
        if name not in _registered:
            _registered.add(name)
            with suppress(RuntimeError):  # somebody has made it
                core.set_random_seed_generator(name, 1)
        core.get_random_seed_generator(name).manual_seed(hashed(seed, name, step))


@dataclass
class Source:
    """What the streams of an engine are hashed from, in a step. With both numbers put back, training goes on with the random
    numbers that it would have drawn."""

    seed: int
    step: int = 0


@dataclass
class Streams:
    """The random streams of one program; programs of one engine share a source, and so never draw from one seed twice."""

    source: Source
    names: tuple[str, ...]
    device: str | None = None
    """The shard that ops make which draw from the generator of the device; None where there are no such ops."""

    @contextmanager
    def of_next_step(self) -> Iterator[None]:
        """Sets the streams for a run of the program, of whatever number of micro batches."""
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
    """Lets the executor run ops one after the other.

    Reason: on CPUs it starts several threads, which draw in any order: of the ops that read the generator of the device Paddle
    orders some only.
    """
    yield Flag("FLAGS_enable_pir_in_executor_trace_run", True)
