"""The registered pass ``rule_based_tuner``: plans a serial forward program and annotates it in place.

    new_pass("rule_based_tuner", {"cluster": "1x8:A100-80G"}).apply([main], [startup], context)

Its attributes are the fields of ``strategy.tuning``, and ``global_batch``, ``precision`` and ``loss``. The plan is stored in
the context under the key ``plan``.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import paddle
from paddle.distributed.passes.pass_base import PassBase, register_pass

from paddle_rbt_plugin.cluster import Cluster, check_job
from paddle_rbt_plugin.completion import Placement, data_parallel
from paddle_rbt_plugin.completion.forms import CPU_FORMS, forms_on
from paddle_rbt_plugin.config import PASS_NAME, Settings
from paddle_rbt_plugin.errors import TunerError, TunerWarning
from paddle_rbt_plugin.graph import Graph, is_legacy, read_program
from paddle_rbt_plugin.graph.legacy import read_legacy_program
from paddle_rbt_plugin.handover.legacy.annotate import annotate as annotate_legacy
from paddle_rbt_plugin.handover.legacy.judge import tune_legacy
from paddle_rbt_plugin.handover.pir.patches import install_for_pass_alone
from paddle_rbt_plugin.handover.pir.pipeline import annotate_plan
from paddle_rbt_plugin.handover.pir.recompute import is_allowed, mark
from paddle_rbt_plugin.handover.pir.seeds import register_streams, stream_names
from paddle_rbt_plugin.handover.pir.shared_weights import copies_in, original_name
from paddle_rbt_plugin.handover.pir.static_shapes import make_shapes_static
from paddle_rbt_plugin.handover.shared.conversion import paddle_mesh
from paddle_rbt_plugin.handover.shared.gloo import enable_static_training_on_cpu
from paddle_rbt_plugin.handover.shared.random_streams import common_seed
from paddle_rbt_plugin.handover.shared.strategy import as_the_program_runs
from paddle_rbt_plugin.plan.plan import Plan
from paddle_rbt_plugin.request import Request
from paddle_rbt_plugin.tuner import tune_graph

PLAN = "plan"
_EXTRA = ("global_batch", "precision", "loss", "constraints")


@register_pass(PASS_NAME)
class RuleBasedTunerPass(PassBase):
    """Plans and annotates one program of either IR. Raises TunerError for wrong attributes, programs and clusters."""

    def _check_self(self) -> bool:
        return True

    def _check_conflict(self, other_pass: Any) -> bool:
        return True

    def _apply_single_impl(self, main_program: Any, startup_program: Any, context: Any) -> None:
        extra = {key: self._attrs[key] for key in _EXTRA if self._attrs.get(key) is not None}
        settings = Settings.from_mapping({k: v for k, v in self._attrs.items() if k not in _EXTRA})
        request = Request(settings, extra.get("global_batch"), extra.get("precision"))
        loss, constraints = extra.get("loss"), extra.get("constraints")
        alone = constraints is None
        world = paddle.distributed.get_world_size()
        if not alone or world > 1 or settings.cluster is None:
            check_job(request.cluster, world)
        legacy = read_legacy_program(main_program, loss) if is_legacy(main_program) else None
        if legacy is None:
            make_shapes_static(main_program)
        graph = legacy.graph if legacy is not None else read_program(main_program, loss)
        if constraints is None:
            steps = (request.global_batch or 0) // graph.batch.size
            asked = set(
                settings.search_space or {}
            )  # a script that asks this pass alone for these also runs Paddle's passes for them
            recompute = None if "recompute" in asked and legacy is None else "none"
            constraints = as_the_program_runs(max(steps, 1), recompute, legacy=legacy is not None, pipeline="pp" in asked)
        request = replace(request, constraints=tuple(constraints))
        if legacy is not None:
            plan = tune_legacy(main_program, legacy, request)
            annotate_legacy(main_program, legacy, plan)
        else:
            plan = tune_graph(graph, request)
            if alone and plan.vpp > 1:
                raise TunerError(
                    f"the plan {settings.load_path!r} interleaves {plan.vpp} chunks per stage, which only auto.Engine and "
                    "dist.to_static can run; to apply the pass alone, plan with "
                    "search_space={'schedule': ['1F1B', 'FThenB']}"
                )
            if is_allowed(plan, constraints):
                mark(main_program, graph, plan)
            if alone:
                install_for_pass_alone()
            placements = {name: t.placement for name, t in plan.leaves(graph).items()}
            apply_plan(main_program, plan, placements, settings.blocked_plugins)
            shared = copies_in(main_program) if alone else []
            if shared:
                names = ", ".join(sorted({original_name(name) for name in shared}))
                raise TunerError(
                    f"several stages of the plan hold {names}, whose gradients only auto.Engine and dist.to_static sum once "
                    f"per step; to apply the pass alone, plan with search_space={{'pp': 1}}"
                )
        context.set_attr(PLAN, plan)


def apply_plan(program: Any, plan: Plan, placements: dict[str, Placement], blocked: Sequence[str] = ()) -> None:
    """Annotates a program in place; ``blocked`` plugins do not name custom ops.

    Raises TunerError for a plan that PIR cannot execute this way."""
    meshes = list(dict.fromkeys(stage.process_mesh for stage in plan.stages))
    enable_static_training_on_cpu([paddle_mesh(mesh) for mesh in meshes])
    forms = forms_of_job(plan)
    if forms != forms_on(Cluster.from_dict(plan.cluster)) and plan.degrees["mp"] > 1:
        warnings.warn(
            "the plan is for GPUs, but this job runs on CPUs, which have no kernel for a loss on sharded logits: the logits "
            "are gathered, which the estimate does not include; plan for the devices of this job to include it",
            TunerWarning,
            stacklevel=2,
        )
    annotate_plan(program, plan, placements, forms, blocked)
    if stream_names(program):
        register_streams(program, common_seed())


def forms_of_job(plan: Plan) -> Collection[str]:
    """The ops that take another form: as planned, except for kernels that a job on CPUs lacks."""
    on_cpus = paddle.distributed.get_world_size() > 1 and not paddle.is_compiled_with_cuda()
    return CPU_FORMS if on_cpus else forms_on(Cluster.from_dict(plan.cluster))


def placements_for(graph: Graph, plan: Plan, replicated: bool = False) -> dict[str, Placement]:
    """Placements for another program of the same model, for evaluation or prediction: parameters as planned, data sharded by
    the batch, or ``replicated`` if the batch cannot be divided.

    Raises TunerError for a parameter that the plan does not know."""
    mesh = plan.stages[0].process_mesh
    placements = {}
    for t in (*graph.params, *graph.data):
        if t.kind == "data" and replicated:
            placements[t.name] = Placement.replicated(t.ndim)
        elif t.name in plan.tensors:
            placements[t.name] = plan.tensors[t.name].placement
        elif t.kind == "data":
            whole = Placement.replicated(t.ndim)
            placements[t.name] = data_parallel(t, graph.batch, mesh.axes.index("dp")) if "dp" in mesh.axes else whole
        else:
            raise TunerError(f"the program reads the parameter {t.name!r}, which the training plan does not place")
    return placements
