"""What the program that a plan is handed over as really holds, beside what the cost model computed with.

The serial program is annotated, Paddle adds the backward pass and the optimizer, partitions it and resolves its reshards, all
for one rank of each pipeline stage in this process, without a device. From the result come the collectives and transfers
(phase, kind, axis, bytes), the local bytes of parameters, gradients and optimizer states, and the FLOP of the local matrix
products; from the completion come the predictions of all of these. ``compare`` lists every difference.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import paddle
from paddle.base.framework import auto_complete_op_role
from paddle.distributed.auto_parallel.static import pir_pass
from paddle.distributed.auto_parallel.static.engine import set_all_ops_op_role
from paddle.distributed.auto_parallel.static.mix_to_dist_pass import apply_mix2dist_pass
from paddle.distributed.auto_parallel.static.pir_pass import RemovePasses, ReshardPasses
from paddle.distributed.auto_parallel.static.process_group import get_process_group
from paddle.distributed.auto_parallel.strategy import Strategy
from paddle.distributed.fleet.meta_optimizers.common import OpRole
from paddle.distributed.passes.pass_base import new_pass

from paddle_rbt_plugin.cluster import Cluster
from paddle_rbt_plugin.cluster.mesh import ProcessMesh
from paddle_rbt_plugin.completion import Completion, Kernel, Placement, SegmentWork, Value, complete, reads_apart, shared_reads
from paddle_rbt_plugin.completion.forms import LOSS_REDUCTIONS, forms_on
from paddle_rbt_plugin.cost.attention import forward_cores
from paddle_rbt_plugin.cost.compute import CONVOLUTIONS, product_flop
from paddle_rbt_plugin.cost.memory import OPTIMIZER_STATES
from paddle_rbt_plugin.cost.op_types import forward_type
from paddle_rbt_plugin.cost.recompute import run_again
from paddle_rbt_plugin.cost.transfers import copies, transfers
from paddle_rbt_plugin.graph import DTYPE_BYTES, Graph
from paddle_rbt_plugin.graph.pir import dtype_name
from paddle_rbt_plugin.handover.pir.patches import environment_read_anew, exact_partition
from paddle_rbt_plugin.handover.pir.pipeline import annotate_plan, schedulable
from paddle_rbt_plugin.handover.pir.recompute import mark
from paddle_rbt_plugin.handover.pir.shared_weights import gradients_summed
from paddle_rbt_plugin.handover.pir.zero import divided
from paddle_rbt_plugin.handover.shared.recompute import recomputes, strategy_of
from paddle_rbt_plugin.handover.shared.zero import STAGES, shard_dimension
from paddle_rbt_plugin.layers.layers import Segment
from paddle_rbt_plugin.plan.plan import Plan
from paddle_rbt_plugin.plugins import load_plugins
from paddle_rbt_plugin.search import analyse

PHASES = {0: "forward", 1: "backward", 2: "optimizer"}
_COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
_PRODUCTS = frozenset({"matmul", "bmm"})
"""The matrix products whose FLOP are compared, beside convolutions; others, which few programs have, are not."""
_TRANSFERS = {"send_v2": "send", "p_send": "send", "recv_v2": "receive", "p_recv": "receive"}

FIGURES = ("parameter_bytes", "gradient_bytes", "optimizer_bytes", "matmul_flop")
"""The single numbers of a structure."""

Collectives = Mapping[tuple[str, str, str, int], int]
"""How often each (phase, kind, axis, bytes of the message) occurs; the axis of a transfer between stages is ``pp``."""


@dataclass(frozen=True)
class Structure:
    """What one rank holds and does in a step of one micro batch."""

    collectives: Collectives
    parameter_bytes: int
    gradient_bytes: int = 0
    optimizer_bytes: int = 0
    matmul_flop: float = 0.0
    local_shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Of every parameter, by name."""


