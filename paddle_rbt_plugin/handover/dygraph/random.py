"""Random numbers of dygraph: alike where a tensor is replicated, different for every shard.

Paddle's random ops on distributed tensors draw from the generator of the device on each rank, so with one seed all shards of a
tensor get the same mask. Here each op takes one number from a stream that all ranks share, and draws from a generator that is
seeded with this number and the shard that this rank holds. A shard draws numbers of its own, replicas draw alike, and no rank
depends on how much another one has drawn.

The shared stream is a state of fleet's ``RNGStatesTracker``, which Paddle's ``recompute`` keeps and puts back: what runs again
draws what it drew. Ops without a distributed operand (``paddle.rand``) draw from the generator of the device. While a sharded
model runs its ``forward``, that is set to another shared stream; ``shard_layer`` gives it one state on all ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import paddle
import paddle.distributed as dist
from paddle.distributed.auto_parallel import random as lazy_weights

from paddle_rbt_plugin.cluster.mesh import ProcessMesh
from paddle_rbt_plugin.completion.placement import Placement
from paddle_rbt_plugin.graph.random_ops import RANDOM_OPS
from paddle_rbt_plugin.handover.shared.conversion import paddle_mesh
from paddle_rbt_plugin.handover.shared.random_streams import PREFIX, common_seed, coordinates, device_generator, hashed, seeded
from paddle_rbt_plugin.patching import SHARDED_MODELS, Attribute, Setting, paddle_change

_SHARED = f"{PREFIX}/dygraph"
_meshes: list[tuple[Any, ProcessMesh]] = []
"""Those of Paddle on which random ops draw so, and each as a mesh of a plan."""
_seeds: list[int] = []
"""Those that the shared stream has started from."""
_shards: dict[tuple[Any, ...], str] = {}
"""Which shard of its result an op makes on this rank, by its name and by where its operands lie."""


def draw_by_shard(model: Any, mesh: ProcessMesh) -> None:
    """Lets a sharded model, and random ops on tensors that are distributed on ``mesh``, draw from streams that are alike on all
    ranks from now on."""
    random_ops_draw_by_shard.install()
    if all(known != mesh for _, known in _meshes):
        _meshes.append((paddle_mesh(mesh), mesh))
    restart(model, common_seed())


@paddle_change(">=2.6,<3.4", permanent=SHARDED_MODELS)
def random_ops_draw_by_shard() -> Iterator[Setting]:
    """Lets random ops on tensors of a plan's mesh draw by the shard that they make.

    Reason: they draw from the generator of the device on each rank, so with one seed all shards get the same numbers.
    """
    for name in _spellings():
        yield Attribute(paddle._C_ops, name, _on_shards(name, getattr(paddle._C_ops, name)))


@paddle_change(">=2.6,<3.4", permanent="the script decides when it initializes weights that LazyGuard has deferred")
def lazy_weights_seeded(seed: int) -> Iterator[Setting]:
    """Lets weights that were built under ``LazyGuard`` be drawn from ``seed``.

    Reason: Paddle draws them from a constant, whatever ``paddle.seed`` says.
    """
    yield Attribute(lazy_weights, "_basic_seed", seed)
    yield Attribute(lazy_weights, "_rng_name_to_seed", {})
    yield Attribute(lazy_weights, "_rng_name_to_states", {})


def restart(model: Any, seed: int) -> None:
    """Begins the streams of a sharded model anew, from a seed that is the same on all ranks."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        paddle.seed(hashed(seed, "script"))
    _set_shared_stream(hashed(seed, "dygraph"))
    _seed_lazy_weights(hashed(seed, "weights"))
    _run_forward_on_stream(model, hashed(seed, "forward"))


def is_on_streams(model: Any) -> bool:
    """Whether a model draws from streams that all ranks share."""
    return getattr(model, "_rule_based_stream", None) is not None


def _seed_lazy_weights(seed: int) -> None:
    """Lets weights that were built under ``LazyGuard`` follow the seed, too, where the script does not seed them itself. Paddle
    draws them by placement when they are initialized, from a constant."""
    if not lazy_weights.is_enable_auto_rand_ctrl():
        lazy_weights_seeded.install(seed)


def _spellings() -> Iterator[str]:
    return (name for op in sorted(RANDOM_OPS) for name in (op, f"{op}_") if hasattr(paddle._C_ops, name))


def _tracker() -> Any:
    from paddle.distributed.fleet.layers.mpu.random import get_rng_state_tracker

    return get_rng_state_tracker()


def _set_shared_stream(seed: int) -> None:
    tracker = _tracker()
    _seeds.append(seed)
    if _SHARED not in tracker.states_:
        tracker.add(_SHARED, seed)
        tracker.seeds_.discard(seed)  # fleet refuses to add a seed twice, which no other stream of its need know
    with tracker.rng_state(_SHARED):
        device_generator().manual_seed(seed)


def _on_shards(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def op(*args: Any, **kwargs: Any) -> Any:
        tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, paddle.Tensor) and t.is_dist()]
        mesh = next((mesh for known, mesh in _meshes for t in tensors if t.process_mesh == known), None)
        if mesh is None:
            return original(*args, **kwargs)
        if _SHARED not in _tracker().states_:  # fleet has been initialized since, and starts its streams anew
            _set_shared_stream(_seeds[-1])
        with _tracker().rng_state(_SHARED):
            number = device_generator().random()
        key = (name, *(str(t.placements) for t in tensors), str(mesh))
        shard = _shards.get(key, _shard(tensors[0], mesh))
        with seeded(device_generator(), hashed(number, shard)):
            result = original(*args, **kwargs)
        _shards[key] = _shard(result[0] if isinstance(result, (list, tuple)) else result, mesh)
        if _shards[key] == shard:
            return result
        with seeded(device_generator(), hashed(number, _shards[key])):  # its result lies otherwise than its operand
            return original(*args, **kwargs)

    return op


def _shard(tensor: Any, mesh: ProcessMesh) -> str:
    """Which shard of a distributed tensor this rank holds; empty where it holds the whole."""
    sharding = tuple(axis for axis, p in enumerate(tensor.placements) if p.is_shard())
    return coordinates(Placement(sharding), mesh, dist.get_rank())


def _run_forward_on_stream(model: Any, seed: int) -> None:
    """Lets ``model`` draw from a stream of its own while it runs; hooks that are there already get the new seed."""
    stream = getattr(model, "_rule_based_stream", None)
    if stream is not None:
        stream.restart(seed)
        return
    stream = _ForwardStream(seed)
    object.__setattr__(model, "_rule_based_stream", stream)
    model.register_forward_pre_hook(stream.enter)
    model.register_forward_post_hook(stream.leave)


class _ForwardStream:
    """Swaps the generator of the device for the time of a forward pass."""

    def __init__(self, seed: int):
        self.restart(seed)

    def restart(self, seed: int) -> None:
        self.seed: int | None = seed
        self.state: Any = None
        self.outside: Any = None

    def enter(self, layer: Any, inputs: Any) -> None:
        generator = device_generator()
        if self.outside is None:  # else an exception has ended the last pass
            self.outside = generator.get_state()
        if self.state is None:
            generator.manual_seed(self.seed)
        else:
            generator.set_state(self.state)

    def leave(self, layer: Any, inputs: Any, outputs: Any) -> None:
        generator = device_generator()
        self.state = generator.get_state()
        generator.set_state(self.outside)
        self.outside = None
