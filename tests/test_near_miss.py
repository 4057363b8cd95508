"""Why a pattern does not match: how far it fits, and the first node or attribute that does not."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from pattern_graphs import GraphWriter
from test_matcher import pattern
from test_matcher_property import as_pattern, graphs, steps

from paddle_rbt_plugin.pattern import compile_pattern
from paddle_rbt_plugin.pattern.matcher import Budget, GraphIndex, occurrences
from paddle_rbt_plugin.pattern.near_miss import near_miss
from paddle_rbt_plugin.pattern.report import match_report


def gated(activation="silu", between=(), up_shape=(64, 256), transpose_up=False):
    """A graph of down(activation(gate(x)) * up(x))."""
    w = GraphWriter()
    x = w.data(8, 16, 64)
    gate = w.op("matmul", x, w.param(64, 256), transpose_x=False, transpose_y=False)
    up = w.op("matmul", x, w.param(*up_shape), transpose_x=False, transpose_y=transpose_up)
    h = w.op(activation, gate)
    for type_ in between:
        h = w.op(type_, h)
    w.op("matmul", w.op("multiply", h, up), w.param(256, 64), transpose_x=False, transpose_y=False)
    return w.graph()


def draw(g, attrs=None, where=None):
    x = g.tensor("x")
    h = g.op("silu", g.op("matmul", x, g.param("gate")))
    up = g.op("matmul", x, g.param("up", ndim=2, where=where), attrs=attrs)
    g.op("matmul", g.op("multiply", h, up), g.param("down"))


def miss(graph, build=draw):
    return near_miss(graph, compile_pattern(pattern(build, {"x": (...,)})))


def test_a_pattern_that_occurs_has_no_near_miss():
    assert miss(gated()) is None


def test_another_op_in_the_place_of_one_is_named():
    found = miss(gated("relu"))
    assert [fit.found.split("(")[0] for fit in found.fits] == ["matmul_0", "matmul_1", "multiply_3", "matmul_4"]
    assert (found.ops, found.wanted) == (5, "silu(the result of matmul)")
    assert (found.nearest, found.objection) == ("relu_2(var_2 [8, 16, 64])", "it is relu, not silu")


def test_an_op_in_between_is_named():
    found = miss(gated(between=["dropout"]))
    assert (len(found.fits), found.wanted) == (4, "silu(the result of matmul)")
    assert (found.nearest, found.objection) == ("dropout_3(var_5 [8, 16, 64])", "it is dropout, not silu")


def test_the_first_attribute_that_differs_is_named_with_both_values():
    found = miss(gated(transpose_up=True), lambda g: draw(g, {"transpose_y": False}))
    assert found.wanted == "matmul(x, up)"
    assert found.objection == "transpose_y is True; wanted: transpose_y False"
    absent = miss(gated(), lambda g: draw(g, {"alpha": 1.0}))
    assert absent.objection == "it has no attribute alpha; wanted: alpha 1.0"
    refused = miss(gated(), lambda g: draw(g, lambda attrs: attrs["transpose_x"]))
    assert refused.objection == "the pattern's condition refuses its attributes (transpose_x=False, transpose_y=False)"


def test_a_tensor_of_another_kind_rank_or_shape_is_named():
    found = miss(gated(up_shape=(64, 256, 1)))
    assert found.objection == "its param_3 [64, 256, 1] has 3 dimensions, and up must have 2"
    found = miss(gated(), lambda g: draw(g, where=lambda t: t.shape[1] > 1000))
    assert found.objection == "the condition (where=...) on up refuses param_3 [64, 256] float32"
    w = GraphWriter()
    w.op("relu", w.data(8, 64))
    found = miss(w.graph(), lambda g: g.op("relu", g.param("x")))
    assert found.objection == "its data_0 [8, 64] is an input of the program, and x must be a parameter"


def test_a_condition_that_raises_is_named():
    found = miss(gated(), lambda g: draw(g, where=lambda t: t.shape[7]))
    assert found.objection == "the condition on up raised IndexError: tuple index out of range"


def test_one_tensor_where_the_pattern_has_two_is_named():
    w = GraphWriter()
    x = w.data(8, 64)
    w.op("multiply", x, x)
    found = miss(w.graph(), lambda g: g.op("multiply", g.tensor("x"), g.tensor("y")))
    assert found.objection == "its data_0 [8, 64] stands for x already, so it cannot be y too"


def test_another_tensor_where_the_pattern_has_one_is_named():
    w = GraphWriter()
    w.op("multiply", w.data(8, 64), w.data(8, 64))

    def square(g):
        x = g.tensor("x")
        g.op("multiply", x, x)

    assert miss(w.graph(), square).objection == "it has data_1 [8, 64] where x, which is data_0 [8, 64], is wanted"


def test_what_nothing_reads_and_what_nothing_writes_is_named():
    w = GraphWriter()
    w.op("relu", w.data(8, 64))
    assert miss(w.graph(), lambda g: g.op("exp", g.op("relu", g.tensor("x")))).objection == "no op reads var_1 [8, 16, 64]"
    found = miss(w.graph(), lambda g: g.op("relu", g.op("exp", g.tensor("x"))))
    assert found.objection == "its data_0 [8, 64] is an input of the program, and the result of exp must be a result of an op"


def test_a_chain_that_does_not_lead_there_is_named():
    w = GraphWriter()
    a, b = w.data(8, 64), w.data(8, 64)
    w.op("multiply", w.op("exp", w.op("cast", a)), w.op("exp", b))

    def build(g):
        x = g.tensor("x")
        g.op("multiply", g.op("exp", g.chain("cast", x)), g.op("exp", x))

    found = miss(w.graph(), build)
    assert (len(found.fits), found.wanted) == (3, "a chain of cast from x")
    assert found.objection == "no way leads from data_1 [8, 64] through at most 8 of cast to var_2 [8, 16, 64]"


def test_a_model_without_any_of_the_ops_says_so():
    w = GraphWriter()
    w.op("relu", w.data(8, 64))
    found = miss(w.graph())
    assert (found.fits, found.nearest, found.objection) == ((), "", "the model has no matmul")


@settings(max_examples=300, deadline=None)
@given(graphs(), steps())
def test_there_is_a_near_miss_exactly_where_there_is_no_occurrence_and_it_always_says_why(graph, drawn):
    compiled = compile_pattern(as_pattern(drawn, frozenset({"out0"})))
    index = GraphIndex(graph)
    occurs = any(next(occurrences(v, index, Budget(10**6)), None) is not None for v in compiled.variants)
    found = near_miss(graph, compiled)
    assert (found is None) == occurs
    if found is not None:
        assert found.objection and found.wanted and len(found.fits) <= found.ops
        assert "the search ended here" not in found.objection


def test_the_report_of_a_pattern_says_all_of_it_and_is_plain_json():
    compiled = compile_pattern(pattern(draw, {"x": ("dp", ..., None), "up": (None, "mp")}, "mine"), "acme", "1.2", "a = b")
    report = match_report(gated(), compiled)
    assert report.count == 1 and "mine matches 1 time" in str(report) and "up = param_3 (None, 'mp')" in str(report)
    tensors = {"x": "data_0", "gate": "param_1", "up": "param_3", "down": "param_7"}
    assert json.loads(json.dumps(report.to_dict()))["matches"] == [tensors]
    missed = match_report(gated("relu"), compiled)
    assert "4 of 5 ops fit" in str(missed) and missed.to_dict()["near_miss"]["objection"] == "it is relu, not silu"


def test_the_report_tells_what_is_dropped_declined_raised_and_unknown():
    def report(build=draw, shard=None, others=()):
        return str(match_report(gated(), pattern(build, shard or {"x": ("dp", ..., None)}, "mine"), others))

    twice = {"x": ("dp", ...), "y": (...,)}
    assert "asks for two shardings" in report(lambda g: g.op("silu", g.chain("cast", g.var("x"), name="y")), twice)
    assert "declines every place" in report(shard=lambda self, match: {})
    assert "left out: its own code raised IndexError" in report(lambda g: draw(g, where=lambda t: t.shape[7]))
    assert "Paddle has no op named 'sillu'; did you mean 'silu'" in report(lambda g: g.op("sillu", g.tensor("x")))
    rival = compile_pattern(pattern(draw, {"up": ("mp", None), "down": (None, "mp")}, "rival"))
    assert "dropped: claims param_3 as (None, 'mp'), but rival claims it" in report(shard={"up": (None, "mp")}, others=[rival])


@pytest.mark.parametrize("attempt", range(3))
def test_the_answer_is_the_same_every_time(attempt):
    assert miss(gated("relu")) == miss(gated("relu"))
