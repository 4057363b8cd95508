"""Explains a plan: as plain data (``reasons``, ``tensor_reasons``) and as text made from that data.

Everything is read from the plan, so a plan loaded from a file can be explained like a new one.
"""

from __future__ import annotations

import difflib
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from paddle_rbt_plugin.cluster import Cluster
from paddle_rbt_plugin.config import Settings
from paddle_rbt_plugin.errors import PlanError
from paddle_rbt_plugin.plan.layout import (
    LEVEL_WORDS,
    communication,
    level_hint,
    pipeline_stages,
    span,
    spell_stages,
)
from paddle_rbt_plugin.plan.plan import Plan, TensorPlacement
from paddle_rbt_plugin.search.rejections import alike, nearness
from paddle_rbt_plugin.spelling import counted, spell_bytes, spell_candidate, spell_seconds

WIDTH = 80
"""Columns of the text."""
REJECTED = "Rejected: ways to use the devices (pp x dp x mp), or candidates of them"
"""What is counted under this title."""
_RUNNER_UPS = 5
_ROUNDING = 1e-9
"""Relative to a step: rounding errors of sums that should be zero."""
_KINDS = {"param": "parameter", "data": "input", "var": "intermediate tensor"}


@dataclass(frozen=True)
class RejectedGroup:
    """Ways to use the devices (pp, dp, mp), or candidates of them, rejected for the same reason apart from its figures."""

    kind: str
    """The kind of the reason, see ``search.rejections``."""
    reason: str
    """The reason of the nearest miss."""
    candidate: Mapping[str, Any]
    """The candidate it is the reason of."""
    count: int
    """How many ways."""
    candidates: int
    """How many of their candidates are rejected; 0 if the ways are ruled out as a whole."""

    @property
    def how_many(self) -> str:
        """``10 ways``, or ``92 candidates of 10 ways``."""
        ways = counted(self.count, "way")
        return f"{counted(self.candidates, 'candidate')} of {ways}" if self.candidates else ways


def reasons(plan: Plan) -> dict[str, Any]:
    """The decision and all reasons for it, as plain JSON values; times in seconds, sizes in bytes."""
    return {
        "cluster": str(Cluster.from_dict(plan.cluster)),
        "candidate": decision(plan),
        "global_batch": plan.global_batch,
        "precision": plan.precision,
        "level": plan.level,
        "cost_model": dict(plan.cost_model),
        "estimate": asdict(plan.estimate),
        "stages": [stage.to_dict() for stage in pipeline_stages(plan)],
        "communication": communication(plan),
        "runner_ups": runner_ups(plan),
        "rejected": [asdict(group) | {"how_many": group.how_many} for group in group_rejected(plan.rejected)],
        "patterns": dict(plan.patterns),
        "unmatched": list(plan.unmatched),
        "remarks": remarks(plan),
        "notes": list(plan.notes),
    }


def remarks(plan: Plan) -> list[str]:
    """Answers to likely questions: why no faster candidate was chosen, and what a higher level would try."""
    step, lines = plan.estimate.step_time_s, []
    faster = [c["step_time_s"] for c in plan.candidates if c["step_time_s"] < step]
    if faster:
        by = f"by up to {1 - min(faster) / step:.2%}, less than the estimate can resolve"
        lines.append(f"simpler than {counted(len(faster), 'candidate')} predicted to be faster {by}")
    if hint := level_hint(plan):
        lines.append(hint)
    return lines


def group_unmatched(unmatched: Iterable[Mapping[str, Any]]) -> list[str]:
    """The entries of ``plan.unmatched``; weights of the same shape whose names differ only in numbers are combined: ``24 x
    layers.0.up.weight to layers.23.up.weight [64, 256], read by matmul``."""
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for weight in unmatched:
        readers = ", ".join(op.rpartition("_")[0] for op in weight.get("readers", ())) or "nothing"
        kind = re.sub(r"\d+", "#", weight["name"]), str(weight.get("shape", "")), readers
        groups.setdefault(kind, []).append(weight)
    return [
        found[0]["reason"]
        if len(found) == 1
        else f"{len(found)} x {found[0]['name']} to {found[-1]['name']} {shape}, read by {readers}"
        for (_, shape, readers), found in groups.items()
    ]


