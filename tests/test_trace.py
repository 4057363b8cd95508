"""Tracing Layers: losses, labels, names, and what cannot be traced."""

from __future__ import annotations

import sys
import warnings

import paddle
import pytest
from paddle import nn
from paddle.static import InputSpec

from paddle_rbt_plugin.errors import TunerError, UnsupportedProgram
from paddle_rbt_plugin.graph import Batch
from paddle_rbt_plugin.handover.pir.native import trace_records
from paddle_rbt_plugin.handover.pir.trace import trace_layer, with_batch


class Net(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)

    def forward(self, x):
        return self.linear(x)


def test_a_loss_is_called_with_output_and_labels() -> None:
    specs = [InputSpec([4, 6], "float32", "x")]
    labels = [InputSpec([4, 1], "int64", "y")]
    graph = trace_layer(Net(), specs, nn.CrossEntropyLoss(), labels).graph
    assert [t.name for t in graph.data] == ["x", "y"]
    assert "cross_entropy_with_softmax" in [op.type for op in graph.ops]


def test_a_trace_that_fails_leaves_no_parameters_for_the_next_one() -> None:
    class Unfinished(Net):
        def forward(self, x):
            super().forward(x)
            raise ValueError("not finished")

    with pytest.raises(UnsupportedProgram, match="not finished"), pytest.warns(UserWarning):
        trace_layer(Unfinished(), [InputSpec([4, 6], "float32", "x")])
    assert not trace_records()._global_parameter_recorder.params_dict


def test_inputs_without_a_name_get_one() -> None:
    graph = trace_layer(Net(), [InputSpec([4, 6], "float32")], lambda out: out.mean()).graph
    assert [t.name for t in graph.data] == ["input0"]


def test_two_inputs_of_one_name_are_refused() -> None:
    with pytest.raises(TunerError, match="same name"):
        trace_layer(Net(), [InputSpec([4, 6], "float32", "x")], nn.CrossEntropyLoss(), [InputSpec([4, 1], "int64", "x")])


def test_something_that_is_no_spec_is_refused() -> None:
    with pytest.raises(TunerError, match="InputSpec"):
        trace_layer(Net(), [(4, 6)])


def test_a_layer_that_branches_on_a_value_is_transcribed_with_a_warning() -> None:
    class Branch(nn.Layer):
        def forward(self, x):
            total = x.mean()
            if total > 0:
                total = total * 2
            return total

    with pytest.warns(UserWarning, match="trying again"), pytest.raises(UnsupportedProgram, match="control flow"):
        trace_layer(Branch(), [InputSpec([4, 6], "float32", "x")])


def test_a_layer_that_fails_is_named_with_its_error() -> None:
    class Broken(nn.Layer):
        def forward(self, x):
            raise ValueError("no such thing")

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(UnsupportedProgram, match=r"Broken cannot be traced.*no such thing"):
            trace_layer(Broken(), [InputSpec([4, 6], "float32", "x")])


def test_tracing_leaves_the_layer_and_the_mode_alone() -> None:
    net = Net()
    trace_layer(net, [InputSpec([4, 6], "float32", "x")], lambda out: out.mean())
    assert paddle.in_dynamic_mode()
    assert net(paddle.ones([4, 6])).shape == [4, 3]
    assert [name for name, _ in net.named_parameters()] == ["linear.weight", "linear.bias"]


def test_a_layer_in_evaluation_mode_stays_in_it() -> None:
    net = nn.Sequential(nn.Dropout(0.5), nn.Linear(6, 3))
    net.eval()
    graph = trace_layer(net, [InputSpec([4, 6], "float32", "x")], lambda out: out.mean()).graph
    assert not net.training
    assert "dropout" not in [op.type for op in graph.ops] or graph.ops[0].attrs["is_test"]


def test_the_global_batch_replaces_the_batch_dimension_of_inputs_and_labels() -> None:
    specs = [InputSpec([None, 6], "float32", "x"), InputSpec([1, 6], "float32", "table")]
    inputs, labels, batch = with_batch(specs, [InputSpec([None, 1], "int64", "y")], 32)
    assert [tuple(s.shape) for s in (*inputs, *labels)] == [(32, 6), (1, 6), (32, 1)]
    assert batch == Batch(32, frozenset({"x", "y"}))


def test_an_open_batch_dimension_needs_a_global_batch() -> None:
    with pytest.raises(TunerError, match="global_batch"):
        with_batch([InputSpec([None, 6], "float32", "x")], [], None)


def test_ops_of_a_trace_do_not_record_where_they_were_built():
    trace = trace_layer(Net(), [InputSpec([4, 6], "float32", "x")], lambda out: out.mean())
    assert not any(op.callstack for op in trace.program.global_block().ops)
    assert not hasattr(sys, "tracebacklimit")
