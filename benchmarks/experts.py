"""Published strategies against what the planner finds for the same model, devices, batch and recomputation.

    python benchmarks/experts.py [FILE.csv] [--json FILE]

One line per run: the published strategy with its predicted and its measured step, the best plan found, and the published one's
rank by predicted time among all candidates that fit with its micro batch and recomputation. ``same features`` is its rank among
those that share its ZeRO stage, schedule and sequence parallelism as well: what its training code could do.

Where a run is not among the best ten, the candidates before it are told apart by the dimensions in which they differ: how many
there are, the fastest of them, and what it saves by part of the step.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from outputs import output_file
from rich.console import Console
from rich.table import Table

from paddle_rbt_plugin.handover.pir.configs import config_graph
from paddle_rbt_plugin.plugins import load_plugins
from paddle_rbt_plugin.runs import TrainingRun, read_runs
from paddle_rbt_plugin.runs.predict import run_candidate, run_cluster, run_config, run_training
from paddle_rbt_plugin.search import Evaluated, Search, SearchSpace, analyse, candidate_dict, candidates
from paddle_rbt_plugin.search.o1 import run_o1
from paddle_rbt_plugin.spelling import spell_candidate, spell_seconds

PUBLISHED = Path(__file__).parent / "published" / "megatron_sc21.csv"
BEST = 10
"""A published strategy should be among so many."""
FEATURES = ("sharding_stage", "sequence_parallel", "schedule")
_FOLLOWS = ("accumulate_steps", "schedule")
"""What follows from other dimensions, and so says nothing of its own."""


@dataclass(frozen=True)
class Group:
    """The candidates predicted to be faster that differ from the published one in the same dimensions, fastest first."""

    differs: tuple[str, ...]
    members: tuple[Evaluated, ...]

    def saves(self, published: Evaluated) -> dict[str, float]:
        """Seconds that the fastest saves, by part of the step; negative where it takes longer."""
        best = self.members[0].estimate.time
        return {part: seconds - best[part] for part, seconds in published.estimate.time.items()}


class Comparison:
    """One published run and the candidates it is compared with."""

    def __init__(self, run: TrainingRun, search: Search):
        self.run = run
        self.search = search
        self.published = search.evaluate(run_candidate(run))

    @cached_property
    def best(self) -> Evaluated:
        """The best plan under the run's recomputation."""
        return run_o1(self._within(recompute=self.run.recompute)).best

    @cached_property
    def rivals(self) -> tuple[int, tuple[Evaluated, ...]]:
        """How many candidates with the run's micro batch and recomputation fit, and those that are predicted to be faster."""
        search = self._within(recompute=self.run.recompute, micro_batch=self.run.mbs)
        fitting, faster = 0, []
        for candidate in candidates(search.analysis, search.cluster, search.training, search.space)[0]:
            bound = search.bound(candidate)
            fitting += bound.missing_bytes <= 0
            if bound.missing_bytes <= 0 and bound.step_time_s < self.published.estimate.step_time_s:
                evaluated = search.evaluate(candidate)
                if evaluated.estimate.step_time_s < self.published.estimate.step_time_s:
                    faster.append(evaluated)
        return fitting, tuple(sorted(faster, key=lambda e: e.rank))

    @property
    def rank(self) -> int:
        return 1 + len(self.rivals[1])

    @property
    def rank_among_same_features(self) -> int:
        mine = self.published.candidate
        return 1 + sum(all(getattr(e.candidate, f) == getattr(mine, f) for f in FEATURES) for e in self.rivals[1])

    def groups(self) -> list[Group]:
        """The faster ones by what they differ in, the largest group first."""
        mine = candidate_dict(self.published.candidate)
        found: dict[tuple[str, ...], list[Evaluated]] = {}
        for e in self.rivals[1]:
            theirs = candidate_dict(e.candidate)
            differs = tuple(key for key in mine if key not in _FOLLOWS and theirs[key] != mine[key])
            found.setdefault(differs, []).append(e)
        groups = [Group(differs, tuple(members)) for differs, members in found.items()]
        return sorted(groups, key=lambda g: (-len(g.members), g.members[0].rank))

    def _within(self, **space: Any) -> Search:
        """The same search in another space; what it has found so far holds for both."""
        search = Search(self.search.analysis, self.search.cluster, self.search.training, SearchSpace.parse(space))
        search.costs = self.search.costs
        return search

    def to_dict(self) -> dict[str, Any]:
        fitting, _ = self.rivals
        return {
            "run": self.run.id,
            "published": _entry(self.published),
            "measured_step_time_s": self.run.measured_step_time_s,
            "best": _entry(self.best),
            "rank": self.rank,
            "of": fitting,
            "rank_among_same_features": self.rank_among_same_features,
            "faster": [
                {
                    "differs": list(g.differs),
                    "count": len(g.members),
                    "fastest": _entry(g.members[0]),
                    "saves_s": g.saves(self.published),
                }
                for g in self.groups()
            ],
        }


