"""Optimizer states of dygraph lie as their parameters do, and are divided over the replicas where a plan asks for ZeRO.

The update of most optimizers is elementwise, so a rank can run it on the part of a parameter that it holds:

    gradients -> finished and cut to shards -> clipped -> regularized -> updated, on local tensors -> parameter gathered again

The states are made from that part, and so are never whole. Between steps they are distributed tensors, which is what
``state_dict`` gives. Paddle's ``dist.shard_optimizer`` divides by the first dimension, whatever its size, needs a
reduce-scatter, which CPUs lack, and reduces one norm per gradient to clip; by itself Paddle keeps the states of optimizers
without a sharding rule, such as ``Momentum``, whole on each rank. As in PIR (``zero``), gradients are cut once a step at stage
1, and in every backward pass at stage 2, so that they accumulate as shards. The dimension is that of ``zero.shard_dimension``.
"""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import paddle
import paddle.distributed as dist
from paddle.distributed.auto_parallel import api
from paddle.optimizer import Optimizer

from paddle_rbt_plugin.errors import TunerError, TunerWarning
from paddle_rbt_plugin.handover.dygraph.local_tensors import mesh_of, moved, placements_of, reduced
from paddle_rbt_plugin.handover.shared.zero import ELEMENTWISE, shard_dimension
from paddle_rbt_plugin.patching import SHARDED_MODELS, Attribute, Setting, paddle_change

_STAGE = "_rbt_zero_stage"
_meshes: list[Any] = []


def adopt_optimizers(mesh: Any, parameters: Iterable[Any], stage: int) -> None:
    """Lets every optimizer of this process keep the states of parameters on ``mesh`` as they lie, and, until it was given to
    ``shard_optimizer``, warn that it does not divide those of ``parameters``, for which a plan has that ZeRO stage."""
    optimizers_adopted.install()
    if mesh not in _meshes:
        _meshes.append(mesh)
    for parameter in parameters:
        setattr(parameter, _STAGE, stage)


@paddle_change(">=2.6,<3.4", permanent=SHARDED_MODELS)
def optimizers_adopted() -> Iterator[Setting]:
    """Lets an optimizer of sharded parameters keep its states as they lie, from its first update on.

    Reason: Paddle makes the states of dygraph whole on every rank, or leaves them to be reduced and gathered.
    """
    yield Attribute(Optimizer, "_apply_optimize", _adopting(Optimizer._apply_optimize))


def shard_optimizer(optimizer: Any, stage: int) -> Any:
    """Makes an optimizer of sharded parameters divide its states at a ZeRO stage, in place.

    Raises TunerError for an optimizer whose update is not elementwise, one that took a step before its parameters were
    sharded, and one of other parameters."""
    if not isinstance(optimizer, Optimizer) or _is_wrapped(optimizer):
        kind = type(optimizer).__name__
        raise TunerError(f"shard_optimizer takes a paddle.optimizer.Optimizer, not {kind}: pass the optimizer itself")
    parameters = [p for p in _parameters(optimizer) if _mesh_of(p) is not None]
    if not parameters:
        raise TunerError(
            "the optimizer has no parameter that plan.shard_layer has sharded: call that first, then create the optimizer "
            "from model.parameters()"
        )
    if stage and not _is_elementwise(optimizer):
        raise TunerError(
            f"{type(optimizer).__name__} cannot update a part of a parameter by itself, so its states cannot be divided (ZeRO "
            f"stage {stage}): use {', '.join(ELEMENTWISE)}, or plan with search_space={{'sharding_stage': 0}}"
        )
    if any(optimizer._accumulators.values()) and not isinstance(optimizer, _OnShards):
        raise TunerError("the optimizer took a step before plan.shard_layer; create it again from model.parameters()")
    if _is_elementwise(optimizer):
        _adopt(optimizer, stage)
        optimizer._redivide()
    if stage == 2:
        for parameter in parameters:
            if not parameter.stop_gradient:
                parameter.register_hook(functools.partial(moved, mesh_of(parameter), _shard_placements(parameter, 2)))
    return optimizer


