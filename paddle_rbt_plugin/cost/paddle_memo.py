"""Lets Paddle's CostEstimator work out equal things once.

It describes every op for every rank anew. But the cost of an op follows from its kind, its attributes and the shapes and
placements of its tensors, so the ops of all equal layers share one answer (``_signature``); and with even sharding the ranks
of a mesh hold parts of equal size, so all of them share one too (``_local_sizes``). The figures stay the same to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from paddle_rbt_plugin.patching import Attribute, Setting, paddle_change

_NAMES = frozenset({"op_namescope", "op_callstack", "op_device", "op_role_var"})
"""Attributes that say where an op stands, not what it does."""


@paddle_change(">=2.6,<3.4")
def estimates_remembered() -> Iterator[Setting]:
    """While it is made, the estimator remembers; what it remembers is forgotten afterwards.

    Reason: it describes every op for every rank anew, which takes minutes for the layers of a model.
    """
    from paddle.distributed.auto_parallel.static.cost import estimate_cost
    from paddle.distributed.auto_parallel.static.dist_tensor import DistributedTensor

    container, sizes = estimate_cost.get_distributed_operator_impl_container, DistributedTensor.get_local_sizes
    known: dict[Any, Any] = {}
    remembering = lambda type_: _Container(container(type_).impls, type_, known)  # noqa: E731
    yield Attribute(estimate_cost, "get_distributed_operator_impl_container", remembering)
    yield Attribute(DistributedTensor, "get_local_sizes", staticmethod(_local_sizes(sizes)))


@dataclass(frozen=True)
class _Container:
    """The implementations of one kind of distributed op, as the estimator asks for them."""

    _impls: list[Any]
    _type: str
    _known: dict[Any, Any]

    @property
    def impls(self) -> _Container:
        return self

    def __getitem__(self, index: int) -> _Implementation:
        return _Implementation(self._impls[index], (self._type, index), self._known)


@dataclass(frozen=True)
class _Implementation:
    _original: Any
    _key: tuple[str, int]
    _known: dict[Any, Any]

    def calc_cost(self, role: int, dist_op: Any, context: Any, cluster: Any) -> Any:
        key = (*self._key, int(role), _signature(dist_op))
        if key not in self._known:
            self._known[key] = self._original.calc_cost(role, dist_op, context, cluster)
        return self._known[key]


def _signature(dist_op: Any) -> tuple[Any, ...]:
    """All of a distributed op that its cost depends on."""
    op, attr = dist_op.serial_op, dist_op.dist_attr
    mesh = attr.process_mesh
    attrs = ((name, repr(value)) for name, value in op.all_attrs().items() if name not in _NAMES)
    inputs = ((slot, [_tensor(op, n, attr.get_input_dims_mapping(n)) for n in op.input(slot)]) for slot in op.input_names)
    outputs = ((slot, [_tensor(op, n, attr.get_output_dims_mapping(n)) for n in op.output(slot)]) for slot in op.output_names)
    slots = tuple((slot, tuple(tensors)) for side in (inputs, outputs) for slot, tensors in side)
    return op.type, tuple(sorted(attrs)), slots, tuple(mesh.shape), tuple(mesh.process_ids)


def _tensor(op: Any, name: str, dims_mapping: Any) -> tuple[Any, ...]:
    var = op.block._var_recursive(name)
    return tuple(var.shape), str(var.dtype), tuple(dims_mapping), bool(var.is_parameter)


def _local_sizes(original: Callable[..., list[int]]) -> Callable[..., list[int]]:
    known: dict[Any, list[int]] = {}

    def local_sizes(
        global_sizes: Any, dims_mapping: Any, topology: Any, processes: Any, rank: Any = None, shard_sizes: Any = None
    ) -> list[int]:
        if shard_sizes is not None:
            return original(global_sizes, dims_mapping, topology, processes, rank, shard_sizes)
        key = tuple(global_sizes), tuple(dims_mapping), tuple(topology)
        if key not in known:
            known[key] = original(global_sizes, dims_mapping, topology, processes, rank)
        return list(known[key])

    return local_sizes
