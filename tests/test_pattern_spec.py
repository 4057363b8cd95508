import pytest

from paddle_rbt_plugin.errors import PatternError
from paddle_rbt_plugin.pattern import dims_mapping, expand


@pytest.mark.parametrize(
    ("axes", "mapping"),
    [
        (("dp", "mp"), (0, -1, 1)),
        (("mp", "dp"), (1, -1, 0)),
        (("dp",), (0, -1, -1)),
        (("mp",), (-1, -1, 0)),
        (("pp",), (-1, -1, -1)),
    ],
)
def test_axes_that_the_mesh_lacks_are_dropped(axes, mapping):
    assert dims_mapping(("dp", ..., "mp"), 3, axes) == mapping


def test_an_ellipsis_stands_for_any_number_of_dimensions_none_included():
    assert expand(("dp", ..., None), 2) == ("dp", None)
    assert expand(("dp", ..., None), 5) == ("dp", None, None, None, None)
    assert expand((..., "mp"), 1) == ("mp",)
    assert expand((), 0) == expand((...,), 0) == ()


@pytest.mark.parametrize(
    ("spec", "ndim", "message"),
    [
        (("dp", None), 3, "entries for 2 dimensions, but the tensor has 3"),
        (("dp", ..., None), 1, "entries for at least 2 dimensions, but the tensor has 1"),
        (("mpp", None), 2, "'mpp' .* neither an axis .dp, mp, sp, ep, cp."),
        (("pp", None), 2, "'pp'"),
        ((0, -1), 2, "0 in .* neither an axis"),
        ((..., None, ...), 3, "more than once"),
        (("mp", "mp"), 2, "two dimensions along one axis"),
        ("dp", 1, "a shard spec is a tuple"),
    ],
)
def test_a_wrong_spec_says_where_and_what_would_be_right(spec, ndim, message):
    with pytest.raises(PatternError, match=f"^qkv, x: .*{message}"):
        dims_mapping(spec, ndim, ("dp", "mp"), of="qkv, x")
