"""What ZeRO (arXiv 1910.02054) divides, in programs as in dygraph: which optimizers, which dimension of a state."""

from __future__ import annotations

from collections.abc import Sequence

STAGES = (0, 1, 2)
"""What can be handed over. Stage 3 would have to place the parameters themselves along dp."""
ELEMENTWISE = (
    "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "Momentum", "NAdam", "RAdam", "RMSProp", "Rprop", "SGD",
)  # fmt: skip
"""Those of ``paddle.optimizer`` whose update of an element depends on its own gradient and states, and on numbers, only."""


def shard_dimension(shape: Sequence[int], dims_mapping: Sequence[int], axis: int, replicas: int) -> int | None:
    """The dimension in which the states of a parameter of that placement are divided over the ``replicas`` along the mesh axis
    ``axis``; None where they stay whole: no dimension is left, or the parameter lies along that axis itself."""
    if replicas == 1 or axis in dims_mapping:
        return None
    free = (d for d, n in enumerate(shape) if dims_mapping[d] < 0 and n % replicas == 0)
    return next(free, None)
