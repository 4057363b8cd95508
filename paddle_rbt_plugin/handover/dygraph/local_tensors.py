"""Distributed tensors of dygraph as the local tensors of this rank, and back, with gradients.

Between ``to_local`` and ``from_local`` a rank computes on what it holds, and says itself what comes of it. Paddle's own
``dtensor_to_local`` and ``dtensor_from_local`` do not serve: the gradient of a sum that is not finished (``Partial``) reaches
the first rank only, and is zero on the others.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import cache
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
from paddle.autograd import PyLayer
from paddle.distributed.auto_parallel import api  # looked into when called: 2.6 lacks the function

from paddle_rbt_plugin.handover.shared.conversion import Placements


def placements_of(x: Any) -> list[Any]:
    """Placements of a distributed tensor that outlive it, which ``x.placements`` do not."""
    return [
        dist.Shard(p.get_dim()) if p.is_shard() else dist.Partial(p.reduce_type()) if p.is_partial() else dist.Replicate()
        for p in x.placements
    ]


def mesh_of(x: Any) -> Any:
    """The mesh of a distributed tensor, which outlives it, as ``x.process_mesh`` does not."""
    mesh = x.process_mesh
    return _mesh(tuple(mesh.process_ids), tuple(mesh.shape), tuple(mesh.dim_names))


@cache
def _mesh(ranks: tuple[int, ...], shape: tuple[int, ...], names: tuple[str, ...]) -> Any:
    return dist.ProcessMesh(np.array(ranks).reshape(shape), dim_names=list(names))


def to_local(x: Any, mesh: Any, gradient: Placements) -> Any:
    """The part of ``x`` that this rank holds; its gradient is part of one that lies on ``mesh`` as ``gradient`` says."""
    return _ToLocal.apply(x, mesh, list(gradient))


def from_local(local: Any, mesh: Any, made: Placements, kept: Placements) -> Any:
    """The tensor whose part on this rank is ``local``, as ``made`` says; it goes on as ``kept`` says, and so must its gradient
    arrive: what a rank gets back is its part of that."""
    return _FromLocal.apply(local, mesh, list(made), list(kept))


def moved(mesh: Any, placements: Placements, tensor: Any) -> Any:
    """A tensor brought to placements of a mesh. CPUs have no reduce-scatter and no all-to-all: there it is made whole along the
    axes that change, and cut; nor do they communicate half precision, which goes as float32."""
    if not tensor.is_dist():
        return dist.shard_tensor(tensor, mesh, list(placements))
    now = placements_of(tensor)
    if now == list(placements):
        return tensor
    if not paddle.is_compiled_with_cuda():
        if tensor.dtype in (paddle.bfloat16, paddle.float16):
            wide = api.dtensor_from_local(tensor._local_value().astype("float32"), mesh, now)
            return moved(mesh, placements, wide).astype(tensor.dtype)
        between = [a if a == b else dist.Replicate() for a, b in zip(now, placements, strict=True)]
        if between != now:
            tensor = dist.reshard(tensor, mesh, between)
    return tensor if placements_of(tensor) == list(placements) else dist.reshard(tensor, mesh, list(placements))


def whole_along(x: Any, axes: Collection[int]) -> Any:
    """A distributed tensor gathered, or its summands summed, along mesh axes; ``x`` where it is whole along them."""
    if all(p.is_replicated() for i, p in enumerate(x.placements) if i in axes):
        return x
    target = [dist.Replicate() if i in axes else p for i, p in enumerate(placements_of(x))]
    return _Moved.apply(x, mesh_of(x), target)


def whole_sums(x: Any) -> Any:
    """A distributed tensor with nothing partial. Has no gradient."""
    kept = placements_of(x)
    target = [dist.Replicate() if p.is_partial() else p for p in kept]
    return x if target == kept else dist.reshard(x, mesh_of(x), target)


def with_whole_gradient(x: Any) -> None:
    """Lets the op that made ``x`` read its gradient as whole sums: the rules of many gradient ops are wrong for summands. The
    gradient of a leaf is summed when it is used."""
    if not x.is_leaf and not x.stop_gradient and paddle.is_grad_enabled():
        x.register_hook(whole_sums)


def reduced(local: Any, mesh: Any, axis: int, how: Any = dist.ReduceType.kRedSum) -> Any:
    """``local`` summed, or reduced otherwise, over the ranks along mesh axis number ``axis``. Has no gradient."""
    whole = [dist.Replicate()] * len(mesh.shape)
    partial = [dist.Partial(how) if i == axis else p for i, p in enumerate(whole)]
    return dist.reshard(api.dtensor_from_local(local, mesh, partial), mesh, whole)._local_value()


def shared_local(x: Any, mesh: Any, gradient: Placements) -> Any:
    """``to_local`` of an activation that several ops read so: all of them get one local tensor, on which their gradients are
    summed before anything is communicated."""
    if x.is_leaf or not paddle.is_grad_enabled():  # what goes on beyond one backward pass cannot be shared
        return to_local(x, mesh, gradient)
    now = x.inplace_version, x.stop_gradient, list(gradient)
    before, local = getattr(x, _SHARED, (None, None))
    if before != now:
        local = to_local(x, mesh, gradient)
        setattr(x, _SHARED, (now, local))
    return local


_SHARED = "_rbt_local"


class _ToLocal(PyLayer):
    @staticmethod
    def forward(ctx: Any, x: Any, mesh: Any, gradient: list[Any]) -> Any:
        ctx.mesh, ctx.gradient, ctx.is_leaf = mesh, gradient, x.is_leaf
        return x._local_value()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        arrived = api.dtensor_from_local(gradient, ctx.mesh, ctx.gradient)
        return arrived if ctx.is_leaf else whole_sums(arrived)


class _Moved(PyLayer):
    @staticmethod
    def forward(ctx: Any, x: Any, mesh: Any, target: list[Any]) -> Any:
        ctx.mesh, ctx.source = mesh, [dist.Replicate() if p.is_partial() else p for p in placements_of(x)]
        return moved(mesh, target, x)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return moved(ctx.mesh, ctx.source, gradient)


class _FromLocal(PyLayer):
    @staticmethod
    def forward(ctx: Any, local: Any, mesh: Any, made: list[Any], kept: list[Any]) -> Any:
        ctx.mesh, ctx.kept = mesh, kept
        value = api.dtensor_from_local(local, mesh, made)
        return value if made == kept else dist.reshard(value, mesh, kept)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        here = gradient if gradient.placements == ctx.kept else dist.reshard(gradient, ctx.mesh, ctx.kept)
        return here._local_value()
