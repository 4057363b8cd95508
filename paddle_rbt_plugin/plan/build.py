"""Makes the plan out of what the search found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import groupby

from paddle_rbt_plugin.cluster import Cluster, stage_meshes
from paddle_rbt_plugin.completion.forms import SHARDED_FORMS
from paddle_rbt_plugin.cost.candidate import Candidate, Training
from paddle_rbt_plugin.cost.estimates import Estimate
from paddle_rbt_plugin.cost.stages import make_cut
from paddle_rbt_plugin.plan.plan import Plan, PlanEstimate, Stage, TensorPlacement
from paddle_rbt_plugin.search import Analysis, SearchResult, candidate_dict


def make_plan(
    analysis: Analysis,
    result: SearchResult,
    cluster: Cluster,
    training: Training,
    level: str,
    notes: Iterable[str] = (),
    cost_model: Mapping[str, str] | None = None,
) -> Plan:
    """The plan of the search's winner."""
    best = result.best.candidate
    stages = _stages(result, cluster, best)
    return Plan(
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
        notes=(
            *notes,
            *result.notes,
            *not_applied(result),
            *applied_to_programs(result),
            *_rewrites(analysis, result),
            *_separate_experts(analysis),
            *_without_rule(analysis),
            *(f"pattern {name}: its search was cut short, matches may be missing" for name in analysis.matches.incomplete),
            *(f"pattern {name}: left out, it raised {error}" for name, error in analysis.matches.failed.items()),
            *(f"pattern match dropped: {d.match.pattern}: {d.reason}" for d in _notable(analysis)),
        ),
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


def not_applied(result: SearchResult) -> tuple[str, ...]:
    """What of the plan none of the hand-overs makes Paddle do by itself, and what to do about it."""
    best, notes = result.best.candidate, []
    if best.sequence_parallel:
        notes.append("sequence parallelism: build the model with it (PIR programs are annotated without sequence dimension)")
    if best.sharding_degree != "whole":
        notes.append(
            f"states split over {best.sharding_degree} of {best.dp} replicas: Paddle splits them over a whole mesh axis; "
            "search_space={'sharding_degree': 'whole'} plans that"
        )
    layers = result.best.layers or ()
    if len({s.completion.mesh for s in layers}) > 1:
        notes.append("layers of one stage on differently arranged devices; search_space={'layer_meshes': 'one'} avoids it")
    if result.ranks is not None:
        notes.append("stages in another order than the ranks of the cluster: start the job with its machines in that order")
    return tuple(f"recommended, not applied: {note}" for note in notes)


def applied_to_programs(result: SearchResult) -> tuple[str, ...]:
    """What of the plan is applied to static programs only, and what dygraph users do about it."""
    ways = {s.recompute for s in result.best.layers or ()} or {result.best.candidate.recompute}
    if "selective" not in ways:
        return ()
    return (
        "recomputation of the attention cores is applied to static programs; dygraph runs whole layers again only, which "
        "search_space={'recompute': ['none', 'full']} plans",
    )


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


def _separate_experts(analysis: Analysis) -> tuple[str, ...]:
    """What to do about experts that are Layers of their own, which sharding tensors cannot place: sharded networks of one kind
    that a layer with a choice of the best (``topk``) holds several of."""
    layer_of = analysis.layers.layer_of()
    routed = {layer_of[op.index] for op in analysis.graph if op.type == "topk"}
    sharded = (m for m in analysis.matches.matches if any("mp" in spec for spec in m.specs.values()))
    most = max(
        (n for (layer, _), n in Counter((layer_of[m.ops[0]], m.pattern) for m in sharded).items() if layer in routed), default=0
    )
    if most < 2:
        return ()
    return (
        f"recommended, not applied: expert parallelism: the {most} experts of a layer have weights of their own; stacked, "
        "[experts, in, out], they can be divided over the ranks of dp (ep)",
    )


def _rewrites(analysis: Analysis, result: SearchResult) -> tuple[str, ...]:
    """What hand-over builds in another way than the program says."""
    kernels = (k.type for work in result.completion.work for k in work.forward)
    taken = Counter(type_ for type_ in kernels if type_ in SHARDED_FORMS)
    notes = [f"rewritten to keep shardings: {n} {SHARDED_FORMS[form]} as {form}" for form, n in sorted(taken.items())]
    return (*analysis.rewritten, *notes)


_INSTEAD = {
    "batch_norm": ". Its statistics are those of the whole batch, as in serial training, and what follows is computed whole "
    "until something divides it again; nn.GroupNorm and nn.LayerNorm leave the batch divided"
}
"""What to know of an op that Paddle knows no sharding of."""


def _without_rule(analysis: Analysis) -> tuple[str, ...]:
    """Ops that run on whole tensors on every rank, whatever the plan."""
    return tuple(
        f"Paddle knows no sharding of {n} {type_}: what it reads is gathered, and it is costed as the bytes that it moves"
        + _INSTEAD.get(type_, "")
        for type_, n in sorted(analysis.without_rule.items())
    )


def _notable(analysis: Analysis) -> list:
    """Dropped matches that cost a weight its sharding: those that lost to another match cost nothing."""
    return [d for d in analysis.matches.dropped if d.winner is None]
