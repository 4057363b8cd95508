"""The demo: several processes, a found plan, and the loss of a serial run."""

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest
from click.testing import CliRunner
from waiting import until

from paddle_rbt_plugin.cli import demo, demo_training
from paddle_rbt_plugin.cli.demo import Comparison, choose_way, compare, find_plan
from paddle_rbt_plugin.cli.demo_training import train_serial
from paddle_rbt_plugin.cli.main import cli
from paddle_rbt_plugin.errors import TunerError

COMMAND = [sys.executable, "-m", "paddle_rbt_plugin", "demo"]


def run(*arguments):
    return CliRunner().invoke(cli, ["demo", *arguments])


def no_report(done, total):
    pass


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """Where the demo puts its logs; empty again when it has ended."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


# --- what is trained


def test_the_serial_run_learns_and_repeats():
    losses = list(train_serial(6))
    assert losses[-1] < losses[0]
    assert losses == list(train_serial(6))


@pytest.mark.parametrize("fixed", [{}, {"mp": 2}, {"dp": 2}])
def test_the_plan_is_the_tuner_s_for_that_many_processes(fixed):
    plan = find_plan(2, fixed)
    assert math.prod(plan.degrees.values()) == 2
    assert {k: plan.degrees[k] for k in fixed} == fixed
    assert plan.accumulate_steps == 1
    assert "qkv" in plan.patterns


@pytest.mark.parametrize(("fixed", "way"), [({"dp": 4}, "static"), ({"mp": 4}, "static"), ({"dp": 2, "mp": 2}, "dygraph")])
def test_two_active_axes_are_trained_in_dygraph_and_one_statically(fixed, way):
    chosen, why = choose_way(find_plan(4, fixed))
    assert chosen == way
    assert "two axes are active" in why or "only one axis is active" in why


def test_what_the_demo_cannot_run_is_refused():
    result = run("--set", "pp=2")
    assert result.exit_code == 1
    assert "search_space allows pp in [2], but the demo" in result.stderr


# --- what is compared


@pytest.mark.parametrize(
    ("distributed", "holds"),
    [
        ((4.5, 4.25), True),
        ((4.5, 4.250005), True),
        ((4.5, 4.25002), False),
        ((4.5, math.nan), False),
        ((math.nan, 4.25), False),
    ],
)
def test_a_difference_beyond_the_tolerance_or_not_a_number_does_not_hold(distributed, holds):
    assert Comparison((4.5, 4.25), distributed).holds is holds


def test_losses_that_differ_are_shown_and_exit_code_1(monkeypatch):
    monkeypatch.setattr(demo, "compare", lambda *_: Comparison((4.5, 4.25, 4.0), (4.5, 4.26, 4.0)))
    result = run("--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["holds"] is False
    assert "serial and distributed loss differ by 1.0e-02 at step 1" in result.stderr


def test_losses_that_are_not_numbers_are_exit_code_1(monkeypatch):
    monkeypatch.setattr(demo, "compare", lambda *_: Comparison((4.5, 4.25), (4.5, math.nan)))
    result = run()
    assert result.exit_code == 1
    assert "nan" in result.stdout


# --- processes that fail


def worker(text, monkeypatch, tmp_path):
    """Lets the launched processes run ``text`` instead of the training."""
    path = tmp_path / "worker.py"
    path.write_text(text)
    monkeypatch.setattr(demo_training, "__file__", str(path))


@pytest.mark.slow
def test_a_worker_that_fails_shows_the_tail_of_its_log(monkeypatch, tmp_path_factory, temporary):
    worker("raise ValueError('no luck today')", monkeypatch, tmp_path_factory.mktemp("worker"))
    with pytest.raises(TunerError, match=r"(?s)a process of the demo failed .*Traceback.*ValueError: no luck today"):
        compare(find_plan(2, {}), "static", 3, 60, no_report)
    assert list(temporary.iterdir()) == []


@pytest.mark.slow
def test_processes_that_end_without_training_are_a_failure(monkeypatch, tmp_path_factory, temporary):
    worker("print('done already')", monkeypatch, tmp_path_factory.mktemp("worker"))
    with pytest.raises(TunerError, match=r"(?s)failed \(exit code 0\) after 0 of 3 steps.*done already"):
        compare(find_plan(2, {}), "static", 3, 60, no_report)


@pytest.mark.slow
def test_workers_that_take_too_long_are_stopped(temporary):
    with pytest.raises(TunerError, match=r"the demo did not end within 8 s and was stopped after \d+ of 100000 steps"):
        compare(find_plan(2, {}), "dygraph", 100_000, 8, no_report)
    wait_for_the_end_of_those_in(temporary)
    assert list(temporary.iterdir()) == []


def wait_for_the_end_of_those_in(directory):
    """One that was killed takes a moment to go, and one that was only starting ends when it finds the directory gone."""
    until(lambda: not any(str(directory) in command_line(process) for process in Path("/proc").glob("[0-9]*")), timeout=30)


def command_line(process):
    with suppress(OSError):
        return (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    return ""


# --- the real thing


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "fixed", "way"),
    [(2, [], "static"), (4, ["mp=4"], "static"), (4, ["dp=4"], "static"), (4, ["dp=2", "mp=2"], "dygraph")],
)
def test_distributed_training_gives_the_serial_loss_at_every_step(processes, fixed, way):
    arguments = ["--processes", str(processes), "--json", *(a for f in fixed for a in ("--set", f))]
    result = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr
    data = json.loads(result.stdout)
    assert (data["processes"], data["way"]) == (processes, way)
    assert [row["step"] for row in data["steps"]] == list(range(20))
    assert all(abs(row["serial"] - row["distributed"]) <= 1e-5 for row in data["steps"])
    assert data["steps"][-1]["distributed"] < data["steps"][0]["distributed"] - 0.5
    for assignment in fixed:
        axis, degree = assignment.split("=")
        assert data["candidate"][axis] == int(degree)


@pytest.mark.slow
def test_ctrl_c_ends_all_processes_and_leaves_no_logs(tmp_path):
    process = subprocess.Popen(COMMAND, env={**os.environ, "TMPDIR": str(tmp_path)}, stdout=-1, stderr=-1, text=True)
    until(lambda: list(tmp_path.glob("*/lines.1")), process)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.splitlines()[-1] == "interrupted"
    wait_for_the_end_of_those_in(tmp_path)
    assert list(tmp_path.iterdir()) == []
