"""Paddle's own CostEstimator as a second opinion, with three of its defects repaired from outside.

- It takes the number of a rank for the number of a device, and a machine's CPU and cards are devices too. It asks a
  cluster about ranks here, which answers about ranks.
- An op type without a cost class is a KeyError. Such a type gets one here: the roofline of its bytes.
- Communication knows five dtypes. The others are shown to it as one of the same width.

It reads a legacy program whose forward and backward pass are completed. Its unit is the microsecond; it costs a pipeline as
one micro batch that goes through, takes no account of recomputation or ZeRO, and counts the outputs of reshape, transpose and
add as free.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from paddle_rbt_plugin.cluster import Cluster
from paddle_rbt_plugin.cost.paddle_memo import estimates_remembered
from paddle_rbt_plugin.patching import Attribute, Item, Setting, paddle_change

_SAME_WIDTH = {"bfloat16": "float16", "int16": "float16", "float64": "int64", "int8": "uint8", "bool": "uint8"}
_BYTES = {"float32": 4, "int32": 4, "float16": 2, "int64": 8, "uint8": 1}


@dataclass(frozen=True)
class PaddleEstimate:
    """What Paddle's CostEstimator says of one step of a completed program."""

    step_time_s: float
    peak_memory_bytes: float


@dataclass(frozen=True)
class _Rates:
    """A device as the estimator sees it: GFLOP/s."""

    dp_gflops: float
    sp_gflops: float
    hp_gflops: float


class RankCluster:
    """A cluster with the questions that the estimator asks, about ranks throughout."""

    alpha_latency = None

    def __init__(self, cluster: Cluster):
        self.cluster = cluster

    def convert_rank_to_device_id(self, ranks: Sequence[int]) -> list[int]:
        return list(ranks)

    def get_device(self, rank: int) -> _Rates:
        device = self.cluster.device_of(rank)
        known = {p: device.flops(p) / 1e9 for p in device.precisions}
        single = known.get("fp32", min(known.values()))
        return _Rates(single / 2, single, max(known.get("fp16", single), known.get("bf16", single)))

    def get_beta(self, source: int, target: int) -> float:
        """Microseconds per byte between two ranks."""
        return 1e6 / self.cluster.link((source, target)).bandwidth if source != target else 0.0

    def get_hop(self, source: int, target: int) -> int:
        return int(self.cluster.machine_of(source) != self.cluster.machine_of(target))

    def cross_machine(self, ranks: Sequence[int]) -> bool:
        return self.get_involved_machine_count(ranks) > 1

    def get_involved_machine_count(self, ranks: Sequence[int]) -> int:
        return len({self.cluster.machine_of(rank) for rank in ranks})


def paddle_estimate(program: Any, context: Any, cluster: Cluster) -> PaddleEstimate:
    """Costs a completed serial program of the legacy IR; ``context`` is its DistributedContext."""
    from paddle.distributed.auto_parallel.static.cost import CostEstimator

    ranks: Any = RankCluster(cluster)
    types = {op.type for block in program.blocks for op in block.ops}
    with estimator_repaired.apply(types, cluster), estimates_remembered.apply():
        estimator = CostEstimator(program, ranks, rank=0)
        seconds = estimator.estimate(context).time / 1e6
        return PaddleEstimate(seconds, float(estimator._estimate_max_memory_by_dist_op(context)))


@paddle_change(">=2.6,<3.4")
def estimator_repaired(types: set[str], cluster: Cluster) -> Iterator[Setting]:
    """The estimator's tables and classes that know every op type and dtype.

    Reason: an op type without a cost class is a KeyError, and communication knows five dtypes.
    """
    from paddle.distributed.auto_parallel.static.cost import base_cost

    factory = base_cost._g_op_cost_factory
    bandwidth = cluster.groups[0].device.memory_bandwidth
    added = {name: _bytes_cost(name, bandwidth) for name in types | {f"{t}_grad" for t in types} if name not in factory}
    added = {name: cls for name, cls in added.items() if name not in base_cost.NON_COMP_TYPE}
    original = base_cost.CommOpCost.__init__

    @functools.wraps(original)
    def init(cost: Any, op: Any = None, op_desc: Any = None, comm_context: Any = None) -> None:
        original(cost, op, _known_dtypes(op_desc), comm_context)

    for name, cls in added.items():
        yield Item(factory, name, cls)
    yield Attribute(base_cost.CommOpCost, "__init__", init)


def _bytes_cost(op_type: str, bandwidth: float) -> type:
    """A cost class for an op that Paddle has none for: operands read and results written once."""
    from paddle.distributed.auto_parallel.static.cost.base_cost import CompOpCost

    def calc_flops(cost: Any) -> int:
        return 0

    def calc_time(cost: Any) -> float:
        desc = cost.op_desc or {}
        read = [(desc.get("dtype"), shape) for slot in desc.get("inputs", {}).values() for shape in slot]  # has no dtypes
        written = [value for slot in desc.get("outputs", {}).values() for value in slot]
        return sum(prod(shape) * _width(dtype) for dtype, shape in (*read, *written)) / bandwidth * 1e6

    return type(f"{op_type}_cost", (CompOpCost,), {"OP_TYPE": op_type, "calc_flops": calc_flops, "calc_time": calc_time})


def _name(dtype: Any) -> str:
    return str(dtype).rsplit(".", 1)[-1].lower().replace("fp", "float").removesuffix(">")


def _width(dtype: Any) -> int:
    name = _name(dtype)
    return _BYTES.get(_SAME_WIDTH.get(name, name), 4)


def _known_dtypes(desc: Any) -> Any:
    import paddle

    if desc is None or "inputs" not in desc:
        return desc
    inputs = {
        slot: [(getattr(paddle, _SAME_WIDTH.get(_name(dtype), _name(dtype)), dtype), shape) for dtype, shape in values]
        for slot, values in desc["inputs"].items()
    }
    return {**desc, "inputs": inputs}
