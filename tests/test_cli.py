"""The command line: what it prints where, and how it ends."""

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys

import pytest
from click.testing import CliRunner
from waiting import until

from paddle_rbt_plugin.cli.main import cli
from paddle_rbt_plugin.cluster.catalogue import device_names
from paddle_rbt_plugin.plan.plan import Plan
from paddle_rbt_plugin.runs import TrainingRun
from paddle_rbt_plugin.search import SearchSpace

MODEL = "arch: gpt\nlayers: 2\nhidden: 64\nffn: 256\nheads: 4\nvocab: 128\nseq: 32\n"
PLAN = ("--cluster", "1x4:A100-80G", "--global-batch", "16")


def run(*arguments):
    return CliRunner().invoke(cli, list(map(str, arguments)), prog_name="paddle-rbt")


def command(*arguments, **environment):
    """A real process: exit code, stdout and stderr as a shell sees them."""
    return subprocess.run(
        [sys.executable, "-m", "paddle_rbt_plugin", *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "small.yaml"
    path.write_text(MODEL)
    return path


# --- help and wrong usage


@pytest.mark.parametrize("name", sorted(cli.commands))
def test_the_help_of_every_command_shows_examples(name):
    result = run(name, "--help")
    assert result.exit_code == 0
    assert f"Examples:\n    paddle-rbt {name}" in result.stdout


def test_the_help_of_plan_names_every_device_level_and_dimension():
    text = run("plan", "--help").stdout
    assert {f.name for f in dataclasses.fields(SearchSpace)} - {"reasons"} <= set(re.findall(r"\w+", text))
    assert set(device_names()) <= set(re.findall(r"[\w-]+", text)) and "[o1|o2|o3]" in text


def test_the_help_of_estimate_names_every_column():
    columns = {f.name for f in dataclasses.fields(TrainingRun)}
    words = set(re.findall(r"\w+", run("estimate", "--help").stdout))
    assert {c for c in columns if not c.startswith("measured")} <= words


def test_the_list_of_commands_says_what_each_does():
    assert "..." not in run("--help").stdout.partition("Commands:")[2]


@pytest.mark.parametrize("name", sorted(cli.commands))
def test_every_command_has_the_common_options(name):
    assert {"--json", "--quiet", "--verbose", "--no-color"} <= {o for p in cli.commands[name].params for o in p.opts}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["explan"], "no command 'explan'; did you mean 'explain'?"),
        (["xyz"], "no command 'xyz'; choose from "),
        (["plan"], "Missing argument 'MODEL'"),
        (["plan", "gpt3-1.3b", "--global-batch", "8"], "Missing option '--cluster'"),
        (["plan", "gpt3-1.3b", *PLAN, "--set", "mp"], "'mp' is not of the form key=value, such as mp=2"),
        (["plan", "gpt3-1.3b", *PLAN, "--set", "mp=1,"], "'mp=1,' is not of the form key=value"),
        (["plan", "gpt3-1.3b", *PLAN, "--set", "pp=2", "--set", "pp=4"], "pp is set more than once; list its values"),
        (["plan", "gpt3-1.3b", *PLAN, "--presicion", "bf16"], "--precision"),
        (["plan", "gpt3-1.3b", "--cluster", "1x8:H100", "--global-batch", "0"], "0 is not in the range 1<=x<=16777216"),
    ],
)
def test_wrong_usage_is_exit_code_2_with_what_would_be_right(arguments, message):
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gpt3-1.3B", *PLAN], "no model is named 'gpt3-1.3B'; did you mean gpt3-1.3b"),
        (["SMALL", "--cluster", "1x8:A100-81G", "--global-batch", "8"], "A100-80G"),
        (["SMALL", "--cluster", "eight gpus", "--global-batch", "8"], "eight gpus"),
        (["SMALL", *PLAN, "--set", "micro_bach=2"], "unknown dimension 'micro_bach'; did you mean micro_batch?"),
        (["SMALL", *PLAN, "--set", "tp=2"], "unknown dimension 'tp'; did you mean mp?"),
        (["SMALL", *PLAN, "--set", "zero=2"], "unknown dimension 'zero'; did you mean sharding_stage?"),
        (["SMALL", *PLAN, "--set", "mp=zwei"], "mp must be a whole number of at least 1, not 'zwei'"),
        (["SMALL", *PLAN, "--level", "o9"], "level must be one of o1, o2, o3, not 'o9'"),
        (["SMALL", *PLAN, "--cost-model", "guess"], "no plugin gives a cost model named 'guess'; known are analytic, paddle"),
        (["SMALL", *PLAN, "--no-plugin", "qvk"], "cannot block 'qvk'"),
        (["SMALL", *PLAN, "--set", "mp=3"], "mp 3 of search_space does not divide"),
        (["SMALL", "--cluster", "1x4:V100-16G", "--global-batch", "8", "--precision", "bf16"], "V100-16G has no bf16"),
        (
            ["SMALL", *PLAN, "--save", "/nowhere/plan.json"],
            "'/nowhere/plan.json' cannot be written: there is no folder '/nowhere'",
        ),
    ],
)
def test_a_tuner_error_is_exit_code_1_with_one_message(arguments, message, model):
    result = run("plan", *(model if a == "SMALL" else a for a in arguments))
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1].startswith("error: ")
    assert message in result.stderr
    assert result.stdout == ""


