"""Which dimensions grow with the batch, seen in what Paddle does with it on a small data-parallel mesh.

The flow begins at the inputs that hold the samples (``graph.batch``). A dimension grows with the batch where completion
shards it. Where Paddle gives the sharding up on the way, the results of an op grow as its operands do: in the same dimension
if its size is the same, else in the first dimension if that has the size. What is computed from parameters alone never
grows, whatever its size.
"""

from __future__ import annotations

from collections import Counter

from paddle_rbt_plugin.cluster.mesh import ProcessMesh, smallest_factor
from paddle_rbt_plugin.completion.answers import Answers
from paddle_rbt_plugin.completion.kernels import AnyOracle
from paddle_rbt_plugin.completion.placement import Placement
from paddle_rbt_plugin.completion.propagate import complete, make_oracle
from paddle_rbt_plugin.completion.work import Completion
from paddle_rbt_plugin.graph import Batch, Graph, Tensor
from paddle_rbt_plugin.layers.layers import Layers


def complete_by_batch(
    graph: Graph, layers: Layers, batch: Batch, answers: Answers | None = None
) -> tuple[Completion, AnyOracle]:
    """The forward pass on a small data-parallel mesh, which shows what Paddle does with the batch, and whom it asked."""
    factor = smallest_factor(batch.size)
    mesh = ProcessMesh(("dp",), (factor,), tuple(range(factor)))
    leaves = {t.index: data_parallel(t, batch) for t in graph.data}
    oracle = make_oracle(mesh, answers)
    return complete(graph, layers, mesh, leaves, batch.size, oracle=oracle, train=False), oracle


def ops_without_rule(graph: Graph, by_batch: Completion) -> Counter[str]:
    """How many ops of each type Paddle knows no sharding of, so that it gathers their inputs: those that give up even the
    batch in ``complete_by_batch``."""
    found: Counter[str] = Counter()
    for segment, work in zip(by_batch.layers.segments, by_batch.work, strict=True):
        for i, kernel in zip(segment.ops, work.forward, strict=True):
            op = graph.ops[i]
            sharded = any(by_batch.placements[t].is_sharded() for t in op.operands)
            found[op.type] += sharded and not any(v.placement.is_sharded() for v in kernel.inputs)
    return +found


def find_batch_dims(graph: Graph, by_batch: Completion) -> dict[int, int]:
    """The dimension of each tensor that grows with the batch, of a program that ``complete_by_batch`` completed."""
    found = {
        t.index: by_batch.placements[t.index].dims_mapping.index(0)
        for t in graph.tensors
        if t.kind != "param" and t.index in by_batch.placements and 0 in by_batch.placements[t.index].dims_mapping
    }
    for op in graph.ops:
        grown = [(dim, graph.tensors[t].shape[dim]) for t in op.operands if (dim := found.get(t)) is not None]
        for t in op.results if grown else ():
            shape = graph.tensors[t].shape
            same = [dim for dim, size in grown if shape[dim : dim + 1] == (size,)]
            first = [0 for _, size in grown if shape[:1] == (size,)]
            if t not in found and (same or first):
                found[t] = (*same, *first)[0]
    return found


def data_parallel(tensor: Tensor, batch: Batch, axis: int = 0) -> Placement:
    """Shards an input that holds the samples along mesh axis ``axis``; replicates any other tensor."""
    if tensor.name not in batch.inputs:
        return Placement.replicated(tensor.ndim)
    return Placement.along(axis, tensor.ndim)
