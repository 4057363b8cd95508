"""Calibration: figures fitted to measured times, and the profile made of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from math import ceil
from pathlib import Path
from typing import Any

import psutil
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from waiting import until

from paddle_rbt_plugin.calibrate import DeviceFit, LinkFit, fit, measure
from paddle_rbt_plugin.calibrate.fit import STREAMING, solve
from paddle_rbt_plugin.calibrate.profile import device_profile, profile_text
from paddle_rbt_plugin.cli import calibrating
from paddle_rbt_plugin.cli.main import cli
from paddle_rbt_plugin.cluster import Cluster, ProcessMesh, parse_cluster
from paddle_rbt_plugin.cost import DEFAULT
from paddle_rbt_plugin.cost.communication import collective_seconds, group_network
from paddle_rbt_plugin.cost.compute import ComputeDevice, Product
from paddle_rbt_plugin.cost.constants import constants_on
from paddle_rbt_plugin.cost.machines import Machines
from paddle_rbt_plugin.errors import TunerError
from paddle_rbt_plugin.plan.files import check_writable, save_file

DEVICE = DeviceFit(
    flops={"fp32": 4e10, "bf16": 9e10},
    fill_flop=2e6,
    tile=32,
    bandwidth=9e9,
    memory_share=0.3,
    program_launch_s=4e-6,
    eager_launch_s=9e-6,
    kernel_gap_s=3e-6,
    link=LinkFit(launch_s=2e-5, step_s=5e-5, bandwidth=1.5e9, passes=1.2),
    errors={"product": 0.05, "traffic": 0.2, "collective": 0.1},
)
COMMAND = [sys.executable, "-m", "paddle_rbt_plugin", "calibrate"]


def told(device: DeviceFit, ranks: int = 4) -> list[dict[str, Any]]:
    """What the measurements of such a device would be."""
    lines = [line for line in measure.plan(ranks) if line.get("precision", "fp32") in device.flops]
    return [line | {"seconds": seconds(line, device)} for line in lines]


def seconds(line: dict[str, Any], device: DeviceFit) -> float:
    if line["kind"] == "product":
        whole = ceil(line["m"] / device.tile) * ceil(line["n"] / device.tile) * device.tile**2
        return (2.0 * line["batch"] * whole * line["k"] + device.fill_flop) / device.flops[line["precision"]]
    if line["kind"] == "traffic":
        return line["bytes"] / device.bandwidth / (1.0 if line["op"] == STREAMING else device.memory_share)
    if line["kind"] == "launch":
        return {"program": device.program_launch_s, "eager": device.eager_launch_s, "queued": device.kernel_gap_s}[line["way"]]
    link, n, nbytes = device.link, line["ranks"], line["bytes"]
    assert link is not None
    if line["collective"] == "p2p":
        return 2 * (link.launch_s + link.step_s + nbytes / link.bandwidth)
    phase = (n - 1) * link.step_s + nbytes * ((n - 1) / n / link.bandwidth + link.passes / 2 / device.bandwidth)
    return link.launch_s + phase * (2 if line["collective"] == "all_reduce" else 1)


RATE = st.floats(1e10, 1e15)


@settings(max_examples=25, deadline=None)
@given(RATE, st.floats(1e9, 1e13), st.sampled_from([16, 32, 64]), st.floats(1e8, 1e12), st.floats(0.0, 4.0))
def test_the_figures_of_a_device_are_found_again(rate: float, memory: float, tile: int, wire: float, passes: float) -> None:
    link = LinkFit(2e-5, 5e-6, wire, passes)
    device = DeviceFit({"fp32": rate / 8, "bf16": rate}, rate * 1e-5, tile, memory, 0.4, 2e-6, 1e-6, 2e-6, link, {})
    found = fit(told(device))
    assert found.link is not None
    assert found.tile == tile
    assert found.flops["bf16"] == pytest.approx(rate, rel=0.02)
    assert found.flops["fp32"] == pytest.approx(rate / 8, rel=0.02)
    assert found.bandwidth == pytest.approx(memory, rel=0.02)
    assert found.memory_share == pytest.approx(0.4, rel=0.02)
    for line in told(device):
        if line["kind"] == "collective":
            again = seconds(line, DeviceFit(**{**vars(device), "link": found.link, "bandwidth": found.bandwidth}))
            assert again == pytest.approx(line["seconds"], rel=0.03)


def test_one_odd_measurement_in_ten_moves_nothing() -> None:
    clean = fit(told(DEVICE))
    samples = told(DEVICE)
    for sample in samples[::10]:
        if sample["kind"] in ("product", "collective"):
            sample["seconds"] *= 5
    odd = fit(samples)
    assert odd.flops["bf16"] == pytest.approx(clean.flops["bf16"], rel=0.02)
    assert odd.link is not None and clean.link is not None
    assert odd.link.bandwidth == pytest.approx(clean.link.bandwidth, rel=0.05)


def test_a_moment_of_other_work_spoils_one_round_only() -> None:
    line = {"kind": "launch", "way": "eager"}
    rounds = [line | {"seconds": s} for s in (2e-6, 9e-4, 2.1e-6, 1.9e-6, 2e-6)]
    lacking = {"kind": "launch", "way": "program", "skipped": "no such kernel"}
    assert measure.merged([*rounds, *[lacking] * 5]) == [line | {"seconds": 2e-6}, lacking]


def test_no_coefficient_is_below_zero() -> None:
    coefficients, _ = solve([[1.0, 10.0], [1.0, 20.0], [1.0, 30.0]], [5.0, 16.0, 25.0])
    assert min(coefficients) == 0.0


@pytest.mark.parametrize("kind", ["product", "traffic", "launch"])
def test_a_kind_that_could_not_be_measured_is_an_error_with_the_reason(kind: str) -> None:
    samples = [{"kind": kind, "skipped": "no such kernel"} if s["kind"] == kind else s for s in told(DEVICE)]
    with pytest.raises(TunerError, match=f"'{kind}' could be measured: no such kernel"):
        fit(samples)


def test_the_cost_model_computes_with_what_was_measured() -> None:
    cluster = parse_cluster(device_profile(DEVICE, 4, gpus=False))
    c = constants_on(cluster.groups)
    device = cluster.device_of(0)
    product = Product(1, 512, 512, 512).seconds(ComputeDevice(device.flops("fp32"), device.memory_bandwidth), c)
    net = group_network(cluster, (0, 1, 2, 3))
    told_of = {"kind": "product", "precision": "fp32", "batch": 1, "m": 512, "n": 512, "k": 512}
    assert product == pytest.approx(seconds(told_of, DEVICE), rel=1e-3)
    for name in ("all_reduce", "all_gather"):
        line = {"kind": "collective", "collective": name, "ranks": 4, "bytes": 1e6}
        assert collective_seconds(name, 1e6, net, c) == pytest.approx(seconds(line, DEVICE), rel=1e-3)  # type: ignore[arg-type]


def test_a_profile_is_a_cluster_file(tmp_path: Path) -> None:
    profile = device_profile(DEVICE, 2, gpus=False)
    path = tmp_path / "cluster.yaml"
    path.write_text(profile_text(profile, DEVICE))
    cluster = parse_cluster(path)
    assert cluster.short_form == "1x2:CPU"
    assert cluster == parse_cluster(profile) == Cluster.from_dict(cluster.to_dict())
    assert path.read_text().startswith("# Device profile by paddle-rbt calibrate: 2 x CPU")
    assert "product 5%" in path.read_text()


def test_a_cpu_computes_while_it_launches() -> None:
    c = constants_on(parse_cluster(device_profile(DEVICE, 2, gpus=False)).groups)
    assert (c.host_launch_s, c.kernel_gap_s) == (0.0, DEVICE.program_launch_s)


def test_one_device_alone_keeps_the_links_of_the_usual_machine() -> None:
    alone = DeviceFit(**{**vars(DEVICE), "link": None})
    profile = device_profile(alone, 1, gpus=False)
    usual = parse_cluster("1x1:CPU").groups[0]
    assert profile["intra_link"] == usual.intra_link.to_dict()
    assert constants_on(parse_cluster(profile).groups).collective_passes == DEFAULT.collective_passes
    assert "Not measured: intra_link and nic" in profile_text(profile, alone)


# --- what a cluster file says of the software


@pytest.mark.parametrize(
    ("software", "message"),
    [
        ({"matmul_peek": 1.0}, r"software: unknown key 'matmul_peek'; did you mean matmul_peak"),
        ({"matmul_peak": 0}, "software.matmul_peak must be a share above 0 and at most 1, e.g. 0.7, not 0"),
        ({"matmul_peak": 90}, "software.matmul_peak must be a share above 0 and at most 1, e.g. 0.7, not 90"),
        ({"inter_bandwidth": 5}, "software.inter_bandwidth must be a share above 0 and at most 1, e.g. 0.7, not 5"),
        ({"memory_peak": "most"}, "software.memory_peak must be a share above 0 and at most 1, e.g. 0.7, not 'most'"),
        ({"update_peak": 1.01}, "software.update_peak must be a share above 0 and at most 1, e.g. 0.7, not 1.01"),
        (
            {"fused_attention_peak": "70%"},
            "software.fused_attention_peak must be a share above 0 and at most 1, e.g. 0.7",
        ),
        ({"matmul_tile": 1e200}, r"software.matmul_tile must be a whole number from 1 to 1048576, e.g. 8, not 1e\+200"),
        ({"kernel_gap_s": "-3 us"}, "software.kernel_gap_s must be seconds of at least 0"),
        ({"matmul_fill_flop": "3 us"}, "software.matmul_fill_flop must be a number of at least 0, e.g. 3e9, not '3 us'"),
        ({"collective_passes": None}, "software.collective_passes must be a number.*, not nothing"),
    ],
)
def test_a_wrong_figure_of_the_software_is_named(software: dict[str, Any], message: str) -> None:
    with pytest.raises(TunerError, match=message):
        parse_cluster({"machines": 1, "devices_per_machine": 8, "device": "A100-80G", "software": software})


def test_software_replaces_the_constants_it_states_and_no_others() -> None:
    cluster = {"machines": 1, "devices_per_machine": 8, "device": "A100-80G", "software": {"host_launch_s": "20 us"}}
    c = constants_on(parse_cluster(cluster).groups)
    assert c.host_launch_s == 20e-6
    assert {**vars(c), "host_launch_s": 0} == {**vars(DEFAULT), "host_launch_s": 0}
    assert constants_on(parse_cluster("1x8:A100-80G").groups) == DEFAULT


def test_of_different_machines_the_slowest_counts() -> None:
    groups = [
        {"machines": 1, "devices_per_machine": 8, "device": "A100-80G", "software": {"memory_peak": 0.9, "kernel_gap_s": 1e-6}},
        {"machines": 1, "devices_per_machine": 8, "device": "V100-32G"},
    ]
    c = constants_on(parse_cluster({"groups": groups}).groups)
    assert (c.memory_peak, c.kernel_gap_s) == (DEFAULT.memory_peak, DEFAULT.kernel_gap_s)


def test_each_stage_is_costed_by_the_software_of_its_own_machines() -> None:
    cluster = parse_cluster("1x8:A100-80G+1x8:H100")
    stage, machines = ProcessMesh(("dp",), (8,), tuple(range(8))), Machines(cluster, "bf16")
    a100, h100 = (machines.of(stage, first).constants for first in (0, 8))
    assert (a100.matmul_peak, h100.matmul_peak) == (DEFAULT.matmul_peak, machines.constants.matmul_peak)
    assert h100.matmul_peak < a100.matmul_peak


# --- the file


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("/missing/cluster.yaml", "there is no folder '/missing'"),
        ("/proc/x.yaml", "'/proc/x.yaml' cannot be written: "),
        ("x" * 300, "cannot be written: File name too long"),
        ("", "a file needs a name"),
    ],
)
def test_a_file_that_cannot_be_written_is_an_error_before_anything_is_measured(
    path: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrating, "calibrate", None)
    result = CliRunner().invoke(cli, ["calibrate", "--output", path])
    assert (result.exit_code, reason in result.stderr) == (1, True)


def test_a_file_whose_folder_goes_meanwhile_is_an_error(tmp_path: Path) -> None:
    check_writable(str(tmp_path / "cluster.yaml"))
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(TunerError, match="cannot be written: No such file or directory"):
        save_file(str(tmp_path / "gone" / "cluster.yaml"), "")


# --- the real thing


@pytest.fixture
def temporary(tmp_path: Path) -> Iterator[dict[str, str]]:
    """An environment whose temporary files must be gone at the end."""
    directory = tmp_path / "tmp"
    directory.mkdir()
    yield {**os.environ, "TMPDIR": str(directory)}
    assert list(directory.iterdir()) == []


def test_the_command_measures_as_often_as_the_function() -> None:
    (rounds,) = (option for option in cli.commands["calibrate"].params if option.name == "rounds")
    assert rounds.default == measure.ROUNDS


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_processes_measure_and_write_a_cluster_file(processes: int, tmp_path: Path, temporary: dict[str, str]) -> None:
    path = tmp_path / "cluster.yaml"
    command = [*COMMAND, "--processes", str(processes), "--rounds", "1", "--json", "--output", str(path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=500, env=temporary)
    assert result.returncode == 0, result.stderr
    data = json.loads(result.stdout)
    assert data["output"] == str(path)
    assert set(data["fit_errors"]) == {"product", "traffic"} | ({"collective"} if processes > 1 else set())
    assert len(data["measurements"]) == len(measure.plan(processes))
    assert parse_cluster(path).device_count == processes
    assert parse_cluster(path) == parse_cluster(data["cluster"])
    assert "fp32" in data["cluster"]["tflops"]


@pytest.mark.slow
@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_all_processes_and_writes_nothing(
    sent: int, code: int, tmp_path: Path, temporary: dict[str, str]
) -> None:
    path = tmp_path / "cluster.yaml"
    command = [*COMMAND, "--processes", "2", "--output", str(path)]
    process = subprocess.Popen(command, env=temporary, stdout=-1, stderr=-1, text=True)
    until(lambda: len(list(Path(temporary["TMPDIR"]).glob("*/lines.*"))) == 2, process)
    workers = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(sent)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err.splitlines()[-1]) == (code, "interrupted")
    assert not [worker for worker in psutil.wait_procs(workers, 30)[1] if worker.status() != psutil.STATUS_ZOMBIE]
    assert [p.name for p in tmp_path.iterdir()] == ["tmp"]
