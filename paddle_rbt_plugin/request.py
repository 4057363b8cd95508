"""What a plan is asked for: made and checked once, where a user comes in, and passed down unchanged.

Every way into the package makes a ``Request``: ``rbt.tune``, the registered pass, the command line, the benchmark suite. The
planner (``tuner``) turns a graph and a request into a plan and validates nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, cast

from paddle_rbt_plugin.cluster import Cluster
from paddle_rbt_plugin.config import Settings
from paddle_rbt_plugin.cost.candidate import Precision, Training
from paddle_rbt_plugin.errors import TunerError
from paddle_rbt_plugin.pattern import CompiledPattern
from paddle_rbt_plugin.plugins import detect_cluster, parse_cluster
from paddle_rbt_plugin.search import SearchSpace, Watcher
from paddle_rbt_plugin.validation import check_fields, one_of, whole

TRAINING_PRECISIONS = ("fp32", "fp16", "bf16")

MAX_GLOBAL_BATCH = 2**24
"""Samples of one step: thousands of times what anybody trains with, and few enough to factorise."""


@dataclass(frozen=True)
class Constraint:
    """Values that something other than the search space fixes, and what that is."""

    reason: str
    values: Mapping[str, tuple]


@dataclass(frozen=True)
class Request:
    """Everything about a plan but the graph. Raises TunerError, or ClusterError, for a wrong value when it is made."""

    settings: Settings
    """Its cluster is replaced by the one parsed, or by the devices of the running job where it names none."""
    global_batch: Annotated[int | None, whole(1, MAX_GLOBAL_BATCH).or_none()] = None
    """Samples of one optimizer step; None for the batch of the program."""
    precision: Annotated[str | None, one_of(*TRAINING_PRECISIONS).or_none()] = None
    """None for ``fp32``."""
    constraints: tuple[Constraint, ...] = ()
    """They narrow the search space, each with its reason."""
    progress: Watcher | None = None
    """Called with a ``search.Progress`` as the search goes on."""
    rewrite: bool = True
    """Whether ops that Paddle shards badly take another form, as in programs that are handed over to PIR."""
    assumed: tuple[str, ...] = ()
    """Flags of ``Training`` that hold although the program does not show them."""
    patterns: tuple[CompiledPattern, ...] = ()
    """Used beside the installed ones."""
    space: SearchSpace = field(init=False)
    """What the settings allow; ``constraints`` are not in it yet."""

    def __post_init__(self) -> None:
        check_fields(self)
        object.__setattr__(self, "settings", replace(self.settings, cluster=_cluster(self.settings)))
        object.__setattr__(self, "space", SearchSpace.parse(self.settings.search_space))

    @property
    def cluster(self) -> Cluster:
        """The cluster that is planned for."""
        return cast(Cluster, self.settings.cluster)

    def training(self, batch: int) -> Training:
        """How a program that was written for ``batch`` samples is trained.

        Raises TunerError for a global batch that is no multiple of it."""
        if self.global_batch is not None and self.global_batch % batch:
            raise TunerError(f"global_batch {self.global_batch} is no multiple of the batch of the program, {batch}")
        flags: dict[str, Any] = dict.fromkeys(self.assumed, True)
        return Training(self.global_batch or batch, cast(Precision, self.precision or "fp32"), **flags)


def best_precision(cluster: Cluster) -> str:
    """The half precision that all devices have and gain by, bf16 before fp16; else fp32."""
    for precision in ("bf16", "fp16"):
        devices = [group.device for group in cluster.groups]
        if all(precision in d.precisions and d.flops(precision) > d.flops("fp32") for d in devices):
            return precision
    return "fp32"


def _cluster(settings: Settings) -> Cluster:
    if settings.cluster is None:
        return detect_cluster(settings.blocked_plugins)
    return parse_cluster(settings.cluster, settings.blocked_plugins)
