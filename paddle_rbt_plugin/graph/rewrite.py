"""Ops that Paddle shards badly, written as others that mean the same.

The placements of some ops are not inferred: whatever reaches them is gathered first, along every axis. Where the same can
be said in ops whose placements are kept, forward and backward, these take their place before anything is matched, completed
or costed, and again when the program is handed over. Asked of Paddle 3.3.1 for every op of the models that the tests know:

- ``expand`` of new copies along dimensions of size 1 gathers its operand; its ``tile`` would gather the gradient. Adding
  zeros of the larger shape does neither.
- ``tile`` of dimensions of size 1 gathers the gradient; it is an ``expand``, as above.
- ``repeat_interleave`` gathers its operand; a new dimension, as above, and a reshape do not.
- ``flatten`` gathers its operand; a reshape does not.
- ``einsum`` ends the process when it is built on distributed operands; it is sums and a matrix product (``einsum``).

An op is left alone if its operand is no activation, since nothing is sharded there that would be lost; ``flatten`` and
``einsum`` of inputs and weights are not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from paddle_rbt_plugin.graph.einsum import einsum_steps
from paddle_rbt_plugin.graph.graph import Graph, Op, Tensor, TensorKind
from paddle_rbt_plugin.graph.steps import Shape, Step
from paddle_rbt_plugin.notes import Note, note


def expand_by_adding(shape: Shape, result: Shape, attrs: Mapping[str, Any], dtype: str) -> tuple[Step, ...]:
    """``expand`` to a shape with as many dimensions."""
    if len(shape) != len(result):
        return ()
    copies = tuple(n if m == 1 else 1 for m, n in zip(shape, result, strict=True))
    return (
        Step("full", {}, {"shape": copies, "value": 0.0, "dtype": dtype}, copies),
        Step("add", {"x": -1, "y": 0}, {}, result),
    )


def tile_by_adding(shape: Shape, result: Shape, attrs: Mapping[str, Any], dtype: str) -> tuple[Step, ...]:
    """``tile`` that copies along dimensions of size 1 only."""
    if len(shape) != len(result) or any(m not in (1, n) for m, n in zip(shape, result, strict=True)):
        return ()
    return expand_by_adding(shape, result, attrs, dtype)


def repeat_by_adding(shape: Shape, result: Shape, attrs: Mapping[str, Any], dtype: str) -> tuple[Step, ...]:
    """``repeat_interleave`` by one number for all."""
    axis = attrs["axis"] % len(shape)
    times = result[axis] // shape[axis]
    lifted = (*shape[: axis + 1], 1, *shape[axis + 1 :])
    copied = (*shape[: axis + 1], times, *shape[axis + 1 :])
    zeros, add = expand_by_adding(lifted, copied, attrs, dtype)
    return (
        Step("unsqueeze", {"x": -1}, {"axis": (axis + 1,)}, lifted),
        zeros,
        replace(add, inputs={"x": 0, "y": 1}),
        Step("reshape", {"x": 2}, {"shape": result}, result),
    )


def flatten_by_reshaping(shape: Shape, result: Shape, attrs: Mapping[str, Any], dtype: str) -> tuple[Step, ...]:
    """``flatten`` of any dimensions."""
    return (Step("reshape", {"x": -1}, {"shape": result}, result),)


Rule = Callable[[Shape, Shape, Mapping[str, Any], str], tuple[Step, ...]]
_OF_ONE: Mapping[str, Rule] = {
    "expand": expand_by_adding,
    "tile": tile_by_adding,
    "repeat_interleave": repeat_by_adding,
    "flatten": flatten_by_reshaping,
}
"""Canonical op of one operand -> its other spelling, from the shapes of operand and result, the attributes and the dtype; no
steps where there is none."""
RULES = frozenset({*_OF_ONE, "einsum"})
"""The ops that have another spelling."""
_OF_ANYTHING = frozenset({"flatten", "einsum"})
"""The ops that are replaced whatever their operands are, in every dtype."""


def steps_for(
    type_: str, kinds: Sequence[TensorKind], shapes: Sequence[Shape], result: Shape, attrs: Mapping[str, Any], dtype: str
) -> tuple[Step, ...]:
    """The steps that replace an op, given kinds and shapes of its operands; none where it stays as it is."""
    if type_ not in RULES or not (type_ in _OF_ANYTHING or dtype.startswith(("float", "bfloat"))):
        return ()
    if type_ == "einsum":
        return einsum_steps(attrs["equation"], shapes, dtype)
    if len(shapes) != 1 or not (kinds[0] == "var" or (kinds[0] == "data" and type_ in _OF_ANYTHING)):
        return ()
    return _OF_ONE[type_](shapes[0], result, attrs, dtype)


def rewrite_graph(graph: Graph) -> tuple[Graph, tuple[Note, ...]]:
    """The graph with every rule applied, and a note for each type of op that was replaced.

    Tensors keep their positions and names, and new ones follow them; ops of the graph keep their names."""
    if RULES.isdisjoint(op.type for op in graph.ops):
        return graph, ()
    replaced: dict[tuple[str, str], int] = {}
    tensors = list(graph.tensors)
    ops: list[Op] = []
    for op in graph.ops:
        steps = _steps(graph, op)
        if steps:
            spelling = op.type, ", ".join(step.type for step in steps)
            replaced[spelling] = replaced.get(spelling, 0) + 1
            ops += _new_ops(op, steps, tensors, len(ops))
        else:
            ops.append(op if op.index == len(ops) else replace(op, index=len(ops)))
    if not replaced:
        return graph, ()
    notes = (note("rewritten", count=n, op=old, form=new) for (old, new), n in sorted(replaced.items()))
    return graph.rewritten(tuple(tensors), tuple(ops), graph.loss), tuple(notes)


def _steps(graph: Graph, op: Op) -> tuple[Step, ...]:
    if op.type not in RULES:
        return ()
    operands, result = [graph.tensors[t] for t in op.operands], graph.tensors[op.results[0]]
    kinds, shapes = [t.kind for t in operands], [t.shape for t in operands]
    return steps_for(op.type, kinds, shapes, result.shape, op.attrs, operands[0].dtype)


def _new_ops(op: Op, steps: Sequence[Step], tensors: list[Tensor], first: int) -> list[Op]:
    """The ops of the steps; results that are new are appended to ``tensors``."""
    result = tensors[op.results[0]]
    made: list[int] = []
    ops = []
    for i, step in enumerate(steps):
        last = step is steps[-1]
        if not last:
            name = f"{op.name}.{i}.out"
            read = [op.operands[-1 - ref] if ref < 0 else made[ref] for ref in step.inputs.values()]
            stop = all(tensors[t].stop_gradient for t in read)
            tensors.append(replace(result, index=len(tensors), name=name, shape=step.shape, stop_gradient=stop))
        made.append(result.index if last else tensors[-1].index)
        inputs = {slot: (op.operands[-1 - ref] if ref < 0 else made[ref],) for slot, ref in step.inputs.items()}
        name = op.name if last else f"{op.name}.{i}"
        ops.append(Op(first + i, name, step.type, inputs, {"out": (made[-1],)}, step.attrs, op.scope, op.source))
    return ops
