"""ZeRO in PIR programs: optimizer states, master weights and gradients are divided over the replicas (arXiv 1910.02054).

A state is divided along ``dp`` in the first dimension that is not sharded already and that ``dp`` divides (see
``shard_dimension``). The rest follows from where the states lie: the update runs on shards, for which Paddle slices the
parameter, and it gathers what the update wrote. Gradients, of which each replica holds a summand, are reduce-scattered

- at stage 1 once a step, before clipping and the update: micro batches accumulate them whole;
- at stage 2 where backward makes them, in every micro batch, which so accumulates shards.

Paddle's own ``dist.shard_optimizer`` takes the first mesh axis whatever its name, and the first dimension whatever its size;
in static programs it does the same at both stages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import paddle
from paddle.distributed.fleet.meta_optimizers.common import OpRole

from paddle_rbt_plugin.completion import Placement
from paddle_rbt_plugin.completion.distributed_ops import placement_of, set_placement, tensor_attr
from paddle_rbt_plugin.errors import TunerError
from paddle_rbt_plugin.handover.shared.zero import ELEMENTWISE, STAGES, shard_dimension
from paddle_rbt_plugin.patching import Attribute, Setting, paddle_change
from paddle_rbt_plugin.plan.plan import Plan
from paddle_rbt_plugin.request import Constraint


def constraint(strategy: Any, optimizer: Any) -> Constraint:
    """The ZeRO stages that a strategy and an optimizer leave open.

    Raises TunerError for a strategy that asks for a stage that is not handed over."""
    asked = int(strategy.sharding.stage) if strategy.sharding.enable else 0
    if strategy.sharding.enable and asked not in STAGES[1:]:
        raise TunerError(f"strategy.sharding.stage is {asked}, but PIR programs are trained under ZeRO stages 1 and 2 only")
    reason = _undivided(strategy, optimizer)
    if reason is None:
        return _stages("strategy.sharding", (asked,) if asked else STAGES)
    if _is_wrapped(optimizer):
        return _stages(reason, (_own_stage(optimizer),))
    if asked:
        raise TunerError(f"strategy.sharding asks for ZeRO stage {asked}, but this is {reason}: its states cannot be divided")
    return _stages(reason, (0,))


def stage_of(plan: Plan, strategy: Any, optimizer: Any) -> int:
    """The stage that a program is made with: the plan's, unless the job was warned that a loaded plan's is not applied."""
    if _undivided(strategy, optimizer) is not None:
        return 0
    allowed = constraint(strategy, optimizer).values["sharding_stage"]
    return plan.sharding_stage if plan.sharding_stage in allowed else allowed[0]


def _stages(reason: str, stages: tuple[int, ...]) -> Constraint:
    return Constraint(reason, {"sharding_stage": stages, "sharding_degree": ("whole",)})


def _undivided(strategy: Any, optimizer: Any) -> str | None:
    """Why the states of an optimizer are not divided here; None where they can be."""
    name = type(optimizer).__name__
    if optimizer is None:
        return "training without an optimizer"
    if _is_wrapped(optimizer):
        return f"training with a {name} of dist.shard_optimizer, which divides its states itself"
    if not isinstance(optimizer, tuple(getattr(paddle.optimizer, name) for name in ELEMENTWISE)):
        return f"training with {name}, whose update does not run on shards (that of {', '.join(ELEMENTWISE)} does)"
    if strategy.amp.enable and strategy.amp.dtype == "float16":
        return "training in float16, whose loss scaling reads whole gradients"
    return None


def _is_wrapped(optimizer: Any) -> bool:
    return hasattr(optimizer, "_shard_fn")


def _own_stage(optimizer: Any) -> int:
    """The stage of an optimizer that ``dist.shard_optimizer`` made, which in static programs is 1 for 2 as well."""
    if isinstance(optimizer._shard_fn, paddle.distributed.ShardingStage3):
        raise TunerError("dist.shard_optimizer divides the states at ZeRO stage 3, which is not planned: use stage 1 or 2")
    return int(isinstance(optimizer._shard_fn, (paddle.distributed.ShardingStage1, paddle.distributed.ShardingStage2)))


@contextmanager
def divided(optimizer: Any, stage: int) -> Iterator[None]:
    """Lets ``optimizer`` divide its states and gradients, while Paddle makes a program. Does nothing at stage 0."""
    if not stage:
        yield
        return
    with states_divided.apply(optimizer, stage):
        yield


@paddle_change(">=3.0,<3.4")
def states_divided(optimizer: Any, stage: int) -> Iterator[Setting]:
    """Puts ``_Divided`` before the class of an optimizer.

    Reason: ``dist.shard_optimizer`` takes the first mesh axis whatever its name, and the first dimension whatever its size; in
    static programs it does the same at stages 1 and 2.
    """
    original = type(optimizer)
    yield Attribute(optimizer, "__class__", type(original.__name__, (_Divided, original), {"zero_stage": stage}))


class _Divided:
    """Goes before the class of an optimizer. The engine calls ``_apply_optimize`` with the gradients that it accumulates, or in
    mixed precision takes them from ``backward`` and lets ``apply_gradients`` have the ones that the update reads."""

    zero_stage: int

    def backward(self, *args: Any, **kwargs: Any) -> list[Any]:
        gradients: list[Any] = super().backward(*args, **kwargs)  # type: ignore[misc]
        if self.zero_stage == 2:
            _reduce_in_backward(gradients)
        return gradients

    def _apply_optimize(self, loss: Any, startup_program: Any, params_grads: list[Any], *args: Any, **kwargs: Any) -> Any:
        if self.zero_stage == 2:
            _reduce_in_backward(params_grads)
        return super()._apply_optimize(loss, startup_program, _shards(params_grads), *args, **kwargs)  # type: ignore[misc]

    def apply_gradients(self, params_grads: list[Any]) -> Any:
        return super().apply_gradients(_shards(params_grads))  # type: ignore[misc]

    def _create_accumulators(self, block: Any, parameters: Any) -> None:
        super()._create_accumulators(block, parameters)  # type: ignore[misc]
        for parameter in parameters:
            master = self._master_weights.get(parameter.name)  # type: ignore[attr-defined]
            owner = parameter if master is None else master
            states = [named[owner.name] for named in self._accumulators.values()]  # type: ignore[attr-defined]
            for state in (*states, *([] if master is None else [master])):
                if state.shape == parameter.shape:  # the others are powers of beta, one number each
                    set_placement(state, parameter.process_mesh, state_placement(parameter))


def state_placement(parameter: Any) -> Placement:
    """How the states of a parameter of a PIR program lie."""
    mesh, placement = parameter.process_mesh, placement_of(parameter)
    if "dp" not in mesh.dim_names:
        return placement
    axis = mesh.dim_names.index("dp")
    dims = list(placement.dims_mapping)
    dim = shard_dimension(parameter.shape, dims, axis, mesh.shape[axis])
    if dim is not None:
        dims[dim] = axis
    return Placement(tuple(dims))


def _shards(params_grads: Sequence[Any]) -> list[Any]:
    return [(parameter, _shard(parameter, gradient)) for parameter, gradient in params_grads]


def _shard(parameter: Any, gradient: Any) -> Any:
    """The part of a gradient that this rank updates; the gradient itself where that is all of it, or what there is already."""
    target = state_placement(parameter)
    if gradient is None or target in (placement_of(parameter), placement_of(gradient)):
        return gradient
    return paddle._C_ops.reshard_v2(gradient, tensor_attr(parameter.process_mesh, target))


def _reduce_in_backward(params_grads: list[Any]) -> None:
    """Puts the gradients' shards in their place, each made right after its gradient."""
    for i, (parameter, gradient) in enumerate(params_grads):
        if gradient is not None:
            paddle.pir.set_insertion_point_after(gradient.get_defining_op())
            shard = _shard(parameter, gradient)
            shard.get_defining_op().op_role = int(OpRole.Backward)  # that of a gradient is this one already
            params_grads[i] = (parameter, shard)
    paddle.pir.set_insertion_point_to_block_end(paddle.static.default_main_program().global_block())
