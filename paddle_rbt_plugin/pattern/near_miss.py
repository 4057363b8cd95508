"""Why a pattern does not match: how far it fits the model at best, and which of its nodes is the first not to fit.

The matcher's own search is run from every op of every variant that the model has any candidate for, with leave to pass over
one op (or chain) that cannot be mapped. The point where most ops are mapped is kept: what was passed over there is the first
not to fit. Each of its candidates is asked for its objection (``objection``), and the one that came nearest is reported.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from paddle_rbt_plugin.graph.graph import Graph
from paddle_rbt_plugin.pattern.builder import ChainNode, OpNode, PatternGraph
from paddle_rbt_plugin.pattern.matcher import Assignment, Budget, GraphIndex, Search, occurrences
from paddle_rbt_plugin.pattern.objection import Objection, Objector, spell_types
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

    def __init__(self, variant: PatternGraph, index: GraphIndex, budget: Budget, first: OpNode):
        super().__init__(variant, index, budget, first)
        self.empty = set()  # every chain is a step that may be passed over, even where it can only be empty
        self.deepest: tuple[_DeadEnd, ...] = ()
        self.passed: int | None = None

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
        return _nothing(Objector(pattern.variants[0], graph))
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
        found.append(_nearest(Objector(variant, graph), search))
    return max(found, key=lambda f: f[0])[1]  # of equals the first


def _occurs(variant: PatternGraph, index: GraphIndex) -> bool:
    try:
        return next(occurrences(variant, index, Budget(MAX_STEPS)), None) is not None
    except (Exception, SystemExit):  # out of budget, or a predicate of the pattern raised
        return False


def _nothing(objector: Objector) -> NearMiss:
    """Of a model that has none of the pattern's ops."""
    ops = objector.variant.ops
    return NearMiss((), len(ops), objector.node(ops[0]), "", f"the model has no {spell_types(ops[0].types)}")


def _nearest(objector: Objector, search: _Probe) -> tuple[tuple[int, int, int], NearMiss]:
    """The candidate that came nearest at the deepest points of a search, with a rank for how near that is."""
    best: tuple[Objection, _DeadEnd, str] | None = None
    for point in search.deepest:
        search.restore(point)
        step = search.steps[point.step]
        found = objector.objection(search, step)
        # Of equals the first, but with the same ops the last: a chain first runs through none.
        if best is None or (found[0], point.ops == best[1].ops) > (best[0][0], False):
            best = found, point, objector.node(step)
    assert best is not None, "a search comes at least to its first step"
    (nearness, nearest, objection), at, wanted = best
    fits = tuple(
        Fit(objector.node(node), objector.op(objector.graph.ops[op]))
        for node, op in ((s, at.ops[s.index]) for s in search.steps if isinstance(s, OpNode))
        if op is not None
    )
    return (*at.rank, nearness), NearMiss(fits, len(objector.variant.ops), wanted, nearest, objection)
