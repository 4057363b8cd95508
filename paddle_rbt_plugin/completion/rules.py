"""Asks Paddle's SPMD rules what an op does with the placements of its inputs.

For Paddle without distributed types in PIR (2.6), where an op cannot be built and looked at. The rules are those by which
the Completer of the legacy IR goes forward. They know no gradients; those follow from the forward answer:

    the gradient of x lies as the op needs x, and is partial along every mesh axis that splits the op but not x

because the ranks along such an axis compute different parts of the op, each of which adds to the same gradient. What a
forward op leaves partial is summed at once, as the distributed ops of the legacy IR do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from paddle_rbt_plugin.cluster.mesh import ProcessMesh
from paddle_rbt_plugin.completion.built import Built, Product, Source, Use
from paddle_rbt_plugin.completion.placement import Placement
from paddle_rbt_plugin.completion.question import Operand, Question

Attrs = dict[str, Any]
Dims = tuple[int, ...]

# Per op, the name of its rule and the attributes that the rule takes in its order; given others, a rule may crash.
_RULES: dict[str, tuple[str, Callable[[Attrs, Operand], list[Any]]]] = {
    "matmul": ("matmul", lambda a, _: [a["transpose_x"], a["transpose_y"]]),
    "embedding": ("embedding", lambda a, _: [a["padding_idx"], a["sparse"]]),
    "c_embedding": ("embedding", lambda *_: [-1, False]),
    "layer_norm": ("layer_norm", lambda a, _: [a["epsilon"], a["begin_norm_axis"]]),
    "softmax": ("softmax", lambda a, _: [a["axis"]]),
    "cross_entropy_with_softmax": (
        "cross_entropy_with_softmax",
        lambda a, _: [a["soft_label"], a["use_softmax"], a["numeric_stable_mode"], a["ignore_index"], a["axis"]],
    ),
    "c_softmax_with_cross_entropy": ("cross_entropy_with_softmax", lambda a, _: [False, True, True, a["ignore_index"], -1]),
    "reshape": ("reshape", lambda a, _: [list(a["shape"])]),
    "transpose": ("transpose", lambda a, _: [list(a["perm"])]),
    "unsqueeze": ("unsqueeze", lambda a, _: [list(a["axis"])]),
    "sum": ("reduce_sum", lambda a, x: [_reduced(a, x), a["keepdim"]]),
    "mean": ("reduce_sum", lambda a, x: [_reduced(a, x), a["keepdim"]]),
}
_GATHERED = "cross_entropy_with_softmax"
"""Takes whole logits, whatever its rule says."""

# Forward tensors that the gradient op reads, by slot; an op that is not listed reads all of its inputs.
_GRADIENT_READS: dict[str, tuple[str, ...]] = {
    "embedding": ("x",), "c_embedding": ("x",), "softmax": ("out",), "layer_norm": ("x", "scale", "mean", "variance"),
    "cross_entropy_with_softmax": ("label", "softmax"), "divide": ("y", "out"), "dropout": ("mask",),
    "c_softmax_with_cross_entropy": ("label", "softmax"),
    **dict.fromkeys(("relu", "tanh", "sigmoid", "sqrt", "rsqrt", "exp"), ("out",)),
    **dict.fromkeys(
        ("add", "subtract", "reshape", "transpose", "unsqueeze", "squeeze", "flatten", "concat", "split", "split_with_num",
         "slice", "expand", "sum", "mean", "scale", "cast", "assign", "add_n", "full_like"), (),
    ),
}  # fmt: skip
_OUTPUTS = {
    "layer_norm": ("out", "mean", "variance"),
    "cross_entropy_with_softmax": ("softmax", "loss"),
    "c_softmax_with_cross_entropy": ("softmax", "loss"),
    "dropout": ("out", "mask"),
}


class RuleOracle:
    """Answers for one arrangement of a mesh, with the interface of ``Oracle``."""

    def __init__(self, mesh: ProcessMesh):
        self.mesh = mesh
        self._answers: dict[Question, Built] = {}

    def forward(self, question: Question) -> Built:
        """The op itself, with its operands as it needs them and its results, which are whole sums."""
        if question not in self._answers:
            self._answers[question] = self._forward(question)
        return self._answers[question]

    def backward(self, question: Question) -> tuple[Built, ...]:
        """Its gradient op, made after the forward answer as the module says."""
        assert question.gradients is not None
        forward = self.forward(Question(question.op, question.attrs, question.slots, None, question.results))
        made = [product.kept for product in forward.products]
        split = {axis for use in forward.uses for axis in use.need.dims_mapping} | {a for p in made for a in p.dims_mapping}
        uses = [*self._read(question, forward), *_arriving(question, forward)]
        products = [
            Product(use.shape, use.dtype, gradient, gradient, use.source.index)
            for use, operand in zip(forward.uses, question.operands, strict=True)
            if not operand.stop_gradient and operand.dtype.startswith(("float", "bfloat"))
            for gradient in [use.need.summands(split - {-1})]
        ]
        return (Built(f"{question.op}_grad", tuple(uses), tuple(products), dict(question.attrs)),) if products else ()

    def _forward(self, question: Question) -> Built:
        operands = question.operands
        needs, results = self._ask(question)
        shapes = question.results or tuple((o.shape, o.dtype) for o in operands[:1])
        uses = tuple(
            Use(Source("input", i), o.shape, o.dtype, o.placement, need)
            for i, (o, need) in enumerate(zip(operands, needs, strict=True))
        )
        products = tuple(
            Product(shape, dtype, made, Placement(made.dims_mapping))
            for (shape, dtype), made in zip(shapes, results, strict=True)
        )
        return Built(question.op, uses, products, dict(question.attrs))

    def _ask(self, question: Question) -> tuple[list[Placement], list[Placement]]:
        """How the op needs its operands and makes its results."""
        operands = [_whole_classes(question, i, o) for i, o in enumerate(question.operands)]
        if question.op in _RULES and all(operands):
            rule, arguments = _RULES[question.op]
            answer = self._rule(rule, operands, arguments(dict(question.attrs), question.operands[0]))
            return answer[0], answer[1][: max(1, len(question.results))]
        results = [shape for shape, _ in question.results] or [question.operands[0].shape]
        if all(_broadcasts(o.shape, shape) for o in operands for shape in results):
            return self._elementwise(operands, results)
        return _along_the_batch(operands, results)

    def _rule(self, name: str, operands: Sequence[Operand], attrs: list[Any]) -> tuple[list[Placement], list[Placement]]:
        from paddle.base import core

        specs = [self._spec(o) for o in operands]
        inputs, outputs = core.get_phi_spmd_rule(name).infer_forward(*specs, *attrs)
        return [_placement(s) for s in inputs], [_placement(s) for s in outputs]

    def _elementwise(self, operands: Sequence[Operand], results: Sequence[Dims]) -> tuple[list[Placement], list[Placement]]:
        """Operands one after the other against what they make together."""
        total = Operand(operands[0].shape, operands[0].dtype, Placement(operands[0].placement.dims_mapping), True)
        for o in operands[1:]:
            (_, _), (made,) = self._rule("elementwise_binary", [total, o], [])
            total = Operand(_wider(total.shape, o.shape), o.dtype, made, True)
        made = total.placement
        needs = [_cut(made, o.shape) for o in operands]
        return needs, [_cut(made, shape) for shape in results]

    def _spec(self, operand: Operand) -> Any:
        from paddle.base import core

        attr = core.TensorDistAttr()
        attr.process_mesh = core.ProcessMesh(list(self.mesh.shape), list(range(self.mesh.size)), list(self.mesh.axes))
        attr.dims_mapping = list(operand.placement.dims_mapping)
        return core.DistTensorSpec(list(operand.shape), attr)

    def _read(self, question: Question, forward: Built) -> list[Use]:
        """What the gradient op reads of the forward pass."""
        slots = [slot for slot, operands in question.slots for _ in operands]
        outputs = _OUTPUTS.get(question.op, ("out",) * len(forward.products))
        reads = _GRADIENT_READS.get(question.op, tuple(dict.fromkeys(slots)))
        uses = [use for slot, use in zip(slots, forward.uses, strict=True) if slot in reads]
        for i, (slot, p) in enumerate(zip(outputs, forward.products, strict=False)):
            if slot in reads:
                uses.append(Use(Source("output", i), p.shape, p.dtype, p.kept, p.kept))
        return uses


def _arriving(question: Question, forward: Built) -> list[Use]:
    """The gradients of the results, which the op needs as it made those."""
    assert question.gradients is not None
    return [
        Use(Source("gradient", i), product.shape, product.dtype, have, product.kept)
        for i, (have, product) in enumerate(zip(question.gradients, forward.products, strict=True))
        if have is not None
    ]


def _placement(spec: Any) -> Placement:
    partial = sorted(spec._partial_dims()) if spec._is_partial() else []
    return Placement(tuple(spec.dims_mapping), tuple((axis, "sum") for axis in partial))


def _reduced(attrs: Attrs, x: Operand) -> list[int]:
    return list(attrs.get("axis") or range(len(x.shape)))  # an empty list crashes the rule


def _whole_classes(question: Question, place: int, operand: Operand) -> Operand:
    dims = operand.placement.dims_mapping
    if question.op == _GATHERED and place == 0:
        axis = dict(question.attrs)["axis"] % len(dims)
        dims = tuple(-1 if d == axis else m for d, m in enumerate(dims))
    return Operand(operand.shape, operand.dtype, Placement(dims), operand.stop_gradient)


def _broadcasts(shape: Dims, to: Dims) -> bool:
    return len(shape) <= len(to) and all(n in (1, m) for n, m in zip(reversed(shape), reversed(to), strict=False))


def _wider(one: Dims, other: Dims) -> Dims:
    n = max(len(one), len(other))
    padded = ((1,) * (n - len(s)) + s for s in (one, other))
    return tuple(map(max, *padded))


def _cut(placement: Placement, shape: Dims) -> Placement:
    """The placement of a broadcast tensor, for one of those it is made of."""
    dims = placement.dims_mapping[len(placement.dims_mapping) - len(shape) :] if shape else ()
    return Placement(tuple(-1 if n == 1 else axis for n, axis in zip(shape, dims, strict=True)))


def _along_the_batch(operands: Sequence[Operand], results: Sequence[Dims]) -> tuple[list[Placement], list[Placement]]:
    """Without a rule nothing is known of an op but that it treats the samples of a batch alike: the first dimension of its
    first operand stays sharded if every result has it too; all else is gathered."""
    first = operands[0]
    batch = first.shape[:1]
    axis = first.placement.dims_mapping[0] if batch and all(shape[:1] == batch for shape in results) else -1
    needs = [Placement.along(axis if o.placement.dims_mapping[:1] == (axis,) else -1, len(o.shape)) for o in operands]
    return needs, [Placement.along(axis, len(shape)) for shape in results]