@dataclass(frozen=True)
class Partitioned:
    """A program that Paddle has completed and partitioned, its reshards not resolved yet."""

    program: Any
    startup: Any
    gradients: list[Any]
    """Pairs of a parameter and its gradient."""


@dataclass(frozen=True)
class StageComparison:
    """The two structures of a rank of one pipeline stage, and what differs in sentences."""

    stage: int
    predicted: Structure
    found: Structure
    differences: tuple[str, ...]


def predicted(
    graph: Graph,
    completion: Completion,
    train: bool = True,
    stages: Sequence[int] = (),
    stage: int = 0,
    recompute: Sequence[str] = (),
    zero_stage: int = 0,
) -> Structure:
    """The structure that the cost model computes with, in the precision of the traced program; ``graph`` is the one that was
    completed, rewritten where it was rewritten. ``stages`` holds the pipeline stage of each layer, none for one stage, and
    ``recompute`` how each layer is recomputed, none where nothing is. States are divided as by ``zero_stage``."""
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
    """Phase, bytes, sending and receiving stage of every message between ranks at one place of their stages."""
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
    """The ops that compute constants which a stage reads."""
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
    compared = [kernel for kernel in kernels if forward_type(kernel.type) in _PRODUCTS | CONVOLUTIONS]
    return float(product_flop(compared, mesh).sum())


def _repeated(segment: Segment, work: SegmentWork, recompute: str) -> list[Kernel]:
    """The forward ops of a segment that are run again in backward."""
    if not segment.is_block or recompute == "none":
        return []
    regions = [range(len(work.forward))] if recompute == "full" else [core.ops for core in forward_cores(work)]
    return [kernel for region in regions for kernel in run_again(work.forward, region, whole=False).values()]


def partition(program: Any, train: bool = True, recompute: bool = False, zero_stage: int = 0) -> Partitioned:
    """Completes an annotated forward program for training with AdamW, or for evaluation, and partitions it, in place. With
    ``recompute`` backward runs again what is marked; ``zero_stage`` divides states."""
    with exact_partition():
        return _partition(program, train, recompute, zero_stage)


def _partition(program: Any, train: bool, recompute: bool, zero_stage: int) -> Partitioned:
    gradients: list[Any] = []
    paddle.enable_static()
    try:
        startup = paddle.static.Program()
        apply_mix2dist_pass(program)
        set_all_ops_op_role(program.global_block(), OpRole.Forward)
        if train:
            loss = [op for op in program.global_block().ops if op.num_results()][-1].result(0)
            optimizer = paddle.optimizer.AdamW(1e-3)
            with paddle.static.program_guard(program, startup), gradients_summed(optimizer), divided(optimizer, zero_stage):
                with auto_complete_op_role(program, OpRole.Backward):
                    gradients = paddle.autograd.ir_backward.append_backward(loss)
                with auto_complete_op_role(program, OpRole.Optimize):
                    optimizer._apply_optimize(loss, startup, params_grads=gradients)
            apply_mix2dist_pass(program)
            if recompute:
                new_pass("auto_parallel_recompute_pir", Strategy().recompute.to_dict()).apply([program], [startup])
        pir_pass.apply_partition_pass(program)
    finally:
        paddle.disable_static()
    return Partitioned(program, startup, gradients)


def resolve(partitioned: Partitioned) -> Any:
    """The program of this process's rank: reshards resolved and what other ranks do removed, in place."""
    log = logging.getLogger(ReshardPasses.__module__)  # it spells out every reshard between stages
    level = log.level
    log.setLevel(logging.WARNING)
    paddle.enable_static()
    try:
        with exact_partition():
            ReshardPasses.apply_reshard_pass(partitioned.program, partitioned.gradients)
        RemovePasses.apply_all(partitioned.program, partitioned.startup, partitioned.gradients)
    finally:
        paddle.disable_static()
        log.setLevel(level)
    return partitioned.program


