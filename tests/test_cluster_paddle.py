"""Paddle's own cluster description, from real objects of Paddle and in its JSON format."""

import json
import re

import pytest

from paddle_rbt_plugin.cluster import parse_cluster
from paddle_rbt_plugin.errors import ClusterError

paddle_cluster = pytest.importorskip("paddle.distributed.auto_parallel.static.cluster")


def device(number, kind="GPU", model="Tesla V100-SXM2-32GB"):
    return {
        "global_id": number,
        "local_id": 0,
        "type": kind,
        "model": model,
        "memory": 32,
        "sp_gflops": 15700,
        "dp_gflops": 7800,
    }


def link(source, target, **figures):
    return {"source_global_id": source, "target_global_id": target, "type": "NVL", **figures}


@pytest.mark.parametrize(
    ("arguments", "short_form"),
    [
        ({"node_count": 1, "device_count": 4}, "1x4:V100-32G"),
        ({"node_count": 2, "device_count": 8, "gpu_model": "A100", "gpu_memory": 80}, "2x8:A100-80G"),
        ({"node_count": 3, "device_count": 2, "gpu_model": "H100", "gpu_memory": 80}, "3x2:H100"),
    ],
)
def test_the_cluster_object_of_paddle_is_read(arguments, short_form):
    cluster = paddle_cluster.Cluster()
    cluster.gen_default_config_cluster(**arguments)
    assert parse_cluster(cluster).short_form == short_form


def test_links_of_the_object_win_over_the_catalogue():
    cluster = paddle_cluster.Cluster()
    cluster.gen_default_config_cluster(node_count=2, device_count=8, intra_bandwidth=130, inter_bandwidth=11)
    (group,) = parse_cluster(cluster).groups
    assert group.intra_link.bandwidth == 130e9
    assert (group.nics, group.nic.bandwidth) == (1, 11e9)


def test_the_device_is_the_catalogues_with_tensor_cores():
    cluster = paddle_cluster.Cluster()
    cluster.gen_default_config_cluster(gpu_hp_gflops=31400)
    assert parse_cluster(cluster).device_of(0).flops("fp16") == 125e12


def test_paddle_and_we_read_the_same_file(tmp_path):
    machines = [
        {
            "hostname": "a",
            "devices": [device(0), device(1), device(2, "CPU"), device(3, "NIC")],
            "links": [link(0, 1, bandwidth=140, latency=0.01)],
        },
        {
            "hostname": "b",
            "devices": [device(4), device(5), device(6, "CPU"), device(7, "NIC")],
            "links": [link(4, 0, bandwidth=12)],
        },
    ]
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps({"machines": machines}), encoding="utf-8")
    theirs = paddle_cluster.Cluster()
    theirs.build_from_file(str(path))
    ours = parse_cluster(path)
    assert ours == parse_cluster(theirs) == parse_cluster({"machines": machines})
    assert [g.short_form for g in ours.groups] == ["1x2:V100-32G", "1x2:V100-32G"]
    first, second = ours.groups
    assert (first.intra_link.bandwidth, first.intra_link.latency) == (140e9, 1e-5)
    assert (second.nic.bandwidth, second.nics) == (12e9, 1)


def test_a_detected_topology_is_read():
    machine = {
        "hostname": "a", "addr": "127.0.0.1", "sp_gflops": 1, "dp_gflops": 1, "memory": 500, "bandwidth": 1, "latency": 0,
        "devices": [{**device(i, model="NVIDIA H800"), "memory": 80} for i in range(4)],
        "links": [link(0, 1, bandwidth=160, latency=0)],
    }  # fmt: skip
    cluster = paddle_cluster.Cluster()
    cluster._build_from_topo({"GPU-H800": [machine]}, 4)
    ours = parse_cluster(cluster)
    assert ours.short_form == "1x4:H800"
    assert ours.groups[0].intra_link.bandwidth == 160e9


@pytest.mark.parametrize(
    ("machines", "message"),
    [
        ([], "machines: the list is empty"),
        ([5], "machines[0]: expected keys and values, not 5"),
        ([{}], "machines[0].devices: no accelerator among them"),
        ([{"devices": [device(0, "CPU")]}], "machines[0].devices: no accelerator among them"),
        ([{"devices": 3}], "machines[0].devices: expected a list"),
        ([{"devices": [{"type": "GPU"}]}], "machines[0].devices[0].global_id: expected the number of a device"),
        ([{"devices": [device(0, model="Tesla T4")]}], "machines[0].devices[0].model: 'Tesla T4' is not in the catalogue"),
        ([{"devices": [device(0), device(1, model="NVIDIA H20")]}], "different models in one machine"),
        ([{"devices": [device(0)]}, {"devices": [device(0)]}], "machines[1].devices: global_id 0 occurs twice"),
        ([{"devices": [device(0), device(0)]}], "machines[0].devices: global_id 0 occurs twice"),
        (
            [{"devices": [device(0), device(1)], "links": [link(0, 1, bandwidth="fast")]}],
            "machines[0].links[0].bandwidth must be ",
        ),
    ],
)
def test_a_wrong_description_is_named_with_its_key(machines, message):
    with pytest.raises(ClusterError, match=re.escape(message)):
        parse_cluster({"machines": machines})