def test_ctrl_c_is_exit_code_130(monkeypatch, model):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("paddle_rbt_plugin.cli.planning.tune_graph", interrupt)
    result = run("plan", model, *PLAN)
    assert result.exit_code == 130
    assert result.stderr.splitlines()[-1] == "interrupted"


# --- plan


def test_a_plan_shows_winner_candidates_rejected_and_patterns(model):
    result = run("plan", model, *PLAN, "--set", "pp=1", "--set", "mp=1,2", "--top", 3)
    assert result.exit_code == 0
    for text in ("step time", "TFLOP/s per device", "MiB", "the best 3 of ", "rejected", "ffn", "qkv", "paddle-rbt-plugin"):
        assert text in result.stdout
    assert "search_space allows" in result.stdout


def test_a_plan_as_json_follows_the_contract(model):
    data = json.loads(run("plan", model, *PLAN, "--set", "mp=2", "--set", "pp=1", "--json").stdout)
    assert data["degrees"] == {"pp": 1, "dp": 2, "mp": 2}
    for key in (
        "schema",
        "signature",
        "level",
        "stages",
        "tensors",
        "estimate",
        "rejected",
        "patterns",
        "unmatched",
        "cluster",
    ):
        assert key in data
    assert Plan.from_dict(data).to_dict() == data


@pytest.mark.parametrize(
    ("assignment", "allowed"),
    [("micro_batch=1,2", {1, 2}), ("recompute=full", {"full"}), ("sequence_parallel=False", {False})],
)
def test_values_that_are_set_are_kept(assignment, allowed, model):
    key = assignment.partition("=")[0]
    data = json.loads(run("plan", model, *PLAN, "--set", assignment, "--json").stdout)
    assert {candidate[key] for candidate in data["candidates"]} <= allowed


def test_auto_leaves_the_choice_to_the_tuner(model):
    free, auto = (run("plan", model, *PLAN, *extra, "--json").stdout for extra in ([], ["--set", "recompute=auto"]))
    assert free == auto


@pytest.mark.parametrize(("cluster", "precision"), [("1x4:A100-80G", "bf16"), ("1x4:V100-16G", "fp16"), ("1x4:CPU", "fp32")])
def test_the_precision_is_the_best_that_the_devices_gain_by(cluster, precision, model):
    data = json.loads(run("plan", model, "--cluster", cluster, "--global-batch", 16, "--json").stdout)
    assert data["precision"] == precision


def test_a_blocked_plugin_matches_nothing(model):
    data = json.loads(run("plan", model, *PLAN, "--no-plugin", "ffn", "--json").stdout)
    assert "ffn" not in data["patterns"]
    assert "qkv" in data["patterns"]


@pytest.mark.parametrize(("path", "reason"), [("", "a file needs a name"), ("gone/plan.json", "there is no folder")])
def test_a_plan_that_cannot_be_saved_is_an_error_before_anything_is_traced(path, reason, model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("paddle_rbt_plugin.cli.planning.model_graph", None)
    result = run("plan", model, *PLAN, "--save", path)
    assert (result.exit_code, reason in result.stderr) == (1, True)
    assert list(tmp_path.iterdir()) == [model]


def test_a_saved_plan_explains_itself(model, tmp_path):
    path = tmp_path / "plan.json"
    assert run("plan", model, *PLAN, "--set", "mp=2", "--save", path, "--quiet").stderr == ""
    text = run("explain", path).stdout
    assert text == Plan.load(path).explain()
    tensor = "gpt.layers.0.ffn.up_proj.weight"
    assert run("explain", path, "--tensor", tensor).stdout == Plan.load(path).explain(tensor)
    data = json.loads(run("explain", path, "--json").stdout)
    assert data["candidate"]["mp"] == 2
    assert json.loads(run("explain", path, "--tensor", tensor, "--json").stdout)["dims"] == [None, "mp"]


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "No such file"), ("plan", "is not JSON"), ("{}", "is not a plan"), ('{"schema": 9}', "schema 9")],
)
def test_a_file_that_is_no_plan_is_exit_code_1(content, message, tmp_path):
    path = tmp_path / "plan.json"
    if content is not None:
        path.write_text(content)
    result = run("explain", path)
    assert result.exit_code == 1
    assert message in result.stderr


