"""Which ops give up shardings: asked of Paddle for every op of a model, forward and backward."""

from __future__ import annotations

from collections import Counter

from paddle_rbt_plugin.cluster import ProcessMesh
from paddle_rbt_plugin.completion import Completion

MESH = ProcessMesh(("dp", "mp"), (2, 2), (0, 1, 2, 3))


def gathers(completion: Completion) -> Counter[str]:
    """Per type of op, how many values are gathered before or after it, because it does not keep how they lie."""
    kernels = (kernel for work in completion.work for kernel in (*work.forward, *work.backward))
    return Counter(kernel.type for kernel in kernels for c in kernel.collectives if c.kind in ("all_gather", "all_to_all"))
