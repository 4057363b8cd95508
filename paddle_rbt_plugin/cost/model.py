"""What a cost model is, and what the search makes of its answers.

A cost model predicts the step time, and if it likes the peak memory, of completed candidates; the search ranks by it. It is
shown what the analytic model says of each (``Case.analytic``), so that it can correct that instead of starting from nothing.
The analytic model is registered as any other, see ``plugins.builtin``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any

from paddle_rbt_plugin.cluster import Cluster
from paddle_rbt_plugin.completion.work import Completion
from paddle_rbt_plugin.cost.candidate import Candidate, Training
from paddle_rbt_plugin.cost.estimate import Estimate
from paddle_rbt_plugin.cost.stage_cost import LayerStrategy
from paddle_rbt_plugin.errors import CostModelError, PatternError, TunerError, describe_error
from paddle_rbt_plugin.graph import Graph

_NAME = re.compile(r"\w[\w.-]*")


@dataclass(frozen=True)
class Case:
    """One candidate that a cost model is asked about."""

    candidate: Candidate
    completion: Completion
    """Every kernel and collective of a step, forward and backward, on the mesh of one stage."""
    analytic: Estimate
    """What the analytic model says: seconds and bytes with their breakdowns, stage by stage."""
    stage_layers: Sequence[int] | None = None
    """How many layers each model chunk has; None for as even as possible."""
    layers: Sequence[LayerStrategy] | None = None
    """The strategy of each layer where they differ (level o2)."""


@dataclass(frozen=True)
class Prediction:
    """What a cost model answers."""

    step_time_s: float
    """Seconds of one optimizer step, more than 0."""
    peak_memory_bytes: float | None = None
    """Bytes on the fullest device; given if and only if the model ``predicts_memory``."""
    time: Mapping[str, float] = field(default_factory=dict)
    """What the step is made of, in seconds, where the model knows: shown in the plan."""


class CostModel:
    """Predicts what candidates cost. Subclass it, and register the class in a plugin's ``register_cost_models`` hook.

    One instance serves one search on one cluster, so it may keep whatever its answers have in common."""

    name: str = ""
    """By which users ask for it: ``paddle-rbt plan --cost-model NAME``."""

    predicts_memory: bool = False
    """True for a model that also predicts peak memory, which then decides what fits. Else the analytic model does."""

    bounded: bool = False
    """True for a model that never predicts a step shorter than the analytic model does. The search may then leave out what
    the analytic lower bounds rule out, and is exact. Else the model is asked about every candidate, up to a number."""

    def __init__(self, graph: Graph, cluster: Cluster, training: Training):
        """``graph`` is the forward program. Raise TunerError to refuse it, with the reason."""

    def estimate(self, case: Case) -> Prediction:
        """The cost of one candidate. The same case must always get the same answer."""
        raise NotImplementedError(f"{type(self).__name__} predicts nothing: it must define estimate(self, case)")


@dataclass(frozen=True)
class PluginCostModel:
    """A cost model and the package it came from."""

    model: type[CostModel]
    distribution: str = ""
    version: str = ""
    entry_point: str = ""

    @property
    def name(self) -> str:
        return self.model.name

    def __str__(self) -> str:
        return f"cost model {self.name!r} ({self.distribution} {self.version}, entry point {self.entry_point!r})"

    def to_dict(self) -> dict[str, str]:
        """What a plan records of it."""
        return {"name": self.name, "distribution": self.distribution, "version": self.version}


def check_cost_model(cls: Any) -> type[CostModel]:
    """A class that can be used as a cost model. Raises PatternError, as for every malformed plugin."""
    if not (isinstance(cls, type) and issubclass(cls, CostModel)):
        raise PatternError(f"register() takes a subclass of CostModel, not {cls!r}")
    if not isinstance(cls.name, str) or not _NAME.fullmatch(cls.name):
        raise PatternError(f"{cls.__name__}: a cost model needs a name of letters, digits, '_', '-' and '.', not {cls.name!r}")
    if cls.estimate is CostModel.estimate:
        raise PatternError(f"cost model {cls.name!r} predicts nothing: it must define estimate(self, case)")
    return cls


class Judge:
    """A cost model at work in one search. Whatever goes wrong in it is a CostModelError that names its package."""

    def __init__(self, source: PluginCostModel, graph: Graph, cluster: Cluster, training: Training):
        self.source = source
        self._graph, self._training = graph, training
        try:
            self._model = source.model(graph, cluster, training)
        except TunerError as error:
            raise CostModelError(f"{source} cannot be used here: {error}") from error
        except (Exception, SystemExit) as error:
            raise CostModelError(f"{source} failed to start: {describe_error(error)}") from error

    @property
    def predicts_memory(self) -> bool:
        return self.source.model.predicts_memory

    @property
    def bounded(self) -> bool:
        return self.source.model.bounded

    def on(self, cluster: Cluster) -> Judge:
        """The same model for another cluster."""
        return Judge(self.source, self._graph, cluster, self._training)

    def estimate(self, case: Case) -> Estimate:
        """The analytic estimate with what the model says in place of it."""
        try:
            found = self._model.estimate(case)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # SystemExit too: a plugin must not end the job
            raise CostModelError(f"{self.source} failed on {_spell(case.candidate)}: {describe_error(error)}") from error
        self._check(found, case.candidate)
        analytic, step = case.analytic, float(found.step_time_s)
        judged = replace(
            analytic,
            step_time_s=step,
            time=dict(found.time),
            tflops_per_gpu=analytic.tflops_per_gpu * analytic.step_time_s / step,
        )
        if found.peak_memory_bytes is None:
            return judged
        limit = min(stage.memory_limit_bytes for stage in analytic.stages)
        peak = float(found.peak_memory_bytes)
        return replace(judged, peak_memory_bytes=peak, memory={}, fits=peak <= limit)

    def _check(self, found: Any, candidate: Candidate) -> None:
        def wrong(what: str, right: str) -> CostModelError:
            return CostModelError(f"{self.source} answers {what} for {_spell(candidate)}; {right} would be right")

        if not isinstance(found, Prediction):
            raise wrong(repr(found), "a Prediction")
        if not _positive(found.step_time_s):
            raise wrong(f"a step time of {found.step_time_s!r}", "a finite number of seconds above 0")
        if self.predicts_memory and not _positive(found.peak_memory_bytes):
            raise wrong(f"a peak memory of {found.peak_memory_bytes!r}", "a finite number of bytes above 0")
        if not self.predicts_memory and found.peak_memory_bytes is not None:
            raise wrong("a peak memory", "None, or predicts_memory = True,")
        if not isinstance(found.time, Mapping) or not all(isinstance(k, str) and _finite(v) for k, v in found.time.items()):
            raise wrong(f"the breakdown {found.time!r}", "a dict of names and seconds")


def _finite(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def _positive(value: Any) -> bool:
    return _finite(value) and value > 0


def _spell(c: Candidate) -> str:
    return f"pp {c.pp} x dp {c.dp} x mp {c.mp}, micro batch {c.micro_batch}"
