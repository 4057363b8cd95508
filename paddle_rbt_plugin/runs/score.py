"""How well predictions agree with what was measured.

MAPE is the mean of |predicted / measured - 1|. Runs of one model, number of devices and batch form a group; in each of at least
four runs, Spearman's coefficient says how well the order is predicted, and the regret how much slower the run that
would have been picked is than the fastest one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from paddle_rbt_plugin.runs.table import TrainingRun

SMALLEST_GROUP = 4
"""Runs that a group needs to be ranked."""


@dataclass(frozen=True)
class Score:
    """Agreement of predictions with measurements; nan where nothing was measured or no group is large enough."""

    runs: int
    mape: float
    spearman: float
    """Mean over the groups."""
    regret_max: float
    regret_mean: float
    not_fitting: int
    """Measured runs that are predicted not to fit."""
    memory_errors: tuple[float, ...]
    """Predicted over measured peak memory, minus 1, of each run whose memory was measured."""


def score_runs(runs: Sequence[TrainingRun], results: Sequence[Mapping[str, Any]]) -> Score:
    """Scores the results of ``estimate_runs`` for the runs of the same table that have a measured step time."""
    errors, groups = [], dict[tuple[object, ...], list[tuple[float, float]]]()
    for run, result in zip(runs, results, strict=True):
        measured, predicted = run.measured_step_time_s, result["step_time_s"]
        if measured is not None:
            errors.append(abs(predicted / measured - 1))
            groups.setdefault((run.layers, run.hidden, run.gpus, run.gbs, run.seq), []).append((measured, predicted))
    ranked = [group for group in groups.values() if len(group) >= SMALLEST_GROUP]
    regrets = [min(g, key=lambda p: p[1])[0] / min(g)[0] - 1 for g in ranked]
    return Score(
        runs=len(errors),
        mape=_mean(errors),
        spearman=_mean([spearman([m for m, _ in g], [p for _, p in g]) for g in ranked]),
        regret_max=max(regrets, default=math.nan),
        regret_mean=_mean(regrets),
        not_fitting=sum(not r["fits"] for r in results),
        memory_errors=tuple(
            result["peak_memory_bytes"] / (run.measured_peak_memory_MB * 2**20) - 1
            for run, result in zip(runs, results, strict=True)
            if run.measured_peak_memory_MB is not None
        ),
    )


def spearman(x: Sequence[float], y: Sequence[float]) -> float:
    """Spearman's rank correlation, equal values sharing their mean rank; nan where either does not vary."""
    a, b = _ranks(x), _ranks(y)
    mean = (len(x) + 1) / 2
    spread = math.sqrt(sum((i - mean) ** 2 for i in a) * sum((j - mean) ** 2 for j in b))
    return sum((i - mean) * (j - mean) for i, j in zip(a, b, strict=True)) / spread if spread else math.nan


def _ranks(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    return [ordered.index(v) + (ordered.count(v) + 1) / 2 for v in values]


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else math.nan