# --- patterns


def test_patterns_lists_the_reference_patterns_with_their_source():
    rows = {row["name"]: row for row in json.loads(run("patterns", "--json").stdout)["patterns"]}
    for name in ("qkv", "row_matmul", "ffn", "shared_word_embedding", "position_embedding", "unsqueeze_data", "reshape_data"):
        assert rows[name]["state"] == "active"
        assert rows[name]["distribution"] == "paddle-rbt-plugin"
        assert rows[name]["entry_point"] == f"{name} = paddle_rbt_patterns.{name}"


def test_a_blocked_pattern_says_by_what():
    result = run("patterns", "--no-plugin", "qkv")
    assert "qkv of paddle-rbt-plugin 0.1.0 is blocked: blocked by name" in result.stdout


@pytest.fixture
def broken_plugin(tmp_path):
    """An installed distribution whose plugin raises at import; gives the directory to put on PYTHONPATH."""
    (tmp_path / "rbt_broken.py").write_text('raise RuntimeError("boom at import")\n')
    info = tmp_path / "rbt_broken-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: rbt-broken\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[paddle_rbt]\nbroken_one = rbt_broken\n")
    return str(tmp_path)


def test_a_broken_plugin_is_listed_with_its_reason_and_exit_code_0(broken_plugin):
    result = command("patterns", PYTHONPATH=broken_plugin)
    assert result.returncode == 0
    assert "broken_one of rbt-broken 1.0 is broken: RuntimeError: boom at import" in result.stdout


def test_planning_goes_on_without_a_broken_plugin_and_warns(broken_plugin, model):
    result = command("plan", model, *PLAN, "--json", PYTHONPATH=broken_plugin)
    assert result.returncode == 0
    json.loads(result.stdout)
    assert "warning: plugin 'broken_one' of rbt-broken 1.0 is left out: RuntimeError: boom at import" in result.stderr


# --- estimate


RUNS = """id,gpu,gpus,layers,hidden,heads,vocab,seq,tp,pp,dp,mbs,gbs,precision
one,A100-80G,8,4,256,4,512,128,2,1,4,2,32,bf16
two,A100-80G,8,4,256,4,512,128,1,2,4,1,32,bf16
"""


def test_estimate_predicts_every_run_in_the_order_of_the_file(tmp_path):
    path = tmp_path / "runs.csv"
    path.write_text(RUNS)
    runs = json.loads(run("estimate", "--runs", path, "--json").stdout)["runs"]
    assert [r["id"] for r in runs] == ["one", "two"]
    for r in runs:
        assert r["step_time_s"] == pytest.approx(sum(r["time"].values()))
        assert r["peak_memory_bytes"] == pytest.approx(sum(r["memory"].values()), abs=len(r["memory"]))
        assert r["fits"] is True
        assert r["tflops_per_gpu"] > 0
    table = run("estimate", "--runs", path).stdout
    assert "2 runs of " in table
    assert "step time" in table


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("gpus", "cards"), "lacks the columns gpus"),
        ((",8,", ",9,"), "tp x pp x dp x cp"),
        (("A100-80G", "A100-81G"), "A100-80G"),
    ],
)
def test_a_table_that_cannot_be_read_is_exit_code_1(change, message, tmp_path):
    path = tmp_path / "runs.csv"
    path.write_text(RUNS.replace(*change))
    result = run("estimate", "--runs", path)
    assert result.exit_code == 1
    assert message in result.stderr


# --- how it is printed


def test_tables_fit_80_columns_when_piped(model):
    for arguments in (["plan", model, *PLAN], ["patterns"]):
        assert max(map(len, command(*arguments, COLUMNS="").stdout.splitlines())) <= 80


def test_a_pipe_gets_neither_colours_nor_progress(model):
    result = command("plan", model, *PLAN, "--verbose")
    assert "\x1b" not in result.stdout + result.stderr


def test_colours_are_for_terminals_and_can_be_turned_off():
    def styles(*arguments, **environment):
        return set(re.findall(r"\x1b\[[\d;]+m", command("patterns", *arguments, FORCE_COLOR="1", **environment).stdout))

    assert "\x1b[32m" in styles()
    assert "\x1b[32m" not in styles(NO_COLOR="1")
    assert styles("--no-color") == set()


def test_quiet_leaves_the_result_alone(model, tmp_path):
    loud, quiet = (run("plan", model, *PLAN, "--save", tmp_path / "p.json", *extra) for extra in ([], ["--quiet"]))
    assert loud.stdout == quiet.stdout
    assert "plan saved to" in loud.stderr
    assert quiet.stderr == ""


