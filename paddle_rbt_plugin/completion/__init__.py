"""Completion: placements of all tensors from those of a few, and the collectives that follow from them."""

from paddle_rbt_plugin.completion.oracle import Oracle
from paddle_rbt_plugin.completion.placement import Placement
from paddle_rbt_plugin.completion.propagate import AnyOracle, complete, data_parallel, find_batch_dims, make_oracle
from paddle_rbt_plugin.completion.work import Collective, Completion, Kernel, SegmentWork, Value

__all__ = [
    "AnyOracle",
    "Collective",
    "Completion",
    "Kernel",
    "Oracle",
    "Placement",
    "SegmentWork",
    "Value",
    "complete",
    "data_parallel",
    "find_batch_dims",
    "make_oracle",
]
