"""The language in which a pattern draws its graph.

A pattern graph says which ops must be there and how they are wired; it is matched against the graph of a program. What a
pattern leaves open (an optional bias, one of two ways to write attention) makes it several graphs, its variants: ``build``
runs once per combination of choices.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, overload

from paddle_rbt_plugin.errors import PatternError
from paddle_rbt_plugin.graph.graph import Tensor, TensorKind

MAX_VARIANTS = 256

AttrsPredicate = Callable[[Mapping[str, Any]], bool]
TensorPredicate = Callable[[Tensor], bool]


@dataclass(frozen=True)
class AttrValues:
    """The predicate that attributes have these values."""

    wanted: Mapping[str, Any]

    def __call__(self, found: Mapping[str, Any]) -> bool:
        return all(name in found and found[name] == value for name, value in self.wanted.items())


@dataclass(frozen=True, eq=False)
class TensorNode:
    """A tensor of a pattern graph: what ``Builder`` hands out and takes back."""

    index: int
    name: str
    """Empty for a tensor that the pattern does not refer to."""
    kind: TensorKind | Literal["any"] = "any"
    ndim: int | None = None
    where: TensorPredicate | None = None

    def accepts(self, tensor: Tensor) -> bool:
        """Whether a tensor of the program can stand for this one."""
        return (
            self.kind in ("any", tensor.kind)
            and (self.ndim is None or self.ndim == tensor.ndim)
            and (self.where is None or self.where(tensor))
        )


@dataclass(frozen=True, eq=False)
class OpNode:
    """An op of a pattern graph. ``operands`` and ``outputs`` are tensor positions; both may be prefixes of what the op has."""

    index: int
    types: frozenset[str]
    operands: tuple[int, ...]
    outputs: tuple[int, ...]
    attrs: AttrsPredicate | None = None


@dataclass(frozen=True, eq=False)
class ChainNode:
    """``target`` is reached from ``source`` through at most ``at_most`` ops of the given types; possibly none, and then
    both are the same tensor. ``whole``: no op of these types makes the source, so the chain cannot begin in its middle."""

    types: frozenset[str]
    source: int
    target: int
    at_most: int
    whole: bool = False


@dataclass(frozen=True, eq=False)
class PatternGraph:
    """One variant of a pattern."""

    tensors: tuple[TensorNode, ...]
    ops: tuple[OpNode, ...]
    chains: tuple[ChainNode, ...]

    @property
    def names(self) -> dict[str, TensorNode]:
        """The tensors that the pattern can refer to."""
        return {t.name: t for t in self.tensors if t.name}


_MAX_TENSORS = 10_000
"""More than any sub-graph of a layer has: a ``build`` that gets here does not end."""


class Builder:
    """Draws one variant of a pattern graph; this is the ``g`` of ``Pattern.build``.

    Every method checks its arguments and raises PatternError.
    """

    def __init__(self, script: Sequence[int] = ()):
        self._script = script
        self._choices: list[int] = []  # how many options each choice had, in order
        self._tensors: list[TensorNode] = []
        self._ops: list[OpNode] = []
        self._chains: list[ChainNode] = []
        self._released: set[int] = set()  # operands of optional ops that this variant goes without

    def tensor(self, name: str = "", *, ndim: int | None = None, where: TensorPredicate | None = None) -> TensorNode:
        """A tensor of any kind. ``where`` is a predicate on the program's tensor, for what ``ndim`` cannot say."""
        return self._tensor(name, "any", ndim, where)

    def param(self, name: str = "", *, ndim: int | None = None, where: TensorPredicate | None = None) -> TensorNode:
        """A parameter."""
        return self._tensor(name, "param", ndim, where)

    def data(self, name: str = "", *, ndim: int | None = None, where: TensorPredicate | None = None) -> TensorNode:
        """An input of the program."""
        return self._tensor(name, "data", ndim, where)

    def var(self, name: str = "", *, ndim: int | None = None, where: TensorPredicate | None = None) -> TensorNode:
        """A tensor that some op writes."""
        return self._tensor(name, "var", ndim, where)

    @overload
    def op(
        self,
        types: str | Collection[str],
        *operands: TensorNode,
        attrs: Mapping[str, Any] | AttrsPredicate | None = None,
        name: str = "",
        ndim: int | None = None,
        where: TensorPredicate | None = None,
        outputs: None = None,
    ) -> TensorNode: ...

    @overload
    def op(
        self,
        types: str | Collection[str],
        *operands: TensorNode,
        attrs: Mapping[str, Any] | AttrsPredicate | None = None,
        outputs: Sequence[str],
    ) -> tuple[TensorNode, ...]: ...

    def op(self, types, *operands, attrs=None, name="", ndim=None, where=None, outputs=None):
        """An op of one of the canonical ``types``; returns its output.

        ``operands`` are the op's first operands in order; the first two of a commutative op match either way round.
        ``attrs`` gives values that attributes must have, or a predicate on all of them. ``name``, ``ndim`` and ``where``
        describe the output. ``outputs`` names the first outputs of an op that has several, and a tuple is returned.
        """
        accepts = _attrs_predicate(attrs)
        inputs = tuple(self._own(t) for t in operands)
        results = [self._tensor(name, "var", ndim, where) for name in ([name] if outputs is None else outputs)]
        node = OpNode(len(self._ops), _types(types), inputs, tuple(t.index for t in results), accepts)
        self._ops.append(node)
        return results[0] if outputs is None else tuple(results)

    def optional(
        self,
        types: str | Collection[str],
        x: TensorNode,
        *operands: TensorNode,
        attrs: Mapping[str, Any] | AttrsPredicate | None = None,
        name: str = "",
    ) -> TensorNode:
        """An op that may be missing: its output where it is there, else ``x``. ``operands`` go with the op; where both fit,
        the match with the op is the one that counts."""
        if self.choose(True, False):
            return self.op(types, x, *operands, attrs=attrs, name=name)
        self._own(x)
        self._released.update(self._own(t) for t in operands)
        return x

    def choose(self, *options: Any) -> Any:
        """One of ``options``: the pattern is built and matched once for each."""
        if not options:
            raise PatternError("choose() needs at least one option")
        depth = len(self._choices)
        self._choices.append(len(options))
        return options[self._script[depth] if depth < len(self._script) else 0]

    def chain(self, types: str | Collection[str], x: TensorNode, *, at_most: int = 8, name: str = "") -> TensorNode:
        """What ``x`` becomes after flowing through up to ``at_most`` ops of the given types, or ``x`` itself. Each op on
        the way reads the tensor before as any of its operands; its other operands are free."""
        if at_most < 1:
            raise PatternError(f"chain(): at_most is the largest number of ops on the way, at least 1, not {at_most!r}")
        return self._chain(types, x, at_most, name)

    def linear(self, x: TensorNode, weight: TensorNode, bias: TensorNode | None = None) -> TensorNode:
        """``x @ weight``, plus ``bias`` where the program adds it: a Linear layer whose weight is [in, out]. Mixed precision
        may cast every tensor on the way."""
        x, weight = self.cast(x), self.cast(weight)
        h = self.op("matmul", x, weight, attrs=lambda a: not a.get("transpose_x") and not a.get("transpose_y"))
        if bias is not None and self.choose(True, False):
            h = self.op("add", self.cast(h), self.cast(bias))
        elif bias is not None:
            self._released.add(self._own(bias))
        return self.cast(h)

    def cast(self, x: TensorNode) -> TensorNode:
        """``x`` in another dtype, or ``x`` itself: what mixed precision makes of an operand. ``x`` is what comes before the
        cast."""
        return self._chain("cast", x, at_most=2, whole=True)

    def _chain(
        self, types: str | Collection[str], x: TensorNode, at_most: int, name: str = "", whole: bool = False
    ) -> TensorNode:
        target = self._tensor(name, "any", None, None)
        self._chains.append(ChainNode(_types(types), self._own(x), target.index, at_most, whole))
        return target

    def _tensor(self, name: str, kind: Any, ndim: int | None, where: TensorPredicate | None) -> TensorNode:
        if not isinstance(name, str):
            raise PatternError(f"a tensor's name is a string, not {name!r}")
        if name and any(t.name == name for t in self._tensors):
            raise PatternError(f"two tensors are named {name!r}; every name may be given once")
        if ndim is not None and (not isinstance(ndim, int) or ndim < 0):
            raise PatternError(f"{name or 'a tensor'}: ndim is a number of dimensions or None, not {ndim!r}")
        if len(self._tensors) == _MAX_TENSORS:
            raise PatternError(f"the pattern has more than {_MAX_TENSORS} tensors; does its build() ever end?")
        node = TensorNode(len(self._tensors), name, kind, ndim, where)
        self._tensors.append(node)
        return node

    def _own(self, node: TensorNode) -> int:
        if not isinstance(node, TensorNode):
            raise PatternError(f"an operand is what g.tensor(), g.param(), g.data(), g.op() ... return, not {node!r}")
        if node.index >= len(self._tensors) or self._tensors[node.index] is not node:
            raise PatternError(f"tensor {node.name!r} belongs to another builder; make it with the g given to build()")
        return node.index

    def _finish(self) -> PatternGraph:
        wired = {t for op in self._ops for t in (*op.operands, *op.outputs)} | {
            t for chain in self._chains for t in (chain.source, chain.target)
        }
        loose = [t for t in self._tensors if t.index not in wired and t.index not in self._released]
        if loose:
            raise PatternError(f"tensor {loose[0].name!r} is read by no op of the pattern; wire it or leave it out")
        kept = [t for t in self._tensors if t.index in wired]
        position = {t.index: i for i, t in enumerate(kept)}
        graph = PatternGraph(
            tuple(TensorNode(i, t.name, t.kind, t.ndim, t.where) for i, t in enumerate(kept)),
            tuple(
                OpNode(
                    op.index,
                    op.types,
                    tuple(position[t] for t in op.operands),
                    tuple(position[t] for t in op.outputs),
                    op.attrs,
                )
                for op in self._ops
            ),
            tuple(ChainNode(c.types, position[c.source], position[c.target], c.at_most, c.whole) for c in self._chains),
        )
        _check_connected(graph)
        return graph


