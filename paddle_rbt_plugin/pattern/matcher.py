"""Finds every occurrence of a pattern graph in a program's graph, by backtracking.

An occurrence maps each op of the pattern to an op of the graph of one of its types, whose attributes the pattern accepts,
and each tensor to a tensor, so that operands and outputs correspond slot by slot (in either order for the first two
operands of a commutative op), and so that a chain's target can be reached from its source. Ops are mapped injectively;
tensors too, except that tensors which a chain joins may coincide.

The search starts at the pattern's rarest op type and always goes on where the fewest candidates are left, so its work
grows with the number of anchors, not with their product with the rest of the graph. A variant that needs an op, or one op
right behind another, that the graph has nowhere is not searched for, and chains of ops that the graph lacks are contracted
first (``contraction``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from paddle_rbt_plugin.graph.graph import Graph, Op
from paddle_rbt_plugin.pattern.builder import ChainNode, OpNode, PatternGraph, TensorNode

COMMUTATIVE = frozenset(
    {"add", "multiply", "maximum", "minimum", "fmax", "fmin", "equal", "not_equal",
     "logical_and", "logical_or", "logical_xor", "bitwise_and", "bitwise_or", "bitwise_xor"}
)  # fmt: skip
"""Canonical ops whose first two operands may be exchanged."""


OCCURRENCE_STEPS = 50
"""What an occurrence costs of the budget: making a match of it takes as long as so many candidates."""


class SearchBudgetExceeded(Exception):
    """The search took more steps than it was allowed."""


@dataclass
class Budget:
    """How much a search may still do: a step is one candidate tried, or one tensor that a chain reaches."""

    steps: int

    def spend(self, steps: int = 1) -> None:
        self.steps -= steps
        if self.steps < 0:
            raise SearchBudgetExceeded


@dataclass(frozen=True)
class Assignment:
    """An occurrence of one variant: graph positions, in the order of the variant's tensors and ops."""

    tensors: tuple[int, ...]
    ops: tuple[int, ...]


class GraphIndex:
    """A graph with what the search looks up again and again."""

    def __init__(self, graph: Graph):
        self.graph = graph
        self._reach: dict[tuple[frozenset[str], int, int, bool], dict[int, int]] = {}

    @cached_property
    def pairs(self) -> frozenset[tuple[str, str]]:
        """The types of every op and of each op that reads a result of it."""
        types = {t: op.type for op in self.graph.ops for t in op.results}
        return frozenset((types[t], op.type) for op in self.graph.ops for t in op.operands if t in types)

    @cached_property
    def by_type(self) -> dict[str, list[Op]]:
        ops: dict[str, list[Op]] = {}
        for op in self.graph.ops:
            ops.setdefault(op.type, []).append(op)
        return ops

    @cached_property
    def orders(self) -> list[tuple[tuple[int, ...], ...]]:
        """Per op, the orders in which its operands may be read."""
        return [operand_orders(op) for op in self.graph.ops]

    @cached_property
    def readers(self) -> dict[int, tuple[Op, ...]]:
        """The ops that read each tensor, in program order."""
        read = {t for op in self.graph.ops for t in op.operands}
        return {t: self.graph.consumers(t) for t in read}

    def of_types(self, types: frozenset[str]) -> list[Op]:
        """Ops of the given types in program order."""
        return sorted((op for t in types for op in self.by_type.get(t, ())), key=lambda op: op.index)

    def count(self, types: frozenset[str]) -> int:
        return sum(len(self.by_type.get(t, ())) for t in types)

    def reach(self, chain: ChainNode, tensor: int, forward: bool, budget: Budget) -> dict[int, int]:
        """Tensors that the chain reaches from ``tensor``, nearest first, each with the number of ops in between."""
        key = (chain.types, chain.at_most, tensor, forward)
        if key not in self._reach:
            distance = {tensor: 0}
            frontier = [tensor]
            for step in range(1, chain.at_most + 1):
                found = {t for near in frontier for t in self._neighbours(near, chain.types, forward)} - distance.keys()
                budget.spend(len(found))
                if not found:
                    break
                frontier = sorted(found)
                distance.update(dict.fromkeys(frontier, step))
            self._reach[key] = distance
        return self._reach[key]

    def between(self, chain: ChainNode, source: int, target: int, budget: Budget) -> set[int]:
        """The ops on every way from ``source`` to ``target`` that the chain allows."""
        if source == target:
            return set()
        ahead, behind = self.reach(chain, source, True, budget), self.reach(chain, target, False, budget)
        budget.spend(len(behind))
        return {
            op.index
            for after, rest in behind.items()
            if (op := self.graph.producer(after)) is not None and op.type in chain.types
            if any(before in ahead and ahead[before] + 1 + rest <= chain.at_most for before in op.operands)
        }

    def _neighbours(self, tensor: int, types: frozenset[str], forward: bool) -> tuple[int, ...]:
        if forward:
            return tuple(t for op in self.graph.consumers(tensor) if op.type in types for t in op.results)
        op = self.graph.producer(tensor)
        return op.operands if op is not None and op.type in types else ()


