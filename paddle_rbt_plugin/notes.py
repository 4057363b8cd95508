"""What the user should know about a plan: as data, and in the only words for it.

A ``Note`` has a kind and figures; ``_WORDS`` has the sentence of every kind. Graph, search and planner make notes; a plan keeps
their sentences.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from paddle_rbt_plugin.spelling import counted, spell_degrees, spell_seconds

_NOT_APPLIED = "recommended, not applied: "

_UNDONE: dict[str, Callable[..., str]] = {
    "ways": lambda left, total: f"not tried: {left} of {counted(total, 'way')} to use the devices",
    "comparison": lambda: "not every way to use the devices was compared",
    "estimates": lambda: "not every candidate that may be among the best was estimated",
    "cost_model": lambda left: f"the cost model was not asked about {counted(left, 'candidate')}",
    "settings": lambda left, total: f"not tried: {left} of {counted(total, 'setting')} of level o2",
    "orders": lambda left, total: f"not tried: {left} of {counted(total, 'order')} of the groups",
}
"""By the work that a time limit cut short, what remained of it."""

_WORDS: dict[str, Callable[..., str]] = {
    "stopped": lambda limit_s, undone, **figures: (
        f"stopped by the time limit of {limit_s:g} s: {_UNDONE[undone](**figures)}; this is the best so far"
    ),
    "asked": lambda cost_model, asked, total: (
        f"{cost_model} was asked about all {counted(total, 'candidate')} that may fit"
        if asked == total
        else f"{cost_model} was asked about {asked} of the {total} candidates that may fit: of each way to use the devices "
        "those that the analytic model predicts to be fastest; a narrower search_space leaves none out"
    ),
    "ignored": lambda asked: (
        f"ignored: {', '.join(asked)}; evaluation keeps nothing for backward and has no optimizer states to split"
    ),
    "sequence_parallel": lambda: (
        f"{_NOT_APPLIED}sequence parallelism: build the model with it (PIR programs are annotated without sequence dimension)"
    ),
    "sharding_degree": lambda sharding_degree, dp: (
        f"{_NOT_APPLIED}states split over {sharding_degree} of {dp} replicas: Paddle splits them over a whole mesh axis; "
        "search_space={'sharding_degree': 'whole'} plans that"
    ),
    "layer_meshes": lambda: (
        f"{_NOT_APPLIED}layers of one stage on differently arranged devices; search_space={{'layer_meshes': 'one'}} avoids it"
    ),
    "group_order": lambda: (
        f"{_NOT_APPLIED}stages in another order than the ranks of the cluster: start the job with its machines in that order"
    ),
    "separate_experts": lambda experts: (
        f"{_NOT_APPLIED}expert parallelism: the {experts} experts of a layer have weights of their own; stacked as [experts, "
        "in, out], they can be divided over the ranks of dp (ep)"
    ),
    "balanced_load": lambda mixtures, experts, room, group: (
        f"assumed: a balanced load of {_counted_mixtures(mixtures, experts)}; each takes {counted(room, 'token')} of every "
        f"{group}. Which tokens an expert computes depends on values, so no static program has these shapes to run it"
    ),
    "balanced_branches": lambda branches: (
        f"assumed: a balanced load of {counted(branches, 'branch', 'branches')} that depend on values, planned one by one: "
        "only loops over equal experts that add up what each computes are stacked"
    ),
    "selective_recompute": lambda: (
        "recomputation of the attention cores is applied to static programs; dygraph can recompute only whole layers, as "
        "search_space={'recompute': ['none', 'full']} plans"
    ),
    "strategy": lambda unmet: (
        f"not applied: {'; '.join(unmet)}; a strategy made by plan.to_strategy() has the settings of the plan"
    ),
    "weights": lambda weights, precision: (
        f"the weights are {weights}, but the plan is for training in {precision}: its times and memory are those of {precision}"
    ),
    "rewritten": lambda count, op, form: f"rewritten to keep shardings: {count} {op} as {form}",
    "no_rule": lambda count, op: (
        f"Paddle has no sharding rule for {count} {op}: its operands are gathered, and it is costed as the bytes that it moves"
    ),
    "other_batch": lambda devices, batch, other, now_s, then_s: (
        f"{counted(devices, 'replica')} cannot share the global batch of {batch}; with {other}, a sample would take "
        f"{spell_seconds(then_s)} instead of {spell_seconds(now_s)}"
    ),
    "incomplete": lambda pattern: f"pattern {pattern}: its search was cut short, matches may be missing",
    "failed": lambda pattern, error: f"pattern {pattern}: left out, it raised {error}",
    "lost": lambda pattern, count, reason: f"not sharded as pattern {pattern} asks in {counted(count, 'place')}: {reason}",
    "dropped": lambda pattern, reason: f"pattern match dropped: {pattern}: {reason}",
    "paddle_estimate": lambda degrees, theirs, ours: (
        f"{spell_degrees(degrees)}: Paddle's CostEstimator {_cost(*theirs)}; analytic {_cost(*ours)}"
    ),
}
"""By kind, the sentence that its figures make."""


def _counted_mixtures(mixtures: int, experts: int) -> str:
    return f"the {experts} experts of {counted(mixtures, 'layer')}, planned as stacked weights"


def _cost(step_time_s: float, peak_memory_bytes: float) -> str:
    return f"{step_time_s * 1e3:.3f} ms, {peak_memory_bytes / 2**30:.2f} GiB"


@dataclass(frozen=True)
class Note:
    """Something that the user should know about a plan; ``str`` gives the sentence."""

    kind: str
    """A key of ``_WORDS``."""
    figures: Mapping[str, Any]
    """What the note is about, by name: plain values, ``*_s`` in seconds and ``*_bytes`` in bytes."""

    def __str__(self) -> str:
        return _WORDS[self.kind](**self.figures)


def note(kind: str, **figures: Any) -> Note:
    """A note of a kind with its figures."""
    return Note(kind, figures)


def distinct(*notes: Note | None) -> tuple[Note, ...]:
    """Each note once, in the order given; None is left out."""
    found: list[Note] = []
    for entry in notes:
        if entry is not None and entry not in found:
            found.append(entry)
    return tuple(found)
