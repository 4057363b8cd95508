"""What Paddle does with the batch of a program, seen by completing it on a small data-parallel mesh."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from paddle_rbt_plugin.cluster.mesh import ProcessMesh, smallest_factor
from paddle_rbt_plugin.completion.kernels import AnyOracle
from paddle_rbt_plugin.completion.placement import Placement
from paddle_rbt_plugin.completion.propagate import complete, make_oracle
from paddle_rbt_plugin.completion.work import Completion
from paddle_rbt_plugin.graph import Graph
from paddle_rbt_plugin.layers.layers import Layers


def complete_by_batch(graph: Graph, layers: Layers, batch: int) -> tuple[Completion, AnyOracle]:
    """The forward pass on a small data-parallel mesh, which shows what Paddle does with the batch, and whom it asked."""
    factor = smallest_factor(batch)
    mesh = ProcessMesh(("dp",), (factor,), tuple(range(factor)))
    leaves = {t.index: data_parallel(t.shape, batch) for t in graph.data}
    oracle = make_oracle(mesh)
    return complete(graph, layers, mesh, leaves, batch, oracle=oracle, train=False), oracle


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
    """The dimension of each tensor that is a multiple of the batch: what data parallelism shards (``complete_by_batch``).
    Where Paddle gives the sharding up on the way, a first dimension of exactly the batch size counts."""
    batch, placements = by_batch.batch, by_batch.placements
    found = {}
    for t in graph.tensors:
        if t.kind != "param" and 0 in placements[t.index].dims_mapping:
            found[t.index] = placements[t.index].dims_mapping.index(0)
        elif t.kind == "var" and t.shape[:1] == (batch,):
            found[t.index] = 0
    return found


def data_parallel(shape: Sequence[int], batch: int, axis: int = 0) -> Placement:
    """Shards the first dimension along mesh axis ``axis`` where it is the batch; replicates anything else."""
    if not shape or shape[0] != batch:
        return Placement.replicated(len(shape))
    return Placement((axis, *(-1,) * (len(shape) - 1)))
