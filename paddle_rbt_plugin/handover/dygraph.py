"""Hands a plan to dygraph semi-auto training: distributed parameters and distributed batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import paddle
import paddle.distributed as dist

from paddle_rbt_plugin.cluster import Cluster, check_job
from paddle_rbt_plugin.completion.placement import Placement
from paddle_rbt_plugin.errors import PlanError, TunerError
from paddle_rbt_plugin.handover import dygraph_random
from paddle_rbt_plugin.handover.copies import share_all
from paddle_rbt_plugin.handover.dygraph_ops import install
from paddle_rbt_plugin.handover.local import paddle_placements
from paddle_rbt_plugin.handover.replay import paddle_mesh
from paddle_rbt_plugin.plan.plan import Plan, TensorPlacement


def shard_layer(plan: Plan, model: Any) -> Any:
    """Replaces the parameters of ``model`` by distributed ones, in place. Create the optimizer afterwards.

    Raises PlanError for a model with other parameters, ClusterError for a job of another size, TunerError for a plan with
    pipeline stages."""
    if not isinstance(model, paddle.nn.Layer):
        raise TunerError(f"a paddle.nn.Layer can be sharded, not {type(model).__name__}")
    _require_one_stage(plan)
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
    install(mesh)
    dygraph_random.install(model, plan.stages[0].process_mesh)
    return model


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
                f"the plan is for another model: {path} has the shape {list(param.shape)}, there {list(planned.shape)}"
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

    The order of the tensors in a batch, lists flattened, is that of the program's inputs; a dict is taken by name."""

    def __init__(self, plan: Plan, loader: Any):
        self.loader = loader
        self.mesh = paddle_mesh(plan.stages[0].process_mesh)
        self.planned = {name: t.placement for name, t in plan.tensors.items() if t.kind == "data"}

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        for batch in self.loader:
            yield self.shard(batch)

    def shard(self, batch: Any) -> Any:
        """One batch. Raises PlanError when it has other tensors than the program has inputs."""
        if isinstance(batch, dict):
            unknown = sorted(set(batch) - set(self.planned))
            if unknown:
                raise PlanError(f"the plan places no input {unknown[0]!r}; the program reads {', '.join(self.planned)}")
            missing = sorted(set(self.planned) - set(batch))
            if missing:
                raise PlanError(f"the batch lacks the input {missing[0]!r}; the program reads {', '.join(self.planned)}")
            return {name: self._shard(value, self.planned[name]) for name, value in batch.items()}
        placements = iter(self.planned.values())
        sharded = self._nested(batch, placements)
        if next(placements, None) is not None:
            raise PlanError(
                f"a batch holds fewer tensors than the {len(self.planned)} inputs of the program ({', '.join(self.planned)})"
            )
        return sharded

    def _nested(self, value: Any, placements: Iterator[Placement]) -> Any:
        if isinstance(value, (list, tuple)):
            return [self._nested(v, placements) for v in value]
        placement = next(placements, None)
        if placement is None:
            raise PlanError(
                f"a batch holds more tensors than the {len(self.planned)} inputs of the program ({', '.join(self.planned)})"
            )
        return self._shard(value, placement)

    def _shard(self, value: Any, placement: Placement) -> Any:
        tensor = value if isinstance(value, paddle.Tensor) else paddle.to_tensor(value)
        self._check_divisible(tensor.shape, placement)
        return dist.shard_tensor(tensor, self.mesh, paddle_placements(placement, len(self.mesh.shape)), stop_gradient=True)

    def _check_divisible(self, shape: Sequence[int], placement: Placement) -> None:
        for size, axis in zip(shape, placement.dims_mapping, strict=True):
            if axis >= 0 and size % self.mesh.shape[axis]:
                raise TunerError(
                    f"a batch of {size} cannot be split over {self.mesh.shape[axis]} ranks; set drop_last or another batch size"
                )


def _require_one_stage(plan: Plan) -> None:
    if plan.degrees["pp"] == 1 and len({stage.process_mesh for stage in plan.stages}) > 1:
        raise TunerError(
            "the layers of the plan run on differently arranged devices, which dygraph semi-auto training does not do here; "
            "restrict the search with search_space={'layer_meshes': 'one'}"
        )
    if plan.degrees["pp"] > 1:
        raise TunerError(
            f"the plan has {plan.degrees['pp']} pipeline stages, which dygraph semi-auto training does not run; "
            "restrict the search with search_space={'pp': 1}"
        )
