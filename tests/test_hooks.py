"""Devices and op names of plugins: found, checked, used, blocked."""

from __future__ import annotations

import warnings

import paddle
import pytest
from paddle.static import InputSpec
from pattern_graphs import GraphWriter

import paddle_rbt_plugin as rbt
from paddle_rbt_plugin.errors import ClusterError, UnsupportedProgram
from paddle_rbt_plugin.graph import names
from paddle_rbt_plugin.graph.cpp_signatures import known_ops
from paddle_rbt_plugin.graph.names import canonical_name, with_canonical_names
from paddle_rbt_plugin.plugins import PluginWarning, detect_cluster, load_plugins, parse_cluster

PROFILE = """{
    "devices_per_machine": 4,
    "tflops": {"fp32": 40, "bf16": 320},
    "memory": "48 GiB",
    "memory_bandwidth": "2 TB/s",
    "intra_link": {"bandwidth": "100 GB/s", "latency": "4 us"},
    "nic": {"count": 2, "bandwidth": "200 Gb/s", "latency": "15 us"},
    "detect": "Acme X9",
}"""
DEVICE = f"""
from paddle_rbt_plugin import hookimpl
PROFILE = {PROFILE}
@hookimpl
def register_devices(register):
    register("ACME-X9", PROFILE)
"""
OP_NAME = """
from paddle_rbt_plugin import hookimpl
@hookimpl
def register_op_names(register):
    register("hardswish", "silu")
"""


def reasons(kind):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PluginWarning)
        rows = load_plugins().rows
    return [(r.name, r.state, r.reason) for r in rows if r.kind == kind and r.distribution == "acme"]


def test_a_device_of_a_plugin_is_named_in_every_description_of_a_cluster(install, tmp_path):
    install("acme", {"x9": "acme_x9"}, acme_x9=DEVICE)
    assert reasons("device") == [("ACME-X9", "active", "")]
    (tmp_path / "cluster.yaml").write_text("groups: ['1x4:A100-80G', {machines: 2, devices_per_machine: 4, device: acme-x9}]")
    mixed = rbt.parse_cluster(tmp_path / "cluster.yaml")
    assert mixed.short_form == "1x4:A100-80G+2x4:ACME-X9"
    (group,) = rbt.parse_cluster("2x4:acme-x9").groups
    assert group == mixed.groups[1]
    assert (group.device.memory, group.device.flops("bf16"), group.nics) == (48 * 2**30, 320e12, 2)
    assert rbt.Cluster.from_dict(mixed.to_dict()) == mixed, "a plan's cluster is read without the plugin"


def test_the_device_of_a_running_job_is_recognised(install, monkeypatch):
    install("acme", {"x9": "acme_x9"}, acme_x9=DEVICE)
    properties = type("Properties", (), {"name": "NVIDIA Acme X9 48GB"})
    monkeypatch.setattr(paddle, "is_compiled_with_cuda", lambda: True)
    monkeypatch.setattr(paddle.device.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(paddle.device.cuda, "get_device_properties", lambda: properties)
    assert detect_cluster().short_form == "1x1:ACME-X9"


def test_a_device_of_a_blocked_plugin_is_unknown(install):
    install("acme", {"x9": "acme_x9"}, acme_x9=DEVICE)
    with pytest.raises(ClusterError, match="unknown device 'ACME-X9'"):
        parse_cluster("1x4:ACME-X9", ["acme"])


def test_an_unknown_device_is_answered_with_the_names_of_plugins_too(install):
    install("acme", {"x9": "acme_x9"}, acme_x9=DEVICE)
    with pytest.raises(ClusterError, match="did you mean ACME-X9"):
        parse_cluster("1x4:ACME-X8")


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        (
            '"48 GiB"',
            '"lots"',
            "ClusterError: device 'ACME-X9': ACME-X9.memory must be bytes above 0",
        ),
        ('"memory": "48 GiB",', "", "ClusterError: device 'ACME-X9': ACME-X9: memory is missing"),
        ('"detect": "Acme X9"', '"detect": "("', "expected a regular expression"),
        ('"detect"', '"detekt"', "unknown key 'detekt'"),
        ('"ACME-X9", PROFILE', '"h100", PROFILE', "the name 'h100' is already taken by a device of the catalogue"),
        ('"ACME-X9", PROFILE', '"1x8:X", PROFILE', "a device needs a name of letters"),
        ('"ACME-X9", PROFILE', '"ACME-X9"', "TypeError: "),
        ('"ACME-X9", PROFILE', '"ACME-X9", 7', "expected keys and values, not 7"),
    ],
)
def test_a_device_that_cannot_be_one_is_left_out_with_the_cause(install, old, new, reason):
    install("acme", {"x9": "acme_x9"}, acme_x9=DEVICE.replace(old, new))
    ((_, state, found),) = reasons("device")
    assert state == "broken" and reason in found