def handed_over(partitioned: Partitioned, mesh: ProcessMesh) -> Structure:
    """The structure of the program of this process's rank, which is one of ``mesh``; it is resolved in place."""
    program = resolve(partitioned)
    updates = [
        dict(zip(op.get_input_names(), op.operands_source(), strict=True))
        for op in program.global_block().ops
        if op.name() == "pd_op.adamw_"
    ]
    moments = {
        value.id for slots in updates for slot, value in slots.items() if slot not in ("param", "grad") and value.initialized()
    }
    held = [op for op in _parameters(program) if op.result(0).id not in moments]
    optimizer_bytes = sum(_local_bytes(slots[moment]) for slots in updates for moment in ("moment1", "moment2"))
    return replace(structure_of(program, partitioned.gradients, held, mesh), optimizer_bytes=optimizer_bytes)


def structure_of(program: Any, gradients: Sequence[Any], parameters: Sequence[Any], mesh: ProcessMesh) -> Structure:
    """The structure of the program of a rank of ``mesh``, optimizer states left out; ``parameters`` are the ops of those that
    count, ``gradients`` the pairs of a parameter and its gradient."""
    ops = program.global_block().ops
    return Structure(
        collectives=_collectives(ops, mesh),
        parameter_bytes=sum(_local_bytes(op.result(0)) for op in parameters),
        gradient_bytes=sum(_local_bytes(gradient) for _, gradient in gradients if gradient is not None),
        matmul_flop=_matmul_flop(ops),
        local_shapes={op.attrs()["parameter_name"]: _local_shape(op.result(0)) for op in parameters},
    )


def parameters_of(program: Any, names: Collection[str]) -> list[Any]:
    """The ops of the parameters of those names."""
    return [op for op in _parameters(program) if op.attrs()["parameter_name"] in names]


def _parameters(program: Any) -> list[Any]:
    return [op for op in program.global_block().ops if op.name() == "builtin.parameter"]


def compare(expected: Structure, found: Structure) -> list[str]:
    """What differs, in sentences; empty where the prediction is the program."""
    lines = []
    for key in sorted(set(expected.collectives) | set(found.collectives)):
        predicted_count, count = expected.collectives.get(key, 0), found.collectives.get(key, 0)
        if predicted_count != count:
            phase, kind, axis, nbytes = key
            lines.append(f"{phase} {kind} along {axis} of {nbytes} bytes: predicted {predicted_count}, in the program {count}")
    for name in FIGURES:
        a, b = getattr(expected, name), getattr(found, name)
        if a != b:
            lines.append(f"{name.replace('_', ' ')}: predicted {a:,.0f}, in the program {b:,.0f}")
    for name in sorted(set(expected.local_shapes) | set(found.local_shapes)):
        shape, real = expected.local_shapes.get(name), found.local_shapes.get(name)
        if shape != real:
            lines.append(f"parameter {name}: predicted local shape {shape}, in the program {real}")
    return lines


def verify(plan: Plan, graph: Graph, program: Any, train: bool = True, blocked: Sequence[str] = ()) -> list[StageComparison]:
    """The prediction for a plan beside what its program holds, for the first rank of each pipeline stage; all ranks of a stage
    do the same on their own slices. ``program`` is the serial program that ``graph`` was read from; it is left alone. Plugins
    that are ``blocked`` were so in planning.

    Raises PlanError for a plan of another program, TunerError for one whose pipeline PIR does not execute (see
    ``annotate_stages``)."""
    leaves = {name: t.placement for name, t in plan.leaves(graph).items()}
    forms = forms_on(Cluster.from_dict(plan.cluster))
    zero_stage = _zero_stage(plan) if train else 0
    expected = predictions(plan, graph, leaves, train, forms, zero_stage, blocked=blocked)
    found = []
    for stage, mesh in enumerate(meshes_of(plan)):
        with as_rank(mesh.ranks[0]), schedulable(plan):
            copy = program.clone()
            mark(copy, graph, plan)
            annotate_plan(copy, plan, leaves, forms, blocked)
            real = handed_over(partition(copy, train, recomputes(plan), zero_stage), mesh)
        found.append(StageComparison(stage, expected[stage], real, tuple(compare(expected[stage], real))))
    return found


