"""Checks that copies are equal: of a replicated tensor on all ranks, of a shard on the ranks that hold it.

Each rank hashes the bytes of every tensor to a number, all ranks exchange these numbers, and the numbers within each replica
group are compared. Eight bytes per tensor and rank are communicated.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist

from paddle_rbt_plugin.cluster.mesh import ProcessMesh
from paddle_rbt_plugin.completion.placement import Placement
from paddle_rbt_plugin.errors import HandoverError, TunerError
from paddle_rbt_plugin.handover.shared.copies import as_bytes
from paddle_rbt_plugin.handover.shared.random_streams import coordinates
from paddle_rbt_plugin.plan.plan import Plan


@dataclass(frozen=True)
class Held:
    """The part of a tensor that this rank holds, as an array (None if it holds nothing), and the tensor's placement on a
    mesh."""

    name: str
    array: np.ndarray[Any, Any] | None
    placement: Placement
    mesh: ProcessMesh


def check_layer(plan: Plan, model: Any) -> None:
    """Compares the parameters and buffers of a Layer that ``shard_layer`` has sharded, across all ranks. All ranks must call
    it.

    Raises HandoverError on every rank that names the first tensor that differs, and the ranks."""
    whole = plan.stages[0].process_mesh
    _check([_held(name, t, whole) for name, t in (*model.named_parameters(), *model.named_buffers())])


def check_replicas(engine: Any) -> None:
    """Compares the weights and optimizer states of an ``auto.Engine`` or a ``DistModel`` across all ranks. All ranks must call
    it, after the engine is prepared for training.

    Raises HandoverError on every rank that names the first tensor that differs, and the ranks; TunerError for an engine that
    was not prepared."""
    engine = getattr(engine, "_engine", engine)
    held = _of_pir(engine) if getattr(engine, "_in_pir_mode", False) else _of_legacy(engine)
    if not held:
        raise TunerError("the engine holds no weights yet: prepare or fit it for training first")
    _check(held)


def _held(name: str, tensor: Any, whole: ProcessMesh) -> Held:
    if not tensor.is_dist():
        return Held(name, as_bytes(tensor).numpy(), Placement.replicated(tensor.ndim), whole)
    mesh, dims = tensor.process_mesh, [-1] * tensor.ndim
    for axis, placement in enumerate(tensor.placements):
        if placement.is_shard():
            dims[placement.get_dim()] = axis
    local = tensor._local_value()
    array = as_bytes(local).numpy() if local._is_initialized() else None
    return Held(name, array, Placement(tuple(dims)), _mesh_of(mesh))


def _mesh_of(mesh: Any) -> ProcessMesh:
    return ProcessMesh(tuple(mesh.dim_names), tuple(mesh.shape), tuple(mesh.process_ids))


def _of_pir(engine: Any) -> list[Held]:
    attributes: Mapping[str, Any] = getattr(getattr(engine, "program_helper", None), "_all_params_dist_attr", {})
    names = _structured_names(engine)
    return [
        Held(names.get(name, name), _in_scope(name), Placement(tuple(dims)), _mesh_of(mesh))
        for name, (mesh, dims) in sorted(attributes.items())
    ]


def _of_legacy(engine: Any) -> list[Held]:
    context = engine._dist_contexts.get("train")
    if context is None:
        return []
    names = _structured_names(engine)
    held = []
    for parameter in context.serial_main_program.all_parameters():
        attr = context.get_tensor_dist_attr_for_program(parameter)
        placement = Placement(tuple(attr.dims_mapping))
        name = parameter.name
        held.append(Held(names.get(name, name), _in_scope(name), placement, _mesh_of(attr.process_mesh)))
    return held


def _structured_names(engine: Any) -> dict[str, str]:
    if not isinstance(engine._model, paddle.nn.Layer):
        return {}
    names: dict[str, str] = {}
    for path, layer in engine._model.named_sublayers(
        include_self=True
    ):  # named_parameters accepts only values of PIR at this point
        for name, parameter in layer._parameters.items():
            if parameter is not None:
                names.setdefault(parameter.name, f"{path}.{name}" if path else name)
    return names


def _in_scope(name: str) -> np.ndarray[Any, Any] | None:
    variable = paddle.static.global_scope().find_var(name)
    if variable is None or not variable.get_tensor()._is_initialized():
        return None
    return np.ascontiguousarray(np.array(variable.get_tensor()))


def _check(tensors: Sequence[Held]) -> None:
    if not dist.is_initialized() or dist.get_world_size() < 2:
        return
    names = "\n".join(held.name for held in tensors).encode()
    numbers = _gathered([_number(names), *(0 if held.array is None else _number(held.array.tobytes()) for held in tensors)])
    if len({own[0] for own in numbers}) > 1:
        raise HandoverError("the ranks hold different tensors, so they cannot be compared: did all ranks build the same model?")
    for i, held in enumerate(tensors, start=1):
        for ranks in _groups(held):
            groups: dict[int, list[int]] = {}
            for rank in ranks:
                groups.setdefault(numbers[rank][i], []).append(rank)
            if len(groups) > 1:
                sides = " and ".join(map(_spelt, groups.values()))
                raise HandoverError(
                    f"{held.name} should be equal on {_spelt(ranks)}, but differs between {sides}: something has changed it "
                    "on only some of these ranks since the plan was handed over"
                )


def _groups(held: Held) -> Iterable[list[int]]:
    """The ranks that should hold equal values, for each shard of a tensor."""
    groups: dict[str, list[int]] = {}
    for rank in held.mesh.ranks:
        groups.setdefault(coordinates(held.placement, held.mesh, rank), []).append(rank)
    return groups.values()


def _spelt(ranks: Sequence[int]) -> str:
    return ("ranks " if len(ranks) > 1 else "rank ") + ", ".join(map(str, ranks))


def _number(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little", signed=True)


def _gathered(numbers: Sequence[int]) -> list[list[int]]:
    """The numbers of every rank; ranks with other tensors differ in the first number."""
    with paddle.base.dygraph.guard():
        count = paddle.to_tensor([len(numbers)], dtype="int64")
        counts: list[Any] = []
        dist.all_gather(counts, count)
        size = max(int(c.item()) for c in counts)
        found: list[Any] = []
        dist.all_gather(found, paddle.to_tensor([*numbers, *[0] * (size - len(numbers))], dtype="int64"))
        return [list(own.tolist()) for own in found]