def occurrences(pattern: PatternGraph, index: GraphIndex, budget: Budget) -> Iterator[Assignment]:
    """Every occurrence of ``pattern``, in an order that depends on the graph alone. Raises SearchBudgetExceeded."""
    if not all(index.count(op.types) for op in pattern.ops):
        return
    contracted, place = contraction(pattern, index)
    if not _has_pairs(contracted, index):
        return
    rarest = min(contracted.ops, key=lambda op: (index.count(op.types), op.index))
    for found in Search(contracted, index, budget, rarest).run():
        budget.spend(OCCURRENCE_STEPS)
        yield Assignment(tuple(found.tensors[i] for i in place), found.ops)


def contraction(pattern: PatternGraph, index: GraphIndex) -> tuple[PatternGraph, tuple[int, ...]]:
    """The pattern with both ends of each chain that can only be empty as one tensor, and for each tensor of the pattern its
    position there. A program in one precision has no casts, which are most chains of most patterns."""
    empty = {chain for chain in pattern.chains if not index.count(chain.types)}
    if not empty:
        return pattern, tuple(range(len(pattern.tensors)))
    merged = _components(pattern, empty)
    kept = list(dict.fromkeys(merged))
    position = {component: i for i, component in enumerate(kept)}
    place = tuple(position[component] for component in merged)
    nodes: list[list[TensorNode]] = [[] for _ in kept]
    for node, at in zip(pattern.tensors, place, strict=True):
        nodes[at].append(node)
    ops = (
        replace(op, operands=tuple(place[t] for t in op.operands), outputs=tuple(place[t] for t in op.outputs))
        for op in pattern.ops
    )
    chains = (replace(c, source=place[c.source], target=place[c.target]) for c in pattern.chains if c not in empty)
    return PatternGraph(tuple(map(_intersection, range(len(kept)), nodes)), tuple(ops), tuple(chains)), place


def _intersection(index: int, nodes: Sequence[TensorNode]) -> TensorNode:
    """A tensor that has to be what each of ``nodes`` may be."""
    if len(nodes) == 1:
        return replace(nodes[0], index=index)
    narrow = [n for n in nodes if n.kind != "any" or n.ndim is not None or n.where is not None]
    if len(narrow) == 1:
        return replace(narrow[0], index=index)
    return TensorNode(index, "", where=(lambda tensor: all(n.accepts(tensor) for n in narrow)) if narrow else None)


def _has_pairs(pattern: PatternGraph, index: GraphIndex) -> bool:
    """Whether the graph has, for each op of the pattern that reads another's result, such ops right behind each other."""
    makers = {t: op for op in pattern.ops for t in op.outputs}
    needed = ((makers[t].types, op.types) for op in pattern.ops for t in op.operands if t in makers)
    return all(any((a, b) in index.pairs for a in before for b in after) for before, after in needed)


