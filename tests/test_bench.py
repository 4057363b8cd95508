"""The benchmark suite: its cases, what it says of them, and what it says has changed."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from paddle_rbt_cli import cli
from paddle_rbt_plugin.bench.case import find_case, load_case, suite
from paddle_rbt_plugin.bench.reference import ReferenceTuner
from paddle_rbt_plugin.bench.report import draw, to_markdown
from paddle_rbt_plugin.bench.results import Change, Result, Row, compare, load_results, to_json
from paddle_rbt_plugin.cost.estimates import RESOLUTION
from paddle_rbt_plugin.errors import TunerError
from paddle_rbt_plugin.models import named_config
from paddle_rbt_plugin.plan.files import check_writable, write_whole
from paddle_rbt_plugin.plugins import parse_cluster
from paddle_rbt_plugin.search import SearchSpace

MODEL = "arch: gpt\nlayers: 4\nhidden: 64\nffn: 256\nheads: 4\nvocab: 128\nseq: 32\n"
CASE = """
model: MODEL
cluster: 1x4:A100-80G
global_batch: 16
experts:
  - {source: a paper, strategy: {mp: 2, pp: 1}, measured_step_time_s: 1.5}
  - {source: a blog, strategy: {mp: 4, pp: 4}}
"""
WANTED = (
    "gpt-345m", "gpt3-1.3b", "gpt3-2.7b", "gpt3-6.7b", "gpt3-13b", "gpt-39b", "gpt-76b", "gpt3-175b",
    "llama2-7b", "llama2-13b", "llama2-70b", "llama3-8b", "llama3-70b", "llama3-405b",
)  # fmt: skip


def run(*arguments):
    return CliRunner().invoke(cli, ["bench", *map(str, arguments)], prog_name="paddle-rbt")


@pytest.fixture
def case(tmp_path):
    model, path = tmp_path / "small.yaml", tmp_path / "mine.yaml"
    model.write_text(MODEL)
    path.write_text(CASE.replace("MODEL", str(model)))
    return path


# --- the cases of the suite


def test_the_suite_has_every_model_that_it_should():
    assert set(WANTED) <= {case.model for case in suite()}


@pytest.mark.parametrize("case", suite(), ids=lambda case: case.name)
def test_a_case_names_what_exists_and_cites_its_experts(case):
    cluster = parse_cluster(case.cluster)
    named_config(case.model)
    assert case.precision in cluster.groups[0].device.precisions
    assert case.experts
    for expert in case.experts:
        space = SearchSpace.parse(expert.strategy)
        assert expert.source
        degrees = [getattr(space, axis)[0] for axis in ("pp", "dp", "mp")]
        assert degrees[0] * degrees[1] * degrees[2] == cluster.device_count


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("model:", "modle:"), "'modle' was unexpected"),
        (("global_batch: 16", "global_batch: sixteen"), "global_batch: 'sixteen' is not of type 'integer'"),
        (("experts:", "training: [fused_atention]\nexperts:"), "there is no 'fused_atention'; did you mean fused_attention"),
        (("source: a paper, ", ""), "experts/0: 'source' is a required property"),
        (("cluster:", "cluster: ["), "cannot be read"),
        (("global_batch: 16", "global_batch: 16\nglobal_batch: 32"), "'global_batch' occurs twice"),
        (("experts:", "seq: 9223372036854775808\nexperts:"), "seq: "),
        (("experts:", "seq: 3000000000\nexperts:"), "seq: "),
        (("1.5}", ".nan}"), "experts/0/measured_step_time_s"),
        (("1.5}", ".inf}"), "experts/0/measured_step_time_s"),
        (("mp: 2, pp: 1", "mp: 2, pq: 1"), "mine.yaml: experts/0/strategy: unknown dimension 'pq'"),
        (("experts:", "search_space: {mp: x}\nexperts:"), "mine.yaml: search_space: mp must be a whole number"),
    ],
)
def test_a_wrong_case_is_refused_with_the_field(change, message, case):
    case.write_text(case.read_text().replace(*change))
    with pytest.raises(TunerError, match=r"mine\.yaml") as error:
        load_case(case)
    assert message in str(error.value)


def test_a_misspelt_case_is_answered_with_the_nearest():
    with pytest.raises(TunerError, match=r"did you mean gpt3-1.3b"):
        find_case("gpt3-1.3")


# --- what it says


def test_a_case_of_ones_own_is_planned_and_compared(case):
    data = json.loads(run(case, "--no-reference", "--json").stdout)
    (result,) = data["cases"]
    ours, paper, blog = result["rows"]
    assert data["schema"] == 1
    assert (result["case"], result["devices"], result["precision"]) == ("mine", 4, "bf16")
    assert ours["step_time_s"] <= paper["step_time_s"] * (1 + RESOLUTION)
    assert ours["tuning_s"] > 0
    assert 0 < ours["mfu"] < 1
    assert ours["mfu"] == pytest.approx(ours["tflops_per_gpu"] / 312)
    assert (paper["source"], paper["measured_step_time_s"], paper["candidate"]["mp"]) == ("a paper", 1.5, 2)
    assert blog["candidate"] is None
    assert "pp 4 x mp 4" in blog["reason"]


def test_the_same_case_gives_the_plan_of_the_plan_command(case):
    row = json.loads(run(case, "--no-reference", "--json").stdout)["cases"][0]["rows"][0]
    arguments = ["plan", str(case.with_name("small.yaml")), "--cluster", "1x4:A100-80G", "--global-batch", "16", "--json"]
    plan = json.loads(CliRunner().invoke(cli, arguments).stdout)
    assert {axis: row["candidate"][axis] for axis in ("pp", "dp", "mp")} == plan["degrees"]
    assert row["step_time_s"] == plan["estimate"]["step_time_s"]


def test_flags_of_training_reach_the_cost_model(case):
    plain = json.loads(run(case, "--no-reference", "--json").stdout)["cases"][0]["rows"][0]
    case.write_text(case.read_text() + "training: [fused_attention, fused_elementwise]\n")
    fused = json.loads(run(case, "--no-reference", "--json").stdout)["cases"][0]["rows"][0]
    assert fused["step_time_s"] < plain["step_time_s"]


def test_the_table_fits_80_columns_and_cites(case):
    text = run(case, "--no-reference").stdout
    assert max(map(len, text.splitlines())) <= 80
    assert "1. a paper; measured there: 1.50 s per step" in text


def test_results_are_written_as_json_markdown_and_plot(case, tmp_path):
    pytest.importorskip("matplotlib")
    files = [tmp_path / name for name in ("r.json", "r.md", "r.svg")]
    result = run(case, "--no-reference", "--save", files[0], "--markdown", files[1], "--plot", files[2])
    assert result.exit_code == 0
    assert load_results(files[0])[0].ours.mfu
    assert "| **mine**<br>1x4:A100-80G, batch 16, bf16 | paddle-rbt |" in files[1].read_text()
    assert files[2].read_text().lstrip().startswith("<?xml")


@pytest.mark.parametrize(
    ("option", "file", "message"),
    [
        ("--plot", "plot.bmx", "must end in .svg, .png or .pdf"),
        ("--save", "nowhere/r.json", "there is no folder 'nowhere'"),
        ("--save", "/proc/r.json", "'/proc/r.json' cannot be written: "),
        ("--markdown", "r" * 300, "cannot be written: File name too long"),
        ("--save", "", "a file needs a name"),
    ],
)
def test_a_file_that_cannot_be_written_is_refused_before_the_work(option, file, message, monkeypatch):
    monkeypatch.setattr("paddle_rbt_plugin.cli.benching.Bench", None)
    result = run("gpt-345m", option, file)
    assert result.exit_code == 1
    assert message in result.stderr


def test_a_model_that_exits_is_an_error(case):
    case.write_text("model: sys:exit\ncluster: 1x4:A100-80G\nglobal_batch: 16\n")
    result = run(case, "--no-reference")
    assert (result.exit_code, result.stderr.splitlines()[-1]) == (1, "error: sys:exit raised SystemExit")


def test_two_cases_of_one_name_are_refused_before_the_work(case, monkeypatch):
    monkeypatch.setattr("paddle_rbt_plugin.cli.benching.Bench", None)
    result = run(case, case)
    assert result.exit_code == 1
    assert "two cases are named 'mine'" in result.stderr


def test_the_list_shows_every_case():
    listed = run("--list").stdout
    assert all(case.name in listed for case in suite())


# --- what has changed

ROW = Row("ours", candidate={"pp": 1, "dp": 4, "mp": 2}, step_time_s=1.0, peak_memory_bytes=2**30, mfu=0.4, tuning_s=2.0)
RESULT = Result("one", "gpt3-1.3b", "1x8:A100-80G", 8, 64, "bf16", (ROW, Row("published", "a paper", reason="too large")))


def with_ours(**changes):
    return dataclasses.replace(RESULT, rows=(dataclasses.replace(ROW, **changes), *RESULT.rows[1:]))


def test_equal_results_have_not_changed_whatever_tuning_took():
    assert compare([RESULT], [with_ours(tuning_s=99.0)]) == []


def test_changes_name_case_row_and_figure():
    changes = compare([RESULT], [with_ours(step_time_s=0.5, candidate={"pp": 1, "dp": 8, "mp": 1})])
    assert changes == [
        Change("one", "ours", "plan", ROW.candidate, {"pp": 1, "dp": 8, "mp": 1}),
        Change("one", "ours", "step_time_s", 1.0, 0.5),
    ]


def test_cases_and_rows_that_come_and_go_are_changes():
    other = dataclasses.replace(RESULT, case="two")
    fewer = dataclasses.replace(RESULT, rows=RESULT.rows[:1])
    changes = compare([RESULT, other], [fewer])
    assert [(c.case, c.row, c.what) for c in changes] == [("one", "a paper", "row"), ("two", "", "case")]


def test_saved_results_are_read_as_they_were(tmp_path):
    path = tmp_path / "r.json"
    path.write_text(json.dumps(to_json([RESULT], {"paddle": "3.3.1"})))
    assert load_results(path) == [RESULT]
    assert run("--compare", path, path).stdout == "nothing changed\n"
    assert json.loads(run("--compare", path, path, "--json").stdout) == {"changes": []}


@pytest.mark.parametrize("content", ["", "[]", '{"schema": 9}', '{"schema": 1}', '{"schema": 1, "cases": [{"rows": [{}]}]}'])
def test_a_file_that_holds_no_results_is_exit_code_1(content, tmp_path):
    path = tmp_path / "r.json"
    path.write_text(content)
    result = run("--compare", path, path)
    assert result.exit_code == 1
    assert str(path) in result.stderr


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        (("rows", 0, "step_time_s"), "1 s", "cases/0/rows/0/step_time_s: '1 s' is not of type"),
        (("rows", 0, "mfu"), float("nan"), "NaN is no number"),
        (("rows", 0, "step_time_s"), 10**400, "cases/0/rows/0/step_time_s: the number is too large"),
        (("rows", 0, "candidate"), [1, 2], "cases/0/rows/0/candidate"),
        (("rows", 0, "candidate"), {"pp": 1, "dp": "x", "mp": 1}, "cases/0/rows/0/candidate/dp"),
        (("rows", 0, "kind"), "published", "cases/0/rows: the first row"),
        (("rows",), [], "cases/0/rows"),
        (("global_batch",), "64", "cases/0/global_batch"),
        (("model",), "\x1b[31m", "'cases/0/model' holds text that cannot be printed"),
        (("case",), "two", "cases/1/case: 'two' occurs twice"),
    ],
)
def test_edited_results_are_refused_by_file_and_field(field, value, message, tmp_path):
    data = json.loads(json.dumps(to_json([RESULT, dataclasses.replace(RESULT, case="two")], {})))
    place = data["cases"][0]
    for key in field[:-1]:
        place = place[key]
    place[field[-1]] = value
    path = tmp_path / "r.json"
    path.write_text(json.dumps(data))
    with pytest.raises(TunerError, match=r"r\.json") as error:
        load_results(path)
    assert message in str(error.value)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--list", "gpt-39b"),
        ("--list", "--save", "r.json"),
        ("--compare", "a.json", "b.json", "gpt-39b"),
        ("--compare", "a.json", "b.json", "--save", "r.json"),
        ("--compare", "a.json", "b.json", "--list"),
    ],
)
def test_what_does_not_go_together_is_wrong_usage(arguments):
    result = run(*arguments)
    assert result.exit_code == 2
    assert "cannot be combined" in result.stderr


def test_a_row_without_figures_has_a_line_all_the_same():
    empty = dataclasses.replace(RESULT, rows=tuple(Row(kind, reason="none") for kind in ("ours", "reference")))
    assert "| none |" in to_markdown([empty])


def test_equal_results_give_the_same_plot():
    pytest.importorskip("matplotlib")
    assert draw([RESULT], "svg") == draw([RESULT], "svg")


# --- Paddle's own tuner


def test_paddles_own_tuner_is_not_asked_what_it_cannot_answer():
    cases = [find_case("gpt-39b")]
    with ReferenceTuner(cases, limit=30) as tuner:
        assert "more than one machine" in tuner.answer(cases[0]).reason


@pytest.mark.slow
def test_paddles_own_tuner_plans_in_a_process_of_its_own(case):
    row = json.loads(run(case, "--json").stdout)["cases"][0]["rows"][-1]
    assert row["kind"] == "reference"
    assert row["candidate"]["pp"] * row["candidate"]["dp"] * row["candidate"]["mp"] == 4
    assert row["tuning_s"] > 0


def test_its_time_is_limited(case):
    loaded = load_case(case)
    with ReferenceTuner([loaded], limit=0.01) as tuner:
        assert tuner.answer(loaded).reason == "stopped: the 0.01 s for all cases were used up"


def test_sigterm_ends_its_process_too(case):
    script = f"""
from paddle_rbt_plugin.bench.case import find_case
from paddle_rbt_plugin.bench.reference import ReferenceTuner
case = find_case({str(case)!r})
with ReferenceTuner([case], 100) as tuner:
    print("started", flush=True)
    tuner.answer(case)
"""
    process = subprocess.Popen([sys.executable, "-c", script], stdout=-1, stderr=-1, text=True)
    assert process.stdout.readline() == "started\n"
    (child,) = map(int, Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split())
    process.terminate()
    process.communicate(timeout=60)
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


# --- files


def test_a_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "result.json"
    path.write_text("before")

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_whole(path, "after")
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


def test_links_and_devices_are_written_to_and_not_replaced(tmp_path):
    (tmp_path / "there").mkdir()
    link = tmp_path / "link.json"
    link.symlink_to("there/result.json")
    check_writable(link)
    write_whole(link, "new")
    assert link.is_symlink() and (tmp_path / "there" / "result.json").read_text() == "new"
    check_writable(os.devnull)
    write_whole(os.devnull, "gone")
    assert not os.path.isfile(os.devnull)


def test_a_folder_is_no_file_to_write(tmp_path):
    with pytest.raises(TunerError, match="cannot be written: it is a folder; name a file in it"):
        check_writable(tmp_path)
