"""What a cost model is, and what the search makes of its answers.

A cost model predicts the step time, and if it likes the peak memory, of completed candidates; the search ranks by it. It is
shown what the analytic model says of each (``Case.analytic``), so that it can correct that instead of starting from nothing.
The analytic model is registered as any other, see ``plugins.builtin``.
"""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any

from paddle_rbt_plugin.cluster import Cluster
from paddle_rbt_plugin.completion.work import Completion
from paddle_rbt_plugin.cost.candidate import Candidate, Training
from paddle_rbt_plugin.cost.estimates import Estimate
from paddle_rbt_plugin.cost.stage_costs import LayerStrategy
from paddle_rbt_plugin.errors import CostModelError, PatternError, TunerError, describe_error
from paddle_rbt_plugin.graph import Graph
from paddle_rbt_plugin.spelling import spell_candidate

_NAME = re.compile(r"\w[\w.-]*")
_SHORTEST_STEP_S = 1e-12
"""Less than a clock cycle of any device; the throughput of much shorter steps is no finite number."""
_ROUNDING = 1e-9
"""By how much, relative to the step, sums of floats may fall short of what they should be."""


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
    """Seconds of one optimizer step, more than 0; no less than the analytic model says, where the model is ``bounded``."""
    peak_memory_bytes: float | None = None
    """Bytes on the fullest device; given if and only if the model ``predicts_memory``."""
    time: Mapping[str, float] = field(default_factory=dict)
    """What the step is made of, in seconds, none below 0, where the model knows: shown in the plan."""


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

    resolution: float = 0.0
    """Relative difference of two predicted step times below which the model cannot say which is shorter: of plans that take
    as long as the fastest within it, the simplest is chosen."""

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
    for key in ("bounded", "predicts_memory"):
        if not isinstance(getattr(cls, key), bool):
            raise PatternError(f"cost model {cls.name!r}: {key} is True or False, not {getattr(cls, key)!r}")
    resolution = _number(cls.resolution)
    if resolution is None or not 0 <= resolution < 1:
        raise PatternError(f"cost model {cls.name!r}: resolution is a number from 0 to less than 1, not {cls.resolution!r}")
    return cls


class CostModelAdapter:
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
    def resolution(self) -> float:
        return self.source.model.resolution

    @property
    def bounded(self) -> bool:
        return self.source.model.bounded

    def on(self, cluster: Cluster) -> CostModelAdapter:
        """The same model for another cluster."""
        return CostModelAdapter(self.source, self._graph, cluster, self._training)

    def estimate(self, case: Case) -> Estimate:
        """The analytic estimate with what the model says in place of it. Raises CostModelError, which names its package."""
        try:
            found = self._model.estimate(case)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # SystemExit too: a plugin must not end the job
            raise CostModelError(
                f"{self.source} failed on {spell_candidate(vars(case.candidate))}: {describe_error(error)}"
            ) from error
        analytic = case.analytic
        step, peak, time = self._checked(found, case)
        judged = replace(
            analytic,
            step_time_s=step,
            time=time,
            tflops_per_gpu=analytic.tflops_per_gpu * analytic.step_time_s / step,
        )
        if peak is None:
            return judged
        limit = min(stage.memory_limit_bytes for stage in analytic.stages)
        return replace(judged, peak_memory_bytes=peak, memory={}, fits=peak <= limit)

    def _checked(self, found: Any, case: Case) -> tuple[float, float | None, dict[str, float]]:
        """Step time, peak memory and breakdown as plain numbers. Raises CostModelError, which says what would be right."""

        def wrong(what: str, right: str) -> CostModelError:
            return CostModelError(
                f"{self.source} answers {what} for {spell_candidate(vars(case.candidate))}; {right} would be right"
            )

        if not isinstance(found, Prediction):
            raise wrong(_show(found), "a Prediction")
        step, peak, analytic = _number(found.step_time_s), _number(found.peak_memory_bytes), case.analytic
        if step is None or step <= 0:
            raise wrong(f"a step time of {_show(found.step_time_s)}", "a finite number of seconds above 0")
        if step < _SHORTEST_STEP_S:
            raise wrong(f"a step time of {step!r}", f"a number of seconds of at least {_SHORTEST_STEP_S}")
        if self.bounded and step < analytic.step_time_s * (1 - _ROUNDING):
            raise wrong(
                f"a step time of {step!r}, below the {analytic.step_time_s!r} of the analytic model, although it is bounded,",
                "bounded = False, or no less,",
            )
        if self.predicts_memory and (peak is None or peak <= 0):
            raise wrong(f"a peak memory of {_show(found.peak_memory_bytes)}", "a finite number of bytes above 0")
        if not self.predicts_memory and found.peak_memory_bytes is not None:
            raise wrong("a peak memory", "None, or predicts_memory = True,")
        time = _breakdown(found.time, -_ROUNDING * step)
        if time is None:
            raise wrong(f"the breakdown {_show(found.time)}", "a dict of printable names and finite seconds, none below 0,")
        return step, peak, time


def _breakdown(time: Any, least: float) -> dict[str, float] | None:
    """Names and seconds as plain numbers, what lies between ``least`` and 0 taken for 0; None for anything else."""
    if not isinstance(time, Mapping) or not all(isinstance(name, str) and name and name.isprintable() for name in time):
        return None
    seconds = {name: _number(value) for name, value in time.items()}
    plain = {name: max(0.0, s) for name, s in seconds.items() if s is not None and s >= least}
    return plain if len(plain) == len(seconds) else None


def _number(value: Any) -> float | None:
    """A finite number as a plain float, whatever class it has; None for anything else."""
    if not isinstance(value, Real) or isinstance(value, bool):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _show(value: Any) -> str:
    """What a model answered, as far as it can be shown."""
    try:
        return reprlib.repr(value)
    except (Exception, SystemExit):  # its own code may be what is broken
        return f"an object of class {type(value).__name__}"
