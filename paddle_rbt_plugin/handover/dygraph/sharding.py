"""Hands a plan to dygraph semi-auto training: distributed parameters and distributed batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import paddle
import paddle.distributed as dist

from paddle_rbt_plugin.cluster import Cluster, check_job
from paddle_rbt_plugin.errors import PlanError, TunerError
from paddle_rbt_plugin.handover.dygraph import optimizer as dygraph_optimizer
from paddle_rbt_plugin.handover.dygraph import random as dygraph_random
from paddle_rbt_plugin.handover.dygraph.ops import shard_ops
from paddle_rbt_plugin.handover.dygraph.recompute import recompute_layers
from paddle_rbt_plugin.handover.shared.conversion import paddle_mesh, paddle_placements
from paddle_rbt_plugin.handover.shared.copies import share_all
from paddle_rbt_plugin.handover.shared.zero import STAGES
from paddle_rbt_plugin.plan.plan import Plan, TensorPlacement


def shard_layer(plan: Plan, model: Any) -> Any:
    """Replaces the parameters of ``model`` by distributed ones, and lets it recompute what the plan does, in place. Create the
    optimizer afterwards, and give it to ``shard_optimizer``.

    Raises PlanError for a model with other parameters, or whose layers to recompute cannot be told, ClusterError for a job of
    another size, TunerError for a plan with pipeline stages or a ZeRO stage that dygraph does not run."""
    if not isinstance(model, paddle.nn.Layer):
        raise TunerError(f"a paddle.nn.Layer can be sharded, not {type(model).__name__}")
    _require_one_stage(plan)
    _require_zero(plan)
    check_job(Cluster.from_dict(plan.cluster), dist.get_world_size())
    mesh, planned = paddle_mesh(plan.stages[0].process_mesh), _planned_params(plan, model)
    share_all([*_all_parameters(model), *model.named_buffers()])
    done: dict[int, Any] = {}  # a tied parameter stays one
    for path, layer in model.named_sublayers(include_self=True):
        for name, param in list(layer._parameters.items()):
            if param is None:
                continue
            if id(param) not in done:
                placement = planned[f"{path}.{name}" if path else name].placement
                done[id(param)] = dist.shard_tensor(param, mesh, paddle_placements(placement, len(mesh.shape)))
            layer._parameters[name] = done[id(param)]
    shard_ops(mesh)
    dygraph_optimizer.adopt_optimizers(mesh, done.values(), plan.sharding_stage)
    recompute_layers(plan, model)
    dygraph_random.draw_by_shard(model, plan.stages[0].process_mesh)
    return model


def shard_optimizer(plan: Plan, optimizer: Any) -> Any:
    """Lets an optimizer of the parameters that ``shard_layer`` has made divide its states as the plan does, in place.

    Raises TunerError for an optimizer whose states cannot be divided, and for one that has none of these parameters."""
    _require_one_stage(plan)
    _require_zero(plan)
    return dygraph_optimizer.shard_optimizer(optimizer, plan.sharding_stage)


def _require_zero(plan: Plan) -> None:
    if plan.sharding_stage not in STAGES:
        raise TunerError(
            f"the plan has ZeRO stage {plan.sharding_stage}, but dygraph supports only stages {', '.join(map(str, STAGES))}; "
            f"restrict the search with search_space={{'sharding_stage': {list(STAGES)}}}"
        )
    if plan.sharding_stage and plan.sharding_degree not in ("whole", plan.degrees["dp"]):
        raise TunerError(
            f"the plan divides states over {plan.sharding_degree} of {plan.degrees['dp']} replicas, but dygraph divides them "
            f"over all; restrict the search with search_space={{'sharding_degree': 'whole'}}"
        )


def _planned_params(plan: Plan, model: Any) -> dict[str, TensorPlacement]:
    """The plan's placement of every parameter of the model by its path; a plan made from a program knows names only."""
    by_path = {t.structured_name: t for t in plan.tensors.values() if t.kind == "param" and t.structured_name}
    params = _all_parameters(model)
    paths_of: dict[int, list[str]] = {}
    for path, param in params:
        paths_of.setdefault(id(param), []).append(path)
    found: dict[str, TensorPlacement] = {}
    for path, param in params:
        planned = next((by_path[p] for p in paths_of[id(param)] if p in by_path), None)
        if not by_path:
            planned = plan.tensors.get(param.name)
        if planned is None or len(planned.dims_mapping) != len(param.shape):
            raise PlanError(f"the plan is for another model: it does not place {path} of shape {list(param.shape)}")
        if planned.shape is not None and planned.shape != tuple(param.shape):
            raise PlanError(
                f"the plan is for another model: {path} has the shape {list(param.shape)}, but {list(planned.shape)} in the "
                "plan"
            )
        found[path] = planned
    missing = sorted(set(by_path) - set(found))
    if missing:
        raise PlanError(f"the plan is for another model: this one lacks {missing[0]}, and {len(missing) - 1} more parameters")
    return found


