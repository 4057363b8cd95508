"""What ZeRO (arXiv 1910.02054) divides, in programs and in dygraph: for which optimizers, and along which dimension of a
state."""

from __future__ import annotations

from collections.abc import Sequence

STAGES = (0, 1, 2)
"""The stages that can be handed over. Stage 3 would have to shard the parameters themselves along dp."""
ELEMENTWISE = (
    "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "Momentum", "NAdam", "RAdam", "RMSProp", "Rprop", "SGD",
)  # fmt: skip
"""The optimizers of ``paddle.optimizer`` whose update of an element depends only on its own gradient and states, and on
scalars."""


def shard_dimension(shape: Sequence[int], dims_mapping: Sequence[int], axis: int, replicas: int) -> int | None:
    """The dimension along which the states of a parameter with that placement are divided over the ``replicas`` of mesh axis
    ``axis``; None if they stay whole, because no dimension is left or the parameter is sharded along that axis."""
    if replicas == 1 or axis in dims_mapping:
        return None
    free = (d for d, n in enumerate(shape) if dims_mapping[d] < 0 and n % replicas == 0)
    return next(free, None)