def meshes_of(plan: Plan) -> list[ProcessMesh]:
    """The mesh of each pipeline stage."""
    return list(dict.fromkeys(entry.process_mesh for entry in plan.stages))


def _zero_stage(plan: Plan) -> int:
    return plan.sharding_stage if plan.sharding_stage in STAGES else 0


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
    """What the cost model computes with, for a rank of each pipeline stage of a plan. ``graph`` is that of the serial program,
    ``leaves`` places its parameters and data; ``forms`` are the ops that may take another form. Without ``recompute`` nothing
    is recomputed, whatever the plan says; plugins that are ``blocked`` were so in planning."""
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


@contextmanager
def as_rank(rank: int) -> Iterator[None]:
    """Lets Paddle take this process for that rank, whose program it then makes."""
    before = os.environ.get("PADDLE_TRAINER_ID")
    os.environ["PADDLE_TRAINER_ID"] = str(rank)
    try:
        with environment_read_anew.apply():
            yield
    finally:
        if before is None:
            del os.environ["PADDLE_TRAINER_ID"]
        else:
            os.environ["PADDLE_TRAINER_ID"] = before


def _collectives(ops: Sequence[Any], mesh: ProcessMesh) -> Collectives:
    axis_of = {tuple(sorted(group)): axis for axis in mesh.axes for group in mesh.groups(axis)}
    count: Counter[tuple[str, str, str, int]] = Counter()

    def add(op: Any, kind: str, message: Any, times: int = 1) -> None:
        ranks = tuple(sorted(get_process_group(op.int_attr("ring_id")).ranks))
        if len(ranks) > 1:  # alone, a rank moves nothing
            count[(PHASES[op.op_role], kind, axis_of.get(ranks, "pp"), _local_bytes(message))] += times

    for op in ops:
        kind = op.name().removeprefix("pd_op.").removesuffix("_")
        if kind in _TRANSFERS:
            message = op.operand_source(0) if _TRANSFERS[kind] == "send" else op.result(0)
            count[(PHASES[op.op_role], _TRANSFERS[kind], "pp", _local_bytes(message))] += 1
        elif kind == "c_softmax_with_cross_entropy":  # they are inside its kernel
            add(op, "all_reduce", op.result(1), LOSS_REDUCTIONS)
        elif kind in _COLLECTIVES:
            add(op, kind, op.result(0) if kind == "all_gather" else op.operand_source(0))
    return count


def _matmul_flop(ops: Sequence[Any]) -> float:
    """A product of m x k by k x n is 2 m n k, a convolution the same with the size of a filter as k; a gradient is two
    products of as many, or one where one is not wanted."""
    total = 0.0
    for op in ops:
        type_ = op.name().removeprefix("pd_op.")
        backward = type_.endswith("_grad")
        type_ = type_.removesuffix("_grad")
        if type_ in _PRODUCTS:
            x = _local_shape(op.operand_source(0))
            inner = x[-2] if len(x) > 1 and op.attrs().get("transpose_x") else x[-1]
        elif type_ in CONVOLUTIONS:
            inner = prod(_local_shape(op.operand_source(1))[1:])
        else:
            continue
        out = _local_shape(op.operand_source(2) if backward else op.result(0))
        wanted = sum(r.initialized() for r in op.results()) if backward else 1
        total += 2.0 * wanted * prod(out) * inner
    return total


def _local_shape(value: Any) -> tuple[int, ...]:
    return tuple(value._local_shape if value.is_dist() else value.shape)


def _local_bytes(value: Any) -> int:
    return prod(_local_shape(value)) * DTYPE_BYTES[dtype_name(value.dtype)]
