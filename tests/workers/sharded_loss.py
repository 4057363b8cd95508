"""Compares ``F.cross_entropy`` and ``F.embedding`` on operands sharded by the vocabulary with those on whole ones.

python -m paddle.distributed.launch --nproc_per_node 2 --backend gloo sharded_loss.py OUT
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
from paddle.nn import functional as F

from paddle_rbt_plugin.handover.dygraph.ops import shard_ops

LOSSES = {
    "mean": {},
    "none": {"reduction": "none"},
    "ignored labels": {"ignore_index": 3},
    "weights of classes": {"weight": paddle.linspace(0.5, 2.0, 8)},
    "smoothed labels": {"label_smoothing": 0.1},
    "an axis": {"axis": 1},
}


def difference(compute: Any, operand: np.ndarray, mesh: Any, placement: Any) -> float:
    """Largest difference of the result, and of the operand's gradient, between whole and sharded."""
    found = []
    for placed in (None, placement):
        x = paddle.to_tensor(operand)
        x = x if placed is None else dist.shard_tensor(x, mesh, [placed], stop_gradient=True)
        x.stop_gradient = False
        out = compute(x)
        (out**2).sum().backward()
        found.append([(dist.unshard_dtensor(t) if t.is_dist() else t).numpy() for t in (out, x.grad)])
    return max(float(np.abs(a - b).max()) for a, b in zip(*found, strict=True))


def main(out: str) -> None:
    paddle.set_device("cpu")
    dist.init_parallel_env()
    mesh = dist.ProcessMesh([0, 1], dim_names=["mp"])
    shard_ops(mesh)
    random = np.random.default_rng(0)
    logits, labels = random.standard_normal([6, 8]), paddle.to_tensor([0, 3, 7, 4, 3, 2])
    whole_labels = dist.shard_tensor(labels, mesh, [dist.Replicate()])

    def loss(x: Any, options: dict[str, Any]) -> Any:
        return F.cross_entropy(x, whole_labels if x.is_dist() else labels, **options)

    found = {
        name: difference(lambda x, o=options: loss(x, o), logits.astype("float32"), mesh, dist.Shard(1))
        for name, options in LOSSES.items()
    }
    found["in float64"] = difference(lambda x: loss(x, {}), logits, mesh, dist.Shard(1))
    far = (logits * 5 + 1e4).astype("float32")
    found["logits far from zero"] = difference(lambda x: loss(x, {}), far, mesh, dist.Shard(1))
    table = random.standard_normal([8, 4]).astype("float32")

    def words(x: Any, **options: Any) -> Any:
        return F.embedding(whole_labels if x.is_dist() else labels, x, **options)

    found["embedding"] = difference(words, table, mesh, dist.Shard(0))
    found["embedding with padding"] = difference(lambda x: words(x, padding_idx=3), table, mesh, dist.Shard(0))
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[-1])
