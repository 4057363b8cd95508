"""What a plan recomputes."""

from __future__ import annotations

from paddle_rbt_plugin.plan.plan import Plan


def recomputes(plan: Plan) -> bool:
    """Whether a plan recomputes anything."""
    return any(strategy_of(plan, entry) != "none" for entry in range(len(plan.stages)))


def strategy_of(plan: Plan, entry: int) -> str:
    """The recomputation of the layers of an entry of ``plan.stages``: none, selective or full."""
    return plan.stages[entry].recompute or plan.recompute
