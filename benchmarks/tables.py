"""Puts results of the benchmark suite where they are shown: ``benchmarks/results``, the plot of the documentation, the README.

paddle-rbt bench --save suite.json && python benchmarks/tables.py suite.json
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from paddle_rbt_plugin.bench.report import draw, to_markdown
from paddle_rbt_plugin.bench.results import Result, load_results
from paddle_rbt_plugin.spelling import spell_candidate, spell_seconds

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
README = ROOT / "README.md"
SHOWN = ("gpt3-1.3b", "gpt3-13b", "gpt-39b", "gpt3-175b", "llama2-7b", "llama2-70b", "llama3-8b")
"""The cases in the README."""
HEADER = "| model | published strategy | step | our plan | step | saved |\n|---|---|---:|---|---:|---:|"


def readme_table(results: Sequence[Result]) -> str:
    """Some cases, each with the fastest published strategy, our plan, and what of a step is saved."""
    by_name = {result.case: result for result in results}
    return "\n".join([HEADER, *(_row(by_name[name]) for name in SHOWN)])


def _row(result: Result) -> str:
    published = [row for row in result.rows if row.kind == "published" and row.step_time_s]
    theirs, ours = min(published, key=lambda row: row.step_time_s), result.ours
    cells = [f"{result.model} on {result.cluster}"]
    for row in (theirs, ours):
        cells += [spell_candidate(row.candidate), spell_seconds(row.step_time_s)]
    return "| " + " | ".join([*cells, f"{1 - ours.step_time_s / theirs.step_time_s:.0%}"]) + " |"


def main(path: str) -> None:
    """Writes all of it."""
    results = load_results(path)
    (RESULTS / "suite.json").write_bytes(Path(path).read_bytes())
    (RESULTS / "suite.md").write_text(to_markdown(results), encoding="utf-8")
    (ROOT / "docs" / "assets" / "suite.svg").write_bytes(draw(results, "svg"))
    before, _, rest = README.read_text(encoding="utf-8").partition(HEADER)
    _, _, after = rest.partition("\n\n")
    README.write_text(f"{before}{readme_table(results)}\n\n{after}", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