class Search:
    """One search: what is mapped so far, and the order in which the rest will be. ``first`` is the op to begin with."""

    def __init__(self, pattern: PatternGraph, index: GraphIndex, budget: Budget, first: OpNode):
        self.pattern = pattern
        self.index = index
        self.graph = index.graph
        self.budget = budget
        self.steps = _order(pattern, first)
        # Chains of no ops: the graph has none of their types, as a program in one precision has no casts.
        self.empty = {chain for chain in pattern.chains if not index.count(chain.types)}
        self.joined = _components(pattern, pattern.chains)
        self.open = {t.index for t in pattern.tensors if t.kind == "any" and t.ndim is None and t.where is None}
        self.tensors: list[int | None] = [None] * len(pattern.tensors)
        self.ops: list[int | None] = [None] * len(pattern.ops)
        self.used_ops: set[int] = set()
        self.holders: dict[int, list[int]] = {}  # graph tensor -> pattern tensors mapped to it
        self.trail: list[int] = []  # pattern tensors in the order they were mapped

    def run(self, depth: int = 0) -> Iterator[Assignment]:
        while depth < len(self.steps) and (chain := self.steps[depth]) in self.empty:
            if not self._join(chain):
                return
            depth += 1
        if depth == len(self.steps):
            yield Assignment(tuple(t for t in self.tensors if t is not None), tuple(op for op in self.ops if op is not None))
            return
        step = self.steps[depth]
        if isinstance(step, ChainNode):
            yield from self._follow(step, depth)
        else:
            yield from self._place(step, depth)

    def _join(self, chain: ChainNode) -> bool:
        """Maps both ends of a chain of no ops to one tensor."""
        self.budget.spend()
        source, target = self.tensors[chain.source], self.tensors[chain.target]
        if source is None:
            assert target is not None, "the order of steps reaches a chain from a mapped tensor"
            return self.bind(chain.source, target)
        return self.bind(chain.target, source)

    def _place(self, node: OpNode, depth: int) -> Iterator[Assignment]:
        types, attrs, operand_count, output_count = node.types, node.attrs, len(node.operands), len(node.outputs)
        wanted, used = node.operands + node.outputs, self.used_ops
        for op in self.candidates(node):
            self.budget.spend()
            if op.type not in types or op.index in used or len(op.results) < output_count or len(op.operands) < operand_count:
                continue
            if attrs is not None and not attrs(op.attrs):
                continue
            self.ops[node.index] = op.index
            used.add(op.index)
            results = op.results[:output_count]
            for operands in self.index.orders[op.index]:
                mark = len(self.trail)
                if self._bind_all(wanted, operands[:operand_count] + results):
                    yield from self.run(depth + 1)
                self.unbind(mark)
            used.discard(op.index)
            self.ops[node.index] = None

    def candidates(self, node: OpNode) -> Sequence[Op]:
        """The shortest list of ops that what is mapped so far leaves for ``node``."""
        for t in node.outputs:
            bound = self.tensors[t]
            if bound is not None:
                producer = self.graph.producer(bound)
                return () if producer is None else (producer,)
        readers = self.index.readers
        read = [readers.get(t, ()) for t in (self.tensors[i] for i in node.operands) if t is not None]
        return min(read, key=len) if read else self.index.of_types(node.types)

    def _follow(self, chain: ChainNode, depth: int) -> Iterator[Assignment]:
        forward = self.tensors[chain.source] is not None
        here, there = (chain.source, chain.target) if forward else (chain.target, chain.source)
        start = self.tensors[here]
        assert start is not None, "the order of steps reaches a chain from a mapped tensor"
        reached = self.index.reach(chain, start, forward, self.budget)
        end = self.tensors[there]
        for tensor in reached if end is None else (end,) if end in reached else ():
            self.budget.spend()
            mark = len(self.trail)
            if self.may_begin(chain, start if forward else tensor) and self._bind_all((there,), (tensor,)):
                yield from self.run(depth + 1)
            self.unbind(mark)

    def may_begin(self, chain: ChainNode, source: int) -> bool:
        """Whether a chain can begin at a tensor of the graph: not in the middle of what it must take whole."""
        producer = self.graph.producer(source)
        return not chain.whole or producer is None or producer.type not in chain.types

    def _bind_all(self, nodes: tuple[int, ...], tensors: tuple[int, ...]) -> bool:
        bound = self.tensors
        for node, tensor in zip(nodes, tensors, strict=True):  # the innermost loop of the search
            now = bound[node]
            if now != tensor and (now is not None or not self.bind(node, tensor)):
                return False
        return True

    def bind(self, node: int, tensor: int) -> bool:
        """Maps a tensor of the pattern to one of the graph, if it can stand for it."""
        if self.tensors[node] is not None:
            return self.tensors[node] == tensor
        holders = self.holders.get(tensor)
        if holders:
            joined = self.joined
            for holder in holders:
                if joined[holder] != joined[node]:
                    return False
        if node not in self.open and not self.pattern.tensors[node].accepts(self.graph.tensors[tensor]):
            return False
        self.tensors[node] = tensor
        if holders is None:
            self.holders[tensor] = [node]
        else:
            holders.append(node)
        self.trail.append(node)
        return True

    def unbind(self, mark: int) -> None:
        """Takes back what was mapped since the trail was ``mark`` long."""
        trail, tensors = self.trail, self.tensors
        while len(trail) > mark:
            node = trail.pop()
            tensor = tensors[node]
            assert tensor is not None
            self.holders[tensor].pop()
            tensors[node] = None


def operand_orders(op: Op) -> tuple[tuple[int, ...], ...]:
    operands = op.operands
    if op.type in COMMUTATIVE and len(operands) >= 2 and operands[0] != operands[1]:
        return operands, (operands[1], operands[0], *operands[2:])
    return (operands,)


def _order(pattern: PatternGraph, first: OpNode) -> list[OpNode | ChainNode]:
    """``first``, then always what is most tightly tied to the tensors mapped by then."""
    rest: list[OpNode | ChainNode] = [*pattern.ops, *pattern.chains]
    step: OpNode | ChainNode = first
    known: set[int] = set()
    order = []
    while True:
        order.append(step)
        rest.remove(step)
        known |= {step.source, step.target} if isinstance(step, ChainNode) else {*step.operands, *step.outputs}
        if not rest:
            return order
        step = min(rest, key=lambda s: _looseness(s, known))


def _looseness(step: OpNode | ChainNode, known: set[int]) -> int:
    if isinstance(step, ChainNode):
        ends = (step.source in known) + (step.target in known)
        return (4, 3, 0)[ends]
    if known.intersection(step.outputs):
        return 1  # a tensor has one producer
    return 2 if known.intersection(step.operands) else 4


def _components(pattern: PatternGraph, chains: Iterable[ChainNode]) -> list[int]:
    """Per tensor, a number that is equal for tensors which the chains join."""
    component = list(range(len(pattern.tensors)))
    for chain in chains:
        old, new = component[chain.target], component[chain.source]
        component = [new if c == old else c for c in component]
    return component
