"""The structures that the cost model computes with, for a rank of each pipeline stage of a plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from paddle_rbt_plugin.cluster.mesh import ProcessMesh
from paddle_rbt_plugin.completion import Completion, Kernel, Placement, SegmentWork, Value, complete, reads_apart, shared_reads
from paddle_rbt_plugin.completion.synchronised import CHANNELS_LAST, SUMS, sums_statistics
from paddle_rbt_plugin.cost.attention import forward_cores
from paddle_rbt_plugin.cost.compute import CONVOLUTIONS, product_flop
from paddle_rbt_plugin.cost.memory import OPTIMIZER_STATES
from paddle_rbt_plugin.cost.op_types import forward_type
from paddle_rbt_plugin.cost.recompute import run_again
from paddle_rbt_plugin.cost.transfers import copies, transfers
from paddle_rbt_plugin.graph import Graph
from paddle_rbt_plugin.handover.pir.structure import PRODUCTS, Structure
from paddle_rbt_plugin.handover.shared.recompute import strategy_of
from paddle_rbt_plugin.handover.shared.zero import shard_dimension
from paddle_rbt_plugin.layers.layers import Segment
from paddle_rbt_plugin.plan.plan import Plan
from paddle_rbt_plugin.plugins import load_plugins
from paddle_rbt_plugin.search import analyse


def meshes_of(plan: Plan) -> list[ProcessMesh]:
    """The mesh of each pipeline stage."""
    return list(dict.fromkeys(entry.process_mesh for entry in plan.stages))


def predictions(
    plan: Plan,
    graph: Graph,
    leaves: Mapping[str, Placement],
    train: bool,
    forms: Collection[str],
    zero_stage: int,
    recompute: bool = True,
    blocked: Sequence[str] = (),
) -> list[Structure]:
    """The structures that the cost model computes with, for a rank of each pipeline stage of a plan. ``graph`` is that of the
    serial program, and ``leaves`` has the placements of its parameters and data; ``forms`` are the ops that may take another
    form. Without ``recompute`` nothing is recomputed, whatever the plan says; ``blocked`` are the plugins that were blocked in
    planning."""
    plugins = load_plugins(blocked)
    analysis = analyse(graph, plugins.patterns, train=train, op_names=plugins.op_names, forms=forms)
    meshes = meshes_of(plan)
    entries = plan.stage_of_layers(analysis.layers.count)
    stages = tuple(meshes.index(plan.stages[i].process_mesh) for i in entries)
    completion = complete(
        analysis.graph,
        analysis.layers,
        meshes[0],
        {t.index: leaves[t.name] for t in analysis.graph.tensors if t.kind != "var"},
        analysis.batch,
        analysis.batch_dims,
        train=train,
        forms=forms,
        apart=reads_apart(shared_reads(analysis.graph, analysis.layers), stages),
    )
    ways = [strategy_of(plan, i) if train and recompute else "none" for i in entries]
    return [predicted(analysis.graph, completion, train, stages, stage, ways, zero_stage) for stage in range(len(meshes))]


def predicted(
    graph: Graph,
    completion: Completion,
    train: bool = True,
    stages: Sequence[int] = (),
    stage: int = 0,
    recompute: Sequence[str] = (),
    zero_stage: int = 0,
) -> Structure:
    """The structure that the cost model computes with, in the precision of the traced program; ``graph`` is the graph that was
    completed, with its rewrites. ``stages`` has the pipeline stage of each layer (empty for one stage), ``recompute`` the
    recomputation of each layer (empty for none). States are divided according to ``zero_stage``."""
    mesh, layers = completion.mesh, completion.layers
    stages = stages or (0,) * layers.count
    constant = graph.constant_ops
    collectives: Counter[tuple[str, str, str, int]] = Counter()
    flop, parameters, gradients, states = 0.0, 0, 0, 0
    for segment, work in zip(layers.segments, completion.work, strict=True):
        if stages[segment.layer] != stage:
            continue
        again = _repeated(segment, work, recompute[segment.layer] if recompute else "none")
        for c in (c for k in (*work.forward, *work.backward) for c in k.collectives):
            collectives[(c.phase, c.kind, c.axis, c.value.local_bytes(mesh, 1))] += 1
        for c in work.gradient_syncs:
            reduced = zero_stage and c.axis == "dp" and _replicas(c.value, mesh) > 1
            phase, kind = ("backward" if zero_stage == 2 else "optimizer", "reduce_scatter") if reduced else (c.phase, c.kind)
            collectives[(phase, kind, c.axis, c.value.local_bytes(mesh, 1))] += 1
        for c in (c for k in again for c in k.collectives):
            collectives[("backward", c.kind, c.axis, c.value.local_bytes(mesh, 1))] += 1
        own = [k for i, k in zip(segment.ops, work.forward, strict=True) if i not in constant]
        flop += _flop((*own, *again, *work.backward), mesh)
        parameters += sum(v.local_bytes(mesh, 1) for v in work.params)
        for v, gradient in zip(work.trained, work.gradients, strict=True):
            nbytes, shards = v.local_bytes(mesh, 1), _replicas(v, mesh) if zero_stage else 1
            gradients += gradient.local_bytes(mesh, 1) // (shards if zero_stage == 2 else 1)
            states += nbytes // shards
            collectives[("optimizer", "all_gather", "dp", nbytes)] += shards > 1
    for phase, nbytes, sender, receiver in _messages(completion, stages, train, zero_stage):
        collectives[(phase, "send", "pp", nbytes)] += sender == stage
        collectives[(phase, "receive", "pp", nbytes)] += receiver == stage
    layer_of = layers.layer_of()
    kernel_of = dict(
        zip((i for s in layers.segments for i in s.ops), (k for w in completion.work for k in w.forward), strict=True)
    )
    flop += _flop((kernel_of[i] for i in _constants_of(graph, constant, layer_of, stages, stage)), mesh)
    shapes = {
        t.name: completion.placements[t.index].local_shape(t.shape, mesh)
        for t in graph.params
        if any(stages[layer_of[op.index]] == stage for op in graph.consumers(t.index))
    }
    return Structure(+collectives, parameters, gradients, states * OPTIMIZER_STATES["adamw"] if train else 0, flop, shapes)


def _messages(
    completion: Completion, stages: Sequence[int], train: bool, zero_stage: int
) -> Iterator[tuple[str, int, int, int]]:
    """Phase, bytes, sending and receiving stage of every message between ranks at the same place in their stages."""
    mesh = completion.mesh
    for t in transfers(completion, stages):
        nbytes = t.crossing.value.local_bytes(mesh, 1)
        yield "forward", nbytes, t.source, t.target
        if t.returns:
            yield "backward", nbytes, t.target, t.source
    for crossing, home, other in copies(completion, stages) if train else ():
        if crossing.has_gradient:
            nbytes = crossing.value.local_bytes(mesh, 1) // (_replicas(crossing.value, mesh) if zero_stage else 1)
            yield from (("optimizer", nbytes, *ends) for ends in ((other, home), (home, other)))


def _constants_of(
    graph: Graph, constant: Collection[int], layer_of: Mapping[int, int], stages: Sequence[int], stage: int
) -> Collection[int]:
    """The ops that compute the constants that a stage reads."""
    needed: set[int] = set()
    for op in reversed(graph.ops):
        is_run = op.index in needed if op.index in constant else stages[layer_of[op.index]] == stage
        if is_run:
            producers = (graph.producer(t) for t in op.operands)
            needed.update(p.index for p in producers if p is not None and p.index in constant)
    return needed


def _replicas(value: Value, mesh: ProcessMesh) -> int:
    """Over how many ranks ZeRO divides the states of a parameter, or of the one whose gradient ``value`` is."""
    axis = mesh.index("dp")
    dimension = shard_dimension(value.shape, value.placement.dims_mapping, axis, mesh.degree("dp"))
    return 1 if dimension is None else mesh.degree("dp")


def _flop(kernels: Iterable[Kernel], mesh: ProcessMesh) -> float:
    compared = [kernel for kernel in kernels if forward_type(kernel.type) in PRODUCTS | CONVOLUTIONS]
    return float(product_flop(compared, mesh).sum()) + sum(_flop_of_statistics(kernel, mesh) for kernel in kernels)


def _flop_of_statistics(kernel: Kernel, mesh: ProcessMesh) -> float:
    """A batch norm of a sharded batch sums its samples by products, see ``handover.pir.batch_norm``."""
    if not sums_statistics(forward_type(kernel.type), kernel.attrs, [v.placement for v in kernel.inputs[:1]]):
        return 0.0
    x = kernel.inputs[0]
    channels = x.shape[-1 if kernel.attrs["data_format"] in CHANNELS_LAST else 1]
    return 2.0 * SUMS * x.placement.local_shape(x.shape, mesh)[0] * channels


def _repeated(segment: Segment, work: SegmentWork, recompute: str) -> list[Kernel]:
    """The forward kernels of a segment that backward runs again."""
    if not segment.is_block or recompute == "none":
        return []
    regions = [range(len(work.forward))] if recompute == "full" else [core.ops for core in forward_cores(work)]
    return [kernel for region in regions for kernel in run_again(work.forward, region, whole=False).values()]
