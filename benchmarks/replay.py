"""Process replay: a change that should not change plans shows that it does not.

    python benchmarks/replay.py --record     writes the plans of today to results/plans.json
    python benchmarks/replay.py              plans again and names every difference from them; exit code 1 where there is one
    python benchmarks/replay.py --only gpt3  the same for the rows whose name holds a text

Every named model is planned on one machine, on several, and on machines of two kinds; the cases of the benchmark suite as
they are; the levels o2 and o3 where layers or machines differ. Plans are made by the command line, so that nothing inside
the package has to keep its name. Words (reasons, notes) may change; what is decided, placed and predicted may not.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from paddle_rbt_cli import cli
from paddle_rbt_plugin.bench.case import suite
from paddle_rbt_plugin.models import config_names

RECORD = Path(__file__).parent / "results" / "plans.json"
SAME = 1e-9
"""Relative difference of figures that sums in another order may have."""
TEXTS = ("notes", "rejected", "unmatched", "candidates", "tensors", "patterns", "cluster", "cost_model", "model", "schema")
"""Parts of a plan that are words, or of which a summary is kept."""


@dataclass(frozen=True)
class Row:
    """One plan: the arguments of ``paddle-rbt plan``."""

    name: str
    arguments: tuple[str, ...]


def rows() -> Iterator[Row]:
    """What is planned."""
    for model in config_names():
        for cluster, batch in (("1x8:A100-80G", 64), ("8x8:H100", 512), ("2x8:A100-80G+2x8:V100-32G", 256)):
            yield _row(model, cluster, batch)
    for case in suite():
        if isinstance(case.cluster, str):
            space = [f"{key}={value}" for key, value in case.search_space.items()]
            seq = () if case.seq is None else ("--seq", str(case.seq))
            precision = () if case.precision is None else ("--precision", case.precision)
            yield _row(case.model, case.cluster, case.global_batch, case.level, *seq, *precision, space=space)
    for model, cluster, batch, level in (
        ("gpt3-1.3b", "1x8:A100-80G", 64, "o2"),
        ("gpt3-13b", "2x8:A100-80G+2x8:V100-32G", 256, "o3"),
        ("llama2-13b", "4x8:A100-40G", 256, "o2"),
        ("llama3-8b", "1x8:A100-80G+1x8:H100", 128, "o3"),
        ("gpt3-175b", "128x8:A100-80G", 1536, "o1"),
        ("gpt3-175b", "128x8:A100-80G", 1536, "o2"),
        ("llama3-405b", "2048x8:H100", 2048, "o1"),
    ):
        yield _row(model, cluster, batch, level)


def _row(model: str, cluster: str, batch: int, level: str = "o1", *more: str, space: Any = ()) -> Row:
    fixed = [word for choice in space for word in ("--set", choice)]
    arguments = (model, "--cluster", cluster, "--global-batch", str(batch), "--level", level, *more, *fixed)
    return Row(" ".join((model, cluster, str(batch), level, *more, *space)), arguments)


def plan(row: Row) -> dict[str, Any]:
    """What must stay of the plan of a row, or the class of the error where nothing fits."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = CliRunner().invoke(cli, ["plan", *row.arguments, "--json"])
    if run.exit_code:
        return {"exit_code": run.exit_code}
    return summary(json.loads(run.stdout))


def summary(made: Mapping[str, Any]) -> dict[str, Any]:
    """What must stay of a plan: its decisions and figures, a digest of all placements, the best ten, and what was ruled out."""
    kept = {key: value for key, value in made.items() if key not in TEXTS}
    placed = {name: [t["stage"], t["dims_mapping"], t["pattern"]] for name, t in made["tensors"].items()}
    kept["tensors"] = hashlib.sha256(json.dumps(placed).encode()).hexdigest()[:16]
    kept["best"] = [
        {key: value for key, value in candidate.items() if key != "reason"} for candidate in made["candidates"][:10]
    ]
    kept["ruled_out"] = sorted("x".join(str(r["candidate"][k]) for k in ("pp", "dp", "mp")) for r in made["rejected"])
    kept["matches"] = {name: entry["matches"] for name, entry in made["patterns"].items()}
    kept["unmatched"] = len(made["unmatched"])
    return kept


def differences(before: Any, after: Any, where: str = "") -> Iterator[str]:
    """Every place in which two summaries differ."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in before.keys() | after.keys():
            yield from differences(before.get(key), after.get(key), f"{where}.{key}" if where else key)
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for i, (old, new) in enumerate(zip(before, after, strict=True)):
            yield from differences(old, new, f"{where}[{i}]")
    elif isinstance(before, (int, float)) and isinstance(after, (int, float)):
        if not math.isclose(before, after, rel_tol=SAME, abs_tol=1e-12):
            yield f"{where}: {before} before, {after} now"
    elif before != after:
        yield f"{where}: {before} before, {after} now"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--only", default="")
    arguments = parser.parse_args()
    known = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    found, different = {}, 0
    for row in rows():
        if arguments.only not in row.name:
            continue
        start = time.perf_counter()
        found[row.name] = plan(row)
        changed = sorted(differences(known[row.name], found[row.name])) if row.name in known else ["not recorded"]
        different += bool(changed)
        print(f"{'equal' if not changed else 'DIFFERS':8}{time.perf_counter() - start:6.1f} s  {row.name}", flush=True)
        for line in changed[:8]:
            print(f"    {line}")
    if arguments.record:
        RECORD.write_text(json.dumps(known | found, indent=1, sort_keys=True) + "\n")
    else:
        print(f"{len(found) - different} of {len(found)} plans equal")
        sys.exit(bool(different))


if __name__ == "__main__":
    main()
