"""Annotates a serial legacy program, as ``shard_tensor`` and ``shard_op`` would.

Parameters, data and the tensors that patterns place get process mesh and dims mapping, every op gets the process mesh of its
pipeline stage. Paddle's Completer infers the rest; what it made of it is checked against the plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from paddle.distributed.auto_parallel.static.dist_context import DistributedContext, get_default_distributed_context
from paddle.distributed.auto_parallel.static.dist_op import DistributedOperator
from paddle.distributed.auto_parallel.static.dist_tensor import DistributedTensor

from paddle_rbt_plugin.completion import Placement, data_parallel
from paddle_rbt_plugin.errors import TunerError
from paddle_rbt_plugin.graph import Graph, Tensor
from paddle_rbt_plugin.graph.legacy import LegacyGraph
from paddle_rbt_plugin.handover.shared.conversion import paddle_mesh
from paddle_rbt_plugin.layers import cluster_layers
from paddle_rbt_plugin.plan.plan import Plan


def annotate(program: Any, legacy: LegacyGraph, plan: Plan) -> None:
    """Annotates ``program`` in Paddle's default context, from which every DistributedContext made of it starts.

    The program may be another one than was planned, that of evaluation or prediction: its parameters lie as planned, its
    data along the batch. Raises TunerError for a parameter that the plan does not place."""
    context = get_default_distributed_context()
    context.data_parallel = False  # what the engine assumes of a program without annotations
    graph, block = legacy.graph, program.global_block()
    meshes = [paddle_mesh(stage.process_mesh) for stage in plan.stages]
    stages = stages_of_ops(graph, plan)
    context.process_meshes = list(meshes)  # the Resharder is confused by any other mesh that was made in this process
    for op, stage in zip(block.ops, _stages_in_block(graph, stages, len(block.ops)), strict=True):
        dist_op = DistributedOperator(op)
        dist_op.dist_attr.process_mesh = meshes[stage]
        dist_op.dist_attr.mark_annotated("process_mesh")
        context.add_dist_op_for_program(dist_op)
    for t in (*graph.params, *graph.data):
        first = next(iter(graph.consumers(t.index)), None)
        _annotate_tensor(context, block.vars[t.name], meshes[stages[first.index] if first else 0], _placement(t, graph, plan))
    for t, planned in _claimed_between(graph, plan):  # completion carries no sharding from one stage to the next
        name, producer = legacy.variables.get(t.index), graph.producer(t.index)
        if name in block.vars and producer is not None:
            _annotate_tensor(context, block.vars[name], meshes[stages[producer.index]], planned)


def _annotate_tensor(context: DistributedContext, variable: Any, mesh: Any, placement: Placement) -> None:
    dist_tensor = DistributedTensor(variable)
    dist_tensor.dist_attr.process_mesh = mesh
    dist_tensor.dist_attr.dims_mapping = list(placement.dims_mapping)
    for annotated in ("process_mesh", "dims_mapping"):
        dist_tensor.dist_attr.mark_annotated(annotated)
    context.add_dist_tensor_for_program(dist_tensor)


def _claimed_between(graph: Graph, plan: Plan) -> Iterator[tuple[Tensor, Placement]]:
    """The intermediate tensors that a pattern places, and where."""
    for t in graph.tensors:
        planned = plan.tensors.get(t.name)
        if t.kind == "var" and planned is not None and planned.pattern and len(planned.dims_mapping) == t.ndim:
            yield t, planned.placement


def check_completed(context: DistributedContext, legacy: LegacyGraph, plan: Plan) -> None:
    """Raises TunerError for a sharding that a pattern asked for and that completion gave up."""
    block = context.serial_main_program.global_block()
    for index, name in legacy.variables.items():
        planned = plan.tensors.get(legacy.graph.tensors[index].name)
        if planned is None or planned.pattern is None or name not in block.vars:
            continue
        completed = context.get_tensor_dist_attr_for_program(block.vars[name])
        shape = plan.stages[planned.stage].mesh
        if completed is not None and _active(completed.dims_mapping, shape) != _active(planned.dims_mapping, shape):
            raise TunerError(
                f"pattern {planned.pattern} places {name} as {list(planned.dims_mapping)} on the mesh of stage "
                f"{planned.stage}, but Paddle's completion made it {list(completed.dims_mapping)}"
            )


def _active(dims_mapping: Sequence[int], mesh_shape: Sequence[int]) -> list[int]:
    """The mapping to the axes that split anything: completion drops those of one rank."""
    return [axis if axis >= 0 and mesh_shape[axis] > 1 else -1 for axis in dims_mapping]


def stages_of_ops(graph: Graph, plan: Plan) -> list[int]:
    """The pipeline stage of every op of a graph, through the layer it belongs to."""
    layers = cluster_layers(graph)
    layer_of, stage_of = layers.layer_of(), plan.stage_of_layers(layers.count)
    return [stage_of[layer_of[op.index]] for op in graph.ops]


def _stages_in_block(graph: Graph, stages: list[int], length: int) -> list[int]:
    """The stage of every op of the block; a constant, which the graph does not hold, is made where the next op runs."""
    known: Mapping[int, int] = {op.source: stage for op, stage in zip(graph.ops, stages, strict=True)}
    result, stage = [], max(stages)
    for i in reversed(range(length)):
        stage = known.get(i, stage)
        result.append(stage)
    return result[::-1]


def _placement(tensor: Tensor, graph: Graph, plan: Plan) -> Placement:
    planned = plan.tensors.get(tensor.name)
    if planned is not None and len(planned.dims_mapping) == tensor.ndim:
        return planned.placement
    if tensor.kind == "param":
        raise TunerError(f"the program reads the parameter {tensor.name!r}, which the training plan does not place")
    mesh = plan.stages[0].process_mesh
    if "dp" not in mesh.axes or not tensor.ndim:
        return Placement.replicated(tensor.ndim)
    return data_parallel(tensor, graph.batch, mesh.axes.index("dp"))
