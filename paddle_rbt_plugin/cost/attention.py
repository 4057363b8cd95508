"""The core of attention in a segment: softmax(q k^T) v, from the first batched product to the second.

Selective recomputation (arXiv 2205.05198, section 5) drops what is computed inside the core and computes it again in
backward; a fused kernel (flash attention, arXiv 2205.14135) never stores it. Both need to know which ops these are. The
core is found from its softmax: upwards through elementwise ops to a product, downwards to the next one; its backward from the
gradient of the softmax in the same way. The two are found apart, since segments that share their work share it pass by
pass and may name values after different layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paddle_rbt_plugin.completion.work import Kernel, SegmentWork, Value
from paddle_rbt_plugin.cost.op_types import MATMULS, forward_type

_BETWEEN = frozenset(
    {"scale", "add", "subtract", "multiply", "divide", "where", "masked_fill", "cast", "dropout", "clip", "tanh"}
)
"""What may stand between the softmax and the two products."""


@dataclass(frozen=True)
class AttentionCore:
    """One attention core: positions of its ops in the forward or in the backward pass of a segment."""

    ops: frozenset[int]
    query: Value
    key: Value
    scores: Value
    """Result of the first product, or its gradient."""
    inner: frozenset[str]
    """Names of the forward values inside the core that this pass makes or reads."""


def forward_cores(work: SegmentWork) -> tuple[AttentionCore, ...]:
    """The cores of a segment's forward pass, in program order."""
    cores = []
    for ops, first, _ in _chains(work.forward, "softmax"):
        query, key = work.forward[first].inputs[:2]
        made = {v.name for i in ops for v in work.forward[i].outputs}
        result = {v.name for v in work.forward[max(ops)].outputs}
        cores.append(AttentionCore(ops, query, key, work.forward[first].outputs[0], frozenset(made - result)))
    return tuple(cores)


def backward_cores(work: SegmentWork) -> tuple[AttentionCore, ...]:
    """The cores of a segment's backward pass, in its order of execution."""
    cores = []
    for ops, second, first in _chains(work.backward, "softmax_grad"):
        query, key = work.backward[first].inputs[:2]
        value = work.backward[second].inputs[1]
        read = {v.name for i in ops for v in work.backward[i].inputs if v.kind == "var" and not v.name.endswith("@GRAD")}
        inner = frozenset(read - {query.name, key.name, value.name})
        cores.append(AttentionCore(ops, query, key, work.backward[first].inputs[-1], inner))
    return tuple(cores)


def _chains(kernels: Sequence[Kernel], softmax: str) -> list[tuple[frozenset[int], int, int]]:
    """For each softmax with a matrix product before and one after: all ops from one to the other, and the two."""
    producer = {v.name: i for i, k in enumerate(kernels) for v in k.outputs}
    readers: dict[str, list[int]] = {}
    for i, kernel in enumerate(kernels):
        for v in kernel.inputs:
            readers.setdefault(v.name, []).append(i)

    def above(i: int) -> list[int]:
        return [producer[v.name] for v in kernels[i].inputs if producer.get(v.name, i) < i]

    def below(i: int) -> list[int]:
        return [j for v in kernels[i].outputs for j in readers.get(v.name, ()) if j > i]

    chains = []
    for i, kernel in enumerate(kernels):
        if kernel.type == softmax:
            up, down = _walk(kernels, i, above), _walk(kernels, i, below)
            if up and down:
                chains.append((frozenset({i, *up, *down}), up[-1], down[-1]))
    return chains


def _walk(kernels: Sequence[Kernel], start: int, step: Callable[[int], list[int]]) -> list[int]:
    """Ops from the one next to ``start`` to the nearest matrix product; empty where something else stands in between."""
    path = [start]
    while True:
        types = {i: forward_type(kernels[i].type) for i in step(path[-1])}
        following = [i for i, type in types.items() if type in MATMULS] or [i for i, type in types.items() if type in _BETWEEN]
        if not following:
            return []
        path.append(following[0])
        if types[following[0]] in MATMULS:
            return path[1:]