def tensor_reasons(plan: Plan, name: str) -> dict[str, Any]:
    """The placement of a tensor and what decided it, as plain JSON values.

    ``name`` is a tensor's name or a parameter's path in ``named_parameters()``. Raises PlanError, with the nearest names, for a
    tensor that the plan does not place."""
    key, tensor = _find(plan, name)
    stage = plan.stages[tensor.stage]
    version = plan.patterns.get(tensor.pattern or "", {}).get("version")
    return {
        "name": key,
        "structured_name": tensor.structured_name,
        "kind": tensor.kind,
        "stage": tensor.stage,
        "pipeline_stage": next(s.number for s in pipeline_stages(plan) if stage.devices[0] in s.devices),
        "layers": list(stage.layers),
        "devices": list(stage.devices),
        "mesh": dict(zip(stage.axes, stage.mesh, strict=True)),
        "dims_mapping": list(tensor.dims_mapping),
        "dims": [None if axis < 0 else stage.axes[axis] for axis in tensor.dims_mapping],
        "pattern": tensor.pattern,
        "distribution": tensor.distribution,
        "version": version,
        "why": _why(tensor),
    }


def explain(plan: Plan, tensor: str | None = None) -> str:
    """The text of ``explain_plan``, or of ``explain_tensor`` for the given tensor."""
    return explain_plan(plan) if tensor is None else explain_tensor(plan, tensor)


def explain_plan(plan: Plan) -> str:
    """The decision and the reasons, in lines of at most 80 columns unless names are longer."""
    return "\n\n".join(_sections(plan, reasons(plan))) + "\n"


def explain_tensor(plan: Plan, name: str) -> str:
    """The explanation of one tensor; see ``tensor_reasons``."""
    t = tensor_reasons(plan, name)
    title = t["name"] + (f" ({t['structured_name']})" if t["structured_name"] else "")
    first, last = t["layers"]
    mesh = " x ".join(f"{axis} {n}" for axis, n in t["mesh"].items())
    split = [f"dim {i} split over {axis} {t['mesh'][axis]}" for i, axis in enumerate(t["dims"]) if axis is not None]
    rows = {
        "kind": _KINDS[t["kind"]],
        "placement": ", ".join(split) or "whole on every device of its stage",
        "dims mapping": str(t["dims_mapping"]),
        "mesh": f"{mesh}, {span('device', t['devices'][0], t['devices'][-1])}",
        "stage": f"{t['pipeline_stage']}, {span('layer', first, last)}",
        "decided by": f"pattern {t['pattern']} of {_source(t)}" if t["pattern"] else "no pattern",
        "which means": t["why"],
    }
    return "\n".join([title, *_rows(rows)]) + "\n"


def decision(plan: Plan) -> dict[str, Any]:
    """The plan as a candidate, in the words of ``plan.candidates``."""
    return {
        **plan.degrees,
        "micro_batch": plan.micro_batch,
        "accumulate_steps": plan.accumulate_steps,
        "recompute": plan.recompute,
        "sharding_stage": plan.sharding_stage,
        "sharding_degree": plan.sharding_degree,
        "sequence_parallel": plan.sequence_parallel,
        "schedule": plan.schedule,
        "vpp": plan.vpp,
        "ep": plan.ep,
        "axes": list(plan.stages[0].axes),
    }


def runner_ups(plan: Plan, count: int = _RUNNER_UPS) -> list[dict[str, Any]]:
    """The best candidate of every other way to use the devices, nearest first, with how much worse it is. ``slower_s`` is in
    seconds; ``more_memory_bytes`` may be negative, since time decides first."""
    best: dict[tuple[int, ...], dict[str, Any]] = {}
    for candidate in plan.candidates:
        degrees = _degrees(candidate)
        if degrees != _degrees(decision(plan)):
            best.setdefault(degrees, dict(candidate))
    rows = sorted(best.values(), key=lambda c: c["step_time_s"])[:count]
    for row in rows:
        row["slower_s"] = row["step_time_s"] - plan.estimate.step_time_s
        row["more_memory_bytes"] = row["peak_memory_bytes"] - plan.estimate.peak_memory_bytes
    return rows


def group_rejected(rejected: Iterable[Mapping[str, Any]]) -> list[RejectedGroup]:
    """Rejections grouped by reason, the most frequent reason first."""
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for entry in rejected:
        groups.setdefault(alike(entry), []).append(entry)
    found = []
    for entries in groups.values():
        nearest = min(entries, key=nearness)
        candidates = sum(e.get("count", 0) for e in entries)
        found.append(RejectedGroup(nearest["kind"], nearest["reason"], nearest["candidate"], len(entries), candidates))
    return sorted(found, key=lambda group: -group.count)


def _degrees(candidate: Mapping[str, Any]) -> tuple[int, ...]:
    """How a candidate uses the devices; old saved plans lack ``ep``."""
    return tuple(candidate.get(axis, 1) for axis in ("pp", "dp", "mp", "ep"))


