"""Recomputes in dygraph the layers that a plan recomputes: their ``forward`` runs again in the backward pass.

A plan counts the repeated blocks of a program as its layers. In a model these are the Layers of a ``LayerList`` or a
``Sequential`` of equal ones, or of several such lists, one after the other, as in an encoder and a decoder.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import paddle
import paddle.distributed as dist
from paddle import nn
from paddle.distributed.fleet.utils import recompute

from paddle_rbt_plugin.errors import PlanError
from paddle_rbt_plugin.handover.shared.recompute import recomputes, strategy_of
from paddle_rbt_plugin.plan.plan import Plan


def recompute_layers(plan: Plan, model: nn.Layer) -> None:
    """Lets ``model`` recompute what ``plan`` does, in place.

    Raises PlanError for a plan that recomputes parts of layers, and for a model whose layers cannot be told."""
    if not recomputes(plan):
        return
    count = plan.stages[-1].layers[1] + 1
    entries = plan.stage_of_layers(count)
    ways = [strategy_of(plan, entry) for entry in entries]
    if "selective" in ways:
        raise PlanError(
            "the plan recomputes attention cores, but dygraph can recompute only whole Layers; restrict the search with "
            "search_space={'recompute': ['none', 'full']}"
        )
    for block, way in zip(blocks(model, count), ways, strict=True):
        if way == "full":
            _recompute(block)


def blocks(model: nn.Layer, count: int) -> list[nn.Layer]:
    """The Layers of ``model`` that are the ``count`` layers of a plan, in order. Raises PlanError where they cannot be told."""
    lists = _lists(model)
    every = [block for blocks_ in lists for block in blocks_]
    found = [every] if len(every) == count else [one for one in lists if len(one) == count]
    if len(found) != 1:
        sizes = ", ".join(f"{len(one)} x {type(one[0]).__name__}" for one in lists) or "none"
        raise PlanError(
            f"the plan recomputes layers of {count}, and {type(model).__name__} does not show which Layers these are (lists of "
            f"equal Layers in it: {sizes}); keep the blocks in a LayerList, or restrict the search with "
            "search_space={'recompute': 'none'}"
        )
    return found[0]


def _lists(layer: nn.Layer) -> list[list[nn.Layer]]:
    """The outermost lists of blocks in ``layer``, in order: Layers of one class that hold Layers themselves. A list of several
    classes is cut to the class that occurs most, as where norms or a head stand beside blocks."""
    children = list(layer.children())
    if isinstance(layer, (nn.LayerList, nn.Sequential)) and children:
        kind = Counter(map(type, children)).most_common(1)[0][0]
        equal: list[Any] = [child for child in children if type(child) is kind]
        if list(equal[0].children()) and all(_shapes(block) == _shapes(equal[0]) for block in equal):
            return [equal]
    return [found for child in children for found in _lists(child)]


def _shapes(layer: nn.Layer) -> Sequence[tuple[int, ...]]:
    return sorted(tuple(p.shape) for p in layer.parameters())


def _recompute(block: Any) -> None:
    """Makes ``block`` run again in backward, while it is trained in dygraph."""
    forward = block.forward
    if getattr(forward, _MARK, False):
        return

    @functools.wraps(forward)
    def again(*args: Any, **kwargs: Any) -> Any:
        if block.training and paddle.in_dynamic_mode() and paddle.is_grad_enabled():
            return _run_again(forward, args, kwargs)
        return forward(*args, **kwargs)

    setattr(again, _MARK, True)
    block.forward = again


_MARK = "_rbt_recomputes"


def _run_again(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``forward(*args, **kwargs)``, run again in backward. Paddle's ``recompute`` takes and returns tensors by position only,
    and drops the gradients of weights where no input has one, so tensors are taken out of what they are in, and one that has
    a gradient goes beside them."""
    tensors: list[Any] = []
    given = _without_tensors((args, kwargs), tensors)
    made: list[Any] = []

    def run(_: Any, *inputs: Any) -> tuple[Any, ...]:
        args, kwargs = _with_tensors(given, inputs)
        outputs: list[Any] = []
        made[:] = [_without_tensors(forward(*args, **kwargs), outputs)]
        return tuple(outputs)

    outputs = recompute(run, _anchor(tensors), *tensors)
    return _with_tensors(made[0], outputs if isinstance(outputs, (list, tuple)) else (outputs,))


def _anchor(tensors: Sequence[Any]) -> Any:
    anchor = paddle.zeros([1])
    mesh = next((t.process_mesh for t in tensors if t.is_dist()), None)
    if mesh is not None:
        anchor = dist.shard_tensor(anchor, mesh, [dist.Replicate()] * len(mesh.shape))
    anchor.stop_gradient = False
    return anchor


class _Place(int):
    """Where a tensor was, as its number."""


def _without_tensors(value: Any, tensors: list[Any]) -> Any:
    if isinstance(value, paddle.Tensor):
        tensors.append(value)
        return _Place(len(tensors) - 1)
    if isinstance(value, dict):
        return type(value)((k, _without_tensors(v, tensors)) for k, v in value.items())
    if isinstance(value, (list, tuple)):
        return _sequence(value, [_without_tensors(v, tensors) for v in value])
    return value


def _with_tensors(value: Any, tensors: Sequence[Any]) -> Any:
    if isinstance(value, _Place):
        return tensors[value]
    if isinstance(value, dict):
        return type(value)((k, _with_tensors(v, tensors)) for k, v in value.items())
    if isinstance(value, (list, tuple)):
        return _sequence(value, [_with_tensors(v, tensors) for v in value])
    return value


def _sequence(like: Any, values: list[Any]) -> Any:
    return type(like)(*values) if hasattr(like, "_fields") else type(like)(values)
