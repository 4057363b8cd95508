"""Compares the program that a plan is handed over as with what the cost model predicts of it.

The serial program is annotated and partitioned for one rank of each pipeline stage (``partitioning``); the structure of the
result (``structure``) is compared with that of the completion (``prediction``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from paddle_rbt_plugin.cluster import Cluster
from paddle_rbt_plugin.cluster.mesh import ProcessMesh
from paddle_rbt_plugin.completion.forms import forms_on
from paddle_rbt_plugin.graph import Graph
from paddle_rbt_plugin.handover.pir.partitioning import Partitioned, as_rank, partition, resolve
from paddle_rbt_plugin.handover.pir.pipeline import annotate_plan, schedulable
from paddle_rbt_plugin.handover.pir.prediction import meshes_of, predictions
from paddle_rbt_plugin.handover.pir.recompute import mark
from paddle_rbt_plugin.handover.pir.structure import Structure, compare, local_bytes, parameter_ops, structure_of
from paddle_rbt_plugin.handover.shared.recompute import recomputes
from paddle_rbt_plugin.handover.shared.zero import STAGES
from paddle_rbt_plugin.plan.plan import Plan


@dataclass(frozen=True)
class StageComparison:
    """The two structures of a rank of one pipeline stage, and their differences in sentences."""

    stage: int
    predicted: Structure
    found: Structure
    differences: tuple[str, ...]


def verify(plan: Plan, graph: Graph, program: Any, train: bool = True, blocked: Sequence[str] = ()) -> list[StageComparison]:
    """Compares the prediction for a plan with its program, for the first rank of each pipeline stage; all ranks of a stage do
    the same on their own slices. ``program`` is the serial program that ``graph`` was read from; it is not changed. ``blocked``
    are the plugins that were blocked in planning.

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
    held = [op for op in parameter_ops(program) if op.result(0).id not in moments]
    optimizer_bytes = sum(local_bytes(slots[moment]) for slots in updates for moment in ("moment1", "moment2"))
    return replace(structure_of(program, partitioned.gradients, held, mesh), optimizer_bytes=optimizer_bytes)


def _zero_stage(plan: Plan) -> int:
    return plan.sharding_stage if plan.sharding_stage in STAGES else 0
