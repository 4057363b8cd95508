"""Which matches stand where several claim one tensor."""

from pattern_graphs import GraphWriter

from paddle_rbt_plugin.pattern import Pattern, match_all


def matmul(name, shard, priority=0):
    def build(self, g):
        g.op("matmul", g.tensor("x"), g.param("w"))

    return type(name, (Pattern,), {"name": name, "priority": priority, "build": build, "shard": shard})


def graph(*widths):
    w = GraphWriter()
    x = w.data(8, 16, 64)
    for width in widths:
        w.op("matmul", x, w.param(64, width))
    return w.graph()


def outcome(graph, *patterns):
    result = match_all(graph, patterns)
    return [m.pattern for m in result.matches], [(d.match.pattern, d.winner.pattern) for d in result.dropped]


def test_equal_claims_agree_however_they_are_spelt():
    a = matmul("a", {"x": ("dp", ..., None), "w": (None, "mp")})
    b = matmul("b", {"x": ("dp", None, None)})
    assert outcome(graph(64), a, b) == (["a", "b"], [])


def test_matches_that_share_an_input_with_equal_specs_both_stand():
    """The parallel blocks of GPT-J."""
    a = matmul("a", {"x": ("dp", ..., None), "w": (None, "mp")})
    assert outcome(graph(64, 256), a) == (["a", "a"], [])


def test_the_larger_priority_wins_over_more_sharded_tensors():
    a = matmul("a", {"x": ("dp", ..., None), "w": (None, "mp")})
    b = matmul("b", {"w": ("mp", None)}, priority=1)
    assert outcome(graph(64), a, b) == (["b"], [("a", "b")])


def test_at_equal_priority_more_sharded_tensors_win():
    a = matmul("a", {"x": (..., None), "w": (None, None)})
    b = matmul("b", {"w": (None, "mp")})
    assert outcome(graph(64), a, b) == (["b"], [("a", "b")])


def test_otherwise_the_earlier_match_wins():
    class First(Pattern):
        name = "z_first_in_the_graph"

        def build(self, g):
            g.op("relu", g.data("x"))

        shard = {"x": ("dp", ...)}

    w = GraphWriter()
    x = w.data(8, 16, 64)
    w.op("relu", x)
    w.op("matmul", x, w.param(64, 64))
    assert outcome(w.graph(), matmul("a", {"x": ("mp", ...)}), First) == (
        ["z_first_in_the_graph"],
        [("a", "z_first_in_the_graph")],
    )


def test_a_loser_is_dropped_whole_and_the_reason_names_tensor_and_winner():
    a = matmul("a", {"x": ("dp", ..., None), "w": (None, "mp")})
    b = matmul("b", {"x": ("mp", ..., None)}, priority=1)
    result = match_all(graph(64), [a, b])
    assert set(result.claims) == {0}
    assert result.claims[0][0] == ("mp", None, None)
    assert result.dropped[0].reason == "claims data_0 as ('dp', None, None), but b claims it as ('mp', None, None)"


def test_a_dropped_match_takes_no_other_with_it():
    """b loses against a, so its claim on the second weight is void and c may have it."""
    a = matmul("a", {"x": ("dp", ..., None), "w": (None, "mp")}, priority=2)
    b = matmul("b", {"x": ("mp", ..., None), "w": (None, None)}, priority=1)
    c = matmul("c", {"w": (None, "mp")})
    assert outcome(graph(64), a, b, c) == (["a", "c"], [("b", "a")])