def compare(path: Path) -> Iterator[Comparison]:
    """The runs of a file, one by one."""
    patterns = load_plugins().patterns
    for run in read_runs(path):
        analysis = analyse(config_graph(run_config(run), run.gbs), patterns)
        yield Comparison(run, Search(analysis, run_cluster(run), run_training(run), SearchSpace()))


def _entry(e: Evaluated) -> dict[str, Any]:
    return {**candidate_dict(e.candidate), "step_time_s": e.estimate.step_time_s, "time": dict(e.estimate.time)}


def table(comparisons: Sequence[Comparison]) -> Table:
    """One line per run, seconds."""
    found = Table("run", "published pp/dp/mp/vpp, mb", title="Published strategies and ours, same recomputation")
    for name in ("measured", "predicted", "rank", "same features", "best found"):
        found.add_column(name, justify="right")
    found.add_column("which is")
    for c in comparisons:
        p = c.published.candidate
        found.add_row(
            c.run.id,
            f"{p.pp}/{p.dp}/{p.mp}/{p.vpp}, {p.micro_batch}",
            f"{c.run.measured_step_time_s:.2f}" if c.run.measured_step_time_s else "",
            f"{c.published.estimate.step_time_s:.2f}",
            f"{c.rank} of {c.rivals[0]}",
            str(c.rank_among_same_features),
            f"{c.best.estimate.step_time_s:.2f}",
            spell_candidate(candidate_dict(c.best.candidate)),
        )
    return found


def explanation(c: Comparison, most: int = 3) -> Iterator[str]:
    """Why a run is not among the best: the groups before it, the largest first."""
    groups = c.groups()
    counts: Counter[str] = Counter()
    for g in groups:
        counts.update(dict.fromkeys(g.differs, len(g.members)))
    yield (
        f"{c.run.id}: {c.rank - 1} of {c.rivals[0]} with micro batch {c.run.mbs} are predicted to be faster; of these "
        + ", ".join(f"{n} differ in {key}" for key, n in counts.most_common() if n)
    )
    for g in groups[:most]:
        saved = c.published.estimate.step_time_s - g.members[0].estimate.step_time_s
        yield (
            f"  {len(g.members):>4} differ in {', '.join(g.differs)}; the fastest, {_changes(c, g)}, saves "
            f"{spell_seconds(saved)}: {_parts(g.saves(c.published))}"
        )
    if len(groups) > most:
        yield f"  {sum(len(g.members) for g in groups[most:]):>4} in {len(groups) - most} other sets of dimensions"


def _changes(c: Comparison, g: Group) -> str:
    new = candidate_dict(g.members[0].candidate)
    return ", ".join(f"{key} {new[key]}" for key in g.differs)


def _parts(saves: Mapping[str, float]) -> str:
    """What is gained and lost, parts of less than a hundredth of all of it left out."""
    whole = sum(map(abs, saves.values()))
    shown = sorted(saves.items(), key=lambda item: -abs(item[1]))
    return ", ".join(f"{part} {seconds:+.2f} s" for part, seconds in shown if abs(seconds) >= 0.01 * whole)


def show(path: Path) -> list[dict[str, Any]]:
    """Prints table and explanations; returns them as plain JSON values."""
    comparisons = list(compare(path))
    console = Console(width=max(Console().width, 150))
    console.print(table(comparisons))
    for c in comparisons:
        if c.rank > BEST:
            for line in explanation(c):
                console.print(line, highlight=False, markup=False, soft_wrap=True)
    return [c.to_dict() for c in comparisons]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", type=Path, default=PUBLISHED)
    parser.add_argument("--json", type=output_file)
    arguments = parser.parse_args()
    found = show(arguments.file)
    if arguments.json:
        arguments.json.write_text(json.dumps({"experts": found}, indent=1))


if __name__ == "__main__":
    main()
