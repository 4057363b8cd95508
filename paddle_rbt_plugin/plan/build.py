"""Makes the plan out of what the search found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from paddle_rbt_plugin.cluster import Cluster, stage_meshes
from paddle_rbt_plugin.completion.forms import SHARDED_FORMS
from paddle_rbt_plugin.cost.candidate import Candidate, Training
from paddle_rbt_plugin.cost.estimates import Estimate
from paddle_rbt_plugin.cost.stages import make_cut
from paddle_rbt_plugin.graph import Graph
from paddle_rbt_plugin.notes import Note, note
from paddle_rbt_plugin.pattern import Match
from paddle_rbt_plugin.plan.plan import Plan, PlanEstimate, Stage, TensorPlacement
from paddle_rbt_plugin.search import Analysis, Loss, SearchResult, candidate_dict


def make_plan(
    analysis: Analysis,
    result: SearchResult,
    cluster: Cluster,
    training: Training,
    level: str,
    cost_model: Mapping[str, str] | None = None,
) -> Plan:
    """The plan of the search's winner."""
    best = result.best.candidate
    stages = _stages(result, cluster, best)
    return Plan(
        assumed=bool(analysis.graph.assumed),
        signature=analysis.signature,
        degrees={"pp": best.pp, "dp": best.dp, "mp": best.mp},
        level=level,
        global_batch=training.global_batch,
        micro_batch=best.micro_batch,
        accumulate_steps=best.accumulate_steps,
        recompute=best.recompute,
        sharding_stage=best.sharding_stage,
        sharding_degree=best.sharding_degree,
        sequence_parallel=best.sequence_parallel,
        schedule=best.schedule,
        vpp=best.vpp,
        ep=best.ep,
        precision=training.precision,
        stages=stages,
        tensors=_tensors(analysis, result, stages),
        estimate=plan_estimate(result.best.estimate),
        candidates=tuple(
            candidate_dict(e.candidate)
            | {"step_time_s": e.estimate.step_time_s, "peak_memory_bytes": round(e.estimate.peak_memory_bytes)}
            for e in result.feasible
        ),
        rejected=tuple(r.to_dict() for r in result.rejected),
        patterns=_patterns(analysis),
        unmatched=_unmatched(analysis),
        cluster=cluster.to_dict(),
        cost_model=cost_model or {},
        notes=tuple(map(str, _notes(analysis, result, training))),
    )


def plan_estimate(estimate: Estimate) -> PlanEstimate:
    """The figures of an estimate that a plan keeps."""
    return PlanEstimate(
        step_time_s=estimate.step_time_s,
        peak_memory_bytes=round(estimate.peak_memory_bytes),
        time=dict(estimate.time),
        memory=dict(estimate.memory),
        tflops_per_gpu=estimate.tflops_per_gpu,
    )


def _stages(result: SearchResult, cluster: Cluster, best: Candidate) -> tuple[Stage, ...]:
    """One entry per run of layers with one strategy, in model order; entries of one pipeline stage share its devices."""
    meshes = stage_meshes(cluster, best.pp, best.dp, best.mp, best.axes)
    layers = result.best.layers
    differ = layers is not None and len({s.recompute for s in layers}) > 1
    entries = []
    cut = make_cut(result.completion.layers.count, best.pp, best.vpp, result.best.stage_layers)
    for stage, mesh_of_stage in enumerate(meshes):
        devices = mesh_of_stage.ranks
        if result.ranks is not None:
            devices = tuple(result.ranks[r] for r in devices)
        for first, last in cut.layers(stage):
            if layers is None:
                entries.append(Stage((first, last), devices, mesh_of_stage.shape, mesh_of_stage.axes))
                continue
            for strategy, run in groupby(range(first, last + 1), key=lambda i: layers[i]):
                numbers, mesh = list(run), strategy.completion.mesh
                entries.append(
                    Stage((numbers[0], numbers[-1]), devices, mesh.shape, mesh.axes, strategy.recompute if differ else None)
                )
    return tuple(sorted(entries, key=lambda e: e.layers))


def _notes(analysis: Analysis, result: SearchResult, training: Training) -> Iterator[Note]:
    """What the user should know about the plan, in the order of the plan file."""
    yield from result.notes
    yield from not_applied(result)
    yield from applied_to_programs(result)
    yield from _rewrites(analysis, result)
    yield from analysis.graph.assumed
    yield from _separate_experts(analysis)
    weights = analysis.graph.weight_precision
    if weights not in ("fp32", training.precision):
        yield note("weights", weights=weights, precision=training.precision)
    for op, count in sorted(analysis.without_rule.items()):
        yield note("no_rule", count=count, op=op)
    for pattern in analysis.matches.incomplete:
        yield note("incomplete", pattern=pattern)
    for pattern, error in analysis.matches.failed.items():
        yield note("failed", pattern=pattern, error=error)
    best, lost = result.best.candidate, dict[str, list[Loss]]()
    degrees = {"dp": best.dp, "mp": best.mp, "ep": best.ep}
    for loss in analysis.losses:
        lost.setdefault(loss.match.pattern, []).append(loss)
    for pattern, losses in lost.items():
        yield note("lost", pattern=pattern, count=len(losses), reason=str(losses[0].reason(degrees)))
    for dropped in analysis.matches.dropped:
        if dropped.winner is None:  # a match that lost to another costs no weight its sharding
            yield note("dropped", pattern=dropped.match.pattern, reason=dropped.reason)


