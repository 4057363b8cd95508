"""The PIR reader: what it keeps, what it folds, what it refuses."""

from __future__ import annotations

import paddle
import pytest
from paddle import nn
from small import SMALL_GPT, lazy_gpt, static_program, traced_gpt

from paddle_rbt_plugin.errors import UnsupportedProgram
from paddle_rbt_plugin.graph import read_program
from paddle_rbt_plugin.handover.pir.trace import trace_layer
from paddle_rbt_plugin.models import input_spec


def data(name: str, shape: list[int], dtype: str = "float32"):
    return paddle.static.data(name, shape, dtype)


def test_constants_that_stand_for_attributes_are_folded() -> None:
    graph = read_program(static_program(lambda: paddle.mean(paddle.reshape(data("x", [4, 6]), [0, 2, 3]))))
    assert [op.type for op in graph.ops] == ["reshape", "mean"]
    assert graph.ops[0].attrs["shape"] == (0, 2, 3)
    assert list(graph.ops[0].inputs) == ["x"]


def test_integer_scalars_keep_their_type() -> None:
    graph = read_program(static_program(lambda: paddle.mean(paddle.concat([data("x", [4, 6]), data("y", [4, 6])], axis=1))))
    concat = graph.ops[0]
    assert concat.attrs["axis"] == 1 and isinstance(concat.attrs["axis"], int)
    assert [t.name for t in graph.op_inputs(concat)] == ["x", "y"]


def test_a_constant_that_an_op_reads_as_a_tensor_stays_an_op() -> None:
    graph = read_program(static_program(lambda: paddle.mean(data("x", [4, 6]) + paddle.full([6], 2.0))))
    assert [op.type for op in graph.ops] == ["full", "add", "mean"]


def test_the_results_of_a_split_are_tensors_of_their_own() -> None:
    def forward() -> None:
        a, b = paddle.split(data("x", [4, 6]), 2, axis=1)
        paddle.mean(a * b)

    graph = read_program(static_program(forward))
    split = graph.ops[0]
    assert [t.shape for t in graph.op_outputs(split)] == [(4, 3), (4, 3)]
    assert graph.ops[1].operands == split.results


def test_names_and_signature_do_not_depend_on_how_often_the_model_was_built() -> None:
    first, second = traced_gpt().graph, traced_gpt().graph
    assert first.signature == second.signature
    assert [t.name for t in first.tensors if t.kind == "var"] == [t.name for t in second.tensors if t.kind == "var"]
    assert {t.structured_name for t in first.params} == {t.structured_name for t in second.params}


def test_the_signature_tells_models_apart() -> None:
    from dataclasses import replace

    assert traced_gpt().graph.signature != traced_gpt(replace(SMALL_GPT, heads=2)).graph.signature
    assert traced_gpt().graph.signature != traced_gpt(batch=4).graph.signature


def test_producers_and_consumers_are_found() -> None:
    graph = traced_gpt().graph
    weight = next(t for t in graph.params if t.structured_name == "gpt.word_embeddings.weight")
    assert graph.producer(weight.index) is None
    assert [op.type for op in graph.consumers(weight.index)] == ["embedding", "matmul"]
    out = graph.tensor("embedding_0.out")
    assert graph.producer(out.index) is graph.ops[0]
    assert out.nbytes == out.numel * 4


def test_an_empty_program_is_refused() -> None:
    with pytest.raises(UnsupportedProgram, match="empty"):
        read_program(paddle.static.Program())


def test_a_program_that_only_declares_inputs_is_empty() -> None:
    with pytest.raises(UnsupportedProgram, match="empty"):
        read_program(static_program(lambda: data("x", [4, 6])))


def test_a_program_without_a_loss_is_refused_and_its_scalars_named() -> None:
    with pytest.raises(UnsupportedProgram, match="loss"):
        read_program(static_program(lambda: data("x", [4, 6]) * 2.0))

    def two() -> None:
        x = data("x", [4, 6])
        paddle.mean(x), paddle.sum(x)

    with pytest.raises(UnsupportedProgram, match=r"mean_0\.out, sum_0\.out"):
        read_program(static_program(two))


def test_a_named_loss_settles_which_scalar_it_is() -> None:
    found = {}

    def two() -> None:
        x = data("x", [4, 6])
        found["loss"] = paddle.mean(x)
        paddle.sum(x)

    program = static_program(two)
    graph = read_program(program, found["loss"])
    assert graph.tensors[graph.loss].name == "mean_0.out"


def test_a_training_program_is_not_a_forward_program() -> None:
    def train() -> None:
        layer = nn.Linear(6, 1)
        loss = paddle.mean(layer(data("x", [4, 6])))
        paddle.optimizer.SGD(0.1, parameters=layer.parameters()).minimize(loss)

    with pytest.raises(UnsupportedProgram, match="not a forward program"):
        read_program(static_program(train))


def test_a_dynamic_dimension_is_refused_with_the_name_of_the_input() -> None:
    with pytest.raises(UnsupportedProgram, match="'x' has the dynamic shape"):
        read_program(static_program(lambda: paddle.mean(data("x", [-1, 6]))))


def test_control_flow_is_refused() -> None:
    def branch() -> None:
        x = data("x", [4, 6])
        paddle.static.nn.cond(paddle.mean(x) > 0, lambda: paddle.mean(x), lambda: paddle.sum(x))

    with pytest.raises(UnsupportedProgram, match="control flow"):
        read_program(static_program(branch))


def test_an_annotated_program_is_refused() -> None:
    from paddle_rbt_plugin.cluster import ProcessMesh
    from paddle_rbt_plugin.completion import Placement
    from paddle_rbt_plugin.handover.pir.replay import annotate

    trace = traced_gpt()
    leaves = {t.name: Placement.replicated(t.ndim) for t in trace.graph.tensors if t.kind != "var"}
    annotate(trace.program, ProcessMesh(("dp",), (2,), (0, 1)), leaves)
    with pytest.raises(UnsupportedProgram, match="already distributed"):
        read_program(trace.program)


def test_scratch_outputs_without_a_size_do_no_harm() -> None:
    class Norm(nn.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1D(6)

        def forward(self, x):
            return paddle.mean(self.norm(x))

    graph = trace_layer(Norm(), [paddle.static.InputSpec([4, 6], "float32", "x")]).graph
    assert graph.loss is not None


def test_parameters_that_nothing_reads_are_kept() -> None:
    class Spare(nn.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.spare = nn.Linear(6, 1), nn.Linear(6, 1)

        def forward(self, x):
            return paddle.mean(self.used(x))

    graph = trace_layer(Spare(), [paddle.static.InputSpec([4, 6], "float32", "x")]).graph
    assert {t.structured_name for t in graph.params} >= {"used.weight", "used.bias"}


def test_large_models_are_read_without_their_memory() -> None:
    from dataclasses import replace

    config = replace(SMALL_GPT, hidden=4096, ffn=16384, heads=32, vocab=50304)
    graph = trace_layer(lazy_gpt(config), input_spec(config, 8)).graph
    assert sum(t.numel for t in graph.params) > 6e8
