"""``paddle-rbt explain PLAN --verify``: is the prediction the program?"""

from __future__ import annotations

from rich.table import Table

from paddle_rbt_plugin.cli.output import Output, make_table, titled
from paddle_rbt_plugin.errors import ModelError
from paddle_rbt_plugin.handover.pir.structure import FIGURES, Structure
from paddle_rbt_plugin.handover.pir.verification import StageComparison, verify
from paddle_rbt_plugin.model_reference import model_trace
from paddle_rbt_plugin.plan.plan import Plan
from paddle_rbt_plugin.spelling import counted


def verify_file(output: Output, path: str, model: str | None) -> bool:
    """Compares what a saved plan was costed with and what Paddle's partitioned program of its model holds, stage by stage;
    prints both, and every difference. Returns whether there is none."""
    plan = Plan.load(path)
    reference = model or plan.model.get("reference")
    if not reference:
        raise ModelError(f"{path} does not say which model it is for; name it with --model")
    with output.progress(f"tracing {reference}"):
        trace = model_trace(reference, plan.global_batch, None if model else plan.model.get("seq"))
    with output.progress("partitioning"):
        stages = verify(plan, trace.graph, trace.program)
    differences = [f"{_stage(c, stages)}{line}" for c in stages for line in c.differences]
    tables = [titled(f"{_stage(c, stages)}one rank, one step at the batch of {plan.global_batch}", _table(c)) for c in stages]
    verdict = "the prediction matches the program" if not differences else counted(len(differences), "difference")
    data = {"equal": not differences, "differences": differences, "stages": [_dict(c) for c in stages]}
    output.result(data, *tables, *differences, verdict)
    return not differences


def _stage(comparison: StageComparison, stages: list[StageComparison]) -> str:
    return f"stage {comparison.stage}: " if len(stages) > 1 else ""


def _table(comparison: StageComparison) -> Table:
    expected, found = comparison.predicted, comparison.found
    table = make_table("", "predicted", "in the program", right=("predicted", "in the program"))
    for name in FIGURES:
        table.add_row(name.replace("_", " "), f"{getattr(expected, name):,.0f}", f"{getattr(found, name):,.0f}")
    for word, transfers in (("collectives", False), ("transfers between stages", True)):
        table.add_row(word, *(str(_count(structure, transfers)) for structure in (expected, found)))
    return table


def _count(structure: Structure, transfers: bool) -> int:
    return sum(n for (_, kind, _, _), n in structure.collectives.items() if (kind in ("send", "receive")) == transfers)


def _dict(comparison: StageComparison) -> dict[str, object]:
    both = {"predicted": _plain(comparison.predicted), "program": _plain(comparison.found)}
    return {"stage": comparison.stage, **both, "differences": list(comparison.differences)}


def _plain(structure: Structure) -> dict[str, object]:
    rows = [
        {"phase": phase, "kind": kind, "axis": axis, "bytes": nbytes, "count": count}
        for (phase, kind, axis, nbytes), count in sorted(structure.collectives.items())
    ]
    return {"collectives": rows, **{name: getattr(structure, name) for name in FIGURES}}