def test_why_not_says_where_a_pattern_matches_or_what_is_the_first_not_to_fit(model):
    found = json.loads(run("patterns", "--why-not", "ffn", "--model", model, "--json").stdout)
    assert len(found["matches"]) == 2 and found["near_miss"] is None
    missed = run("patterns", "--why-not", "gated_ffn", "--model", model)
    assert "gated_ffn matches 0 times" in missed.stdout and "the first that does not: " in missed.stdout
    nearest = json.loads(run("patterns", "--why-not", "gated_ffn", "--model", model, "--json").stdout)["near_miss"]
    assert nearest["objection"] and len(nearest["fits"]) < nearest["ops"]


@pytest.mark.parametrize("arguments", [("--why-not", "ffn"), ("--model", "gpt3-1.3b"), ("--seq", "16")])
def test_why_not_and_model_go_together(arguments):
    result = run("patterns", *arguments)
    assert result.exit_code == 2 and "go together" in result.stderr


@pytest.mark.parametrize("arguments", [["plan", "sys:exit", *PLAN], ["patterns", "--why-not", "ffn", "--model", "sys:exit"]])
def test_a_model_that_exits_does_not_end_the_command_silently(arguments):
    result = run(*arguments)
    assert (result.exit_code, result.stderr.splitlines()[-1]) == (1, "error: sys:exit raised SystemExit")


def test_why_not_of_a_pattern_that_is_not_there_suggests_one(model):
    result = run("patterns", "--why-not", "fnn", "--model", model)
    assert result.exit_code == 1 and "did you mean 'ffn'" in result.stderr


def test_every_kind_of_what_plugins_register_is_listed():
    found = json.loads(run("patterns", "--json").stdout)
    assert set(found) == {"patterns", "devices", "cost_models", "op_names"}
    assert [row["name"] for row in found["cost_models"]] == ["analytic", "paddle"]
    assert {row["kind"] for row in found["patterns"]} == {"pattern"}


def test_a_pattern_that_names_an_op_that_exists_nowhere_is_listed_with_that(install):
    source = """
from paddle_rbt_plugin import Pattern, hookimpl
class Lost(Pattern):
    name = "lost"
    def build(self, g): g.op("sillu", g.tensor("x"))
    shard = {"x": (...,)}
@hookimpl
def register_patterns(register): register(Lost)
"""
    install("acme", {"lost": "acme_lost"}, acme_lost=source)
    (row,) = [r for r in json.loads(run("patterns", "--json").stdout)["patterns"] if r["name"] == "lost"]
    assert row["state"] == "active" and "Paddle has no op named 'sillu'; did you mean 'silu'" in row["reason"]


def test_a_model_that_nothing_matches_is_planned_with_a_warning(model):
    names = {row["name"] for row in json.loads(run("patterns", "--json").stdout)["patterns"]}
    result = run("plan", model, *PLAN, "--json", *(a for name in names for a in ("--no-plugin", name)))
    assert json.loads(result.stdout)["degrees"] == {"pp": 1, "dp": 4, "mp": 1}
    assert "warning: no pattern matches this model" in result.stderr


ENDLESS = """
import os, threading
from pathlib import Path
from paddle_rbt_plugin import CostModel, hookimpl

class Endless(CostModel):
    name = "endless"

    def estimate(self, case):
        Path(os.environ["SEARCHING"]).touch()
        threading.Event().wait()

@hookimpl
def register_cost_models(register):
    register(Endless)
"""
PADDLE_IN_IMPORT = """
import os, threading
from pathlib import Path
Path(os.environ["SEARCHING"]).touch()
threading.Event().wait()
"""


@pytest.mark.parametrize("where", ["import", "search"])
def test_ctrl_c_leaves_nothing_half_written(where, model, install, tmp_path):
    install("acme", {"endless": "acme_endless"}, acme_endless=ENDLESS)
    if where == "import":
        (tmp_path / "paddle.py").write_text(PADDLE_IN_IMPORT)
    folder = tmp_path / "saved"
    folder.mkdir()
    arguments = ["plan", str(model), *PLAN, "--cost-model", "endless", "--save", str(folder / "plan.json")]
    program = "from paddle_rbt_cli import main; main()"  # as the installed command starts: Paddle is imported inside it
    begun = tmp_path / "begun"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "SEARCHING": str(begun)}
    process = subprocess.Popen([sys.executable, "-c", program, *arguments], env=environment, stdout=-1, stderr=-1, text=True)
    until(begun.exists, process)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert out == ""
    assert err.splitlines()[-1] == "interrupted"
    assert list(folder.iterdir()) == []


def test_a_time_limit_ends_the_search_and_says_so(model):
    result = run("plan", model, *PLAN, "--time-limit", "1e-9", "--json")
    assert result.exit_code == 0
    assert any("time limit" in note for note in json.loads(result.stdout)["notes"])
    assert run("plan", model, *PLAN, "--time-limit", "0").exit_code == 2
