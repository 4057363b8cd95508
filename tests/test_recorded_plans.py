"""Plans of the named models are those on record: a change that is meant to change plans records them anew, see
``benchmarks/replay.py``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))  # at the end: some modules there are named as packages are
import replay

ROWS = list({row.name: row for row in replay.rows()}.values())
RECORDED = json.loads(replay.RECORD.read_text())
QUICK = {"gpt3-1.3b 1x8:A100-80G 64 o1", "llama2-7b 8x8:H100 512 o1", "gpt3-1.3b 1x8:A100-80G 64 o2"}


def test_every_row_is_on_record_and_none_beside() -> None:
    assert {row.name for row in ROWS} == RECORDED.keys()
    assert {row.name for row in ROWS} > QUICK


@pytest.mark.parametrize(
    "row", [pytest.param(row, marks=[] if row.name in QUICK else [pytest.mark.slow], id=row.name) for row in ROWS]
)
def test_a_plan_is_the_one_on_record(row) -> None:
    assert list(replay.differences(RECORDED[row.name], replay.plan(row))) == []


def test_a_difference_is_named_by_its_place() -> None:
    before = {"degrees": {"pp": 1}, "best": [{"step_time_s": 1.0}, {"step_time_s": 2.0}]}
    after = {"degrees": {"pp": 1}, "best": [{"step_time_s": 1.0 + 1e-12}, {"step_time_s": 2.1}], "vpp": 2}
    assert sorted(replay.differences(before, after)) == ["best[1].step_time_s: 2.0 before, 2.1 now", "vpp: None before, 2 now"]
