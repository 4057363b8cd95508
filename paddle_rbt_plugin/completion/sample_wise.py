"""Ops that treat the samples of a batch one by one, and that Paddle does not shard: it has no rule for them and gathers their
operands, or ends the process when they are built on distributed operands (interpolation, recurrences).

Each rank runs such an op on its own samples: the hand-over builds it on local tensors. So nothing is asked of Paddle but which
ops its gradient takes. A sharded dimension that does not hold samples is gathered. What the ranks compute of the gradient of an
operand that is whole, such as a weight, are summands.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from paddle_rbt_plugin.completion.built import Built, Product, Use
from paddle_rbt_plugin.completion.placement import Placement
from paddle_rbt_plugin.completion.question import Question


@dataclass(frozen=True)
class SampleWise:
    """Where an op has its samples: the dimension by the slot of an operand and of a result. What is in other slots is whole."""

    operands: Mapping[str, int]
    results: Mapping[str, int]


def _first(*slots: str, results: Sequence[str] = ("out",)) -> SampleWise:
    return SampleWise(dict.fromkeys(slots, 0), dict.fromkeys(results, 0))


_IMAGES = _first("x")
SAMPLE_WISE: Mapping[str, SampleWise] = {
    **dict.fromkeys(("pool2d", "pool3d", "lp_pool2d", "maxout"), _IMAGES),
    **dict.fromkeys(("pixel_shuffle", "pixel_unshuffle", "channel_shuffle", "shuffle_channel"), _IMAGES),
    **dict.fromkeys(("fold", "unfold", "pad3d"), _IMAGES),
    **dict.fromkeys(("max_pool2d_with_index", "max_pool3d_with_index"), _first("x", results=("out", "mask"))),
    **dict.fromkeys(("unpool", "unpool3d"), _first("x", "indices")),
    **dict.fromkeys(
        ("linear_interp", "bilinear_interp", "bicubic_interp", "nearest_interp", "trilinear_interp"),
        _first("x", results=("output",)),
    ),
    **dict.fromkeys(("hardshrink", "hardsigmoid", "hardswish", "hardtanh", "leaky_relu", "relu6"), _IMAGES),
    "instance_norm": _first("x", results=("y", "saved_mean", "saved_variance")),
    "grid_sample": _first("x", "grid"),
    "affine_grid": _first("input", results=("output",)),
    "rnn": SampleWise({"x": 1, "pre_state": 1, "sequence_length": 0}, {"out": 1, "state": 1}),
    "warpctc": SampleWise({"logits": 1, "label": 0, "logits_length": 0, "labels_length": 0}, {"loss": 0, "warpctcgrad": 1}),
}
"""By canonical op."""
PLANNED_ONLY = frozenset({"instance_norm", "rnn"})
"""Those of them that Paddle cannot train in distributed static programs: it loses gradients of weights that are read on local
tensors, or in lists."""


@dataclass(frozen=True)
class LocalPlacements:
    """How an op lies that runs on local tensors."""

    needs: tuple[Placement, ...]
    gradients: tuple[Placement, ...]
    """Of what each rank computes of the operands' gradients."""
    results: tuple[Placement, ...]


def local_placements(question: Question, result_slots: Sequence[str], result_dims: Sequence[int]) -> LocalPlacements:
    """How the operands and results of an op of ``SAMPLE_WISE`` lie, given those that the question has. ``result_slots`` holds
    the slot of each result, ``result_dims`` its number of dimensions."""
    op = SAMPLE_WISE[question.op]
    operands = [(slot, o) for slot, some in question.slots for o in some]
    dims = op.operands
    axes = {o.placement.dims_mapping[dims[slot]] for slot, o in operands if slot in dims and o.shape} - {-1}
    axis = axes.pop() if len(axes) == 1 else -1  # samples that lie whole on every rank are cut alike
    needs = tuple(Placement.along(axis, len(o.shape), dims.get(slot)) for slot, o in operands)
    results = tuple(
        Placement.along(axis, ndim, op.results.get(slot)) for slot, ndim in zip(result_slots, result_dims, strict=True)
    )
    return LocalPlacements(needs, tuple(need.summands({axis} - {-1}) for need in needs), results)


def laid(dense: Sequence[Built], question: Question, where: LocalPlacements) -> tuple[Built, ...]:
    """The answer to a question, given the ops that Paddle builds on whole operands."""

    def used(use: Use) -> Use:
        i = use.source.index
        if use.source.kind == "input":
            return use._replace(have=question.operands[i].placement, need=where.needs[i])
        if use.source.kind == "output":
            return use._replace(have=where.results[i], need=where.results[i])
        gradient = question.gradients[i] if use.source.kind == "gradient" and question.gradients is not None else None
        if gradient is not None:
            return use._replace(have=gradient, need=where.results[i])
        return use

    def made(product: Product, place: int) -> Product:
        if product.gradient_of is not None:
            lies = where.gradients[product.gradient_of]
            return product._replace(made=lies, kept=lies.finished())
        if question.gradients is None:
            return product._replace(made=where.results[place], kept=where.results[place])
        return product

    return tuple(
        replace(
            built,
            uses=tuple(map(used, built.uses)),
            products=tuple(made(product, i) for i, product in enumerate(built.products)),
        )
        for built in dense
    )
