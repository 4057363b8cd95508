"""Compares ops, and their gradients, on operands sharded in a dimension that they reduce or move with those on whole ones.

    python -m paddle.distributed.launch --nproc_per_node 2 --backend gloo dygraph_wholes.py FORMS OUT

``FORMS`` is ``plan`` for the functions that ``plan.shard_layer`` installs, and ``paddle`` for Paddle's own. An op that fails
has no difference, but null.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
from paddle.nn import functional as F

from paddle_rbt_plugin.handover.dygraph.ops import shard_ops

OPS: dict[str, tuple[Callable[[Any], Any], int]] = {
    "norm of all": (lambda x: x.norm(), 0),
    "norm of a dimension": (lambda x: paddle.linalg.norm(x, p=2, axis=1), 1),
    "cubic norm": (lambda x: paddle.linalg.norm(x, p=3, axis=0), 0),
    "largest magnitude": (lambda x: paddle.linalg.norm(x, p=float("inf")), 2),
    "norm of another dimension": (lambda x: paddle.linalg.norm(x, p=2, axis=1), 0),
    "normalize": (lambda x: F.normalize(x, axis=-1), 2),
    "pairwise distance": (lambda x: F.pairwise_distance(x[:, 0], x[:, 1] * 2), 2),
    "logsumexp of all": (paddle.logsumexp, 1),
    "logsumexp of a dimension": (lambda x: paddle.logsumexp(x, axis=-1), 2),
    "logsumexp of two": (lambda x: paddle.logsumexp(x, [0, 1], keepdim=True), 0),
    "einsum": (lambda x: paddle.einsum("bij,bkj->bik", x, x), 0),
    "einsum with a matrix": (lambda x: paddle.einsum("bij,jk->bik", x, paddle.ones([6, 3])), 0),
    "einsum over the shards": (lambda x: paddle.einsum("bij,bkj->bik", x, x), 2),
    "concat": (lambda x: paddle.concat([x, 2 * x], axis=-1), 2),
    "a batch with itself": (lambda x: paddle.matmul(x[:, 0], x[:, 0], transpose_y=True), 0),
    "a sequence with itself": (lambda x: paddle.bmm(x, x.transpose([0, 2, 1])), 1),
}
"""Each with the dimension of [4, 8, 6] that is sharded."""


def values(op: Callable[[Any], Any], x: Any) -> list[np.ndarray]:
    """The result and the gradient of a weighted sum of it."""
    x.stop_gradient = False
    out = op(x)
    weights = paddle.to_tensor(np.cos(np.arange(out.numel().item(), dtype="float32")).reshape(out.shape))
    if out.is_dist():
        weights = dist.shard_tensor(weights, out.process_mesh, [dist.Replicate()])
    (out * weights).sum().backward()
    return [(dist.unshard_dtensor(t) if t.is_dist() else t).numpy() for t in (out, x.grad)]


def main(forms: str, out: str) -> None:
    paddle.set_device("cpu")
    dist.init_parallel_env()
    mesh = dist.ProcessMesh([0, 1], dim_names=["mp"])
    if forms == "plan":
        shard_ops(mesh)
    operand = paddle.to_tensor(np.random.default_rng(0).standard_normal([4, 8, 6]).astype("float32"))
    found: dict[str, float | None] = {}
    for name, (op, dim) in OPS.items():
        right = values(op, operand.clone().detach())
        try:
            seen = values(op, dist.shard_tensor(operand.clone(), mesh, [dist.Shard(dim)], stop_gradient=True))
            found[name] = max(float(np.abs(a - b).max()) for a, b in zip(right, seen, strict=True))
        except (RuntimeError, ValueError, NotImplementedError):  # what Paddle raises
            found[name] = None
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