def test_of_two_devices_whose_names_differ_in_case_the_first_is_kept(install):
    twice = '"ACME-X9", PROFILE)\n    register("acme-x9", PROFILE'
    install("acme", {"x9": "acme_x9"}, acme_x9=DEVICE.replace('"ACME-X9", PROFILE', twice))
    first, (name, state, reason) = reasons("device")
    assert first == ("ACME-X9", "active", "")
    assert (name, state) == ("acme-x9", "broken") and "already taken by a device of acme" in reason


def gated_network():
    class Gated(paddle.nn.Layer):
        def __init__(self):
            super().__init__()
            self.gate, self.up = (paddle.nn.Linear(64, 256, bias_attr=False) for _ in range(2))
            self.down = paddle.nn.Linear(256, 64, bias_attr=False)

        def forward(self, x):
            return paddle.mean(self.down(paddle.nn.functional.hardswish(self.gate(x)) * self.up(x)))

    return Gated()


def test_an_op_that_is_read_as_another_is_matched_planned_and_leaves_the_signature_alone(install, monkeypatch):
    every = known_ops()
    monkeypatch.setattr(names, "known_ops", lambda: every - {"hardswish"})  # as if it were a custom op
    how = {"input_spec": [InputSpec([8, 16, 64], "float32", "x")], "cluster": "1x2:A100-80G", "search_space": {"pp": 1}}
    before = rbt.tune(gated_network(), **how)
    assert "gated_ffn" not in before.patterns
    install("acme", {"names": "acme_names"}, acme_names=OP_NAME)
    after = rbt.tune(gated_network(), **how)
    assert after.patterns["gated_ffn"]["matches"] == 1
    assert after.signature == before.signature


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        ('"acme_act", "sillu"', "'sillu', which is no op of the installed Paddle; did you mean 'silu'"),
        ('"acme_act", "gelu", aproximate=True', "'gelu' has no attribute 'aproximate'; it has approximate"),
        ('"acme_act"', "TypeError: "),
        ('5, "silu"', "an op's name is a string"),
        ('"matmul", "gelu"', "the name 'matmul' is already taken by an op of Paddle"),
        ('"relu_", "gelu"', "the name 'relu_' is already taken by an op of Paddle"),
    ],
)
def test_an_op_name_that_leads_nowhere_is_left_out_with_the_cause(install, call, reason):
    install("acme", {"names": "acme_names"}, acme_names=OP_NAME.replace('"hardswish", "silu"', call))
    ((_, state, found),) = reasons("op_name")
    assert state == "broken" and reason in found


def test_operands_go_by_position_and_attributes_by_name():
    w = GraphWriter()
    w.op("acme_gelu", w.data(8, 64))
    read_as = {"acme_gelu": canonical_name("acme_gelu", "gelu", {"approximate": True})}
    (op,) = with_canonical_names(w.graph(), read_as)
    assert (op.type, dict(op.inputs), dict(op.attrs)) == ("gelu", {"x": (0,)}, {"approximate": True})
    with pytest.raises(UnsupportedProgram, match=r"no attribute 'approximate'.*register\('acme_gelu', 'gelu', approximate="):
        with_canonical_names(w.graph(), {"acme_gelu": canonical_name("acme_gelu", "gelu", {})})


def test_more_operands_than_the_canonical_op_takes_are_an_error():
    w = GraphWriter()
    w.op("acme_silu", w.data(8, 64), w.data(8, 64))
    with pytest.raises(UnsupportedProgram, match="takes 1 tensors, but it has 2 operands"):
        with_canonical_names(w.graph(), {"acme_silu": canonical_name("acme_silu", "silu", {})})


def test_a_hook_of_a_later_version_may_be_marked_as_optional(install):
    hook = "\n@hookimpl(optionalhook=True)\ndef register_schedulers(register): pass\n"
    install("acme", {"x9": "acme_x9"}, acme_x9=DEVICE + hook)
    assert reasons("device") == [("ACME-X9", "active", "")]
