"""Completion: placements of all tensors from those of a few, and the collectives that follow from them."""

from paddle_rbt_plugin.completion.answers import Answers
from paddle_rbt_plugin.completion.by_batch import complete_by_batch, data_parallel, find_batch_dims, ops_without_rule
from paddle_rbt_plugin.completion.cache import cache_folder
from paddle_rbt_plugin.completion.crossings import RemoteReads, SharedReads, reads_apart, shared_reads
from paddle_rbt_plugin.completion.kernels import AnyOracle
from paddle_rbt_plugin.completion.oracle import Oracle
from paddle_rbt_plugin.completion.placement import Placement
from paddle_rbt_plugin.completion.propagate import Memo, complete, make_oracle
from paddle_rbt_plugin.completion.work import Collective, Completion, Crossing, Kernel, SegmentWork, Value

__all__ = [
    "Answers",
    "AnyOracle",
    "Collective",
    "Completion",
    "Crossing",
    "Kernel",
    "Memo",
    "Oracle",
    "Placement",
    "RemoteReads",
    "SegmentWork",
    "SharedReads",
    "Value",
    "cache_folder",
    "complete",
    "complete_by_batch",
    "data_parallel",
    "find_batch_dims",
    "make_oracle",
    "ops_without_rule",
    "reads_apart",
    "shared_reads",
]
