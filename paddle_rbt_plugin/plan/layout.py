"""The layers, devices and links of a plan's pipeline stages, as plain data and in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby, pairwise
from typing import Any

from paddle_rbt_plugin.cluster import Cluster, describe_axis
from paddle_rbt_plugin.plan.plan import Plan, Stage
from paddle_rbt_plugin.spelling import counted

LEVEL_WORDS: Mapping[str, str] = {
    "o1": "one strategy for all layers, even stages",
    "o2": "a strategy for each layer, stages cut where it is best",
    "o3": "as o2, with the groups of machines in the best order",
}
"""What the search of each level decides."""
_HINTS: Mapping[str, str] = {
    "o1": (
        "the machines are of several kinds: level o3 gives each kind as many layers as it computes and holds, and tries the "
        "kinds in every order"
    ),
    "o2": "the machines are of several kinds: level o3 also tries the kinds in every order",
}


@dataclass(frozen=True)
class LayerRun:
    """Consecutive layers, first and last, that a pipeline stage runs in the same way."""

    layers: tuple[int, int]
    mesh: dict[str, int]
    recompute: str | None
    """Set if it differs from the plan's."""

    @property
    def count(self) -> int:
        return self.layers[1] - self.layers[0] + 1


@dataclass(frozen=True)
class PipelineStage:
    """The layers and the devices of a pipeline stage."""

    number: int
    runs: tuple[LayerRun, ...]
    devices: tuple[int, ...]
    device: str

    def to_dict(self) -> dict[str, Any]:
        """The stage as plain JSON values."""
        runs = [asdict(run) | {"layers": list(run.layers)} for run in self.runs]
        return {"stage": self.number, "runs": runs, "devices": list(self.devices), "device": self.device}


def pipeline_stages(plan: Plan) -> list[PipelineStage]:
    """The stages of the pipeline in order. ``plan.stages`` has an entry for each chunk and strategy of a stage; here they are
    combined."""
    cluster = Cluster.from_dict(plan.cluster)
    entries: dict[frozenset[int], list[Stage]] = {}
    for entry in plan.stages:
        entries.setdefault(frozenset(entry.devices), []).append(entry)
    return [
        PipelineStage(
            number,
            tuple(LayerRun(e.layers, dict(zip(e.axes, e.mesh, strict=True)), e.recompute) for e in found),
            tuple(sorted(found[0].devices)),
            cluster.device_of(found[0].devices[0]).name,
        )
        for number, found in enumerate(entries.values())
    ]


def spell_stages(plan: Plan) -> dict[str, str]:
    """The contents of each stage, with similar consecutive stages on one line, ``{"stages 0 to 3": "6 layers each, 0 to 23;
    ..."}``; empty if one stage runs all layers in the same way."""
    stages = pipeline_stages(plan)
    if len(plan.stages) == 1:
        return {}
    meshes_differ = len({tuple(run.mesh.items()) for stage in stages for run in stage.runs}) > 1
    lines = {}
    for _, group in groupby(stages, key=_shape):
        alike = list(group)
        first, last = alike[0], alike[-1]
        held = "layers " + ", ".join(_spell_run(run, meshes_differ) for run in first.runs)
        devices = span("device", first.devices[0], last.devices[-1])
        if len(alike) > 1:
            each = f"{counted(sum(run.count for run in first.runs), 'layer')} each"
            held = f"{each}, in stage {first.number} {held}"
            devices = f"{counted(len(first.devices), 'device')} each of {_spell_range(first.devices[0], last.devices[-1])}"
        lines[span("stage", first.number, last.number)] = f"{held}; {devices}, {first.device}"
    return lines


def communication(plan: Plan) -> list[dict[str, Any]]:
    """Where each axis of more than one device communicates, and for which layers if they differ."""
    cluster = Cluster.from_dict(plan.cluster)
    found: dict[tuple[str, int, str], list[tuple[int, int]]] = {}
    for entry in plan.stages:
        mesh = entry.process_mesh
        for axis in (axis for axis in mesh.axes if mesh.degree(axis) > 1):
            found.setdefault((axis, mesh.degree(axis), describe_axis(mesh, axis, cluster)), []).append(entry.layers)
    rows: list[dict[str, Any]] = []
    for (axis, degree, where), layers in found.items():
        some = ", ".join(span("layer", *r) for r in _joined(layers))
        rows.append({"axis": axis, "degree": degree, "where": where + (f" ({some})" if len(layers) < len(plan.stages) else "")})
    if plan.ep > 1:
        where = f"ep {plan.ep}: the ranks of dp hold different experts, and send each token to its experts"
        rows.append({"axis": "ep", "degree": plan.ep, "where": where})
    cuts = [(a.devices[0], b.devices[0]) for a, b in pairwise(plan.stages) if set(a.devices) != set(b.devices)]
    if cuts:
        crossing = sum(cluster.machine_of(a) != cluster.machine_of(b) for a, b in cuts)
        where = f"pp {plan.degrees['pp']} crosses machines at {crossing} of its {counted(len(cuts), 'cut')}"
        rows.append({"axis": "pp", "degree": plan.degrees["pp"], "where": where})
    return rows


def level_hint(plan: Plan) -> str:
    """What a higher level would try on a cluster of several kinds of machines; empty if there is none."""
    return "" if Cluster.from_dict(plan.cluster).is_homogeneous else _HINTS.get(plan.level, "")


def span(word: str, first: int, last: int) -> str:
    """``layer 3``, ``layers 3 to 5``."""
    return f"{word} {first}" if first == last else f"{word}s {_spell_range(first, last)}"


def _shape(stage: PipelineStage) -> tuple[object, ...]:
    """What consecutive stages must share to be combined: the number of layers, how they run, and adjacent devices."""
    runs = tuple((run.count, *run.mesh.items(), run.recompute) for run in stage.runs)
    return runs, stage.device, stage.devices[0] - stage.number * len(stage.devices)


def _spell_run(run: LayerRun, meshes_differ: bool) -> str:
    return _spell_range(*run.layers) + _how(run, meshes_differ)


def _how(run: LayerRun, meshes_differ: bool) -> str:
    mesh = " x ".join(f"{axis} {n}" for axis, n in run.mesh.items()) if meshes_differ else ""
    recompute = "" if run.recompute is None else f"{run.recompute} recomputation".replace("none", "no")
    how = ", ".join(filter(None, (mesh, recompute)))
    return f" ({how})" if how else ""


def _spell_range(first: int, last: int) -> str:
    return str(first) if first == last else f"{first} to {last}"


def _joined(layers: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same layers, in as few ranges as possible."""
    joined: list[tuple[int, int]] = []
    for first, last in layers:
        if joined and joined[-1][1] + 1 == first:
            joined[-1] = joined[-1][0], last
        else:
            joined.append((first, last))
    return joined
