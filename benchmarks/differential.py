"""Random small models under random training scripts: what trains under the tuner is what one process trains.

    python benchmarks/differential.py --models 500 --seed 1
    python benchmarks/differential.py --case case.json

Each case is a model, a script, a layout of CPU processes and an entry point (``random_models/grammar.py``). It is trained in
one process without the tuner, and by several under it; losses, weights and optimizer states are compared
(``random_models/compare.py``). A case that differs, crashes (an exception other than a TunerError, or the end of a process) or
hangs is shrunk and printed, as a model to read and as JSON that ``--case`` runs again. Refusals, which are TunerErrors, are
counted by reason.

Exits with 1 where a case fails, and where more than a tenth are refused.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from random_models.draw import draw_case
from random_models.grammar import ENTRIES, LAYOUTS, Case, check, completed
from random_models.pool import Jobs
from random_models.run import FAILURES, Outcome, run_case
from random_models.shrink import MAX_RUNS, shrink
from random_models.spell import spell_case, spell_layout

MOST_REFUSED = 0.1
RUNS_OF_A_HANG = 12
"""Each takes the whole time limit."""


def main() -> int:
    options = _options()
    rows: list[dict[str, Any]] = []
    seen: Counter[tuple[str, str]] = Counter()
    begin = time.monotonic()
    with Jobs() as jobs:
        for name, case in _cases(options):
            outcome = run_case(jobs, case, options.time_limit)
            row = _row(name, case, outcome)
            rows.append(row)
            print(f"{name}  {outcome.outcome:10} {row['layout']:9} {case['entry']:9} {_short(outcome)}", flush=True)
            if outcome.outcome == "serial":
                print(f"{spell_case(case)}\n{outcome.detail}")
            if outcome.failed:
                seen[outcome.outcome, outcome.kind] += 1
                small = options.shrink and seen[outcome.outcome, outcome.kind] <= options.shrink
                row["shrunk"], row["shrunk_detail"] = _report(jobs, case, outcome, options.time_limit, small)
            if options.json:
                Path(options.json).write_text("\n".join(map(json.dumps, rows)) + "\n")
        starts = jobs.starts
    print(_summary(rows, time.monotonic() - begin, starts))
    bad = sum(r["outcome"] in (*FAILURES, "serial") for r in rows)
    refused = sum(r["outcome"] == "refused" for r in rows)
    return int(bad > 0 or refused > MOST_REFUSED * len(rows))


def _options() -> Any:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=int, default=20, help="how many cases to draw")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="the number of the first case")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--entry", nargs="+", choices=ENTRIES, default=list(ENTRIES))
    parser.add_argument("--with-crashing-ops", action="store_true", help="also ops that may end the process, such as einsum")
    parser.add_argument("--case", type=Path, nargs="+", help="run these cases instead of drawing some")
    parser.add_argument("--json", type=Path, help="write one line per case here")
    parser.add_argument("--shrink", type=int, default=3, help="how many failures of a kind are shrunk; all are printed")
    parser.add_argument("--no-shrink", dest="shrink", action="store_const", const=0)
    parser.add_argument("--time-limit", type=float, default=60, help="seconds after which a case hangs")
    return parser.parse_args()


def _cases(options: Any) -> Iterator[tuple[str, Case]]:
    if options.case:
        for path in options.case:
            case = completed(json.loads(path.read_text()))
            check(case)
            yield path.stem, case
        return
    for number in range(options.first, options.first + options.models):
        case = draw_case(options.seed, number, options.layouts, options.entry, options.with_crashing_ops)
        yield f"{options.seed}-{number}", case


def _report(jobs: Jobs, case: Case, outcome: Outcome, limit: float, small: bool) -> tuple[Case, str]:
    """Prints a failing case, shrunk if it is to be small, and returns it with what it fails with."""
    last = outcome

    def fails(candidate: Case) -> bool:
        nonlocal last
        found = run_case(jobs, candidate, limit)
        if found.failed and found.same_failure(outcome):
            last = found
            return True
        return False

    if small:
        jobs.afresh()
        if fails(case):
            case = shrink(case, fails, RUNS_OF_A_HANG if outcome.outcome == "hang" else MAX_RUNS)
        else:
            print("    not seen again by processes that had trained nothing before", flush=True)
    text = f"{spell_case(case)}\n{last.outcome} {last.kind}: {last.detail.strip()[-1500:]}\n{json.dumps(case)}"
    print("\n".join(f"    {line}" for line in text.splitlines()), flush=True)
    return case, f"{last.outcome} {last.kind}: {last.detail.strip()[-1500:]}"


def _row(name: str, case: Case, outcome: Outcome) -> dict[str, Any]:
    row = {"name": name, "outcome": outcome.outcome, "kind": outcome.kind, "layout": spell_layout(case), "entry": case["entry"]}
    return {**row, "detail": outcome.detail[-1500:], **outcome.sizes, "seconds": outcome.seconds, "case": case}


def _short(outcome: Outcome) -> str:
    seconds = f"{sum(outcome.seconds.values()):.1f} s"
    if outcome.outcome == "same":
        return f"{seconds}  loss {outcome.sizes['loss']:.0e}, weights {outcome.sizes['weight']:.0e}"
    return f"{seconds}  {outcome.kind} {outcome.detail.strip().splitlines()[-1][:150] if outcome.detail.strip() else ''}"


def _summary(rows: Sequence[dict[str, Any]], seconds: float, starts: int) -> str:
    order = ("same", "unstable", "refused", *FAILURES, "serial")
    present = [o for o in order if any(r["outcome"] == o for r in rows)]
    lines = ["", f"{'':12}" + "".join(f"{o:>12}" for o in present)]
    for key in ("layout", "entry"):
        for value in sorted({r[key] for r in rows}):
            counts = Counter(r["outcome"] for r in rows if r[key] == value)
            lines.append(f"{value:12}" + "".join(f"{counts[o]:12}" for o in present))
    counts = Counter(r["outcome"] for r in rows)
    lines.append(f"{'all':12}" + "".join(f"{counts[o]:12}" for o in present))
    for outcome in order[1:]:
        kinds = Counter(r["kind"] for r in rows if r["outcome"] == outcome)
        lines += [f"{outcome} {count:4}  {kind}" for kind, count in kinds.most_common()]
    parts = Counter[str]()
    for r in rows:
        parts.update(r["seconds"])
    spent = ", ".join(f"{s:.0f} s {name}" for name, s in parts.items())
    lines.append(f"{len(rows)} cases in {seconds:.0f} s ({spent}; shrinking included); jobs were started {starts} times")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
