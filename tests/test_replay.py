"""Annotating PIR programs by building them again."""

from __future__ import annotations

import paddle
import pytest
from paddle import nn
from paddle.static import InputSpec
from small import traced_gpt

import paddle_rbt_plugin as rbt
from paddle_rbt_plugin.cluster import ProcessMesh
from paddle_rbt_plugin.completion import Placement
from paddle_rbt_plugin.completion.distributed_ops import building_pir, call_op, producer_of
from paddle_rbt_plugin.errors import UnsupportedProgram
from paddle_rbt_plugin.graph.cpp_signatures import signature
from paddle_rbt_plugin.handover.pir.replay import annotate
from paddle_rbt_plugin.handover.pir.trace import Trace, trace_layer
from paddle_rbt_plugin.handover.pir.verification import verify

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


@pytest.mark.skipif(not hasattr(paddle._C_ops, "linear_v2"), reason="this Paddle has no op of its own for linear layers")
def test_linear_layers_of_gpu_builds_are_planned_and_handed_over_as_those_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = traced_gpt()
    with monkeypatch.context() as patch:
        patch.setattr(paddle, "is_compiled_with_cuda", lambda: True)
        trace = traced_gpt()
    assert names(trace.program).count("pd_op.linear_v2") == 12
    assert trace.graph.signature == elsewhere.graph.signature
    plan = rbt.tune(trace.program, cluster="1x4:A100-80G", search_space={"dp": 2, "mp": 2})
    assert {"qkv", "ffn", "row_matmul"} <= plan.patterns.keys()
    assert plan.estimate == rbt.tune(elsewhere.program, cluster="1x4:A100-80G", search_space={"dp": 2, "mp": 2}).estimate
    (comparison,) = verify(plan, trace.graph, trace.program)
    assert comparison.differences == ()
    annotate(trace.program, MESH, batch_sharded(trace))
    assert names(trace.program) == names(elsewhere.program)


def test_ops_of_the_fused_api_and_those_in_place_have_arguments() -> None:
    assert [a.name for a in signature("fused_rotary_position_embedding") or ()][:5] == ["q", "k", "v", "sin", "cos"]
    with building_pir(), paddle.static.program_guard(paddle.static.Program()):
        x, mean, variance = (paddle.static.data(n, shape) for n, shape in (("x", [2, 3, 4, 4]), ("m", [3]), ("v", [3])))
        attrs = {"is_test": False, "momentum": 0.9, "epsilon": 1e-5, "data_format": "NCHW"}
        attrs |= {"use_global_stats": False, "trainable_statistics": False}
        inputs = {"x": [x], "mean": [mean], "variance": [variance], "scale": [], "bias": []}
        for name in ("batch_norm", "batch_norm_"):
            assert producer_of(call_op(name, attrs.items(), inputs)[0]).name() == f"pd_op.{name}"


def test_an_op_without_listed_arguments_is_refused_with_the_reason() -> None:
    with pytest.raises(UnsupportedProgram, match="'array_length' cannot be built again"):
        call_op("array_length", (), {})
