"""Annotates a serial PIR program: every op is built again on distributed inputs.

Paddle infers placements when an op is built, never afterwards. So the leaves (parameters and data) of the program are given
distributed types, and each forward op is rebuilt in order through ``paddle._C_ops``, which runs Paddle's own inference.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import paddle

from paddle_rbt_plugin.cluster.mesh import ProcessMesh
from paddle_rbt_plugin.completion.forms import FORMS
from paddle_rbt_plugin.completion.oracle import finished, set_placement
from paddle_rbt_plugin.completion.placement import Placement
from paddle_rbt_plugin.errors import UnsupportedProgram
from paddle_rbt_plugin.graph.pir import CONTAINER_OPS, RECOMPUTE_MARKS, SINK_OPS, plain_attrs
from paddle_rbt_plugin.graph.random_ops import draws
from paddle_rbt_plugin.handover.pir.custom_ops import build_custom_op
from paddle_rbt_plugin.handover.pir.rewrite import build_op
from paddle_rbt_plugin.handover.pir.seeds import Seeds
from paddle_rbt_plugin.handover.shared.conversion import paddle_mesh
from paddle_rbt_plugin.handover.shared.custom_ops import PREFIX

LEAVES = {"builtin.parameter": "parameter_name", "pd_op.data": "name"}


def annotate(program: Any, mesh: ProcessMesh, placements: Mapping[str, Placement], forms: Collection[str] = FORMS) -> None:
    """Rebuilds ``program`` in place on ``mesh``; ``placements`` holds every parameter and every data tensor by name, ``forms``
    the ops that may take another form.

    Raises UnsupportedProgram for a leaf without a placement and for an op that cannot be rebuilt."""
    target = paddle_mesh(mesh)
    pir = paddle.base.libpaddle.pir
    was_dynamic = paddle.in_dynamic_mode()
    paddle.enable_static()
    try:
        with paddle.static.program_guard(program):
            # Names first: the container that splits a list result goes with its op, and must not be touched afterwards.
            ops = [(op.name(), op) for op in program.global_block().ops]
            has_custom_ops = any(name.startswith(PREFIX) for name, _ in ops)
            seeds = Seeds()
            for name, op in ops:
                if name in LEAVES:
                    leaf = op.attrs()[LEAVES[name]]
                    if leaf not in placements:
                        raise UnsupportedProgram(f"the plan does not place {leaf!r}, which the program reads")
                    set_placement(op.result(0), target, placements[leaf])
                elif name not in CONTAINER_OPS and name not in SINK_OPS:
                    pir.set_insertion_point(op)
                    built = rebuild(op, mesh, forms, seeds, has_custom_ops)[0][-1]
                    if has_custom_ops and not built.operands_source():
                        # The first op to read a value that is not distributed distributes all such values of the program, and
                        # so the local ones of custom ops; so there is none.
                        set_placement(built.result(0), target, Placement.replicated(len(built.result(0).shape)))
    finally:
        if was_dynamic:
            paddle.disable_static()


def rebuild(
    op: Any, mesh: ProcessMesh, forms: Collection[str], seeds: Seeds, custom_ops: bool = False
) -> tuple[list[Any], list[Any]]:
    """Builds an op again, on the types that its operands have now, in its place; ``forms`` as in ``build_op``, and ``seeds``
    builds random ops. ``custom_ops`` says that all values of the program are distributed, without which custom ops cannot be
    built. Returns as ``build_again`` does.

    Raises UnsupportedProgram for an op that cannot be built again."""
    built, results = build_again(op, operands_by_slot(op), mesh, forms, seeds, custom_ops)
    for old_result, new_result in zip(results_of(op), results, strict=True):
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
    custom_ops: bool = False,
    recomputed: bool = True,
) -> tuple[list[Any], list[Any]]:
    """Builds on ``inputs`` what ``op`` computes, beside it; returns the ops built and the tensors that stand for its results.
    They are ``recomputed`` where ``op`` is, or not at all.

    Raises UnsupportedProgram for an op that cannot be built again."""
    name = op.name().split(".", 1)[1]
    if op.name().startswith(PREFIX):
        if not custom_ops:
            raise UnsupportedProgram(
                f"the custom op {name!r} cannot be handed over to pipeline stages; restrict the search to pp 1"
            )
        built, results = build_custom_op(name, plain_attrs(op), inputs, mesh, paddle_mesh(mesh))
    else:
        attrs = plain_attrs(op)
        if draws(name, attrs):
            built = seeds.build(name, attrs, inputs, op.result(0), mesh, paddle_mesh(mesh))
        else:
            built = build_op(name, attrs, inputs, op.result(0), mesh, forms)
        results = results_of(built[-1])
    for new in built:
        if op.has_attr("struct_name"):
            new.set_str_attr("struct_name", op.attrs()["struct_name"])
        for mark in RECOMPUTE_MARKS:
            if recomputed and op.has_attr(mark):
                new.set_int_attr(mark, op.attrs()[mark])
        new.op_role = op.op_role
    for old_result, new_result in zip(results_of(op), results, strict=True):
        new_result.stop_gradient = old_result.stop_gradient
        new_result.persistable = old_result.persistable
    return built, [finished(value) for value in results]


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
