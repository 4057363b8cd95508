"""Annotates a serial PIR program for pipeline parallelism: each layer's ops on the mesh of its stage.

The program is rebuilt op by op as in ``replay``. An op runs on the stage of its layer, and what it reads comes there in one of
four ways:

- A constant (``Graph.constant_ops``: masks, rotary tables) is computed on every stage that reads it.
- An input is fed to every stage that reads it.
- A parameter lies on every stage that reads it. ``shared_weights`` sums the gradients of its copies once per step.
- Any other value goes from stage to stage by ``paddle._C_ops.reshard``, with the placement it has, until it has reached all who
  read it. Its gradient comes back the same way and is summed on it. No stage sends to any but its neighbours (where chunks are
  interleaved, the last one to the first as well), so stages that wait for their sends to be received never wait in a circle.

Paddle's partition turns these reshards into sends and receives, and its pipeline pass makes the jobs of a rank from
``strategy.pipeline``, which ``strategy.set_pipeline`` fills in.

Where a plan interleaves several chunks per stage, every op is marked with its chunk as well, see ``chunks``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import groupby
from typing import Any

import paddle

from paddle_rbt_plugin.completion.distributed_ops import placement_of, producer_of, set_placement
from paddle_rbt_plugin.completion.forms import FORMS
from paddle_rbt_plugin.completion.placement import Placement
from paddle_rbt_plugin.errors import TunerError
from paddle_rbt_plugin.graph import Graph, read_program
from paddle_rbt_plugin.graph.pir import CONTAINER_OPS, SINK_OPS
from paddle_rbt_plugin.handover.pir.chunks import mark
from paddle_rbt_plugin.handover.pir.patches import chunks_as_marked, receives_awaited
from paddle_rbt_plugin.handover.pir.replay import (
    LEAVES,
    Annotation,
    annotate,
    build_again,
    erase,
    operands_by_slot,
    rebuild,
    results_of,
)
from paddle_rbt_plugin.handover.pir.shared_weights import name_copy, names_restored
from paddle_rbt_plugin.handover.shared.conversion import paddle_placements
from paddle_rbt_plugin.handover.shared.strategy import can_interleave
from paddle_rbt_plugin.layers import cluster_layers
from paddle_rbt_plugin.plan.plan import Plan

pir = paddle.base.libpaddle.pir


def annotate_plan(
    program: Any,
    plan: Plan,
    placements: Mapping[str, Placement],
    forms: Collection[str] = FORMS,
    blocked: Sequence[str] = (),
) -> None:
    """Rebuilds a serial program in place as ``plan`` says, on one mesh or on stages; arguments and errors are those of
    ``annotate`` and ``annotate_stages``."""
    meshes = dict.fromkeys(stage.process_mesh for stage in plan.stages)
    if len(meshes) == 1:
        annotate(program, next(iter(meshes)), placements, forms, blocked)
    else:
        annotate_stages(program, read_program(program, needs_loss=False), plan, placements, forms)


def annotate_stages(
    program: Any, graph: Graph, plan: Plan, placements: Mapping[str, Placement], forms: Collection[str] = FORMS
) -> None:
    """Rebuilds ``program``, from which ``graph`` was read, in place on the stages of ``plan``. Paddle goes on with it in the
    context ``schedulable(plan)``.

    ``placements`` holds every parameter and every data tensor by name, ``forms`` the ops that may take another form. Raises
    TunerError for stages that differ in shape and for a schedule that this Paddle lacks, UnsupportedProgram as ``annotate``
    does."""
    _check_executable(plan)
    _StagedAnnotation(program, graph, plan, placements, forms).run()


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
    with receives_awaited.apply(), names_restored.apply(), chunks_as_marked.apply() if plan.vpp > 1 else nullcontext():
        yield


def _check_executable(plan: Plan) -> None:
    if plan.vpp > 1 and not can_interleave():
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


class _StagedAnnotation(Annotation):
    def __init__(self, program: Any, graph: Graph, plan: Plan, placements: Mapping[str, Placement], forms: Collection[str]):
        meshes = tuple(dict.fromkeys(entry.process_mesh for entry in plan.stages))
        super().__init__(program, meshes, placements, forms)
        self.custom_ops = None  # where values are sent, some are not distributed
        layers = cluster_layers(graph)
        chunks = [chunk for chunk, (_, entries) in enumerate(groupby(plan.stages, lambda e: e.process_mesh)) for _ in entries]
        layer_of = layers.layer_of()
        self.chunk_of_layer = [chunks[entry] for entry in plan.stage_of_layers(layers.count)]
        self.interleaved = plan.vpp > 1
        self.layers = {op.source: layer_of[op.index] for op in graph}
        self.chunks = {source: self.chunk_of_layer[layer] for source, layer in self.layers.items()}
        self.leaf_chunks = {
            t.name: min((self.chunks[op.source] for op in graph.consumers(t.index)), default=0)
            for t in (*graph.params, *graph.data)
        }
        self.constants = self._shared_constants({graph.ops[i].source for i in graph.constant_ops})
        self.made_in: dict[int, int] = {}  # the chunk that makes a value or reads it first, by the value's id
        self.copies: dict[tuple[int, int], Any] = {}  # by the value's id and the stage
        self.last_constant = next(op for name, op in self.ops if name in LEAVES)

    def _shared_constants(self, constant: Collection[int]) -> dict[int, Any]:
        """The ops by their ids that compute constants which several layers read, or others than the ops' own.

        Shapes and numbers, which Paddle has as ops too, are not in the graph: they belong to the layer that reads them."""
        shared: dict[int, Any] = {}
        reading: dict[int, set[int]] = {}  # the layers that read what an op computes, by its id
        position = {op.id(): i for i, op in enumerate(self.program.global_block().ops)}

        def readers(op: Any) -> set[int]:
            found: set[int] = set()
            for user in (user for value in op.results() if value.initialized() for user in value.all_used_ops()):
                known = reading.get(user.id())
                if known is None:
                    known = readers(user) if user.name() in CONTAINER_OPS else {self.layers.get(position[user.id()], -1)}
                found |= known
            return found

        for i, op in reversed(list(enumerate(self.program.global_block().ops))):
            if op.name() in (*LEAVES, *CONTAINER_OPS, *SINK_OPS) or (i in self.layers and i not in constant):
                continue
            layers = reading[op.id()] = readers(op)
            if i not in self.layers and len(layers) == 1:
                self.layers[i] = next(iter(layers))
                if self.layers[i] >= 0:
                    self.chunks[i] = self.chunk_of_layer[self.layers[i]]
            if layers != {self.layers.get(i)} or -1 in layers:
                shared[op.id()] = op
        return shared

    def _is_rebuilt(self, position: int) -> bool:
        return position in self.chunks and self.ops[position][1].id() not in self.constants

    def _place(self, op: Any, leaf: str, stage: int = 0) -> None:
        chunk = self.leaf_chunks.get(leaf, 0)
        super()._place(op, leaf, chunk % len(self.meshes))
        self.made_in[op.result(0).id] = chunk
        self._mark(op, 0)  # as Paddle has it: the first chunk of a stage is fed

    def _rebuild(self, position: int, op: Any) -> None:
        chunk = self.chunks[position]
        self._bring_operands(op, op, chunk)
        stage = chunk % len(self.meshes)
        built, results = rebuild(op, self.process_meshes[stage], self.forms, self.seeds)
        self._place_whole(built[-1], stage)
        for new in built:
            self._mark(new, chunk)
        self.made_in.update((value.id, chunk) for value in results)

    def _finish(self) -> None:
        """Erases the constants of the serial program, of which the stages have copies; what the program returns of them is
        computed on the first stage."""
        for op in reversed(self.constants.values()):
            for value in results_of(op):
                if not value.use_empty():
                    value.replace_all_uses_with(self._constant(value, 0))
            erase(op)

    def _mark(self, op: Any, chunk: int) -> None:
        """Marks an op and its lists of values with a chunk of the model, where the schedule has use for it."""
        if self.interleaved:
            lists = [v.get_defining_op() for v in op.operands_source() if v.initialized() and v.is_combine()]
            lists += [user for v in op.results() if v.initialized() and v.is_combine() for user in v.all_used_ops()]
            for marked in (op, *lists):
                mark(marked, chunk // len(self.meshes))

    def _bring_operands(self, op: Any, reader: Any, chunk: int) -> None:
        """Lets ``op`` read what lies on the stage of ``reader``, which is the op, or reads the list that the op makes."""
        for i, value in enumerate(op.operands_source()):
            if value is None or not value.initialized():
                continue
            if value.is_combine():
                container = value.get_defining_op()
                if container.name() == "builtin.combine":
                    self._bring_operands(container, reader, chunk)
            else:
                op.operand(i).set_source(self._brought(value, reader, chunk))

    def _brought(self, value: Any, reader: Any, chunk: int) -> Any:
        """The value as it is on the stage of the chunk."""
        producer = producer_of(value)
        if producer.id() in self.constants:
            made = self._constant(value, chunk)
            pir.set_insertion_point(reader)
            return made
        stage, made_in = chunk % len(self.meshes), self.made_in[value.id]
        if stage == made_in % len(self.meshes):
            return value
        if (value.id, stage) not in self.copies:
            if producer.name() in LEAVES:
                self.copies[value.id, stage] = self._leaf(producer, stage)
                pir.set_insertion_point(reader)
            else:
                before = value if (stage - made_in) % len(self.meshes) == 1 else self._brought(value, reader, chunk - 1)
                self.copies[value.id, stage] = self._moved(before, stage)
        return self.copies[value.id, stage]

    def _constant(self, value: Any, chunk: int, alone: bool = False) -> Any:
        """A constant as it is computed on the stage of a chunk, where a first reader wants it, or for one reader ``alone``.

        All constants stand before what else the program computes: among the ops of a layer that is recomputed, they would be
        recomputed with it, though others read them."""
        op, stage = producer_of(value), chunk % len(self.meshes)
        if not alone and (value.id, stage) in self.copies:
            return self.copies[value.id, stage]
        changed = op.name().endswith("_")  # it works in place, so nothing else may read its operands
        slots = operands_by_slot(op).items()
        inputs = {slot: [self._constant(v, chunk, changed) for v in values] for slot, values in slots}
        pir.set_insertion_point_after(self.last_constant)
        built, results = build_again(op, inputs, self.process_meshes[stage], self.forms, self.seeds, recomputed=False)
        self._place_whole(built[-1], stage)
        for new in built:
            self._mark(new, chunk)
        self.last_constant = results[-1].get_defining_op()  # the container that splits them, where there is one
        made = {(old.id, stage): new for old, new in zip(results_of(op), results, strict=True)}
        if not alone:
            self.copies.update(made)
        return made[value.id, stage]

    def _leaf(self, op: Any, stage: int) -> Any:
        """The parameter or input on one more stage."""
        pir.set_insertion_point_after(op)
        copy = op.clone(paddle.pir.IrMapping(), paddle.pir.CloneOptions(False, True, True))
        set_placement(copy.result(0), self.meshes[stage], placement_of(op.result(0)))
        if op.name() == "builtin.parameter":
            name_copy(copy, stage)
        self._mark(copy, 0)
        return copy.result(0)

    def _moved(self, value: Any, stage: int) -> Any:
        """The value sent to a stage by the one before."""
        mesh = self.meshes[stage]
        return paddle._C_ops.reshard(value, mesh, paddle_placements(placement_of(value), len(mesh.shape)))
