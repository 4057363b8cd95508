"""The tables in README and documentation are those of the saved results."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from paddle_rbt_plugin.bench.case import suite
from paddle_rbt_plugin.bench.report import to_markdown
from paddle_rbt_plugin.bench.results import load_results

ROOT = Path(__file__).parents[1]


def benchmark(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


sys.path.insert(0, str(ROOT / "benchmarks"))
tables, fields = benchmark("tables"), benchmark("fields")
RESULTS = load_results(tables.RESULTS / "suite.json")


def test_the_readme_shows_the_saved_results():
    assert tables.readme_table(RESULTS) in tables.README.read_text(encoding="utf-8")


def test_the_documentation_shows_the_saved_results():
    assert (tables.RESULTS / "suite.md").read_text(encoding="utf-8") == to_markdown(RESULTS)


def test_the_saved_results_are_those_of_the_suite():
    assert [result.case for result in RESULTS] == [case.name for case in suite()]


@pytest.mark.parametrize("model", list(fields.CASES))
def test_the_documentation_shows_the_plans_of_other_fields(model):
    rows = fields.table([model]).splitlines()[2:]
    assert set(rows) <= set(fields.RESULTS.read_text(encoding="utf-8").splitlines())


@pytest.mark.parametrize("model", [name for name in fields.CASES if "DLRM" not in name])
def test_what_fits_a_device_is_trained_by_replicas_with_their_whole_share_at_once(model):
    for cluster, times in fields.CLUSTERS.items():
        plan = fields.planned(fields.CASES[model], cluster)
        assert plan.degrees == {"pp": 1, "dp": 8 * times, "mp": 1}
        assert plan.accumulate_steps == 1 and plan.recompute == "none"
