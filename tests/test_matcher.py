import pytest
from pattern_graphs import GraphWriter, self_attention

from paddle_rbt_plugin.graph import Graph
from paddle_rbt_plugin.layers import Layers, Segment
from paddle_rbt_plugin.pattern import Pattern, match_all
from paddle_rbt_plugin.pattern.matcher import OCCURRENCE_STEPS


def pattern(build, shard, name="sample", **fields):
    return type("Sample", (Pattern,), {"name": name, "build": lambda self, g: build(g), "shard": shard, **fields})


def found(graph, *patterns, **options):
    return [dict(m.tensors) for m in match_all(graph, patterns, **options).matches]


def two_layer_mlp(g):
    h = g.optional("add", g.op("matmul", g.tensor("x"), g.param("w1")), g.param("b1"))
    h = g.optional("add", g.op("matmul", g.op("relu", h), g.param("w2")), g.param("b2"))


MLP = pattern(two_layer_mlp, {"w1": (None, "mp"), "w2": ("mp", None)}, "mlp")


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("second", [True, False])
def test_a_match_with_its_optional_op_hides_the_one_without(first, second):
    w = GraphWriter()
    x = w.data(8, 64)
    w.linear(w.op("relu", w.linear(x, 64, 256, first)), 256, 64, second)
    (names,) = found(w.graph(), MLP)
    assert ("b1" in names, "b2" in names) == (first, second)


def test_backtracking_finds_what_a_greedy_choice_would_miss():
    """The first user of x is a matmul that leads nowhere."""
    w = GraphWriter()
    x = w.data(8, 64)
    for _ in range(3):
        w.op("matmul", x, w.param(64, 64))
    w.op("relu", w.op("matmul", x, w.param(64, 256)))
    relu = pattern(lambda g: g.op("relu", g.op("matmul", g.tensor("x"), g.param("w"))), {"w": (None, "mp")})
    assert [w.tensors[names["w"]].shape for names in found(w.graph(), relu)] == [(64, 256)]


def test_operands_of_commutative_ops_match_either_way_round_and_of_others_in_order():
    w = GraphWriter()
    x, b = w.data(8, 64), w.param(64)
    w.op("add", b, x)
    w.op("subtract", b, x)
    for type_, count in {"add": 1, "subtract": 0}.items():
        p = pattern(lambda g, t=type_: g.op(t, g.data("x"), g.param("b")), {"b": (None,)})
        assert len(found(w.graph(), p)) == count


def test_two_pattern_tensors_are_two_tensors():
    w = GraphWriter()
    x = w.data(8, 64)
    w.op("multiply", x, x)
    assert not found(w.graph(), pattern(lambda g: g.op("multiply", g.tensor("a"), g.tensor("b")), {"a": (...,)}))

    def square(g):
        a = g.tensor("a")
        g.op("multiply", a, a)

    assert len(found(w.graph(), pattern(square, {"a": (...,)}))) == 1


def test_a_chain_reaches_as_far_as_it_may_and_no_further():
    w = GraphWriter()
    h = w.op("matmul", w.data(8, 64), w.param(64, 64))
    for type_ in ("reshape", "transpose", "reshape"):
        h = w.op(type_, h)
    w.op("softmax", h)

    def chained(types, at_most):
        return pattern(
            lambda g: g.op("softmax", g.chain(types, g.op("matmul", g.tensor(), g.param("w")), at_most=at_most)), {"w": (...,)}
        )

    assert len(found(w.graph(), chained({"reshape", "transpose"}, 3))) == 1
    assert not found(w.graph(), chained({"reshape", "transpose"}, 2))
    assert not found(w.graph(), chained({"reshape"}, 3))
    (match,) = match_all(w.graph(), [chained({"reshape", "transpose"}, 5)]).matches
    assert match.ops == (0, 1, 2, 3, 4)


def test_a_chain_may_be_empty():
    w = GraphWriter()
    w.op("softmax", w.op("matmul", w.data(8, 64), w.param(64, 64)))
    p = pattern(lambda g: g.op("softmax", g.chain("cast", g.op("matmul", g.tensor(), g.param("w")), name="h")), {"w": (...,)})
    assert len(found(w.graph(), p)) == 1


