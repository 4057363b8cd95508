"""Annotating PIR programs by building them again."""

from __future__ import annotations

import paddle
import pytest
from paddle import nn
from paddle.static import InputSpec
from small import traced_gpt

from paddle_rbt_plugin.cluster import ProcessMesh
from paddle_rbt_plugin.completion import Placement
from paddle_rbt_plugin.errors import UnsupportedProgram
from paddle_rbt_plugin.handover.replay import annotate
from paddle_rbt_plugin.handover.trace import Trace, trace_layer

MESH = ProcessMesh(("dp", "mp"), (2, 4), tuple(range(8)))


def batch_sharded(trace: Trace) -> dict[str, Placement]:
    return {
        t.name: Placement((0, *(-1,) * (t.ndim - 1))) if t.kind == "data" else Placement.replicated(t.ndim)
        for t in trace.graph.tensors
        if t.kind != "var"
    }


def names(program) -> list[str]:
    return [op.name() for op in program.global_block().ops]


def test_every_value_of_an_annotated_program_is_distributed() -> None:
    trace = traced_gpt()
    before = names(trace.program)
    annotate(trace.program, MESH, batch_sharded(trace))
    constants = ("pd_op.full", "pd_op.full_int_array")
    ops = [op for op in trace.program.global_block().ops if op.name() not in constants]
    assert [op.name() for op in ops] == [n for n in before if n not in constants]
    assert all(r.is_dist() for op in ops for r in op.results())
    assert paddle.in_dynamic_mode()


def test_the_structure_of_the_layers_survives() -> None:
    trace = traced_gpt()

    def scopes(program):
        return [op.attrs()["struct_name"] for op in program.global_block().ops if op.name() == "pd_op.matmul"]

    before = scopes(trace.program)
    annotate(trace.program, MESH, batch_sharded(trace))
    assert scopes(trace.program) == before


def test_lists_dropout_and_slices_are_rebuilt() -> None:
    class Mixed(nn.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            a, b = paddle.split(self.linear(x), 2, axis=-1)
            parts = paddle.concat([paddle.tanh(a), b[:, :4]], axis=-1)
            stacked = paddle.stack([parts, nn.functional.dropout(parts, 0.1)])
            return paddle.mean(paddle.squeeze(stacked[0].astype("float32")))

    trace = trace_layer(Mixed(), [InputSpec([8, 8], "float32", "x")])
    annotate(trace.program, MESH, batch_sharded(trace))
    dead = [op for op in trace.program.global_block().ops if op.name() == "builtin.combine" and op.result(0).use_empty()]
    assert not dead


def test_a_leaf_that_the_plan_does_not_place_is_named() -> None:
    trace = traced_gpt()
    placements = batch_sharded(trace)
    del placements["tokens"]
    with pytest.raises(UnsupportedProgram, match="'tokens'"):
        annotate(trace.program, MESH, placements)