def _find(plan: Plan, name: str) -> tuple[str, TensorPlacement]:
    for key, tensor in plan.tensors.items():
        if name in (key, tensor.structured_name):
            return key, tensor
    known = [n for key, t in plan.tensors.items() for n in (key, t.structured_name) if n]
    near = difflib.get_close_matches(name, known, 3)
    example = next((t.structured_name for t in plan.tensors.values() if t.structured_name), known[0])
    hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"it places {len(plan.tensors)}, such as {example!r}"
    raise PlanError(f"the plan places no tensor {name!r}; {hint}")


def _why(tensor: TensorPlacement) -> str:
    sharded = any(axis >= 0 for axis in tensor.dims_mapping)
    if tensor.pattern:
        return "it is split as the pattern says" if sharded else "the pattern does not split it along any axis of this plan"
    if tensor.kind == "data":
        return "inputs are split by the batch" if sharded else "it is not split by the batch, so every device reads all of it"
    return "its sharding follows from its inputs" if sharded else "no pattern claims it, so it stays whole"


def _source(row: Mapping[str, Any]) -> str:
    return f"{row['distribution']} {row['version'] or ''}".rstrip()


def _sections(plan: Plan, data: Mapping[str, Any]) -> Iterator[str]:
    candidate, estimate = data["candidate"], data["estimate"]
    step, peak, time = estimate["step_time_s"], estimate["peak_memory_bytes"], estimate["time"]
    yield _wrap(
        f"{spell_candidate(candidate)}, {counted(candidate['accumulate_steps'], 'accumulation step')}; global batch "
        f"{data['global_batch']} in {data['precision']} on {data['cluster']}"
        + _predicted_by(data["cost_model"])
        + f"; level {data['level']}: {LEVEL_WORDS.get(data['level'], 'unknown')}"
    )
    if stages := spell_stages(plan):
        yield _section("Stages", _rows(stages))
    yield _section(
        f"A step takes {spell_seconds(step)}, {estimate['tflops_per_gpu']:.3g} TFLOP/s per device",
        _rows({_words(k): f"{spell_seconds(v):>9}{v / step:8.1%}" for k, v in time.items() if v > _ROUNDING * step}),
    )
    yield _section(
        f"The fullest device needs {spell_bytes(peak)}",
        _rows({_words(k): f"{spell_bytes(v):>9}{v / peak:8.1%}" for k, v in estimate["memory"].items() if v}),
    )
    where = [_wrap(row["where"], "  ") for row in data["communication"]]
    yield _section("Where the axes communicate", where or ["  nowhere: there is one device"])
    others = [_wrap(spell_candidate(row), f"  {_compared(row, step)}  ") for row in data["runner_ups"]]
    yield _section("Next best", others or ["  no other way to use the devices fits"])
    yield _section(REJECTED, [_rejected(group) for group in data["rejected"]] or ["  nothing"])
    matched = {
        name: f"{counted(row['matches'], 'match', 'matches'):>11}, {_source(row)}" for name, row in data["patterns"].items()
    }
    yield _section("Patterns", _rows(matched) or ["  none matched"])
    everything = ["  nothing: a pattern claims every weight"]
    yield _section("Matched by no pattern", [_wrap(line, "  ") for line in group_unmatched(data["unmatched"])] or everything)
    if data["remarks"] or data["notes"]:
        yield _section("Notes", [_wrap(note, "  ") for note in (*data["remarks"], *data["notes"])])


def _predicted_by(cost_model: Mapping[str, str]) -> str:
    """The cost model, if it is not the default one."""
    if cost_model.get("name", Settings.cost_model) == Settings.cost_model:
        return ""
    return f"; predicted by cost model {cost_model['name']} of {_source(cost_model)}"


def _section(title: str, lines: Sequence[str]) -> str:
    return "\n".join([title, *lines])


def _rows(rows: Mapping[str, str]) -> list[str]:
    width = max(map(len, rows), default=0)
    return [_wrap(text, f"  {name:<{width}}  ") for name, text in rows.items()]


def _compared(row: Mapping[str, Any], step: float) -> str:
    return f"{spell_seconds(row['step_time_s']):>9}{row['slower_s'] / step:+8.1%}{spell_bytes(row['peak_memory_bytes']):>10}"


def _rejected(group: Mapping[str, Any]) -> str:
    return _wrap(f"{group['how_many']}, nearest {spell_candidate(group['candidate'])}: {group['reason']}", "  ")


def _wrap(text: str, first: str = "") -> str:
    """The text wrapped to the width; lines after the first are indented by the length of ``first``."""
    rest = " " * len(first)
    return textwrap.fill(
        text, WIDTH, initial_indent=first, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False
    )


def _words(key: str) -> str:
    return key.replace("_", " ")
