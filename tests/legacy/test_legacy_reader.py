"""Legacy programs as graphs: the same as PIR's, and the same errors."""

from __future__ import annotations

import paddle
import pytest
from legacy_models import gpt

import paddle_rbt_plugin as rbt
from paddle_rbt_plugin.graph import read_program
from paddle_rbt_plugin.graph.legacy import read_legacy_program
from paddle_rbt_plugin.layers import cluster_layers
from paddle_rbt_plugin.plugins import load_plugins
from paddle_rbt_plugin.search import analyse


def pir_gpt(layers: int = 2, batch: int = 8):
    from small import traced_gpt

    from paddle_rbt_plugin.models import GPTConfig

    with paddle.pir_utils.IrGuard():
        paddle.disable_static()
        from legacy_models import SMALL_GPT

        try:
            return traced_gpt(GPTConfig(layers=layers, **SMALL_GPT), batch).graph
        finally:
            paddle.enable_static()


needs_pir = pytest.mark.skipif(paddle.__version__.startswith("2."), reason="Paddle 2.6 cannot trace PIR programs")


@needs_pir
@pytest.mark.parametrize("layers", [2, 3])
def test_a_model_read_through_either_ir_is_the_same_graph(layers: int) -> None:
    program = gpt(layers)
    legacy, pir = read_program(program.main, program.loss), pir_gpt(layers)
    assert [op.name for op in legacy] == [op.name for op in pir]
    assert [(t.name, t.shape, t.dtype, t.kind, t.stop_gradient) for t in legacy.tensors if t.kind != "param"] == [
        (t.name, t.shape, t.dtype, t.kind, t.stop_gradient) for t in pir.tensors if t.kind != "param"
    ]
    assert legacy.signature == pir.signature


@needs_pir
def test_a_model_read_through_either_ir_has_the_same_layers_matches_and_plan() -> None:
    program, pir = gpt(3), pir_gpt(3)
    legacy = read_program(program.main, program.loss)
    patterns = load_plugins(()).patterns
    mine, other = analyse(legacy, patterns), analyse(pir, patterns)
    assert [s.ops for s in mine.layers.segments] == [s.ops for s in other.layers.segments]
    assert [(m.pattern, m.tensors) for m in mine.matches.matches] == [(m.pattern, m.tensors) for m in other.matches.matches]
    from paddle_rbt_plugin.config import Settings
    from paddle_rbt_plugin.request import Request
    from paddle_rbt_plugin.tuner import tune_graph

    plans = [tune_graph(graph, Request(Settings(cluster="1x8:V100-32G"))) for graph in (legacy, pir)]
    assert plans[0].degrees == plans[1].degrees
    assert plans[0].estimate == plans[1].estimate
    assert plans[0].candidates == plans[1].candidates
    assert [t.dims_mapping for t in plans[0].tensors.values()] == [t.dims_mapping for t in plans[1].tensors.values()]


def test_ops_and_tensors_lead_back_to_the_program() -> None:
    program = gpt()
    legacy = read_legacy_program(program.main, program.loss)
    block = program.main.global_block()
    for op in legacy.graph:
        written = block.ops[op.source].output_arg_names
        assert all(legacy.variables[t] in written for t in op.results)
    for t in (*legacy.graph.params, *legacy.graph.data):
        assert tuple(block.vars[t.name].shape) == t.shape


@pytest.mark.parametrize("layers", [1, 2, 3, 5, 8])
def test_every_layer_count_gives_as_many_layers(layers: int) -> None:
    program = gpt(layers)
    assert cluster_layers(read_program(program.main, program.loss)).count == layers


def test_an_empty_program_is_refused() -> None:
    with pytest.raises(rbt.UnsupportedProgram, match="empty"):
        read_program(paddle.static.Program())


def test_a_program_with_a_backward_pass_is_refused() -> None:
    program = gpt()
    with rbt.legacy_static_ops(), paddle.static.program_guard(program.main, program.startup):
        paddle.static.append_backward(program.loss)
    with pytest.raises(rbt.UnsupportedProgram, match="not a forward program"):
        read_program(program.main)


def test_a_program_without_a_loss_is_refused() -> None:
    main = paddle.static.Program()
    with paddle.static.program_guard(main, paddle.static.Program()):
        paddle.nn.functional.relu(paddle.static.data("x", [4, 8]))
    with pytest.raises(rbt.UnsupportedProgram, match="no single loss"):
        read_program(main)


def test_dynamic_shapes_are_refused_by_name() -> None:
    main = paddle.static.Program()
    with paddle.static.program_guard(main, paddle.static.Program()):
        paddle.mean(paddle.nn.functional.relu(paddle.static.data("x", [-1, 8])))
    with pytest.raises(rbt.UnsupportedProgram, match="'x' has the dynamic shape"):
        read_program(main)


def test_control_flow_is_refused() -> None:
    main = paddle.static.Program()
    with paddle.static.program_guard(main, paddle.static.Program()):
        x = paddle.static.data("x", [4, 8])
        n = paddle.full([1], 0, "int64")
        paddle.static.nn.while_loop(lambda i, y: i < 3, lambda i, y: [i + 1, y * 2], [n, x])
    with pytest.raises(rbt.UnsupportedProgram, match="control flow"):
        read_program(main)


def test_a_loss_that_is_not_of_the_program_is_refused() -> None:
    with pytest.raises(rbt.UnsupportedProgram, match="'nowhere', is not a variable"):
        read_program(gpt().main, "nowhere")
