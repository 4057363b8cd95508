"""Annotates a serial PIR program for pipeline parallelism: each layer's ops on the mesh of its stage.

The program is rebuilt op by op as in ``replay``. An op runs on the stage of its layer; a leaf lies on the stage that reads it
first; an operand that lies on another stage's mesh is brought over by ``paddle._C_ops.reshard`` with the placement it has, once
for each stage that reads it. That holds for the hidden state between two stages, for masks and rotary tables that all
layers share, and for a head tied to the embedding: its weight goes to the last stage and its gradient comes back, in every
micro batch. Paddle's partition turns these reshards into sends and receives, and its pipeline pass makes the jobs of a rank
from ``strategy.pipeline``, which ``strategy.set_pipeline`` fills in.

Where a plan interleaves several chunks per stage, every op is marked with its chunk as well, see ``chunks``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from itertools import groupby
from typing import Any

import paddle

from paddle_rbt_plugin.completion.forms import FORMS
from paddle_rbt_plugin.completion.oracle import placement_of, set_placement
from paddle_rbt_plugin.completion.placement import Placement
from paddle_rbt_plugin.errors import TunerError, UnsupportedProgram
from paddle_rbt_plugin.graph import Graph
from paddle_rbt_plugin.graph.pir import CONTAINER_OPS, SINK_OPS
from paddle_rbt_plugin.handover.chunks import can_be_scheduled, mark
from paddle_rbt_plugin.handover.local import paddle_placements
from paddle_rbt_plugin.handover.patches import chunks_as_marked, receives_awaited
from paddle_rbt_plugin.handover.replay import LEAVES, paddle_mesh, rebuild
from paddle_rbt_plugin.handover.seeds import Seeds
from paddle_rbt_plugin.layers import cluster_layers
from paddle_rbt_plugin.plan.plan import Plan


def annotate_stages(
    program: Any, graph: Graph, plan: Plan, placements: Mapping[str, Placement], forms: Collection[str] = FORMS
) -> None:
    """Rebuilds ``program``, from which ``graph`` was read, in place on the stages of ``plan``. Paddle goes on with it in the
    context ``schedulable(plan)``.

    ``placements`` holds every parameter and every data tensor by name, ``forms`` the ops that may take another form. Raises
    TunerError for stages that differ in shape and for a schedule that this Paddle lacks, UnsupportedProgram as ``annotate``
    does."""
    _check_executable(plan)
    _Annotation(program, graph, plan, placements, forms).run()


def check_order(plan: Plan) -> None:
    """Raises TunerError unless the stages of a plan hold ascending ranks: Paddle tells the stage of a process by its rank."""
    first = [min(mesh.ranks) for mesh in dict.fromkeys(entry.process_mesh for entry in plan.stages)]
    if first != sorted(first):
        raise TunerError(
            f"the stages of the plan begin with the ranks {', '.join(map(str, first))}, but Paddle runs stages in the order of "
            "their ranks; start the job with its machines in that order and describe the cluster so, or plan with level='o2'"
        )


@contextmanager
def schedulable(plan: Plan) -> Iterator[None]:
    """The context in which Paddle makes the program of a rank, and its jobs, of one that is annotated as ``plan`` says."""
    with receives_awaited(), chunks_as_marked() if plan.vpp > 1 else nullcontext():
        yield


def _check_executable(plan: Plan) -> None:
    if plan.vpp > 1 and not can_be_scheduled():
        raise TunerError(
            f"the plan interleaves {plan.vpp} chunks per stage, which Paddle {paddle.__version__} cannot split into jobs; use "
            "Paddle 3.1 or later, or restrict the search with search_space={'schedule': ['1F1B', 'FThenB']}"
        )
    shapes = {(stage.axes, stage.mesh) for stage in plan.stages}
    meshes = dict.fromkeys(stage.process_mesh for stage in plan.stages)
    if len(shapes) > 1 or len(meshes) > plan.degrees["pp"]:
        raise TunerError(
            "the layers of the plan run on meshes of different shapes, which Paddle cannot send between; "
            "restrict the search with search_space={'layer_meshes': 'one'}"
        )


class _Annotation:
    def __init__(self, program: Any, graph: Graph, plan: Plan, placements: Mapping[str, Placement], forms: Collection[str]):
        self.program = program
        self.forms = forms
        self.placements = placements
        self.process_meshes = list(dict.fromkeys(entry.process_mesh for entry in plan.stages))
        self.meshes = [paddle_mesh(mesh) for mesh in self.process_meshes]
        layers = cluster_layers(graph)
        chunks = [chunk for chunk, (_, entries) in enumerate(groupby(plan.stages, lambda e: e.process_mesh)) for _ in entries]
        layer_of, entry_of = layers.layer_of(), plan.stage_of_layers(layers.count)
        self.interleaved = plan.vpp > 1
        self.chunks = {op.source: chunks[entry_of[layer_of[op.index]]] for op in graph}
        self.leaf_chunks = {
            t.name: min((self.chunks[op.source] for op in graph.consumers(t.index)), default=0)
            for t in (*graph.params, *graph.data)
        }
        self.moved: dict[tuple[int, int], Any] = {}
        self.seeds = Seeds()

    def run(self) -> None:
        pir = paddle.base.libpaddle.pir
        was_dynamic = paddle.in_dynamic_mode()
        paddle.enable_static()
        try:
            with paddle.static.program_guard(self.program):
                # Names first: a container may go with the op that it belongs to.
                ops = [(op.name(), op) for op in self.program.global_block().ops]
                for position, (name, op) in enumerate(ops):
                    if name in LEAVES:
                        self._place(op, op.attrs()[LEAVES[name]])
                    elif name not in CONTAINER_OPS and name not in SINK_OPS:
                        pir.set_insertion_point(op)
                        chunk = self.chunks.get(position)
                        stage = 0 if chunk is None else chunk % len(self.meshes)
                        if chunk is not None:
                            self._bring_operands(op, stage)
                        built = rebuild(op, self.process_meshes[stage], self.forms, self.seeds)
                        if chunk is not None:
                            for new in built:
                                self._mark(new, chunk)
        finally:
            if was_dynamic:
                paddle.disable_static()

    def _place(self, op: Any, leaf: str) -> None:
        if leaf not in self.placements:
            raise UnsupportedProgram(f"the plan does not place {leaf!r}, which the program reads")
        chunk = self.leaf_chunks.get(leaf, 0)
        set_placement(op.result(0), self.meshes[chunk % len(self.meshes)], self.placements[leaf])
        self._mark(op, 0)  # as Paddle has it: the first chunk of a stage is fed

    def _mark(self, op: Any, chunk: int) -> None:
        """Marks an op and its lists of values with a chunk of the model, where the schedule has use for it."""
        if self.interleaved:
            lists = [v.get_defining_op() for v in op.operands_source() if v.initialized() and v.is_combine()]
            lists += [user for v in op.results() if v.initialized() and v.is_combine() for user in v.all_used_ops()]
            for marked in (op, *lists):
                mark(marked, chunk // len(self.meshes))

    def _bring_operands(self, op: Any, stage: int) -> None:
        for i, value in enumerate(op.operands_source()):
            if value is None or not value.initialized():
                continue
            if value.is_combine():
                container = value.get_defining_op()
                if container.name() == "builtin.combine":
                    self._bring_operands(container, stage)
            elif value.is_dist() and value.process_mesh != self.meshes[stage]:
                op.operand(i).set_source(self._bring(value, stage))

    def _bring(self, value: Any, stage: int) -> Any:
        key = (value.id, stage)
        if key not in self.moved:
            axes = len(self.meshes[stage].shape)
            # A sum over ranks is finished before it leaves: Paddle sends whole values only.
            whole = paddle_placements(Placement(placement_of(value).dims_mapping), axes)
            if any(p.is_partial() for p in value.placements):
                value = paddle._C_ops.reshard(value, value.process_mesh, whole)
            self.moved[key] = paddle._C_ops.reshard(value, self.meshes[stage], whole)
        return self.moved[key]