def variants(build: Callable[[Builder], object]) -> Iterator[PatternGraph]:
    """The graphs that ``build`` draws, one per combination of its choices; the first takes every first option.

    Raises PatternError for a malformed graph and for more than ``MAX_VARIANTS`` of them.
    """
    scripts: list[tuple[int, ...]] = [()]
    for _ in range(MAX_VARIANTS):
        script = scripts.pop()
        builder = Builder(script)
        build(builder)
        yield builder._finish()
        for depth in range(len(script), len(builder._choices)):
            prefix = script + (0,) * (depth - len(script))
            scripts += [(*prefix, option) for option in range(1, builder._choices[depth])]
        if not scripts:
            return
    raise PatternError(f"its optional ops and choices make more than {MAX_VARIANTS} graphs; split the pattern")


def _types(types: str | Collection[str]) -> frozenset[str]:
    names = frozenset({types} if isinstance(types, str) else types)
    if not names or not all(isinstance(n, str) and n for n in names):
        raise PatternError(f'an op type is a canonical name like "matmul", or a set of them, not {types!r}')
    return names


def _attrs_predicate(attrs: Mapping[str, Any] | AttrsPredicate | None) -> AttrsPredicate | None:
    if attrs is None or callable(attrs):
        return attrs
    if not isinstance(attrs, Mapping):
        raise PatternError(f'attrs is a dict like {{"transpose_y": True}} or a function of the attributes, not {attrs!r}')
    return AttrValues(attrs)


def _check_connected(graph: PatternGraph) -> None:
    """A pattern in two parts would pair everything with everything."""
    if not graph.ops:
        raise PatternError("the pattern has no op; build() must call g.op() at least once")
    edges = [{*op.operands, *op.outputs} for op in graph.ops] + [{c.source, c.target} for c in graph.chains]
    reached, rest = edges[0], edges[1:]
    while rest:
        touching = [e for e in rest if e & reached]
        if not touching:
            names = sorted(graph.tensors[t].name for e in rest for t in e if graph.tensors[t].name)
            raise PatternError(f"the pattern is in pieces: nothing joins {', '.join(names) or 'its ops'} to the rest")
        rest = [e for e in rest if not e & reached]
        reached = reached.union(*touching)
