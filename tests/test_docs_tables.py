"""The tables in README and documentation are those of the saved results."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from paddle_rbt_plugin.bench.case import suite
from paddle_rbt_plugin.bench.report import to_markdown
from paddle_rbt_plugin.bench.results import load_results

ROOT = Path(__file__).parents[1]
SPEC = importlib.util.spec_from_file_location("tables", ROOT / "benchmarks" / "tables.py")
tables = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(tables)
RESULTS = load_results(tables.RESULTS / "suite.json")


def test_the_readme_shows_the_saved_results():
    assert tables.readme_table(RESULTS) in tables.README.read_text(encoding="utf-8")


def test_the_documentation_shows_the_saved_results():
    assert (tables.RESULTS / "suite.md").read_text(encoding="utf-8") == to_markdown(RESULTS)


def test_the_saved_results_are_those_of_the_suite():
    assert [result.case for result in RESULTS] == [case.name for case in suite()]
