"""``paddle-rbt plan`` and ``paddle-rbt explain``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rich.console import RenderableType
from rich.padding import Padding
from rich.text import Text

from paddle_rbt_plugin.cli.output import Output, make_table, titled
from paddle_rbt_plugin.cluster import Cluster
from paddle_rbt_plugin.config import Settings
from paddle_rbt_plugin.model_reference import model_graph
from paddle_rbt_plugin.plan.explain import (
    REJECTED,
    decision,
    explain_plan,
    explain_tensor,
    group_rejected,
    group_unmatched,
    reasons,
    remarks,
    tensor_reasons,
)
from paddle_rbt_plugin.plan.files import check_writable
from paddle_rbt_plugin.plan.layout import LEVEL_WORDS, spell_stages
from paddle_rbt_plugin.plan.plan import Plan
from paddle_rbt_plugin.request import Request, best_precision
from paddle_rbt_plugin.search import Progress
from paddle_rbt_plugin.spelling import counted, spell_bytes, spell_candidate, spell_seconds
from paddle_rbt_plugin.tuner import collection_paused, tune_graph

_CHOICES: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "ep": lambda c: str(c["ep"]) if c.get("ep", 1) > 1 else "",
    "recompute": lambda c: "" if c["recompute"] == "none" else c["recompute"],
    "ZeRO stage": lambda c: str(c["sharding_stage"] or ""),
    "over": lambda c: str(c["sharding_degree"]) if c["sharding_degree"] != "whole" else "",
    "sequence parallel": lambda c: "yes" if c["sequence_parallel"] else "",
    "mesh": lambda c: "mp, dp" if list(c["axes"]) == ["mp", "dp"] else "",
    "schedule": lambda c: f"VPP {c['vpp']}" if c["schedule"] == "VPP" else "" if c["schedule"] == "1F1B" else c["schedule"],
}
"""How a candidate's choices show in its row; empty where a choice is as usual."""


def plan_model(
    output: Output,
    *,
    model: str,
    cluster: str,
    global_batch: int,
    seq: int | None,
    level: str,
    fixed: Sequence[tuple[str, Any]],
    precision: str | None,
    cost_model: str,
    time_limit: float | None,
    cache: str | None,
    top: int,
    save: str | None,
    blocked: tuple[str, ...],
) -> None:
    """Plans MODEL and prints the winner, the candidates, the rejected ones and what the patterns matched."""
    if save is not None:
        check_writable(save)  # before the search, which may take minutes
    settings = Settings(
        level=level,
        cluster=cluster,
        cost_model=cost_model,
        search_space=dict(fixed),
        time_limit=time_limit,
        cache=cache,
        blocked_plugins=blocked,
    )
    request = Request(settings, global_batch, precision)
    request = replace(request, precision=precision or best_precision(request.cluster))
    with collection_paused():
        with output.progress(f"tracing {model}"):
            graph = model_graph(model, global_batch, seq)
        with output.progress(f"planning {model} for {request.cluster}") as report:
            plan = tune_graph(graph, replace(request, progress=lambda p: report(p.done, p.total, spell_progress(p))))
    plan = replace(plan, model={"reference": model, "seq": seq})
    if save is not None:  # before anything is printed: whoever reads may leave early
        plan.save(save)
    output.result(plan.to_dict(), *_tables(model, plan, top))
    if save is not None:
        output.note(f"plan saved to {save}")


def spell_progress(progress: Progress) -> str:
    """What is tried, and on a line of its own the best so far: ``best so far 1.03 s, pp 1 x dp 8 x mp 1, micro batch 4``."""
    fixed = " x ".join(f"{axis} {progress.trying[axis]}" for axis in ("pp", "dp", "mp") if axis in progress.trying)
    steps = progress.trying.get("accumulate_steps")
    parts = [f"trying {fixed}" + (f", {counted(steps, 'accumulation step')}" if steps else "")] if fixed else []
    if progress.step_time_s is not None:
        bound = "" if progress.is_estimated else "at least "
        parts.append(f"best so far {bound}{spell_seconds(progress.step_time_s)}, {spell_candidate(progress.best)}")
    return "\n".join(parts)


