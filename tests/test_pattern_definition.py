"""What a pattern class may look like, and what is said about one that may not."""

import pytest

from paddle_rbt_plugin.errors import PatternError
from paddle_rbt_plugin.pattern import Pattern, compile_pattern


def pattern(build, shard=None, **fields):
    return type(
        "Sample", (Pattern,), {"name": "sample", "build": lambda self, g: build(g), "shard": shard or {"x": (...,)}, **fields}
    )


def relu(g):
    return g.op("relu", g.tensor("x"))


def test_optional_ops_and_choices_make_variants_of_which_the_first_has_everything():
    def build(g):
        h = g.optional("add", g.op("matmul", g.tensor("x"), g.param("w")), g.param("b"))
        g.op(g.choose("gelu", "relu", "silu"), h)

    compiled = compile_pattern(pattern(build))
    shapes = {(tuple(sorted(v.names)), *(t for op in v.ops for t in op.types)) for v in compiled.variants}
    assert {tensor.name for tensor in compiled.variants[0].tensors} == {"x", "w", "b", ""}
    assert shapes == {(("b", "w", "x"), "matmul", "add", act) for act in ("gelu", "relu", "silu")} | {
        (("w", "x"), "matmul", act) for act in ("gelu", "relu", "silu")
    }
    assert sorted(compiled.nodes) == ["b", "w", "x"]


def test_several_outputs_can_be_named():
    def build(g):
        mean, variance = g.op("moments", g.tensor("x"), outputs=("mean", "variance"))
        g.op("add", mean, variance)

    assert set(compile_pattern(pattern(build)).nodes) == {"x", "mean", "variance"}


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda g: g.tensor("x"), "'x' is read by no op"),
        (lambda g: None, "no op"),
        (lambda g: (relu(g), g.op("gelu", g.tensor("y"))), "in pieces: nothing joins y"),
        (lambda g: (relu(g), g.op("gelu", g.tensor("x"))), "two tensors are named 'x'"),
        (lambda g: g.op("relu", "x"), "an operand is what g.tensor"),
        (lambda g: g.op((), g.tensor("x")), "an op type is a canonical name"),
        (lambda g: g.op("relu", g.tensor("x"), attrs=3), "attrs is a dict"),
        (lambda g: g.op("relu", g.tensor("x", ndim=-1)), "ndim"),
        (lambda g: g.op("relu", g.chain("cast", g.tensor("x"), at_most=0)), "at_most"),
        (lambda g: 1 / 0, "raised ZeroDivisionError"),
        (lambda g: relu_or_gelu(g), "more than 256 graphs"),
    ],
)
def test_a_graph_that_makes_no_sense_is_refused_with_the_reason(build, message):
    with pytest.raises(PatternError, match=f"pattern 'sample'.*{message}"):
        compile_pattern(pattern(build))


def relu_or_gelu(g):
    h = g.tensor("x")
    for _ in range(9):
        h = g.op(g.choose("relu", "gelu"), h)


def test_a_tensor_of_another_builder_is_refused():
    kept = []

    def build(g):
        kept.append(g.tensor("x"))
        g.op("relu", kept[0])
        g.choose(1, 2)

    with pytest.raises(PatternError, match="another builder"):
        compile_pattern(pattern(build))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"shard": {}}, "has no shard spec"),
        ({"shard": None}, "has no shard spec"),
        ({"shard": [("x", ("dp",))]}, "shard is a dict"),
        ({"shard": {"weigth": ("mp", None)}}, "names 'weigth', which the pattern's graph lacks; did you mean 'weight'?"),
        ({"shard": {"weight": ("mp",)}}, "tensor 'weight': .'mp',. has entries for 1 dimensions, but the tensor has 2"),
        ({"shard": {"weight": ("tp", None)}}, "tensor 'weight': 'tp'"),
        ({"name": ""}, "needs a name"),
        ({"name": "a,b"}, "needs a name"),
        ({"priority": "high"}, "priority is an integer"),
        ({"dim_names": {"w": ("a", "b")}}, "dim_names names 'w'"),
        ({"dim_names": {"weight": ("a",)}}, "dim_names of tensor 'weight'"),
        ({"dim_names": {"weight": "ab"}}, "dim_names is a tuple"),
    ],
)
def test_a_malformed_class_is_refused_with_the_reason(fields, message):
    cls = pattern(lambda g: g.op("matmul", g.tensor("x"), g.param("weight", ndim=2)))
    with pytest.raises(PatternError, match=message):
        compile_pattern(type("Sample", (cls,), fields))


def test_what_is_no_pattern_class_is_refused():
    for thing in (int, relu, Pattern.__new__(Pattern), None):
        with pytest.raises(PatternError, match="takes a subclass of Pattern"):
            compile_pattern(thing)
    with pytest.raises(PatternError, match="must define build"):
        compile_pattern(type("Empty", (Pattern,), {"name": "empty"}))
