"""Why a pattern does not match: how far it fits the model at best, and which of its nodes is the first not to fit.

The matcher's own search is run from every op of every variant that the model has any candidate for, with leave to pass over
one op (or chain) that cannot be mapped. The point where most ops are mapped is kept: what was passed over there is the first
not to fit. Each of its candidates is asked for its objection, and the one that came nearest is reported.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from paddle_rbt_plugin.errors import describe_error
from paddle_rbt_plugin.graph.graph import Graph, Op, Tensor
from paddle_rbt_plugin.pattern.builder import AttrValues, ChainNode, OpNode, PatternGraph, TensorNode
from paddle_rbt_plugin.pattern.matcher import (
    Assignment,
    Budget,
    GraphIndex,
    Search,
    occurrences,
    operand_orders,
)
from paddle_rbt_plugin.pattern.pattern import CompiledPattern

MAX_STEPS = 200_000
"""Candidates that may be tried in all, some seconds; each op to begin with gets its part."""
_MOST_STEPS = 10_000
_DEAD_ENDS = 20
"""Equally deep points of a search that are compared."""


@dataclass(frozen=True)
class Fit:
    """An op of the pattern and the op of the model that stands for it."""

    wanted: str
    found: str


@dataclass(frozen=True)
class NearMiss:
    """The best that a pattern does in a model that it does not match."""

    fits: tuple[Fit, ...]
    """The ops that fit, in the order in which they were found."""
    ops: int
    """How many ops the pattern has, in the variant that does best."""
    wanted: str
    """The first node of the pattern that does not fit: ``silu(the result of matmul)``."""
    nearest: str
    """The op of the model that came nearest to it, with its operands; empty where none was a candidate."""
    objection: str
    """Why that op, or nothing at all, can stand for the node."""

    def __str__(self) -> str:
        lines = [f"{len(self.fits)} of {self.ops} ops fit"]
        lines += [f"  {fit.wanted}  is  {fit.found}" for fit in self.fits]
        lines.append(f"the first that does not: {self.wanted}")
        lines += [f"  nearest: {self.nearest}"] if self.nearest else []
        lines.append(f"  but {self.objection}")
        return "\n".join(lines)


class _Enough(Exception):
    """All ops but one are mapped: no point of a search is deeper."""


@dataclass(frozen=True)
class _DeadEnd:
    """A state of a search from which no step leads on, and the step that was passed over on the way."""

    depth: int
    passed: int | None
    tensors: tuple[int | None, ...]
    ops: tuple[int | None, ...]

    @property
    def rank(self) -> tuple[int, int]:
        return sum(op is not None for op in self.ops), self.depth

    @property
    def step(self) -> int:
        """The step that is the first not to fit."""
        return self.depth if self.passed is None else self.passed


class _Probe(Search):
    """A search that may pass over one step, and remembers the deepest points it comes to."""

    deepest: tuple[_DeadEnd, ...] = ()
    passed: int | None = None

    def run(self, depth: int = 0) -> Iterator[Assignment]:
        self._remember(_DeadEnd(depth, self.passed, tuple(self.tensors), tuple(self.ops)))
        if depth < len(self.steps):
            yield from self._go_on(depth)
        elif sum(op is not None for op in self.ops) >= len(self.ops) - 1:
            raise _Enough

    def _go_on(self, depth: int) -> Iterator[Assignment]:
        if depth > 0 and not self._tied(self.steps[depth]):
            yield from self.run(depth + 1)  # only what was passed over would have led here
            return
        yield from super().run(depth)
        if self.passed is None and depth > 0 and self._may_pass(self.steps[depth]):
            self.passed = depth
            yield from self.run(depth + 1)
            self.passed = None

    def _tied(self, step: OpNode | ChainNode) -> bool:
        """Whether a step begins at a tensor that is mapped."""
        ends = (step.source, step.target) if isinstance(step, ChainNode) else (*step.operands, *step.outputs)
        return any(self.tensors[t] is not None for t in ends)

    def _may_pass(self, step: OpNode | ChainNode) -> bool:
        """A chain to nowhere is no better than none."""
        return isinstance(step, OpNode) or None not in (self.tensors[step.source], self.tensors[step.target])

    def _remember(self, here: _DeadEnd) -> None:
        if not self.deepest or here.rank > self.deepest[0].rank:
            self.deepest = (here,)
        elif here.rank == self.deepest[0].rank and len(self.deepest) < _DEAD_ENDS:
            self.deepest += (here,)

    def restore(self, point: _DeadEnd) -> None:
        """Goes back to a point that the search has come to, and left again."""
        self.unbind(0)
        for node, tensor in enumerate(point.tensors):
            if tensor is not None:
                self.bind(node, tensor)
        self.ops = list(point.ops)
        self.used_ops = {op for op in point.ops if op is not None}


def near_miss(graph: Graph, pattern: CompiledPattern) -> NearMiss | None:
    """The best that ``pattern`` does in ``graph``; None where it occurs."""
    index = GraphIndex(graph)
    if any(_occurs(variant, index) for variant in pattern.variants):
        return None
    starts = [(variant, op) for variant in pattern.variants for op in variant.ops if index.count(op.types)]
    if not starts:
        return _Explainer(pattern.variants[0], graph).nothing()
    steps = min(_MOST_STEPS, MAX_STEPS // len(starts))
    found: list[tuple[tuple[int, int, int], NearMiss]] = []
    for variant, first in starts:
        search = _Probe(variant, index, Budget(steps), first)
        try:
            for _ in search.run():
                pass
        except (Exception, SystemExit):  # enough, out of budget, or a predicate raised: what was found by then counts
            search.budget = Budget(steps)
        if search.deepest[0].step == len(search.steps):
            return None  # where looking for an occurrence ran out of budget, this search came upon one
        found.append(_Explainer(variant, graph).nearest(search))
    return max(found, key=lambda f: f[0])[1]  # of equals the first


def _occurs(variant: PatternGraph, index: GraphIndex) -> bool:
    try:
        return next(occurrences(variant, index, Budget(MAX_STEPS)), None) is not None
    except (Exception, SystemExit):  # out of budget, or a predicate of the pattern raised
        return False


class _Explainer:
    """Words for what happens in one variant."""

    def __init__(self, variant: PatternGraph, graph: Graph):
        self.variant = variant
        self.graph = graph

    def nothing(self) -> NearMiss:
        """Of a model that has none of the pattern's ops."""
        first = self.variant.ops[0]
        return NearMiss((), len(self.variant.ops), self._node(first), "", f"the model has no {_types(first.types)}")

    def nearest(self, search: _Probe) -> tuple[tuple[int, int, int], NearMiss]:
        """The candidate that came nearest at the deepest points of a search, with a rank for how near that is."""
        best: tuple[tuple[int, str, str], _DeadEnd, str] | None = None
        for point in search.deepest:
            search.restore(point)
            step = search.steps[point.step]
            found = self._chain(search, step) if isinstance(step, ChainNode) else self._op(search, step)
            # Of equals the first, but with the same ops the last: a chain first runs through none.
            if best is None or (found[0], point.ops == best[1].ops) > (best[0][0], False):
                best = found, point, self._node(step)
        assert best is not None, "a search comes at least to its first step"
        (nearness, nearest, objection), at, wanted = best
        fits = tuple(
            Fit(self._node(node), self._found(self.graph.ops[op]))
            for node, op in ((s, at.ops[s.index]) for s in search.steps if isinstance(s, OpNode))
            if op is not None
        )
        return (*at.rank, nearness), NearMiss(fits, len(self.variant.ops), wanted, nearest, objection)

    def _op(self, search: _Probe, node: OpNode) -> tuple[int, str, str]:
        """How near a candidate came, which, and why it is none."""
        candidates = search.candidates(node)
        if not candidates:
            return 0, "", self._no_candidate(search, node)
        objections = [(*self._objection(search, node, op), op) for op in candidates]
        nearness, objection, op = max(objections, key=lambda o: o[0])
        return nearness, self._found(op), objection

    def _no_candidate(self, search: _Probe, node: OpNode) -> str:
        for t in node.outputs:
            bound = search.tensors[t]
            if bound is not None:
                return f"{_tensor(self.graph.tensors[bound])} is written by no op"
        read = next(t for t in (search.tensors[i] for i in node.operands) if t is not None)
        return f"no op reads {_tensor(self.graph.tensors[read])}"

    def _objection(self, search: _Probe, node: OpNode, op: Op) -> tuple[int, str]:
        """What keeps an op from standing for a node, in the order in which the search looks."""
        if op.type not in node.types:
            return 0, f"it is {op.type}, not {_types(node.types)}"
        if op.index in search.used_ops:
            other = next(n for n in self.variant.ops if search.ops[n.index] == op.index)
            return 1, f"it stands for {self._node(other)} already"
        if len(op.results) < len(node.outputs):
            return 1, f"it has {len(op.results)} results, not {len(node.outputs)}"
        refused = _attrs_objection(node, op)
        if refused:
            return 2, refused
        if len(op.operands) < len(node.operands):
            return 2, f"it has {len(op.operands)} operands, not {len(node.operands)}"
        return max(self._binding(search, node, op, operands) for operands in operand_orders(op))

    def _binding(self, search: _Probe, node: OpNode, op: Op, operands: Sequence[int]) -> tuple[int, str]:
        mark = len(search.trail)
        wanted = node.operands + node.outputs
        given = (*operands[: len(node.operands)], *op.results[: len(node.outputs)])
        for i, (t, tensor) in enumerate(zip(wanted, given, strict=True)):
            try:
                fits = search.bind(t, tensor)
                why = "" if fits else self._unbound(search, t, tensor)
            except (Exception, SystemExit) as error:  # the pattern's own predicate
                fits, why = False, f"the condition on {self._label(t)} raised {describe_error(error)}"
            if not fits:
                search.unbind(mark)
                return 3 + i, why
        search.unbind(mark)
        return 3 + len(wanted), "the search ended here: there are too many candidates"

    def _unbound(self, search: _Probe, node: int, tensor: int) -> str:
        """Why a tensor of the model cannot stand for one of the pattern."""
        found, label = self.graph.tensors[tensor], self._label(node)
        bound = search.tensors[node]
        if bound is not None:
            return f"it has {_tensor(found)} where {label}, which is {_tensor(self.graph.tensors[bound])}, is wanted"
        holders = search.holders.get(tensor, [])
        if any(search.joined[holder] != search.joined[node] for holder in holders):
            return f"its {_tensor(found)} stands for {self._label(holders[0])} already, so it cannot be {label} too"
        return _refusal(self.variant.tensors[node], found, label)

    def _chain(self, search: _Probe, chain: ChainNode) -> tuple[int, str, str]:
        """Why no way leads through a chain: its far end is mapped, or what it reaches cannot stand for the far end."""
        forward = search.tensors[chain.source] is not None
        here, there = (chain.source, chain.target) if forward else (chain.target, chain.source)
        start, end = search.tensors[here], search.tensors[there]
        assert start is not None, "the order of steps reaches a chain from a mapped tensor"
        origin = _tensor(self.graph.tensors[start])
        way = f"{'from' if forward else 'back from'} {origin} through at most {chain.at_most} of {_types(chain.types)}"
        if end is not None:
            return 1, "", f"no way leads {way} to {_tensor(self.graph.tensors[end])}"
        reached = search.index.reach(chain, start, forward, search.budget)
        begun = [t for t in reached if search.may_begin(chain, start if forward else t)]
        if not begun:
            return 1, "", f"{origin} is made by an op of the chain itself"
        refused = self._unbound(search, there, begun[-1])
        return 1, "", f"nothing that is reached {way} can be {self._label(there)}: {refused}"

    # Spelling

    def _node(self, step: OpNode | ChainNode) -> str:
        if isinstance(step, ChainNode):
            target = self.variant.tensors[step.target].name
            return f"a chain of {_types(step.types)} from {self._label(step.source)}" + (f" to {target}" if target else "")
        return f"{_types(step.types)}({', '.join(map(self._label, step.operands))})"

    def _label(self, tensor: int) -> str:
        """A tensor of the pattern: its name, or what makes it."""
        node = self.variant.tensors[tensor]
        if node.name:
            return node.name
        for op in self.variant.ops:
            if tensor in op.outputs:
                return f"the result of {_types(op.types)}"
        for chain in self.variant.chains:
            if tensor == chain.target:
                return self._label(chain.source)
        return "a parameter" if node.kind == "param" else "a tensor"

    def _found(self, op: Op) -> str:
        """An op of the model: its name, what it reads, and the Layer it comes from."""
        operands = ", ".join(_tensor(t) for t in self.graph.op_inputs(op))
        return f"{op.name}({operands})" + (f" of {op.scope}" if op.scope else "")