def _all_parameters(model: Any) -> list[tuple[str, Any]]:
    """Every path of every parameter, those of tied ones too."""
    return [
        (f"{path}.{name}" if path else name, param)
        for path, layer in model.named_sublayers(include_self=True)
        for name, param in layer._parameters.items()
        if param is not None
    ]


def shard_dataloader(plan: Plan, loader: Any) -> ShardedLoader:
    """Wraps a loader that yields the whole batch on every rank. Raises TunerError for a plan with pipeline stages."""
    _require_one_stage(plan)
    return ShardedLoader(plan, loader)


class ShardedLoader:
    """Yields the batches of a loader with every tensor distributed as the plan says; each rank holds its part.

    The order of the tensors in a batch, lists flattened, is that of the program's inputs; what stands in a dict is taken by
    name. A batch may be smaller than planned, as the last one of a loader is, where its parts are still equal."""

    def __init__(self, plan: Plan, loader: Any):
        self.loader = loader
        self.mesh = paddle_mesh(plan.stages[0].process_mesh)
        self.planned = {name: t for name, t in plan.tensors.items() if t.kind == "data"}

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        for batch in self.loader:
            yield self.shard(batch)

    def shard(self, batch: Any) -> Any:
        """One batch. Raises PlanError where it holds other tensors than the program has inputs, or of other dimensions, and
        where they cannot be split evenly."""
        named = set(self._names(batch))
        unknown = sorted(named - set(self.planned))
        if unknown:
            raise PlanError(f"the plan places no input {unknown[0]!r}; the program reads {', '.join(self.planned)}")
        by_position = iter([name for name in self.planned if name not in named])
        sharded = self._nested(batch, by_position)
        left = next(by_position, None)
        if left is not None and not named:
            raise PlanError(f"a batch holds fewer tensors than {self._inputs()}")
        if left is not None:
            raise PlanError(f"the batch lacks the input {left!r}; the program reads {', '.join(self.planned)}")
        return sharded

    def _names(self, batch: Any) -> Iterator[str]:
        """The names under which tensors stand in a batch. What a dict holds under another name may be a list of tensors."""
        if isinstance(batch, dict):
            for name, value in batch.items():
                if name in self.planned or not isinstance(value, (dict, list, tuple)):
                    yield name
                else:
                    yield from self._names(value)
        elif isinstance(batch, (list, tuple)):
            for value in batch:
                yield from self._names(value)

    def _nested(self, value: Any, by_position: Iterator[str]) -> Any:
        if isinstance(value, dict):
            return {
                name: self._shard(v, name) if name in self.planned else self._nested(v, by_position)
                for name, v in value.items()
            }
        if isinstance(value, (list, tuple)):
            return [self._nested(v, by_position) for v in value]
        name = next(by_position, None)
        if name is None:
            raise PlanError(f"a batch holds more tensors than {self._inputs()}")
        return self._shard(value, name)

    def _inputs(self) -> str:
        return f"the {len(self.planned)} inputs of the program ({', '.join(self.planned)})"

    def _shard(self, value: Any, name: str) -> Any:
        try:
            tensor = value if isinstance(value, paddle.Tensor) else paddle.to_tensor(value)
        except (TypeError, ValueError) as error:  # rows of different lengths, or text
            raise PlanError(f"the batch entry for the input {name!r} cannot be converted to a tensor: {error}") from error
        self._check(tensor.shape, name)
        placements = paddle_placements(self.planned[name].placement, len(self.mesh.shape))
        return dist.shard_tensor(tensor, self.mesh, placements, stop_gradient=True)

    def _check(self, shape: Sequence[int], name: str) -> None:
        planned = self.planned[name]
        size = f"{len(planned.dims_mapping)} dimensions" if planned.shape is None else f"the shape {list(planned.shape)}"
        if len(shape) != len(planned.dims_mapping):
            raise PlanError(f"a batch has the shape {list(shape)} for the input {name!r}, which was planned with {size}")
        for dim, (n, axis) in enumerate(zip(shape, planned.dims_mapping, strict=True)):
            if axis >= 0 and n % self.mesh.shape[axis]:
                raise PlanError(
                    f"a batch of shape {list(shape)} for the input {name!r} cannot be split over {self.mesh.shape[axis]} "
                    f"ranks in dimension {dim}; it was planned with {size}: set drop_last or another batch size"
                )


def _require_one_stage(plan: Plan) -> None:
    if plan.degrees["pp"] == 1 and len({stage.process_mesh for stage in plan.stages}) > 1:
        raise TunerError(
            "the layers of the plan run on differently arranged devices, which dygraph does not support; restrict the search "
            "with search_space={'layer_meshes': 'one'}"
        )
    if plan.degrees["pp"] > 1:
        raise TunerError(
            f"the plan has {plan.degrees['pp']} pipeline stages, which dygraph cannot run; restrict the search with "
            "search_space={'pp': 1}"
        )
