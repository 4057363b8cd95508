"""Collectives."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_rbt_plugin.cluster import parse_cluster
from paddle_rbt_plugin.cost import DEFAULT
from paddle_rbt_plugin.cost.communication import collective_seconds, group_network, split_network

KINDS = st.sampled_from(["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
BYTES = st.floats(1.0, 1e10)
CLUSTER = parse_cluster("4x8:A100-80G")
GROUPS = st.sampled_from([(0, 1), (0, 1, 2, 3), tuple(range(8)), (0, 8), (0, 8, 16, 24), tuple(range(16)), tuple(range(32))])


@given(KINDS, BYTES, BYTES, GROUPS)
def test_more_bytes_are_never_faster(kind: str, a: float, b: float, group: tuple[int, ...]) -> None:
    net = group_network(CLUSTER, group)
    small, large = (collective_seconds(kind, n, net, DEFAULT) for n in sorted((a, b)))  # type: ignore[arg-type]
    assert small <= large


@given(KINDS, BYTES, GROUPS, st.floats(1.0, 10.0))
def test_more_bandwidth_is_never_slower(kind: str, nbytes: float, group: tuple[int, ...], factor: float) -> None:
    net = group_network(CLUSTER, group)
    for name in ("intra_bandwidth", "inter_bandwidth"):
        faster = replace(net, **{name: getattr(net, name) * factor})
        old, new = (collective_seconds(kind, nbytes, n, DEFAULT) for n in (net, faster))  # type: ignore[arg-type]
        assert new <= old


@given(st.sampled_from(["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "p2p"]), BYTES)
def test_one_rank_communicates_for_nothing(kind: str, nbytes: float) -> None:
    assert collective_seconds(kind, nbytes, group_network(CLUSTER, (3,)), DEFAULT) == 0.0  # type: ignore[arg-type]


@given(BYTES, GROUPS)
def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather_in_one_launch(nbytes: float, group: tuple[int, ...]) -> None:
    net = group_network(CLUSTER, group)
    whole, scatter, gather = (
        collective_seconds(kind, nbytes, net, DEFAULT)  # type: ignore[arg-type]
        for kind in ("all_reduce", "reduce_scatter", "all_gather")
    )
    assert whole == pytest.approx(scatter + gather - DEFAULT.collective_launch_s)


def test_a_group_across_machines_is_bound_by_its_share_of_the_network_cards() -> None:
    whole_machines = group_network(CLUSTER, tuple(range(16)))
    one_per_machine = group_network(CLUSTER, (0, 8))
    assert one_per_machine.inter_bandwidth == pytest.approx(whole_machines.inter_bandwidth / 8)
    fast, slow = (collective_seconds("all_reduce", 1e9, n, DEFAULT) for n in (whole_machines, one_per_machine))
    assert slow > 4 * fast


def test_a_send_between_machines_is_slower_than_within_one() -> None:
    inside, between = (collective_seconds("p2p", 1e8, group_network(CLUSTER, pair), DEFAULT) for pair in ((0, 1), (0, 8)))
    assert between > inside


@pytest.mark.parametrize(("mp", "size"), [(1, 2), (1, 4), (1, 8), (1, 16), (2, 2), (2, 4), (2, 8), (4, 2), (4, 4)])
def test_a_split_group_has_the_networks_of_its_parts_and_of_counterparts(mp: int, size: int) -> None:
    ranks = tuple(range(0, 32, mp))
    inside, across = split_network(group_network(CLUSTER, ranks), size)
    for found, group in ((inside, ranks[:size]), (across, ranks[::size])):
        expected = group_network(CLUSTER, group)
        assert (found.ranks, found.machines) == (expected.ranks, expected.machines)
        if found.machines > 1:
            assert found.inter_bandwidth == pytest.approx(expected.inter_bandwidth)
