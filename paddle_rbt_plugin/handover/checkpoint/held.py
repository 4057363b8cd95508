"""The tensors of a model and its optimizer in a process: their names, their placements, and how to read and write them.

A program keeps its tensors in a scope, a Layer in its parameters. Once an engine has prepared a program, it has moved the
tensors of its Layer to a scope and emptied the Layer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
from paddle.distributed.auto_parallel.static.engine import Engine

from paddle_rbt_plugin.errors import TunerError
from paddle_rbt_plugin.handover.pir.engine_outputs import Layout, dygraph
from paddle_rbt_plugin.handover.pir.engine_programs import current, inner


@dataclass(frozen=True)
class Held:
    """A tensor of which this rank holds a part."""

    name: str
    layout: Layout
    dtype: str
    read: Callable[[], np.ndarray]
    write: Callable[[np.ndarray], None]


@dataclass(frozen=True)
class Holder:
    """A model and its optimizer, with or without an engine."""

    engine: Any
    model: Any
    optimizer: Any

    @property
    def optimizer_name(self) -> str | None:
        """The class of the optimizer."""
        return type(self.optimizer).__name__ if self.optimizer is not None else None

    @property
    def has_states(self) -> bool:
        """Whether there are optimizer states to save or load now."""
        return self.optimizer is not None and (self.engine is None or current(self.engine, "train") is not None)

    def tensors(self) -> list[Held]:
        """What this rank holds."""
        if self.engine is not None and (prepared := _prepared(self.engine)):
            return [*_of_scope(self.model, prepared, self.optimizer if self.has_states else None)]
        states = _states_of_layer(self.model, self.optimizer) if self.has_states else ()
        return [*(_of_tensor(name, tensor) for name, tensor in named_tensors(self.model) if tensor._is_initialized()), *states]

    def expected(self) -> dict[str, tuple[int, ...]]:
        """The shapes of all tensors of the model, and of the states that this rank holds, by name."""
        shapes = {name: tuple(int(n) for n in tensor.shape) for name, tensor in named_tensors(self.model)}
        return shapes | {tensor.name: tensor.layout.shape for tensor in self.tensors()}


def holder_of(model: Any, optimizer: Any) -> Holder:
    """Raises TunerError if ``model`` is not a model, and for an engine given together with another optimizer."""
    engine = getattr(model, "_engine", model)
    if isinstance(engine, Engine):
        if not engine._in_pir_mode:
            raise TunerError("checkpoints support PIR programs only; save a legacy program with Engine.save")
        if optimizer is not None and inner(optimizer) is not inner(engine._optimizer):
            raise TunerError("an engine has its own optimizer: do not pass another one")
        return Holder(engine, engine._model, inner(engine._optimizer))
    if not isinstance(model, paddle.nn.Layer):
        raise TunerError(
            "checkpoints are made of an auto.Engine, of the result of dist.to_static, or of a paddle.nn.Layer, not of "
            f"{type(model).__name__}"
        )
    return Holder(None, model, getattr(optimizer, "_inner_opt", optimizer))


def named_tensors(model: Any) -> Iterator[tuple[str, Any]]:
    """Parameters and persistable buffers by their structured names; a tied parameter has the first of its names."""
    seen: set[int] = set()
    for path, layer in _layers(model, ""):
        own = {name: b for name, b in layer._buffers.items() if name not in layer._non_persistable_buffer_names_set}
        for name, tensor in (*layer._parameters.items(), *own.items()):
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                yield f"{path}{name}", tensor


def _layers(layer: Any, path: str) -> Iterator[tuple[str, Any]]:
    yield path, layer
    for name, child in layer._sub_layers.items():
        if child is not None:
            yield from _layers(child, f"{path}{name}.")


def _prepared(engine: Any) -> Any:
    return next((found for mode in ("train", "eval", "predict") if (found := current(engine, mode))), None)


def _of_scope(model: Any, prepared: Any, optimizer: Any) -> Iterator[Held]:
    values = {}
    for op in prepared.distributed.global_block().ops:
        if op.name() == "builtin.parameter":
            values[op.attrs()["parameter_name"]] = op.result(0)
        elif op.name() == "pd_op.data" and op.result(0).persistable:
            values[op.attrs()["name"]] = op.result(0)
    names = {tensor.name: (name, tensor) for name, tensor in named_tensors(model)}
    for variable, (name, tensor) in names.items():
        if variable in values:
            yield _of_variable(name, variable, values[variable])
        elif tensor._is_initialized():  # no program reads it
            yield _of_tensor(name, tensor)
    kinds = "|".join(map(re.escape, optimizer._accumulators)) if optimizer is not None else ""
    for variable, value in values.items() if kinds else ():
        found = re.fullmatch(rf"(.+?)(_fp32_master_\d+)?(?:_({kinds})_\d+)?", variable)
        if found and found[1] in names and (found[2] or found[3]):
            yield _of_variable(f"{names[found[1]][0]}/{found[3] or 'master'}", variable, value)


def _of_variable(name: str, variable: str, value: Any) -> Held:
    scope, place = paddle.static.global_scope(), paddle.framework._current_expected_place_()

    def tensor() -> Any:
        return scope.var(variable).get_tensor()

    return Held(name, Layout.of(value), _type(value), lambda: np.array(tensor()), lambda array: tensor().set(array, place))


def _of_tensor(name: str, tensor: Any) -> Held:
    """A dygraph tensor, distributed or whole on every rank."""
    distributed = tensor.is_dist()

    def read() -> np.ndarray:
        with dygraph():
            return np.asarray((tensor._local_value() if distributed else tensor).numpy())

    def write(array: np.ndarray) -> None:
        with dygraph():
            wide = (array.astype("uint32") << 16).view("float32") if _type(tensor) == "bfloat16" else array
            value = paddle.to_tensor(wide).astype(tensor.dtype)
            if distributed:
                tensor._local_value().copy_(value, False)
            else:
                tensor.set_value(value)

    return Held(name, _layout(tensor), _type(tensor), read, write)


def _layout(tensor: Any) -> Layout:
    shape = tuple(int(n) for n in tensor.shape)
    world = dist.get_world_size()
    if not tensor.is_dist():
        return Layout(shape, tuple(range(world)), (world,), (-1,) * len(shape))
    mesh = tensor.process_mesh
    dims = [-1] * len(shape)
    for axis, placement in enumerate(tensor.placements):
        if placement.is_shard():
            dims[placement.get_dim()] = axis
        elif placement.is_partial():
            raise TunerError(f"{tensor.name} is a partial sum, which cannot be saved")
    return Layout(shape, tuple(mesh.process_ids), tuple(mesh.shape), tuple(dims))


def _states_of_layer(model: Any, optimizer: Any) -> Iterator[Held]:
    names = {tensor.name: name for name, tensor in named_tensors(model)}
    _make_states(optimizer)
    masters = optimizer._master_weights
    owners = names | {master.name: names[name] for name, master in masters.items() if name in names}
    for kind, named in optimizer._accumulators.items():
        for owner, tensor in named.items():
            if owner not in owners:
                raise TunerError(f"the optimizer updates {owner}, which is not a parameter of the model")
            yield _of_tensor(f"{owners[owner]}/{kind}", tensor)
    for name, tensor in masters.items():
        yield _of_tensor(f"{names[name]}/master", tensor)


def _make_states(optimizer: Any) -> None:
    """Creates the states of an optimizer that has not taken a step yet."""
    if any(optimizer._accumulators.values()):
        return
    with dygraph():
        if hasattr(optimizer, "_make_states"):
            optimizer._make_states()
            return
        groups = optimizer._parameter_list or ()
        parameters = [p for group in groups for p in (group["params"] if isinstance(group, dict) else (group,))]
        block = paddle.static.default_main_program().global_block()
        optimizer._create_accumulators(block, [p for p in parameters if not p.stop_gradient])


def _type(tensor: Any) -> str:
    return str(tensor.dtype).rpartition(".")[2].lower()
