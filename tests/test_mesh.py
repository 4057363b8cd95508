"""Process meshes: factorisations, the meshes of pipeline stages, and where the groups of an axis communicate."""

from math import comb, prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_rbt_plugin.cluster import ProcessMesh, axis_link, describe_axis, factorisations, parse_cluster, stage_meshes
from paddle_rbt_plugin.errors import ClusterError

AXES = st.sampled_from([("dp", "mp"), ("mp", "dp")])


@st.composite
def arranged(draw):
    """A cluster and degrees that use all of it."""
    cluster = parse_cluster(f"{draw(st.integers(1, 6))}x{draw(st.integers(1, 12))}:A100-80G")
    return cluster, draw(st.sampled_from(factorisations(cluster.device_count)))


def prime_exponents(n):
    exponents, p = [], 2
    while n > 1:
        e = 0
        while n % p == 0:
            n, e = n // p, e + 1
        exponents.append(e)
        p += 1
    return exponents


@given(st.integers(1, 2000))
def test_factorisations_are_all_triples_each_once(devices):
    triples = factorisations(devices)
    assert all(pp * dp * mp == devices for pp, dp, mp in triples)
    assert len(set(triples)) == len(triples) == prod(comb(e + 2, 2) for e in prime_exponents(devices))


def test_factorisations_are_ordered_by_pp_and_then_by_mp():
    assert factorisations(4) == ((1, 4, 1), (1, 2, 2), (1, 1, 4), (2, 2, 1), (2, 1, 2), (4, 1, 1))


def test_factorisations_reach_the_pipelines_that_the_reference_never_tried():
    """The reference stopped at pp = sqrt(n) and had 8 of these 15."""
    triples = factorisations(16)
    assert len(triples) == 15
    assert (16, 1, 1) in triples and (1, 8, 2) in triples


def test_no_devices_cannot_be_arranged():
    with pytest.raises(ClusterError, match="at least 1"):
        factorisations(0)


@given(arranged(), AXES)
def test_the_meshes_of_the_stages_partition_the_ranks(arrangement, axes):
    cluster, (pp, dp, mp) = arrangement
    meshes = stage_meshes(cluster, pp, dp, mp, axes)
    assert len(meshes) == pp
    assert [rank for mesh in meshes for rank in mesh.ranks] == list(range(cluster.device_count))
    for mesh in meshes:
        assert (mesh.degree("dp"), mesh.degree("mp"), mesh.size) == (dp, mp, dp * mp)
        assert prod(mesh.shape) == mesh.size and len(mesh.axes) == len(mesh.shape)
        assert 1 not in mesh.shape or (mesh.axes, mesh.shape) == (("dp",), (1,))


@given(arranged(), AXES, st.sampled_from(["dp", "mp", "pp"]))
def test_the_groups_of_an_axis_partition_the_mesh(arrangement, axes, axis):
    cluster, degrees = arrangement
    for mesh in stage_meshes(cluster, *degrees, axes):
        groups = mesh.groups(axis)
        assert sorted(rank for group in groups for rank in group) == sorted(mesh.ranks)
        assert {len(group) for group in groups} == {mesh.degree(axis)}
        assert groups[0] == mesh.group(axis)


@given(arranged(), AXES)
def test_two_groups_of_different_axes_share_one_rank(arrangement, axes):
    cluster, degrees = arrangement
    for mesh in stage_meshes(cluster, *degrees, axes):
        assert all(len(set(a) & set(b)) == 1 for a in mesh.groups("dp") for b in mesh.groups("mp"))


@given(arranged())
def test_mp_that_divides_a_machine_stays_inside_it(arrangement):
    cluster, (pp, dp, mp) = arrangement
    for mesh in stage_meshes(cluster, pp, dp, mp):
        if cluster.groups[0].devices_per_machine % mp == 0:
            assert all(len({cluster.machine_of(rank) for rank in group}) == 1 for group in mesh.groups("mp"))
            assert axis_link(mesh, "mp", cluster).level == "intra"


def test_the_last_axis_runs_over_neighbouring_ranks():
    cluster = parse_cluster("1x4:H100")
    (mesh,) = stage_meshes(cluster, 1, 2, 2)
    assert mesh == ProcessMesh(("dp", "mp"), (2, 2), (0, 1, 2, 3))
    assert (mesh.groups("dp"), mesh.groups("mp")) == (((0, 2), (1, 3)), ((0, 1), (2, 3)))
    (turned,) = stage_meshes(cluster, 1, 2, 2, ("mp", "dp"))
    assert (turned.groups("dp"), turned.groups("mp")) == (((0, 1), (2, 3)), ((0, 2), (1, 3)))


def test_axes_of_degree_one_are_left_out():
    cluster = parse_cluster("1x4:H100")
    assert stage_meshes(cluster, 1, 1, 4)[0] == ProcessMesh(("mp",), (4,), (0, 1, 2, 3))
    assert stage_meshes(cluster, 2, 2, 1)[1] == ProcessMesh(("dp",), (2,), (2, 3))
    assert stage_meshes(cluster, 4, 1, 1)[3] == ProcessMesh(("dp",), (1,), (3,))


@pytest.mark.parametrize("degrees", [(1, 2, 2), (3, 1, 1), (0, 8, 1), (-1, -8, 1)])
def test_degrees_that_do_not_use_the_cluster_are_an_error(degrees):
    with pytest.raises(ClusterError, match="does not use the 8 devices of 1x8:H100 exactly"):
        stage_meshes(parse_cluster("1x8:H100"), *degrees)


def test_unknown_axes_are_an_error():
    with pytest.raises(ClusterError, match=r"not \('dp', 'sp'\)"):
        stage_meshes(parse_cluster("1x8:H100"), 1, 4, 2, ("dp", "sp"))


@pytest.mark.parametrize(
    ("degrees", "axis", "text"),
    [
        ((1, 1, 16), "mp", "mp 16 crosses machines of 8"),
        ((1, 2, 8), "mp", "mp 8 stays inside machines of 8"),
        ((1, 2, 8), "dp", "dp 2 crosses machines of 8"),
        ((2, 8, 1), "dp", "dp 8 stays inside machines of 8"),
    ],
)
def test_an_axis_is_described_by_where_it_communicates(degrees, axis, text):
    cluster = parse_cluster("2x8:A100-80G")
    assert describe_axis(stage_meshes(cluster, *degrees)[0], axis, cluster) == text


def test_the_slowest_group_decides_for_an_axis():
    cluster = parse_cluster("3x3:A100-80G")
    (mesh,) = stage_meshes(cluster, 1, 3, 3, ("mp", "dp"))
    assert axis_link(mesh, "mp", cluster).level == "inter"
    uneven = parse_cluster("3x4:A100-80G")
    (mesh,) = stage_meshes(uneven, 1, 4, 3)
    assert axis_link(mesh, "mp", uneven).level == "inter"
