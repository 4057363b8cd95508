"""The registered pass ``rule_based_tuner``: plans a serial forward program and annotates it in place.

    new_pass("rule_based_tuner", {"cluster": "1x8:A100-80G"}).apply([main], [startup], context)

Its attributes are the fields of ``strategy.tuning``, and ``global_batch``, ``precision`` and ``loss``. The plan is left in
the context under the key ``plan``.
"""

from __future__ import annotations

from typing import Any

import paddle
from paddle.distributed.passes.pass_base import PassBase, register_pass

from paddle_rbt_plugin.config import PASS_NAME, Settings
from paddle_rbt_plugin.graph import is_legacy, read_program
from paddle_rbt_plugin.graph.legacy import read_legacy_program
from paddle_rbt_plugin.handover.legacy.annotate import annotate as annotate_legacy
from paddle_rbt_plugin.handover.legacy.judge import tune_legacy
from paddle_rbt_plugin.handover.patches import enable_static_training_on_cpu
from paddle_rbt_plugin.handover.pipeline import annotate_stages
from paddle_rbt_plugin.handover.replay import annotate, paddle_mesh
from paddle_rbt_plugin.handover.strategy import as_the_program_runs
from paddle_rbt_plugin.plan.plan import Plan
from paddle_rbt_plugin.tuner import job_cluster, tune_graph

PLAN = "plan"


@register_pass(PASS_NAME)
class RuleBasedTunerPass(PassBase):
    """Plans and annotates one program of either IR. Raises TunerError for wrong attributes, programs and clusters."""

    def _check_self(self) -> bool:
        return True

    def _check_conflict(self, other_pass: Any) -> bool:
        return True

    def _apply_single_impl(self, main_program: Any, startup_program: Any, context: Any) -> None:
        extra = {key: self._attrs[key] for key in ("global_batch", "precision", "loss", "constraints") if key in self._attrs}
        settings = Settings.from_mapping({k: v for k, v in self._attrs.items() if k not in extra})
        loss = extra.pop("loss", None)
        legacy = read_legacy_program(main_program, loss) if is_legacy(main_program) else None
        graph = legacy.graph if legacy is not None else read_program(main_program, loss)
        steps = extra.get("global_batch", 0) // graph.data[0].shape[0] if graph.data and graph.data[0].shape else 1
        pipeline = "pp" in (settings.search_space or {})  # whoever applies the pass alone runs the pipeline pass, too
        extra.setdefault("constraints", as_the_program_runs(max(steps, 1), legacy=legacy is not None, pipeline=pipeline))
        world = paddle.distributed.get_world_size()
        if world > 1 or settings.cluster is None:
            job_cluster(settings, world)
        if legacy is not None:
            plan = tune_legacy(main_program, legacy, settings, **extra)
            annotate_legacy(main_program, legacy, plan)
        else:
            plan = tune_graph(graph, settings, **extra)
            apply_plan(main_program, plan, {name: t.placement for name, t in plan.leaves(graph).items()})
        context.set_attr(PLAN, plan)


def apply_plan(program: Any, plan: Plan, placements: dict[str, Any]) -> None:
    """Annotates a program in place. Raises TunerError for a plan that PIR cannot execute this way."""
    meshes = list(dict.fromkeys(stage.process_mesh for stage in plan.stages))
    enable_static_training_on_cpu([paddle_mesh(mesh) for mesh in meshes])
    if len(meshes) == 1:
        annotate(program, meshes[0], placements)
    else:
        annotate_stages(program, read_program(program, needs_loss=False), plan, placements)