def test_symmetric_matches_are_one():
    def three(g):
        x = g.tensor("x")
        g.op("sum", *(g.op("matmul", x, g.param(f"w{i}")) for i in range(3)))

    w = GraphWriter()
    x = w.data(8, 64)
    w.op("sum", *(w.op("matmul", x, w.param(64, 64)) for _ in range(3)))
    assert len(found(w.graph(), pattern(three, {f"w{i}": (None, "mp") for i in range(3)}))) == 1


def test_attributes_are_matched_by_value_and_by_predicate():
    w = GraphWriter()
    x, y = w.data(8, 64), w.param(64, 64)
    w.op("matmul", x, y, transpose_y=True)
    w.op("matmul", x, y, transpose_y=False)
    for attrs, op in (({"transpose_y": True}, 0), (lambda a: not a["transpose_y"], 1)):
        p = pattern(lambda g, a=attrs: g.op("matmul", g.tensor(), g.param("y"), attrs=a), {"y": (...,)})
        assert [m.ops for m in match_all(w.graph(), [p]).matches] == [(op,)]
    assert not found(w.graph(), pattern(lambda g: g.op("matmul", g.tensor("y"), attrs={"missing": None}), {"y": (...,)}))


def test_shard_may_be_a_method_that_looks_at_shapes_and_attributes():
    class Wide(Pattern):
        name = "wide"

        def build(self, g):
            g.op("matmul", g.tensor("x"), g.param("w"), name="out")

        def shard(self, match):
            assert match.producer("out").type == "matmul" and match.producer("w") is None
            return {"w": (None, "mp")} if match.tensor("w").shape[1] > 100 else {}

    w = GraphWriter()
    x = w.data(8, 64)
    for width in (64, 256):
        w.op("matmul", x, w.param(64, width))
    matches = match_all(w.graph(), [Wide]).matches
    assert [dict(m.specs) for m in matches] == [{3: (None, "mp")}], "an empty answer declines the place"


def test_a_spec_that_does_not_fit_the_tensor_drops_the_match_with_the_reason():
    w = GraphWriter()
    w.op("relu", w.data(8, 16, 64))
    result = match_all(w.graph(), [pattern(lambda g: g.op("relu", g.data("x")), {"x": ("dp", None)})])
    assert not result.matches
    assert "entries for 2 dimensions, but the tensor has 3" in result.dropped[0].reason


def test_two_specs_for_one_tensor_drop_the_match_with_the_reason():
    w = GraphWriter()
    w.op("relu", w.data(8, 64))
    p = pattern(lambda g: g.op("relu", g.chain("cast", g.data("x"), name="y")), {"x": ("dp", None), "y": (None, None)})
    (dropped,) = match_all(w.graph(), [p]).dropped
    assert "two shardings of data_0" in dropped.reason


def test_a_pattern_whose_own_code_raises_is_left_out_and_the_others_stay():
    w = GraphWriter()
    w.op("relu", w.data(8, 64))
    bad = pattern(lambda g: g.op("relu", g.data("x", where=lambda t: t.shape[7])), {"x": (...,)}, "bad")
    good = pattern(lambda g: g.op("relu", g.data("x")), {"x": (...,)}, "good")
    with pytest.warns(UserWarning, match="'bad' is left out, its own code raised IndexError"):
        result = match_all(w.graph(), [bad, good])
    assert [m.pattern for m in result.matches] == ["good"]
    assert result.failed == {"bad": "IndexError: tuple index out of range"}


def test_a_search_that_is_cut_short_says_so():
    w = GraphWriter()
    x = w.data(8, 64)
    for _ in range(30):
        w.op("relu", x)
    star = pattern(lambda g: [g.op("relu", x) for x in [g.data("x")] for _ in range(5)], {"x": (...,)}, "star")
    with pytest.warns(UserWarning, match="'star': search ended after 1000 steps"):
        assert match_all(w.graph(), [star], max_steps=1000).incomplete == ("star",)


ANY = {"relu", "add", "multiply", "softmax"}


def star(g):
    """Five readers of one tensor: of n readers, n to the power of five."""
    x = g.data("x")
    for _ in range(5):
        g.op("relu", x)