def _adopting(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def apply_optimize(optimizer: Any, loss: Any, startup_program: Any, params_grads: Any, *args: Any, **kwargs: Any) -> Any:
        if paddle.in_dynamic_mode() and not isinstance(optimizer, _OnShards):
            planned = [p for p, _ in _pairs(params_grads) if _mesh_of(p) is not None]
            stage = max((getattr(p, _STAGE, 0) for p in planned), default=0)
            if stage:
                _warn_whole(optimizer, stage)
            is_fresh = not _is_wrapped(optimizer) and not any(optimizer._accumulators.values())
            if planned and is_fresh and _is_elementwise(optimizer):
                _adopt(optimizer, 0)
                return optimizer._apply_optimize(loss, startup_program, params_grads, *args, **kwargs)
        return original(optimizer, loss, startup_program, params_grads, *args, **kwargs)

    return apply_optimize


def _warn_whole(optimizer: Any, stage: int) -> None:
    if _is_wrapped(optimizer) or getattr(optimizer, "_rbt_warned", False):  # dist.shard_optimizer divides by itself
        return
    optimizer._rbt_warned = True
    warnings.warn(
        f"the plan uses ZeRO stage {stage}, but every replica keeps whole optimizer states, which need more memory than the "
        "plan estimates: call plan.shard_optimizer(optimizer) before the first step",
        TunerWarning,
        stacklevel=5,
    )


def _adopt(optimizer: Any, stage: int) -> None:
    if not isinstance(optimizer, _OnShards):
        original = type(optimizer)
        optimizer.__class__ = type(original.__name__, (_OnShards, original), {"__module__": original.__module__})
        optimizer._rbt_kinds = {}
        optimizer._rbt_parts = {}
        optimizer._use_multi_tensor = False  # one kernel for many parameters, to the same numbers
    optimizer._rbt_stage = stage


def _is_elementwise(optimizer: Any) -> bool:
    bases = [getattr(paddle.optimizer, name) for name in ELEMENTWISE if hasattr(paddle.optimizer, name)]
    update = "_append_optimize_op"
    return any(isinstance(optimizer, base) and getattr(type(optimizer), update) is getattr(base, update) for base in bases)


def _is_wrapped(optimizer: Any) -> bool:
    return hasattr(optimizer, "_shard_fn") or hasattr(optimizer, "_inner_opt")


def _parameters(optimizer: Any) -> list[Any]:
    groups = optimizer._parameter_list or ()
    return [p for group in groups for p in (group["params"] if isinstance(group, dict) else (group,))]


def _pairs(params_grads: Any) -> list[Any]:
    return params_grads["params"] if isinstance(params_grads, dict) else params_grads


def _mesh_of(parameter: Any) -> Any:
    """The mesh of a plan on which a parameter lies; None for a parameter that no plan has sharded."""
    if not (isinstance(parameter, paddle.Tensor) and parameter.is_dist()):
        return None
    return next((mesh for mesh in _meshes if parameter.process_mesh == mesh), None)


def _shard_placements(parameter: Any, stage: int) -> list[Any]:
    """Where the states of a parameter lie at a stage: as it does, and along dp in the dimension that is divided."""
    mesh, placements = parameter.process_mesh, placements_of(parameter)
    if stage and "dp" in mesh.dim_names:
        axis = mesh.dim_names.index("dp")
        dims = [-1] * parameter.ndim
        for i, placement in enumerate(placements):
            if placement.is_shard():
                dims[placement.get_dim()] = i
        dim = shard_dimension(parameter.shape, dims, axis, mesh.shape[axis])
        if dim is not None:
            placements[axis] = dist.Shard(dim)
    return placements


class _OnShards:
    """Goes before the class of an optimizer whose update is elementwise. ``_apply_optimize``, which ``step`` calls, clips,
    regularizes through ``append_regularization_ops``, and updates through ``_create_optimization_pass``."""

    _rbt_stage: int
    _rbt_kinds: dict[str, int]
    """By name of a state, how many dimensions it has before those of its parameter; absent for a single number."""
    _rbt_parts: dict[str, tuple[Any, list[Any], Any]]
    """By name of a parameter in this step: itself, where its states lie, and the part of it that this rank updates."""

    def _apply_optimize(self: Any, loss: Any, startup_program: Any, params_grads: Any, param_group_idx: int = 0) -> Any:
        if not paddle.in_dynamic_mode():
            return super()._apply_optimize(loss, startup_program, params_grads, param_group_idx)  # type: ignore[misc]
        shards = [(p, g if g is None else self._gradient(p, g)) for p, g in _pairs(params_grads)]
        group = {**params_grads, "params": shards} if isinstance(params_grads, dict) else shards
        clip = self._grad_clip
        if isinstance(group, dict) and "grad_clip" in group:
            group["grad_clip"] = _sharded_clip(group["grad_clip"])
        self._grad_clip = _sharded_clip(clip)
        self._take_local()
        try:
            return super()._apply_optimize(loss, startup_program, group, param_group_idx)  # type: ignore[misc]
        finally:
            self._grad_clip = clip
            self._give_distributed()

    def _gradient(self, parameter: Any, gradient: Any) -> Any:
        mesh = _mesh_of(parameter)
        return gradient if mesh is None else moved(mesh, _shard_placements(parameter, self._rbt_stage), gradient)

    def append_regularization_ops(self: Any, parameters_and_grads: Any, regularization: Any = None) -> Any:
        if paddle.in_dynamic_mode():
            parameters_and_grads = [self._local(p, g) for p, g in parameters_and_grads]
        return super().append_regularization_ops(parameters_and_grads, regularization)  # type: ignore[misc]

    def _local(self, parameter: Any, gradient: Any) -> tuple[Any, Any]:
        """The part of a parameter that this rank updates, and of its gradient."""
        if _mesh_of(parameter) is None:
            return parameter, gradient
        part = self._part(parameter)
        return part, gradient if gradient is None else self._gradient(parameter, gradient)._local_value()

    def _part(self, parameter: Any) -> Any:
        if parameter.name not in self._rbt_parts:
            placements = _shard_placements(parameter, self._rbt_stage)
            part = moved(parameter.process_mesh, placements, parameter)._local_value()
            part.name, part.stop_gradient = parameter.name, parameter.stop_gradient
            for name in ("optimize_attr", "regularizer", "need_clip"):
                setattr(part, name, getattr(parameter, name, None))
            self._rbt_parts[parameter.name] = parameter, placements, part
        return self._rbt_parts[parameter.name][2]

    def _add_accumulator(
        self: Any,
        name: str,
        param: Any,
        dtype: Any = None,
        fill_value: float = 0.0,
        shape: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        made = super()._add_accumulator(name, param, dtype, fill_value, shape, *args, **kwargs)  # type: ignore[misc]
        if shape is None or list(shape)[-param.ndim or len(shape) :] == list(param.shape) != [1]:
            self._rbt_kinds[made.name] = 0 if shape is None else len(shape) - param.ndim
        return made

    def _create_optimization_pass(self: Any, parameters_and_grads: Any, param_group_idx: int = 0) -> Any:
        done = super()._create_optimization_pass(parameters_and_grads, param_group_idx)  # type: ignore[misc]
        if paddle.in_dynamic_mode():
            for parameter, placements, part in self._rbt_parts.values():
                if placements != placements_of(parameter):  # else the part shares the memory of the parameter
                    mesh = parameter.process_mesh
                    whole = moved(mesh, placements_of(parameter), api.dtensor_from_local(part, mesh, placements))
                    parameter.get_tensor()._share_data_with(whole.get_tensor())
        return done

    def _states(self: Any) -> Iterable[tuple[dict[str, Any], str, Any]]:
        """Every state of a parameter on a mesh of a plan: the table and the key under which it is kept, and the parameter."""
        owners = {p.name: p for p in _parameters(self) if _mesh_of(p) is not None}
        masters = getattr(self, "_master_weights", {})
        owners |= {master.name: owners[name] for name, master in masters.items() if name in owners}
        for table in self._accumulators.values():
            for key, state in table.items():
                if key in owners and state.name in self._rbt_kinds:
                    yield table, key, owners[key]
        for name in masters:
            if name in owners:
                yield masters, name, owners[name]

    def _take_local(self) -> None:
        for table, key, _ in list(self._states()):
            if table[key].is_dist():
                table[key] = _named(table[key]._local_value(), table[key].name)

    def _give_distributed(self) -> None:
        for table, key, parameter in list(self._states()):
            if not table[key].is_dist():
                state = table[key]
                placements = self._state_placements(state.name, parameter)
                table[key] = _named(api.dtensor_from_local(state, parameter.process_mesh, placements), state.name)
        self._rbt_parts.clear()

    def _redivide(self) -> None:
        """Moves states that are there already to where the stage wants them."""
        for table, key, parameter in list(self._states()):
            state = table[key]
            placements = self._state_placements(state.name, parameter)
            table[key] = _named(moved(parameter.process_mesh, placements, state), state.name)

    def _state_placements(self, name: str, parameter: Any) -> list[Any]:
        before = self._rbt_kinds.get(name, 0)
        placements = _shard_placements(parameter, self._rbt_stage)
        return [dist.Shard(p.get_dim() + before) if p.is_shard() else p for p in placements]

    def set_state_dict(self: Any, state_dict: Mapping[str, Any]) -> None:
        """As that of the optimizer; takes whole states, and distributed ones wherever they lie."""
        given = dict(state_dict)
        masters = given.pop("master_weights", {})
        self._make_states()
        for table, key, parameter in list(self._states()):
            state = table[key]
            source, name = (masters, key) if table is getattr(self, "_master_weights", None) else (given, state.name)
            value = source.get(name, source.get(name.replace(".dist", "")))
            if value is None:
                raise TunerError(f"the state dict lacks {name!r}, a state of the optimizer")
            value = value if isinstance(value, paddle.Tensor) else paddle.to_tensor(value)
            if value.is_dist() and value.process_mesh != parameter.process_mesh:
                value = dist.unshard_dtensor(value)
            placed = moved(parameter.process_mesh, self._state_placements(state.name, parameter), value)
            state._local_value().copy_(placed._local_value(), False)
            given[state.name] = state
        for state in itertools.chain.from_iterable(table.values() for table in self._accumulators.values()):
            if state.name not in given and state.name.replace(".dist", "") in given:
                given[state.name] = given[state.name.replace(".dist", "")]
        self._take_local()
        try:
            super().set_state_dict({k: _local_value(v) for k, v in given.items()})  # type: ignore[misc]
        finally:
            self._give_distributed()

    load_state_dict = set_state_dict

    def _make_states(self: Any) -> None:
        """The states that are not there before the first step."""
        self._take_local()
        block = paddle.static.default_main_program().global_block()
        groups = self._param_groups if self._param_groups and isinstance(self._param_groups[0], dict) else [None]
        with paddle.no_grad():
            for group in groups:
                given = _parameters(self) if group is None else group["params"]
                parts = [p if _mesh_of(p) is None else self._part(p) for p in given if not p.stop_gradient]
                self._create_accumulators(block, parts if group is None else {**group, "params": parts})
        self._give_distributed()


def _named(tensor: Any, name: str) -> Any:
    tensor.name = name
    return tensor


def _local_value(value: Any) -> Any:
    return value._local_value() if isinstance(value, paddle.Tensor) and value.is_dist() else value


def _sharded_clip(clip: Any) -> Any:
    """A clip by global norm of shards, each element of which counts once; other clips stay as they are."""
    return _GlobalNormOfShards(clip) if type(clip) is paddle.nn.ClipGradByGlobalNorm else clip


class _GlobalNormOfShards:
    """``paddle.nn.ClipGradByGlobalNorm`` for gradients none of which is partial:

        scale = clip_norm / max(clip_norm, sqrt(sum over sets of axes of reduce over these axes of the squares of local parts))

    Gradients that are sharded along the same axes are reduced together, so there is one number to send per set of axes."""

    def __init__(self, clip: Any):
        self.clip = clip

    def __call__(self, params_grads: Sequence[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
        clipped = [i for i, (p, g) in enumerate(params_grads) if g is not None and getattr(p, "need_clip", True) is not False]
        if not clipped:
            return list(params_grads)
        scale = self._scale([params_grads[i][1] for i in clipped])
        result = list(params_grads)
        for i in clipped if scale is not None else ():
            parameter, gradient = params_grads[i]
            local = _local_value(gradient)
            scaled = local * scale.astype(local.dtype)
            if gradient.is_dist():
                scaled = api.dtensor_from_local(scaled, gradient.process_mesh, placements_of(gradient))
            result[i] = parameter, scaled
        return result

    def _scale(self, gradients: Sequence[Any]) -> Any:
        """What gradients are multiplied by; None where they stay as they are."""
        wide = "float64" if any(g.dtype == paddle.float64 for g in gradients) else "float32"
        squares: dict[tuple[int, tuple[int, ...]], Any] = {}
        meshes: list[Any] = []
        for gradient in gradients:
            axes: tuple[int, ...] = ()
            mesh = None
            if gradient.is_dist():
                mesh = mesh_of(gradient)
                axes = tuple(i for i, p in enumerate(placements_of(gradient)) if p.is_shard())
            if mesh not in meshes:
                meshes.append(mesh)
            key = meshes.index(mesh), axes
            square = (_local_value(gradient).astype(wide) ** 2).sum()
            squares[key] = squares[key] + square if key in squares else square
        total = paddle.zeros([], wide)
        for (number, axes), square in sorted(squares.items(), key=lambda item: item[0]):
            for axis in axes:
                square = reduced(square, meshes[number], axis)
            total = total + square
        norm = total.sqrt()
        if self.clip.auto_skip_clip and float(norm) <= self.clip.clip_norm:
            return None
        limit = paddle.full([], self.clip.clip_norm, wide)
        return limit / paddle.maximum(norm, limit)