def explain_file(output: Output, path: str, tensor: str | None) -> None:
    """Prints why a saved plan is what it is, or all about one tensor."""
    plan = Plan.load(path)
    if tensor is None:
        output.result(reasons(plan), explain_plan(plan).rstrip("\n"))
    else:
        output.result(tensor_reasons(plan, tensor), explain_tensor(plan, tensor).rstrip("\n"))


def _tables(model: str, plan: Plan, top: int) -> Iterator[RenderableType]:
    yield _winner(model, plan)
    yield _candidates(plan, top)
    if plan.rejected:
        yield _rejected(plan)
    yield _patterns(plan)
    yield from (_wrapped(f"matched by no pattern: {line}") for line in group_unmatched(plan.unmatched))
    yield from (_wrapped(f"note: {line}") for line in (*remarks(plan), *plan.notes))


def _wrapped(text: str) -> RenderableType:
    """A sentence that breaks where the terminal does."""
    return Padding(Text(text), 0)


def _winner(model: str, plan: Plan) -> RenderableType:
    table = make_table("plan", spell_candidate(decision(plan)))
    rows = {
        "global batch": f"{plan.global_batch} in {counted(plan.accumulate_steps, 'accumulation step')}, {plan.precision}",
        "step time": spell_seconds(plan.estimate.step_time_s),
        "throughput": f"{plan.estimate.tflops_per_gpu:.3g} TFLOP/s per device",
        "memory": f"{spell_bytes(plan.estimate.peak_memory_bytes)} on the fullest device",
        "level": f"{plan.level}: {LEVEL_WORDS[plan.level]}",
        **spell_stages(plan),
    }
    if plan.cost_model["name"] != Settings.cost_model:
        rows["predicted by"] = "{name} of {distribution} {version}".format(**plan.cost_model)
    for name, value in rows.items():
        table.add_row(name, value)
    return titled(f"{model} on {Cluster.from_dict(plan.cluster)}", table)


def _candidates(plan: Plan, top: int) -> RenderableType:
    """The best candidates; of the choices beyond the degrees only those that one of them makes."""
    shown = plan.candidates[:top]
    spelled = [{name: spell(c) for name, spell in _CHOICES.items()} for c in shown]
    made = [name for name in _CHOICES if any(row[name] for row in spelled)]
    names = ("pp", "dp", "mp", "micro batch", *made, "time", "slower", "memory")
    columns = tuple(name.replace(" ", "\n") for name in names)  # two lines of headings, else they decide the widths
    table = make_table(*columns, right=columns, gap=1 if len(made) > 2 else 3)
    for candidate, row in zip(shown, spelled, strict=True):
        slower = round(candidate["step_time_s"] / plan.estimate.step_time_s - 1, 3)
        table.add_row(
            *(str(candidate[key]) for key in ("pp", "dp", "mp", "micro_batch")),
            *(row[name] for name in made),
            spell_seconds(candidate["step_time_s"]),
            f"{slower:.1%}" if slower else "",
            spell_bytes(candidate["peak_memory_bytes"]),
        )
    return titled(
        f"the best {len(shown)} of {counted(len(plan.candidates), 'candidate')} that fit and were estimated exactly", table
    )


def _rejected(plan: Plan) -> RenderableType:
    table = make_table("how many", "nearest", "reason")
    for group in group_rejected(plan.rejected):
        table.add_row(group.how_many, spell_candidate(group.candidate), group.reason)
    return titled(REJECTED.lower(), table)


def _patterns(plan: Plan) -> RenderableType:
    table = make_table("pattern", "matches", "distribution", "version", right=("matches",))
    for name, row in plan.patterns.items():
        table.add_row(name, str(row["matches"]), str(row["distribution"]), str(row["version"]))
    return titled("patterns", table)
