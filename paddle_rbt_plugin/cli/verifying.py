"""``paddle-rbt explain PLAN --verify``: is the prediction the program?"""

from __future__ import annotations

from paddle_rbt_plugin.cli.model import model_trace
from paddle_rbt_plugin.cli.output import Output, make_table, titled
from paddle_rbt_plugin.errors import ModelError
from paddle_rbt_plugin.handover.structure import FIGURES, Structure, verify
from paddle_rbt_plugin.plan.plan import Plan


def verify_file(output: Output, path: str, model: str | None) -> bool:
    """Compares what a saved plan was costed with and what Paddle's partitioned program of its model holds; prints both, and
    every difference. Returns whether there is none."""
    plan = Plan.load(path)
    reference = model or plan.model.get("reference")
    if not reference:
        raise ModelError(f"{path} does not say which model it is for; name it with --model")
    with output.progress(f"tracing {reference}"):
        trace = model_trace(reference, plan.global_batch, None if model else plan.model.get("seq"))
    with output.progress("partitioning"):
        expected, found, differences = verify(plan, trace.graph, trace.program)
    data = {"equal": not differences, "differences": differences, "predicted": _dict(expected), "program": _dict(found)}
    table = make_table("", "predicted", "in the program", right=("predicted", "in the program"))
    for name in FIGURES:
        table.add_row(name.replace("_", " "), f"{getattr(expected, name):,.0f}", f"{getattr(found, name):,.0f}")
    table.add_row("collectives", str(sum(expected.collectives.values())), str(sum(found.collectives.values())))
    verdict = "the prediction is the program" if not differences else f"{len(differences)} differences"
    output.result(data, titled(f"one rank, one step at the batch of {plan.global_batch}", table), *differences, verdict)
    return not differences


def _dict(structure: Structure) -> dict[str, object]:
    rows = [
        {"phase": phase, "kind": kind, "axis": axis, "bytes": nbytes, "count": count}
        for (phase, kind, axis, nbytes), count in sorted(structure.collectives.items())
    ]
    return {"collectives": rows, **{name: getattr(structure, name) for name in FIGURES}}
