"""Clusters: where ranks live, which link they share, and the plain data they are saved as."""

import inspect
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_rbt_plugin.cluster import Cluster, catalogue, parse_cluster
from paddle_rbt_plugin.errors import ClusterError


@st.composite
def clusters(draw):
    groups = draw(
        st.lists(st.tuples(st.integers(1, 5), st.integers(1, 9), st.sampled_from(list(catalogue()))), min_size=1, max_size=3)
    )
    return parse_cluster("+".join(f"{m}x{d}:{name}" for m, d, name in groups))


@given(clusters())
def test_every_rank_has_the_device_and_the_machine_that_counting_gives(cluster):
    expected = []
    for group in cluster.groups:
        for _ in range(group.machines):
            machine = expected[-1][1] + 1 if expected else 0
            expected += [(group.device, machine)] * group.devices_per_machine
    assert [(cluster.device_of(r), cluster.machine_of(r)) for r in range(cluster.device_count)] == expected
    assert cluster.machines == expected[-1][1] + 1


def test_ranks_beyond_the_first_machine_are_devices_and_not_cpus_or_nics():
    """Paddle's own tuner takes rank 8 for the CPU and rank 9 for the NIC of the first machine."""
    cluster = parse_cluster("2x8:A100-80G")
    assert {cluster.device_of(r).name for r in range(16)} == {"A100-80G"}
    assert [cluster.machine_of(r) for r in (7, 8, 9, 15)] == [0, 1, 1, 1]


def test_machines_need_not_have_eight_devices():
    """Paddle's own tuner counts machines x 8."""
    cluster = parse_cluster("3x2:A100-80G")
    assert cluster.device_count == 6
    assert [cluster.machine_of(r) for r in range(6)] == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("rank", [-1, 16])
def test_a_rank_outside_the_cluster_is_an_error(rank):
    with pytest.raises(ClusterError, match=f"has no rank {rank}: its ranks are 0 to 15"):
        parse_cluster("2x8:H100").device_of(rank)


@given(clusters())
def test_plain_data_through_json_gives_an_equal_cluster(cluster):
    again = Cluster.from_dict(json.loads(json.dumps(cluster.to_dict())))
    assert again == cluster
    assert hash(again) == hash(cluster)
    assert parse_cluster(cluster.to_dict()) == cluster


def test_plain_data_keeps_overridden_figures():
    group = parse_cluster("2x8:H100").groups[0]
    odd = replace(group, device=replace(group.device, name="mine", tflops=(("bf16", 0.1 + 0.2),)), nics=3)
    assert Cluster.from_dict(Cluster((odd,)).to_dict()) == Cluster((odd,))


def test_plain_data_is_not_filled_in_from_the_catalogue():
    data = parse_cluster("2x8:H100").to_dict()
    del data["groups"][0]["memory"]
    with pytest.raises(ClusterError, match=r"plan.json: groups\[0\]: memory is missing"):
        Cluster.from_dict(data, "plan.json")


def test_equal_machines_make_a_homogeneous_cluster():
    assert parse_cluster("2x8:H100").is_homogeneous
    assert parse_cluster("2x8:H100+1x8:H100").is_homogeneous
    assert not parse_cluster("2x8:H100+1x4:H100").is_homogeneous
    assert not parse_cluster("2x8:A100-80G+2x8:V100-32G").is_homogeneous


def test_a_group_inside_one_machine_has_the_link_inside():
    link = parse_cluster("2x8:A100-80G").link(range(8, 16))
    assert (link.level, link.bandwidth, link.ranks_per_machine, link.machines) == ("intra", 300e9, 8, 1)


def test_a_group_across_machines_shares_the_network_cards():
    cluster = parse_cluster("2x8:A100-80G")
    everyone, pair = cluster.link(range(16)), cluster.link([3, 11])
    assert (everyone.level, everyone.bandwidth, everyone.ranks_per_machine, everyone.machines) == ("inter", 200e9, 8, 2)
    assert (pair.level, pair.bandwidth, pair.ranks_per_machine, pair.machines) == ("inter", 25e9, 1, 2)
    assert everyone.link == pair.link == cluster.groups[0].inter_link


def test_the_slowest_machine_decides_for_a_mixed_group():
    cluster = parse_cluster("1x8:H100+1x8:V100-32G")
    assert cluster.link(range(16)).bandwidth == 50e9
    assert cluster.link([0, 8, 9]).bandwidth == pytest.approx(12.5e9)
    assert cluster.link([0, 8, 9]).ranks_per_machine == 2


def test_a_group_of_no_ranks_has_no_link():
    with pytest.raises(ClusterError, match="no ranks"):
        parse_cluster("1x8:H100").link([])


def test_the_network_can_be_replaced_per_machine():
    assert parse_cluster("4x8:A100-80G").with_network(100e9).link(range(32)).bandwidth == 100e9


def test_a_cluster_without_machines_is_an_error():
    with pytest.raises(ClusterError, match="at least one group"):
        Cluster(())


def test_nothing_of_paddle_is_imported_with_the_package():
    modules = Path(inspect.getfile(Cluster)).parent.glob("*.py")
    assert not [m.name for m in modules if re.search(r"^(import|from) paddle\b", m.read_text(encoding="utf-8"), re.MULTILINE)]