def not_applied(result: SearchResult) -> Iterator[Note]:
    """The parts of a plan that no hand-over makes Paddle do by itself."""
    best = result.best.candidate
    if best.sequence_parallel:
        yield note("sequence_parallel")
    if best.sharding_degree != "whole":
        yield note("sharding_degree", sharding_degree=best.sharding_degree, dp=best.dp)
    if len({s.completion.mesh for s in result.best.layers or ()}) > 1:
        yield note("layer_meshes")
    if result.ranks is not None:
        yield note("group_order")


def applied_to_programs(result: SearchResult) -> Iterator[Note]:
    """The parts of a plan that are applied to static programs only."""
    if "selective" in ({s.recompute for s in result.best.layers or ()} or {result.best.candidate.recompute}):
        yield note("selective_recompute")


def _tensors(analysis: Analysis, result: SearchResult, stages: tuple[Stage, ...]) -> dict[str, TensorPlacement]:
    graph, claims = analysis.graph, analysis.matches.claims
    layer_of = analysis.layers.layer_of()
    stage_of_layer = {layer: i for i, s in enumerate(stages) for layer in range(s.layers[0], s.layers[1] + 1)}
    tensors = {}
    for t in graph.tensors:
        if t.kind == "var" and t.index not in claims:
            continue
        match = claims[t.index][1] if t.index in claims else None
        op = graph.producer(t.index) or next(iter(graph.consumers(t.index)), None)
        layer = layer_of[op.index] if op is not None else 0
        stage = stage_of_layer[layer]
        completion = result.best.layers[layer].completion if result.best.layers else result.completion
        tensors[t.name] = TensorPlacement(
            stage,
            completion.placements[t.index].dims_mapping,
            match.pattern if match else None,
            match.distribution if match else None,
            t.kind,
            t.structured_name,
            t.shape,
            frozen=t.kind == "param" and t.stop_gradient,
        )
    return tensors


def _patterns(analysis: Analysis) -> dict[str, dict[str, object]]:
    found: dict[str, dict[str, object]] = {}
    for match in analysis.matches.matches:
        row = found.setdefault(match.pattern, {"distribution": match.distribution, "version": match.version, "matches": 0})
        row["matches"] = int(str(row["matches"])) + 1
    return dict(sorted(found.items()))


def _unmatched(analysis: Analysis) -> tuple[dict[str, object], ...]:
    found: list[dict[str, object]] = []
    for t in analysis.unmatched:
        name, shape = t.structured_name or t.name, list(t.shape)
        readers = [op.name for op in analysis.graph.consumers(t.index)]
        words = f"{name} {shape}, read by {', '.join(readers) or 'nothing'}"
        found.append({"name": name, "kind": "no_pattern", "reason": words, "shape": shape, "readers": readers})
    return tuple(found)


def _separate_experts(analysis: Analysis) -> Iterator[Note]:
    """A note on experts that are Layers of their own, which sharding tensors cannot place: a layer that chooses the best
    (``topk``) holds several sharded networks of one kind side by side."""
    layer_of = analysis.layers.layer_of()
    routed = {layer_of[op.index] for op in analysis.graph if op.type == "topk"}
    sharded = [m for m in analysis.matches.matches if any("mp" in spec for spec in m.specs.values())]
    candidates = [m for m in sharded if layer_of[m.ops[0]] in routed]
    beside = Counter((layer_of[m.ops[0]], m.pattern, behind) for m, behind in _behind(analysis.graph, candidates))
    most = max(beside.values(), default=0)
    if most > 1:
        yield note("separate_experts", experts=most)


def _behind(graph: Graph, matches: Sequence[Match]) -> Iterator[tuple[Match, int]]:
    """Each match with the number of matches of its kind that come one after the other before it."""
    for pattern in dict.fromkeys(m.pattern for m in matches):
        own = [m for m in matches if m.pattern == pattern]
        match_of = {op: n for n, m in enumerate(own) for op in m.ops}
        behind, before = [0] * len(own), [0] * len(graph.tensors)
        for op in graph.ops:
            n = match_of.get(op.index)
            reads = [before[t] for t in op.operands if n is None or not _made_in(graph, t, n, match_of)]
            if n is not None:
                behind[n] = max([behind[n], *reads])
            for t in op.results:
                before[t] = max(reads, default=0) if n is None else behind[n] + 1
        yield from zip(own, behind, strict=True)


def _made_in(graph: Graph, tensor: int, match: int, match_of: Mapping[int, int]) -> bool:
    op = graph.producer(tensor)
    return op is not None and match_of.get(op.index) == match


def _rewrites(analysis: Analysis, result: SearchResult) -> Iterator[Note]:
    """The ops that hand-over builds in another form than the program has."""
    yield from analysis.rewritten
    kernels = (k.type for work in result.completion.work for k in work.forward)
    taken = Counter(type_ for type_ in kernels if type_ in SHARDED_FORMS)
    for form, count in sorted(taken.items()):
        yield note("rewritten", count=count, op=SHARDED_FORMS[form], form=form)
