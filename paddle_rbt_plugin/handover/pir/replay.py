"""Annotates a serial PIR program: every op is built again on distributed inputs.

Paddle infers placements when an op is built, never afterwards. So the leaves (parameters and data) of the program are given
distributed types, and each forward op is rebuilt in order through ``paddle._C_ops``, which runs Paddle's own inference.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import paddle

from paddle_rbt_plugin.cluster.mesh import ProcessMesh
from paddle_rbt_plugin.completion.distributed_ops import finished, placement_of, set_placement
from paddle_rbt_plugin.completion.forms import FORMS
from paddle_rbt_plugin.completion.placement import Placement
from paddle_rbt_plugin.completion.sample_wise import PLANNED_ONLY, SAMPLE_WISE
from paddle_rbt_plugin.completion.synchronised import BATCH_NORM, shards_samples
from paddle_rbt_plugin.errors import UnsupportedProgram
from paddle_rbt_plugin.graph.names import CanonicalName
from paddle_rbt_plugin.graph.pir import CONTAINER_OPS, RECOMPUTE_MARKS, SINK_OPS, plain_attrs
from paddle_rbt_plugin.graph.random_ops import draws
from paddle_rbt_plugin.handover.pir.batch_norm import build_batch_norm
from paddle_rbt_plugin.handover.pir.custom_ops import build_custom_op
from paddle_rbt_plugin.handover.pir.local_ops import build_sample_wise
from paddle_rbt_plugin.handover.pir.rewrite import SerialOp, build_op
from paddle_rbt_plugin.handover.pir.seeds import Seeds
from paddle_rbt_plugin.handover.shared.conversion import paddle_mesh
from paddle_rbt_plugin.handover.shared.custom_ops import PREFIX
from paddle_rbt_plugin.plugins import load_plugins

LEAVES = {"builtin.parameter": "parameter_name", "pd_op.data": "name"}


def annotate(
    program: Any,
    mesh: ProcessMesh,
    placements: Mapping[str, Placement],
    forms: Collection[str] = FORMS,
    blocked: Sequence[str] = (),
) -> None:
    """Rebuilds ``program`` in place on ``mesh``; ``placements`` holds every parameter and every data tensor by name, ``forms``
    the ops that may take another form, and ``blocked`` the plugins that name no custom op.

    Raises UnsupportedProgram for a leaf without a placement and for an op that cannot be rebuilt."""
    Annotation(program, (mesh,), placements, forms, blocked).run()


class Annotation:
    """A program that is rebuilt op by op, each on the mesh of its stage: here on the first, for a subclass says otherwise."""

    def __init__(
        self,
        program: Any,
        meshes: Sequence[ProcessMesh],
        placements: Mapping[str, Placement],
        forms: Collection[str],
        blocked: Sequence[str] = (),
    ):
        self.program = program
        self.process_meshes = meshes
        self.meshes = [paddle_mesh(mesh) for mesh in meshes]
        self.placements = placements
        self.forms = forms
        self.seeds = Seeds()
        # Names first: the container that splits a list result goes with its op, and must not be touched afterwards.
        self.ops = [(op.name(), op) for op in program.global_block().ops]
        custom = any(name.startswith(PREFIX) for name, _ in self.ops)
        # An op that reads a value which is not distributed distributes all of the program, which einsum does not survive.
        local = custom or any(_needs_all_placed(name) for name, _ in self.ops)
        self.custom_ops: Mapping[str, CanonicalName] | None = (
            (load_plugins(blocked).op_names if custom else {}) if local else None
        )

    def run(self) -> None:
        """Rebuilds the program in place."""
        was_dynamic = paddle.in_dynamic_mode()
        paddle.enable_static()
        try:
            with paddle.static.program_guard(self.program):
                for position, (name, op) in enumerate(self.ops):
                    if name in LEAVES:
                        self._place(op, op.attrs()[LEAVES[name]])
                    elif self._is_rebuilt(position):
                        paddle.base.libpaddle.pir.set_insertion_point(op)
                        self._rebuild(position, op)
                self._finish()
        finally:
            if was_dynamic:
                paddle.disable_static()

    def _is_rebuilt(self, position: int) -> bool:
        """Whether the op at a position of the serial program is built again where it stands."""
        name, _ = self.ops[position]
        return name not in CONTAINER_OPS and name not in SINK_OPS

    def _place(self, op: Any, leaf: str, stage: int = 0) -> None:
        if leaf not in self.placements:
            raise UnsupportedProgram(f"the plan does not place {leaf!r}, which the program reads")
        set_placement(op.result(0), self.meshes[stage], self.placements[leaf])

    def _rebuild(self, position: int, op: Any) -> None:
        built, _ = rebuild(op, self.process_meshes[0], self.forms, self.seeds, self.custom_ops)
        if self.custom_ops is not None:
            # The first op to read a value that is not distributed distributes all such values of the program, and so the local
            # ones of ops on local tensors; so there is none.
            self._place_whole(built[-1], 0)

    def _place_whole(self, op: Any, stage: int) -> None:
        """Places what reads nothing, which Paddle would place where the first op runs that reads anything unplaced."""
        if not op.operands_source():
            set_placement(op.result(0), self.meshes[stage], Placement.replicated(len(op.result(0).shape)))

    def _finish(self) -> None:
        """What is left to do when all ops are rebuilt."""


def rebuild(
    op: Any, mesh: ProcessMesh, forms: Collection[str], seeds: Seeds, custom_ops: Mapping[str, CanonicalName] | None = None
) -> tuple[list[Any], list[Any]]:
    """Builds an op again, on the types that its operands have now, in its place; ``forms`` as in ``build_op``, and ``seeds``
    builds random ops. ``custom_ops`` are the names that plugins give custom ops, where all values of the program are
    distributed; without that custom ops cannot be built. Returns as ``build_again`` does.

    Raises UnsupportedProgram for an op that cannot be built again."""
    built, results = build_again(op, operands_by_slot(op), mesh, forms, seeds, custom_ops)
    for old_result, new_result in zip(results_of(op), results, strict=False):  # nothing reads what einsum makes besides
        old_result.replace_all_uses_with(new_result)
    erase(op)
    return built, results


def operands_by_slot(op: Any) -> dict[str, list[Any]]:
    """The tensors that an op reads; a slot has several where they come in a list."""
    inputs: dict[str, list[Any]] = {}
    for slot, value in zip(op.get_input_names(), op.operands_source(), strict=True):
        if value is None or not value.initialized():
            inputs[slot] = []
        elif value.is_combine() and value.get_defining_op().name() == "builtin.combine":
            inputs[slot] = list(value.get_defining_op().operands_source())
        else:
            inputs[slot] = [value]
    return inputs


def build_again(
    op: Any,
    inputs: Mapping[str, list[Any]],
    mesh: ProcessMesh,
    forms: Collection[str],
    seeds: Seeds,
    custom_ops: Mapping[str, CanonicalName] | None = None,
    recomputed: bool = True,
) -> tuple[list[Any], list[Any]]:
    """Builds on ``inputs`` what ``op`` computes, beside it; returns the ops built and the tensors that stand for its results.
    They are ``recomputed`` where ``op`` is, or not at all.

    Raises UnsupportedProgram for an op that cannot be built again."""
    name = op.name().split(".", 1)[1]
    synchronised = shards_samples(name, [placement_of(v) for of in inputs.values() for v in of])
    if custom_ops is None and (op.name().startswith(PREFIX) or name in SAMPLE_WISE or synchronised):
        raise UnsupportedProgram(
            f"the op {name!r}, which runs on local tensors, cannot be handed over to pipeline stages; restrict the search to "
            "pp 1"
        )
    if name in PLANNED_ONLY:
        raise UnsupportedProgram(
            f"Paddle cannot train {name!r} in distributed static programs, since it loses gradients of its weights; train the "
            "model in dygraph with plan.shard_layer"
        )
    if op.name().startswith(PREFIX):
        assert custom_ops is not None
        built, results = build_custom_op(name, plain_attrs(op), inputs, mesh, paddle_mesh(mesh), custom_ops)
    elif synchronised:
        built, results = build_batch_norm(op, plain_attrs(op), inputs, mesh)
    elif name in SAMPLE_WISE:
        built, results = build_sample_wise(op, name, plain_attrs(op), inputs, mesh)
    else:
        attrs = plain_attrs(op)
        if draws(name, attrs):
            built = seeds.build(SerialOp(name, attrs, op.result(0), mesh), inputs)
        else:
            built = build_op(SerialOp(name, attrs, op.result(0), mesh, forms), inputs)
        results = results_of(built[-1])
    mark_like(op, built, results, recomputed)
    return built, [finished(value) for value in results]


def _needs_all_placed(name: str) -> bool:
    """Whether a program with such an op must hold no value that is not distributed, except local tensors."""
    return name.removeprefix("pd_op.").removesuffix("_") in (*SAMPLE_WISE, BATCH_NORM, "einsum")


def mark_like(op: Any, built: Sequence[Any], results: Sequence[Any], recomputed: bool = True) -> None:
    """Marks ops that are built in the place of ``op``, and the tensors that stand for its results, as it is marked."""
    for new in built:
        if op.has_attr("struct_name"):
            new.set_str_attr("struct_name", op.attrs()["struct_name"])
        for mark in RECOMPUTE_MARKS:
            if recomputed and op.has_attr(mark):
                new.set_int_attr(mark, op.attrs()[mark])
        new.op_role = op.op_role
    for old_result, new_result in zip(results_of(op), results, strict=False):
        new_result.stop_gradient = old_result.stop_gradient
        if old_result.persistable:  # setting it leaves other results of the op without a value, which nobody can read then
            new_result.persistable = True


def erase(op: Any) -> None:
    """Erases an op that nothing reads, with the containers of its lists."""
    old_inputs = [v for v in op.operands_source() if v is not None and v.initialized() and v.is_combine()]
    for split in [user for r in op.results() if r.initialized() and r.is_combine() for user in r.all_used_ops()]:
        split.erase()
    op.erase()
    for value in old_inputs:
        if value.use_empty():
            value.get_defining_op().erase()


def results_of(op: Any) -> list[Any]:
    """The op's tensors: those of the container that splits a list result."""
    values = []
    for r in op.results():
        users = r.all_used_ops() if r.initialized() and r.is_combine() else []
        values += list(users[0].results()) if users else [r]
    return values
