"""Tables of training runs."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_rbt_plugin.errors import TunerError
from paddle_rbt_plugin.runs import estimate_runs, read_runs, score_runs
from paddle_rbt_plugin.runs.predict import run_cluster, run_config, run_training
from paddle_rbt_plugin.runs.score import spearman

RUN = {
    "id": "a",
    "gpu": "A100-80G",
    "gpus": 8,
    "layers": 4,
    "hidden": 256,
    "heads": 4,
    "vocab": 1000,
    "seq": 128,
    "mbs": 1,
    "gbs": 8,
}


def table(path: Path, *rows: dict[str, object]) -> Path:
    file = path / "runs.csv"
    with file.open("w", newline="") as f:
        columns = dict.fromkeys(column for row in rows for column in row)
        writer = csv.DictWriter(f, list(columns), restval="")
        writer.writeheader()
        writer.writerows(rows)
    return file


def test_an_empty_cell_means_the_default(tmp_path: Path) -> None:
    (run,) = read_runs(table(tmp_path, {**RUN, "tp": "", "comment": "ignored"}))
    assert (run.tp, run.pp, run.dp, run.cp, run.vpp) == (1, 1, 8, 1, 1)
    assert (run.gpus_per_node, run.ffn, run.kv_heads, run.arch) == (8, 1024, 4, "gpt")
    assert (run.sharding, run.precision, run.recompute, run.seq_parallel) == ("none", "fp16", "none", False)
    assert run.inter_node_GBps is None
    assert run.micro_batches == 1


def test_dp_is_what_the_other_degrees_leave(tmp_path: Path) -> None:
    (run,) = read_runs(table(tmp_path, {**RUN, "tp": 2, "pp": 2}))
    assert run.dp == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gpus": ""}, "column gpus: is empty"),
        ({"layers": "four"}, "column layers must be a whole number of at least 1, not 'four'"),
        ({"hidden": 0}, "column hidden must be a whole number of at least 1, not '0'"),
        ({"tp": 3}, "column gpus: tp x pp x dp x cp must be the 8 devices, but is 3 x 1 x 2 x 1 = 6"),
        ({"dp": 4}, "column gpus: tp x pp x dp x cp must be the 8 devices"),
        ({"gpus": 12, "dp": 12, "gbs": 12}, "column gpus: 12 is not a multiple of gpus_per_node, 8"),
        ({"gbs": 12}, "column gbs: 12 is not a multiple of dp x mbs = 8"),
        ({"pp": 8, "gbs": 8}, "column pp: pp x vpp = 8 exceeds the 4 layers"),
        ({"vpp": 2}, "column vpp: interleaving needs a pipeline"),
        ({"arch": "bert"}, "column arch must be one of gpt, llama, not 'bert'"),
        ({"sharding": "zero1"}, "column sharding must be one of none, stage1, stage2, stage3, not 'zero1'"),
        ({"inter_node_GBps": "fast"}, "column inter_node_GBps must be a number above 0, not 'fast'"),
        ({"measured_step_time_s": -1}, "column measured_step_time_s"),
    ],
)
def test_a_bad_value_is_named_by_file_row_and_column(tmp_path: Path, change: dict[str, object], message: str) -> None:
    with pytest.raises(TunerError) as error:
        read_runs(table(tmp_path, {**RUN, "id": "fine"}, {**RUN, **change, "id": "odd_one"}))
    assert "runs.csv, run odd_one, " in str(error.value)
    assert message in str(error.value)


def test_a_missing_column_is_named_with_those_found(tmp_path: Path) -> None:
    with pytest.raises(TunerError, match=r"lacks the columns gbs; found: id, gpu"):
        read_runs(table(tmp_path, {k: v for k, v in RUN.items() if k != "gbs"}))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(TunerError, match=r"nowhere\.csv cannot be read: No such file"):
        read_runs(tmp_path / "nowhere.csv")


def test_two_runs_of_one_id_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(TunerError, match="ids must be unique, but a are not"):
        read_runs(table(tmp_path, RUN, RUN))


def test_runs_are_predicted_in_the_order_of_the_file(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    rows = [{**RUN, "id": f"tp{tp}", "tp": tp} for tp in (4, 1, 2)]
    results = estimate_runs(table(tmp_path, *rows), lambda done, total: told.append((done, total)))
    assert [r["id"] for r in results] == ["tp4", "tp1", "tp2"]
    assert told == [(1, 3), (2, 3), (3, 3)]
    assert all(r["step_time_s"] > 0 and r["fits"] and r["tflops_per_gpu"] > 0 for r in results)
    assert all(sum(r["time"].values()) == pytest.approx(r["step_time_s"]) for r in results)
    json.dumps(results)


def test_every_column_reaches_the_prediction(tmp_path: Path) -> None:
    base = {**RUN, "tp": 2, "pp": 2, "gbs": 16, "seq_parallel": "0"}
    changes: list[dict[str, object]] = [
        {"gpu": "H100"}, {"gpus_per_node": 4}, {"layers": 6}, {"hidden": 512}, {"ffn": 2048}, {"heads": 8}, {"vocab": 2000},
        {"seq": 256}, {"arch": "llama"}, {"sharding": "stage1"}, {"vpp": 2}, {"mbs": 2}, {"gbs": 32}, {"precision": "fp32"},
        {"recompute": "full"}, {"seq_parallel": "1"}, {"pp": 1}, {"tp": 4}, {"cp": 2},
    ]  # fmt: skip
    rows = [{**base, "id": "base"}, *({**base, **change, "id": str(change)} for change in changes)]
    first, *others = estimate_runs(table(tmp_path, *rows))
    same = [r["id"] for r in others if (r["step_time_s"], r["memory"]) == (first["step_time_s"], first["memory"])]
    assert not same


def test_the_network_of_a_row_replaces_the_catalogues(tmp_path: Path) -> None:
    rows = [{**RUN, "id": str(rate), "gpus": 16, "gbs": 16, "inter_node_GBps": rate} for rate in (1, 100)]
    slow, fast = estimate_runs(table(tmp_path, *rows))
    assert slow["step_time_s"] > fast["step_time_s"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gpu": "A100-81G"}, "unknown device"),
        ({"tp": 8, "heads": 4}, "8 does not divide"),
        ({"hidden": 250}, "heads must divide"),
    ],
)
def test_a_run_that_cannot_be_predicted_is_named(tmp_path: Path, change: dict[str, object], message: str) -> None:
    with pytest.raises(TunerError, match=f"runs.csv, run odd_one: .*{message}"):
        estimate_runs(table(tmp_path, {**RUN, **change, "id": "odd_one"}))


def test_a_vocabulary_is_padded_for_its_shards(tmp_path: Path) -> None:
    (run,) = read_runs(table(tmp_path, {**RUN, "vocab": 50257, "tp": 8}))
    assert run_config(run).vocab == 51200


def test_a_small_run_has_one_small_machine(tmp_path: Path) -> None:
    (run,) = read_runs(table(tmp_path, {**RUN, "gpus": 2, "gbs": 2}))
    assert run_cluster(run).short_form == "1x2:A100-80G"


def test_gradients_are_kept_in_float32_under_bf16_only(tmp_path: Path) -> None:
    runs = read_runs(table(tmp_path, *({**RUN, "id": p, "precision": p} for p in ("fp16", "bf16"))))
    assert [run_training(r).float32_gradients for r in runs] == [False, True]


def test_scores_are_those_of_their_definitions(tmp_path: Path) -> None:
    measured = [1.0, 2.0, 3.0, 4.0, 5.0]
    predicted = [1.1, 1.0, 3.0, 4.0, 5.0]
    runs = read_runs(table(tmp_path, *({**RUN, "id": i, "measured_step_time_s": m} for i, m in enumerate(measured))))
    results = [{"step_time_s": t, "fits": i != 3, "peak_memory_bytes": 1} for i, t in enumerate(predicted)]
    score = score_runs(runs, results)
    assert score.mape == pytest.approx((0.1 + 0.5) / 5)
    assert score.spearman == pytest.approx(0.9)
    assert score.regret_max == score.regret_mean == 1.0
    assert score.not_fitting == 1


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=20, unique=True))
def test_ranks_agree_with_themselves_and_not_with_their_reverse(values: list[float]) -> None:
    assert spearman(values, values) == pytest.approx(1.0)
    assert spearman(values, [-v for v in values]) == pytest.approx(-1.0)
