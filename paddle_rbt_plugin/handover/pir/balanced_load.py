"""What a trace can know of values that a router computes, if every expert gets the same load.

A mixture of experts sends each token to the experts that its router chooses, so shapes and branches of such a model depend on
values. For planning they are those of a balanced load: a token chooses each expert equally often. ``BalancedLoad.of`` derives
from that, op by op, which share of a tensor is not zero and how large its elements are on average; ``places`` chooses how many
tokens an expert takes.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from paddle_rbt_plugin.graph.mixtures import Places, places
from paddle_rbt_plugin.graph.pir import is_list, is_present, plain_attrs


@dataclass(frozen=True)
class Load:
    """What is known of the elements of a tensor."""

    mean: float | None
    """None if it is unknown."""
    density: float
    """Share of the elements that are not zero."""
    classes: int = 0
    """Elements are numbers of experts, each chosen equally often; 0 for other tensors."""
    kept: float = 0.0
    """The elements are scores that this share of all scores reaches; 0 for other tensors."""
    constant: bool = False
    size: int = 0
    """Elements of a vector whose shape does not say it."""


def _indicator(share: float) -> Load:
    return Load(share, share)


def _choice(classes: int) -> Load:
    return Load((classes - 1) / 2, 1 - 1 / classes, classes)


_SAME = frozenset(
    [
        "transpose",
        "reshape",
        "slice",
        "strided_slice",
        "squeeze",
        "unsqueeze",
        "expand",
        "tile",
        "flatten",
        "assign",
        "share_data",
        "gather",
        "gather_nd",
        "index_select",
        "detach",
        "contiguous",
        "view_shape",
        "set_value_with_tensor",
        "roll",
        "mean",
        "clip",
        "abs",
        "flip",
        "index_elementwise_get",
    ]
)
_OPPOSITE = {
    "greater_than": "less_than",
    "less_than": "greater_than",
    "greater_equal": "less_equal",
    "less_equal": "greater_equal",
}


class BalancedLoad:
    """The loads of the values of one trace, and where it dispatched tokens."""

    def __init__(self, batch: int | None = None):
        self.batch = batch
        self.is_assumed = False
        """Whether anything of the program depends on it."""
        self.dispatches: dict[int, tuple[Any, Any, Places]] = {}
        """By the id of a mask: the mask, the tensor that stands for the coordinates of its elements, and how many these are."""
        self._known: dict[int, Load | None] = {}

    def of(self, value: Any) -> Load | None:
        """The load of a PIR value; None if the router does not decide it, or not in a way that is known."""
        if not is_present(value) or is_list(value):
            return None
        if value.id not in self._known:
            self._known[value.id] = self._load(value)
        return self._known[value.id]

    def number(self, value: Any) -> float | None:
        """The value of a tensor of one element, if it is a count or a condition on counts."""
        found = self.of(value)
        if found is None or found.classes or found.mean is None or _numel(value) != 1:
            return None
        self.is_assumed |= not found.constant
        return found.mean

    def numbers(self, value: Any) -> list[int] | None:
        """The counts in a vector, spread evenly so that their sum is right."""
        found = self.of(value)
        if found is None or found.classes or found.mean is None or len(value.shape) != 1:
            return None
        self.is_assumed |= not found.constant
        size = value.shape[0] if value.shape[0] > 0 else found.size
        each, more = divmod(round(found.mean * size), size)
        return [each + (i < more) for i in range(size)]

    def places(self, mask: Any) -> Places | None:
        """How many elements of a mask are taken to be not zero, with the groups of tokens that they come from; None for a mask
        of unknown load. ``groups`` is 0 where all are."""
        found = self.of(mask)
        if found is None or found.density <= 0 or found.classes:
            return None
        numel = _numel(mask)
        self.is_assumed = True
        if found.density >= 1:
            return Places(0, 0, numel)
        tokens = max(mask.shape)
        return places(tokens, numel * found.density / tokens, self.batch)

    def _load(self, value: Any) -> Load | None:
        op = value.get_defining_op()
        type_ = op.name().split(".", 1)[1].removesuffix("_")
        operands = op.operands_source()
        attrs = plain_attrs(op)
        if type_ in ("full", "full_like", "full_with_tensor", "full_int_array"):
            number = attrs.get("value", 0.0) if type_ == "full" else self._of_operand(operands, 1)
            return Load(float(number), float(number != 0), constant=True) if isinstance(number, (int, float)) else number
        if type_ == "assign_value":
            numbers = attrs.get("values", ())
            same = len(set(numbers)) == 1 and isinstance(numbers[0], (int, float))
            return Load(float(numbers[0]), float(numbers[0] != 0), constant=True) if same else None
        if type_ in ("numel", "shape", "shape64"):
            return (
                Load(float(_numel(operands[0])), 1.0, constant=True)
                if type_ == "numel" and min(operands[0].shape, default=1) >= 0
                else None
            )
        rule = _RULES.get(type_)
        if rule is not None:
            return rule(self, op, operands, attrs, value)
        if type_ in _SAME:
            return self._of_operand(operands, 0)
        return None

    def _of_operand(self, operands: list[Any], position: int) -> Load | None:
        return self.of(operands[position]) if len(operands) > position else None


def _numel(value: Any) -> int:
    return math.prod(value.shape)


def _best(load: BalancedLoad, op: Any, operands: list[Any], attrs: Mapping[str, Any], value: Any) -> Load | None:
    """``topk``: scores, and numbers of experts."""
    axis = attrs.get("axis", -1)
    size, chosen = operands[0].shape[axis], op.result(0).shape[axis]
    if size <= 0 or chosen <= 0:
        return None
    return _choice(size) if value.id == op.result(1).id else Load(None, 1.0, kept=chosen / size)


def _chosen(load: BalancedLoad, op: Any, operands: list[Any], attrs: Mapping[str, Any], value: Any) -> Load | None:
    """``argmax`` and ``argsort``: numbers of experts."""
    axis = attrs.get("axis", -1)
    size = operands[0].shape[axis if isinstance(axis, int) else -1] if operands[0].shape else 1
    if op.name().endswith("argsort") and value.id == op.result(0).id:
        return None
    return _choice(size) if size > 1 and load.of(operands[0]) is None else None


def _one_hot(load: BalancedLoad, op: Any, operands: list[Any], attrs: Mapping[str, Any], value: Any) -> Load | None:
    return _indicator(1 / value.shape[-1]) if load.of(operands[0]) is not None else None


def _cast(load: BalancedLoad, op: Any, operands: list[Any], attrs: Mapping[str, Any], value: Any) -> Load | None:
    found = load.of(operands[0])
    return replace(found, mean=found.density, classes=0) if found is not None and str(value.dtype).endswith("bool") else found


def _sum(load: BalancedLoad, op: Any, operands: list[Any], attrs: Mapping[str, Any], value: Any) -> Load | None:
    found, summands = load.of(operands[0]), _numel(operands[0]) / max(1, _numel(value))
    if found is None or found.mean is None or found.classes:
        return None
    return Load(found.mean * summands, min(1.0, found.density * summands))


def _any(load: BalancedLoad, op: Any, operands: list[Any], attrs: Mapping[str, Any], value: Any) -> Load | None:
    found = _sum(load, op, operands, attrs, value)
    return None if found is None else _indicator(found.density)


def _counts(load: BalancedLoad, op: Any, operands: list[Any], attrs: Mapping[str, Any], value: Any) -> Load | None:
    found = load.of(operands[0])
    return Load(_numel(operands[0]) / found.classes, 1.0, size=found.classes) if found is not None and found.classes else None


def _multiply(load: BalancedLoad, op: Any, operands: list[Any], attrs: Mapping[str, Any], value: Any) -> Load | None:
    found = [load.of(x) for x in operands[:2]]
    known = [f for f in found if f is not None]
    if not known or (len(known) < 2 and known[0].density == 1):
        return None
    mean = None if len(known) < 2 or any(f.mean is None for f in known) else math.prod(f.mean or 0.0 for f in known)
    return Load(mean, math.prod(f.density for f in known))


def _or(load: BalancedLoad, op: Any, operands: list[Any], attrs: Mapping[str, Any], value: Any) -> Load | None:
    found = [load.of(x) for x in operands[:2]]
    return None if None in found else _indicator(min(1.0, sum(f.density for f in found if f is not None)))


def _not(load: BalancedLoad, op: Any, operands: list[Any], attrs: Mapping[str, Any], value: Any) -> Load | None:
    found = load.of(operands[0])
    return None if found is None else _indicator(1 - found.density)


def _linear(load: BalancedLoad, op: Any, operands: list[Any], attrs: Mapping[str, Any], value: Any) -> Load | None:
    """``scale``, ``add`` and ``subtract``."""
    found = load.of(operands[0])
    if found is None or found.mean is None:
        return None
    other = load.of(operands[1]) if len(operands) > 1 else None
    if op.name() == "pd_op.scale":
        if other is None or other.mean is None:
            return None
        mean = found.mean * other.mean + float(attrs.get("bias", 0.0))
    elif other is None or other.mean is None:
        return None
    else:
        mean = found.mean + (other.mean if op.name().startswith("pd_op.add") else -other.mean)
    return Load(mean, float(mean != 0))


def _divide(load: BalancedLoad, op: Any, operands: list[Any], attrs: Mapping[str, Any], value: Any) -> Load | None:
    found, other = load.of(operands[0]), load.of(operands[1])
    if found is None or other is None or found.mean is None or not other.mean:
        return None
    return Load(found.mean / other.mean, found.density)


def _put(load: BalancedLoad, op: Any, operands: list[Any], attrs: Mapping[str, Any], value: Any) -> Load | None:
    """``put_along_axis``: a row gets as many elements as it chooses experts."""
    into, index = load.of(operands[0]), load.of(operands[1])
    axis = attrs.get("axis", 0)
    if into is None or into.density > 0 or index is None or not index.classes:
        return None
    return Load(None, operands[1].shape[axis] / value.shape[axis])


def _compare(load: BalancedLoad, op: Any, operands: list[Any], attrs: Mapping[str, Any], value: Any) -> Load | None:
    type_ = op.name().split(".", 1)[1].removesuffix("_")
    a, b = load.of(operands[0]), load.of(operands[1])
    if a is not None and a.constant and b is not None and b.constant and a.mean is not None and b.mean is not None:
        return Load(mean := float(_HOLDS[type_](a.mean, b.mean)), mean, constant=True)
    if a is not None and (b is None or a.constant):
        a, b, type_ = b, a, _OPPOSITE.get(type_, type_)
    if b is None:
        return None
    if type_ in ("equal", "not_equal"):
        share = _equal(a, b)
        return None if share is None else _indicator(share if type_ == "equal" else 1 - share)
    above = type_.startswith("greater")
    if a is None:  # scores against the smallest of those that are chosen
        return _indicator(b.kept if above else 1 - b.kept) if b.kept else None
    if a.classes or a.mean is None or b.mean is None:
        return None
    if a.density < 1 and b.constant and 0 <= b.mean < 1:  # marks against a threshold
        return _indicator(a.density if above else 1 - a.density)
    return _indicator(float(_HOLDS[type_](a.mean, b.mean)))


_HOLDS: dict[str, Callable[[float, float], bool]] = {
    "equal": operator.eq,
    "not_equal": operator.ne,
    "greater_than": operator.gt,
    "greater_equal": operator.ge,
    "less_than": operator.lt,
    "less_equal": operator.le,
}


def _equal(a: Load | None, b: Load) -> float | None:
    if a is None:
        return 1 / b.classes if b.classes else None
    classes = a.classes or b.classes
    if classes:
        return 1 / classes
    if b.constant and b.mean in (0, 1) and a.mean is not None:
        if a.density < 1:
            return 1 - a.density if b.mean == 0 else a.density
        return float(a.mean == b.mean)
    return None


_Rule = Callable[[BalancedLoad, Any, list[Any], Mapping[str, Any], Any], Load | None]
_RULES: dict[str, _Rule] = {
    "topk": _best,
    "argmax": _chosen,
    "argsort": _chosen,
    "one_hot": _one_hot,
    "cast": _cast,
    "sum": _sum,
    "any": _any,
    "max": _any,
    "bincount": _counts,
    "histogram": _counts,
    "multiply": _multiply,
    "logical_and": _multiply,
    "bitwise_and": _multiply,
    "logical_or": _or,
    "bitwise_or": _or,
    "logical_not": _not,
    "bitwise_not": _not,
    "scale": _linear,
    "add": _linear,
    "subtract": _linear,
    "divide": _divide,
    "put_along_axis": _put,
    **dict.fromkeys(("equal", "not_equal", *_OPPOSITE), _compare),
}
