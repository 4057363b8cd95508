"""The inputs of planning: created and checked once, at each entry point, and passed down unchanged.

Every entry point creates a ``Request``: ``rbt.tune``, the registered pass, the command line, the benchmark suite. The planner
(``tuner``) turns a graph and a request into a plan and validates nothing else.
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
"""Samples per step: thousands of times what anybody trains with, yet few enough to factorise."""


@dataclass(frozen=True)
class Constraint:
    """Values fixed by something other than the search space, and what that is."""

    reason: str
    values: Mapping[str, tuple]


@dataclass(frozen=True)
class Request:
    """All inputs of planning except the graph. Raises TunerError or ClusterError for a wrong value on creation."""

    settings: Settings
    """Its cluster is replaced by the parsed cluster, or by the devices of the running job if it names none."""
    global_batch: Annotated[int | None, whole(1, MAX_GLOBAL_BATCH).or_none()] = None
    """Samples of one optimizer step; None for the batch of the program."""
    precision: Annotated[str | None, one_of(*TRAINING_PRECISIONS).or_none()] = None
    """None for the precision of the program's weights."""
    constraints: tuple[Constraint, ...] = ()
    """Constraints that narrow the search space, each with its reason."""
    progress: Watcher | None = None
    """Called with a ``search.Progress`` during the search."""
    rewrite: bool = True
    """Whether ops that Paddle shards badly are rewritten, as in programs that are handed over to PIR."""
    assumed: tuple[str, ...] = ()
    """Flags of ``Training`` to assume although the program does not show them."""
    patterns: tuple[CompiledPattern, ...] = ()
    """Used beside the installed ones."""
    space: SearchSpace = field(init=False)
    """The space that the settings allow, before ``constraints`` are applied."""

    def __post_init__(self) -> None:
        check_fields(self)
        object.__setattr__(self, "settings", replace(self.settings, cluster=_cluster(self.settings)))
        object.__setattr__(self, "space", SearchSpace.parse(self.settings.search_space))

    @property
    def cluster(self) -> Cluster:
        """The cluster that is planned for."""
        return cast(Cluster, self.settings.cluster)

    def training(self, batch: int, weights: Precision) -> Training:
        """How a program written for ``batch`` samples, with ``weights`` in a precision, is trained.

        Raises TunerError if the global batch is not a multiple of ``batch``."""
        if self.global_batch is not None and self.global_batch % batch:
            raise TunerError(f"global_batch {self.global_batch} is no multiple of the batch of the program, {batch}")
        flags: dict[str, Any] = dict.fromkeys(self.assumed, True)
        return Training(self.global_batch or batch, cast(Precision, self.precision or weights), **flags)


def best_precision(cluster: Cluster) -> str:
    """The half precision that all devices support and that is faster on them, preferring bf16 to fp16; else fp32."""
    for precision in ("bf16", "fp16"):
        devices = [group.device for group in cluster.groups]
        if all(precision in d.precisions and d.flops(precision) > d.flops("fp32") for d in devices):
            return precision
    return "fp32"


def _cluster(settings: Settings) -> Cluster:
    if settings.cluster is None:
        return detect_cluster(settings.blocked_plugins)
    return parse_cluster(settings.cluster, settings.blocked_plugins)