def _types(types: frozenset[str]) -> str:
    named = sorted(types)
    return "|".join(named[:4]) + ("|..." if len(named) > 4 else "")


def _tensor(tensor: Tensor) -> str:
    return f"{tensor.structured_name or tensor.name} {list(tensor.shape)}"


def _attrs_objection(node: OpNode, op: Op) -> str:
    if node.attrs is None:
        return ""
    if isinstance(node.attrs, AttrValues):
        wrong = [name for name, value in node.attrs.wanted.items() if op.attrs.get(name, AttrValues) != value]
        found = [f"{name} is {op.attrs[name]!r}" if name in op.attrs else f"it has no attribute {name}" for name in wrong]
        wanted = [f"{name} {node.attrs.wanted[name]!r}" for name in wrong]
        return f"{' and '.join(found)}; wanted: {', '.join(wanted)}" if wrong else ""
    try:
        accepted = node.attrs(op.attrs)
    except (Exception, SystemExit) as error:  # the pattern's own predicate
        return f"the condition on attributes raised {describe_error(error)}"
    spelled = ", ".join(f"{name}={value!r}" for name, value in op.attrs.items())
    return "" if accepted else f"the pattern's condition refuses its attributes ({spelled})"


def _refusal(node: TensorNode, tensor: Tensor, label: str) -> str:
    """Why ``TensorNode.accepts`` says no."""
    kinds = {"param": "a parameter", "data": "an input of the program", "var": "a result of an op"}
    if node.kind not in ("any", tensor.kind):
        return f"its {_tensor(tensor)} is {kinds[tensor.kind]}, and {label} must be {kinds[node.kind]}"
    if node.ndim is not None and node.ndim != tensor.ndim:
        return f"its {_tensor(tensor)} has {tensor.ndim} dimensions, and {label} must have {node.ndim}"
    return f"the condition (where=...) on {label} refuses {_tensor(tensor)} {tensor.dtype}"
