"""Cluster descriptions from users: what is read, and what the errors say."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from paddle_rbt_plugin.cluster import Cluster, parse_cluster
from paddle_rbt_plugin.errors import ClusterError

DOC = (Path(__file__).parents[1] / "docs" / "clusters.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", DOC, re.DOTALL)
GROUP = {"machines": 4, "devices_per_machine": 8, "device": "A100-80G"}


def write(tmp_path, text, name="cluster.yaml"):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("text", ["4x8:A100-80G", " 4 x 8 : a100-80g ", "4X8:A100-80g\n"])
def test_the_short_form_ignores_case_and_spaces(text):
    cluster = parse_cluster(text)
    assert (cluster.machines, cluster.device_count, cluster.short_form) == (4, 32, "4x8:A100-80G")


def test_groups_are_joined_by_plus():
    cluster = parse_cluster("2x8:A100-80G + 1x4:V100-32G")
    assert [g.short_form for g in cluster.groups] == ["2x8:A100-80G", "1x4:V100-32G"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "cannot read ''; write NODESxDEVICES:GPU, e.g. 4x8:A100-80G"),
        ("A100-80G", "cannot read 'A100-80G'; write NODESxDEVICES:GPU"),
        ("8:A100-80G", "cannot read '8:A100-80G'"),
        ("1x8:", "cannot read '1x8:'"),
        ("1x8:H100+", "cannot read '' in '1x8:H100+'"),
        ("1.5x8:H100", "cannot read '1.5x8:H100'"),
        ("0x8:H100", "'0x8:H100': the number of machines must be from 1 to 1048576, not 0"),
        ("2x-8:H100", "the number of devices per machine must be from 1 to 1048576, not -8"),
        ("2x99999999999999999999:H100", "the number of devices per machine must be"),
        ("2x8:H1000", "'2x8:H1000': unknown device 'H1000'; did you mean H100"),
    ],
)
def test_a_malformed_short_form_says_what_would_be_right(text, message):
    with pytest.raises(ClusterError, match=re.escape(message)):
        parse_cluster(text)


def test_a_cluster_is_returned_as_it_is():
    cluster = parse_cluster("1x8:H20")
    assert parse_cluster(cluster) is cluster


@pytest.mark.parametrize("value", [None, 8, 1.5, ["1x8:H100"], object()])
def test_other_types_are_refused(value):
    with pytest.raises(ClusterError, match="cannot read a cluster from"):
        parse_cluster(value)


def test_a_dict_says_the_same_as_the_short_form():
    assert parse_cluster(GROUP) == parse_cluster({"groups": [GROUP]}) == parse_cluster({"groups": ["4x8:A100-80G"]})
    assert parse_cluster(GROUP) == parse_cluster("4x8:A100-80G")


def test_overrides_win_and_the_rest_comes_from_the_catalogue(tmp_path):
    path = write(
        tmp_path,
        """
        machines: 2
        devices_per_machine: 8
        device: a100-80g
        tflops: {bf16: 280}
        memory: 79 GiB
        memory_bandwidth: 1.9 TB/s
        intra_link: {bandwidth: 250e9}
        nic: {count: 4, bandwidth: 100 Gb/s, latency: 20 us}
        """,
    )
    (group,) = parse_cluster(path).groups
    assert group.device.name == "A100-80G"
    assert (group.device.flops("bf16"), group.device.flops("fp16")) == (280e12, 312e12)
    assert (group.device.memory, group.device.memory_bandwidth) == (79 * 2**30, 1.9e12)
    assert (group.intra_link.bandwidth, group.intra_link.latency) == (250e9, 3.4e-6)
    assert (group.nics, group.nic.bandwidth, group.nic.latency, group.inter_link.bandwidth) == (4, 12.5e9, 20e-6, 50e9)


def test_yaml_json_dict_and_path_objects_agree(tmp_path):
    as_json = Path(write(tmp_path, "\t" + json.dumps({"groups": [GROUP]}), "cluster.json"))
    as_yaml = Path(write(tmp_path, "groups:\n- 4 x 8 : A100-80G\n"))
    assert parse_cluster(as_json) == parse_cluster(as_yaml) == parse_cluster(str(as_json)) == parse_cluster("4x8:A100-80G")


def test_a_file_may_hold_the_short_form_alone(tmp_path):
    assert parse_cluster(write(tmp_path, "2x8:H100+1x8:H20\n")) == parse_cluster("2x8:H100+1x8:H20")
    assert parse_cluster(write(tmp_path, "2 x 8: H100\n")) == parse_cluster("2x8:H100")


def test_yaml_anchors_and_merge_keys_work(tmp_path):
    text = "groups:\n- &a {machines: 1, devices_per_machine: 8, device: H100}\n- {<<: *a, machines: 2, device: H20}\n"
    assert parse_cluster(write(tmp_path, text)).short_form == "1x8:H100+2x8:H20"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"device": "A100-80"}, "device: unknown device 'A100-80'; did you mean A100-80G? known: V100-16G"),
        ({"device": "Mine", "memory": 1}, "for a device of your own add tflops, memory_bandwidth, intra_link, nic"),
        ({"device": 5}, "device: expected a name, not 5"),
        ({"device": ""}, "device: expected a name, not ''"),
        ({"machines": 0}, "machines must be a whole number from 1 to 1048576, e.g. 8, not 0"),
        ({"machines": -1}, "machines must be a whole number from 1 to 1048576, e.g. 8, not -1"),
        ({"machines": 1.5}, "machines must be a whole number from 1 to 1048576, e.g. 8, not 1.5"),
        ({"machines": 10**400}, "machines must be a whole number from 1 to 1048576, e.g. 8, not 1000"),
        ({"machines": "four"}, "machines must be a whole number from 1 to 1048576, e.g. 8, not 'four'"),
        ({"machines": True}, "machines must be a whole number from 1 to 1048576, e.g. 8, not True"),
        ({"machines": None}, "machines must be a whole number from 1 to 1048576, e.g. 8, not nothing"),
        ({"memory": "80 GX"}, "memory must be bytes above 0, or a number with a unit, e.g. '80 GiB', not '80 GX'"),
        ({"memory": float("nan")}, "memory must be bytes above 0, or a number with a unit, e.g. '80 GiB', not nan"),
        ({"memory": "1e999"}, "memory must be bytes above 0, or a number with a unit, e.g. '80 GiB', not '1e999'"),
        ({"memory": 0}, "memory must be bytes above 0, or a number with a unit, e.g. '80 GiB', not 0"),
        (
            {"memory_bandwidth": "2 TB"},
            "e.g. '300 GB/s' or '200 Gb/s', not '2 TB'",
        ),
        ({"memory_bandwith": 1}, "unknown key 'memory_bandwith'; did you mean memory_bandwidth"),
        ({1: 2}, "unknown key 1; known: machines"),
        ({"tflops": {"fp15": 1}}, "tflops: unknown key 'fp15'; did you mean"),
        ({"tflops": 312}, "tflops: expected keys and values, not 312; keys: fp32, tf32, fp16, bf16, fp8"),
        ({"tflops": {"bf16": -1}}, "tflops.bf16 must be a number above 0, e.g. 312, not -1"),
        (
            {"intra_link": {"latency": "-1 us"}},
            "intra_link.latency must be seconds of at least 0, or a number with a unit",
        ),
        (
            {"nic": {"bandwidth": float("inf")}},
            "nic.bandwidth must be bytes per second above 0, or a number with a unit",
        ),
        ({"nic": {"count": 0}}, "nic.count must be a whole number from 1 to 1048576, e.g. 8, not 0"),
    ],
)
def test_a_wrong_value_is_named_with_its_key(change, message):
    with pytest.raises(ClusterError, match=re.escape(message)):
        parse_cluster({"groups": ["1x8:H100", {**GROUP, **change}]})
    with pytest.raises(ClusterError, match=r"^cluster: groups\[1\]"):
        parse_cluster({"groups": ["1x8:H100", {**GROUP, **change}]})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({}, "neither groups nor a device"),
        ({"groups": []}, "groups: expected a list of groups"),
        ({"groups": "1x8:H100"}, "groups: expected a list of groups"),
        ({"groups": [5]}, "groups[0]: expected keys and values, not 5"),
        ({"groups": ["1x8:H1"]}, "groups[0]: '1x8:H1': unknown device 'H1'"),
        ({"groups": ["1x8:H100"], "memory": 5}, "memory is given beside groups"),
        ({"device": "H100", "machines": 1}, "devices_per_machine is missing"),
        ({"group": []}, "unknown key 'group'; did you mean groups"),
    ],
)
def test_a_wrong_structure_says_what_is_expected(content, message):
    with pytest.raises(ClusterError, match=re.escape(message)):
        parse_cluster(content)


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        ("", "c.yaml", "the file is empty"),
        (" \n", "c.json", "the file is empty"),
        ("# nothing\n", "c.yaml", "the file is empty"),
        ("a: [", "c.yaml", "not valid YAML"),
        ("a: 2024-99-99", "c.yaml", "not valid YAML"),
        ("!!python/object:os.system {}", "c.yaml", "not valid YAML"),
        ("machines: 1\nmachines: 2\n", "c.yaml", "the key 'machines' occurs twice"),
        ("{", "c.json", "not valid JSON"),
        ('{"device": "H100", "device": "H20"}', "c.json", "the key 'device' occurs twice"),
        ("[" * 100_000, "c.json", "not valid JSON"),
        ("- 1x8:H100", "c.yaml", "expected keys and values, not ['1x8:H100']"),
        (
            "machines: 2024-01-01\ndevices_per_machine: 1\ndevice: H100",
            "c.yaml",
            "e.g. 8, not datetime.date(2024, 1, 1)",
        ),
        (
            "machines: yes\ndevices_per_machine: 1\ndevice: H100",
            "c.yaml",
            "machines must be a whole number from 1 to 1048576, e.g. 8, not True",
        ),
        ("hello", "c.yaml", "cannot read 'hello'; write NODESxDEVICES:GPU"),
    ],
)
def test_a_file_that_is_no_description_is_named(tmp_path, text, name, message):
    path = write(tmp_path, text, name)
    with pytest.raises(ClusterError, match=re.escape(message)) as caught:
        parse_cluster(path)
    assert path in str(caught.value)


def test_a_file_that_does_not_exist_is_named():
    with pytest.raises(ClusterError, match=r"'nowhere/c.yaml': no such file; .* short form such as 4x8:A100-80G"):
        parse_cluster("nowhere/c.yaml")


def test_a_directory_and_bytes_that_are_no_text_are_refused(tmp_path):
    with pytest.raises(ClusterError, match="cannot read the file"):
        parse_cluster(tmp_path)
    (tmp_path / "c.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ClusterError, match="cannot read the file"):
        parse_cluster(tmp_path / "c.yaml")


@given(st.text())
@example("\0")
@example("/\0")
@example("\ud800.yaml")
@example("x" * 10_000)
@example("9" * 10_000 + "x8:H100")
@example("٣x8:H100")
@example("./")
def test_any_text_gives_a_cluster_or_a_cluster_error(text):
    try:
        assert isinstance(parse_cluster(text), Cluster)
    except ClusterError as error:
        assert str(error)


@given(
    st.from_regex(
        r"\s*-?[0-9]{1,6}\s*[xX:]?\s*-?[0-9]{1,6}\s*:?\s*(A100-80G|h100|CPU|[A-Z0-9-]{0,9})(\+1x8:H20)?", fullmatch=True
    )
)
def test_nearly_right_text_gives_a_cluster_or_a_cluster_error(text):
    try:
        assert parse_cluster(text).device_count > 0
    except ClusterError as error:
        assert str(error)


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["H100", "1e9", "80 GiB", "3 us"])
)
KEYS = st.sampled_from([
    "groups", "machines", "devices_per_machine", "device", "tflops", "memory", "memory_bandwidth", "intra_link", "nic", "count",
    "bandwidth", "latency", "bf16", "devices", "links", "model", "type", "global_id", "source_global_id", "target_global_id",
])  # fmt: skip
CONTENT = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS | SCALARS, inner, max_size=6), max_leaves=20
)


@given(st.dictionaries(KEYS, CONTENT))
def test_any_dict_gives_a_cluster_or_a_cluster_error(content):
    try:
        assert isinstance(parse_cluster(content), Cluster)
    except ClusterError as error:
        assert str(error)


@given(
    st.fixed_dictionaries(
        {k: st.just(v) for k, v in GROUP.items()}, optional=dict.fromkeys(("tflops", "memory", "nic"), CONTENT)
    )
)
def test_any_override_gives_a_cluster_or_a_cluster_error(content):
    try:
        assert isinstance(parse_cluster(content), Cluster)
    except ClusterError as error:
        assert str(error)


@given(st.text() | st.from_regex(r"(\s*[-?&*!<]?[a-z]*: ?[\[{]?[0-9a-z.:,]*[\]}]?\n){0,5}", fullmatch=True))
def test_any_file_gives_a_cluster_or_a_cluster_error(tmp_path_factory, text):
    folder = tmp_path_factory.getbasetemp()
    for name in ("fuzz.yaml", "fuzz.json"):
        (folder / name).write_text(text, encoding="utf-8", errors="surrogatepass")
        try:
            assert isinstance(parse_cluster(folder / name), Cluster)
        except ClusterError as error:
            assert str(error)


@pytest.mark.parametrize("form", next(body for kind, body in BLOCKS if kind == "text").split("\n")[:-1])
def test_the_short_forms_of_the_documentation_parse(form):
    assert parse_cluster(form).short_form == form


@pytest.mark.parametrize(("kind", "body"), [b for b in BLOCKS if b[0] in ("yaml", "json")])
def test_the_files_of_the_documentation_parse(tmp_path, kind, body):
    assert parse_cluster(write(tmp_path, body, f"cluster.{kind}")).device_count > 0


def test_the_python_of_the_documentation_runs():
    (body,) = (body for kind, body in BLOCKS if kind == "python")
    exec(body, {})