def fan(g):
    """Twelve chains from one tensor, each to wherever it reaches."""
    x = g.tensor("x")
    for _ in range(12):
        g.op(ANY, g.chain(ANY, x, at_most=50), g.tensor())


def endless(g):
    """From every op to every op behind it."""
    g.op("softmax", g.chain(ANY, g.op(ANY, g.tensor("x")), at_most=10**9))


def meander(g):
    """Every step of the way has several continuations."""
    h = g.op("add", g.tensor("x"), g.tensor())
    for _ in range(20):
        h = g.op({"add", "multiply"}, g.chain(ANY, h, at_most=8), g.tensor())


@pytest.mark.parametrize("explosive", [star, fan, endless, meander])
def test_no_pattern_makes_the_search_explode(explosive):
    """Whatever a pattern asks, the work is bounded: candidates looked at, and matches made of them."""
    w = GraphWriter()
    a = b = w.data(8, 64)
    for _ in range(30):
        w.op("relu", a)
    for _ in range(300):
        a, b = w.op("add", a, b), w.op("multiply", a, b)
    w.op("softmax", a)
    looked_at = 0

    def look(tensor):
        nonlocal looked_at
        looked_at += 1
        return True

    def build(g):
        tensor, data = g.tensor, g.data
        g.tensor = lambda name="", **how: tensor(name, where=look)
        g.data = lambda name="", **how: data(name, where=look)
        explosive(g)

    budget = 100_000
    with pytest.warns(UserWarning, match=f"search ended after {budget} steps, matches may be missing"):
        result = match_all(w.graph(), [pattern(build, {"x": (...,)}, "explosive")], max_steps=budget)
    assert result.incomplete == ("explosive",)
    assert looked_at <= 2 * 21 * budget, "for each candidate at most its tensors, in both orders"
    assert len(result.matches) + len(result.dropped) <= budget / OCCURRENCE_STEPS


def layers(*groups):
    return Layers(tuple(Segment(ops, layer, True, 0) for layer, ops in enumerate(groups)))


def test_a_match_stays_within_one_layer_unless_its_pattern_spans_layers():
    w = GraphWriter()
    w.linear(w.op("relu", w.linear(w.data(8, 64), 64, 256)), 256, 64)
    assert len(found(w.graph(), MLP, layers=layers(range(5)))) == 1
    result = match_all(w.graph(), [MLP], layers=layers((0, 1, 2), (3, 4)))
    assert not result.matches
    assert {d.reason for d in result.dropped} == {"reaches across layers 0, 1"}
    spanning = type("Spanning", (MLP,), {"spans_layers": True})
    assert len(found(w.graph(), spanning, layers=layers((0, 1, 2), (3, 4)))) == 1


def test_the_optional_op_of_another_layer_is_left_to_it():
    w = GraphWriter()
    w.linear(w.op("relu", w.linear(w.data(8, 64), 64, 256)), 256, 64)
    (names,) = found(w.graph(), MLP, layers=layers((0, 1, 2, 3), (4,)))
    assert "b1" in names and "b2" not in names


def test_matches_come_in_program_order_and_the_same_every_time():
    w = GraphWriter()
    x = w.data(8, 16, 64)
    for _ in range(4):
        x = self_attention(w, w.linear(w.op("relu", w.linear(x, 64, 64)), 64, 64))
    graph = w.graph()
    results = [match_all(Graph(graph.tensors, graph.ops), [MLP]).matches for _ in range(3)]
    assert results[0] == results[1] == results[2]
    assert [m.ops[0] for m in results[0]] == sorted(m.ops[0] for m in results[0])
    assert len(results[0]) == 4


def test_dimensions_are_named_in_the_words_of_the_pattern():
    w = GraphWriter()
    w.op("matmul", w.data(8, 16, 64), w.param(64, 256))
    p = pattern(
        lambda g: g.op("matmul", g.data("x"), g.param("weight")),
        {"x": ("dp", ..., None), "weight": (None, "mp")},
        dim_names={"x": ("batch", ..., None)},
    )
    (match,) = match_all(w.graph(), [p]).matches
    assert [match.dim_name(0, 0), match.dim_name(0, 2), match.dim_name(1, 1)] == ["batch", "dim 2 of x", "dim 1 of weight"]
