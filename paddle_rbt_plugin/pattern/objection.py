"""Why an op of a model cannot stand for a node of a pattern, in words, at a point that a search has come to."""

from __future__ import annotations

from collections.abc import Sequence

from paddle_rbt_plugin.errors import describe_error
from paddle_rbt_plugin.graph.graph import Graph, Op, Tensor
from paddle_rbt_plugin.pattern.builder import AttrValues, ChainNode, OpNode, PatternGraph, TensorNode
from paddle_rbt_plugin.pattern.matcher import Search, operand_orders

Objection = tuple[int, str, str]
"""How near the candidate came that came nearest, which that is (empty where there is none), and why it is none."""


class Objector:
    """Words for what happens in one variant of a pattern."""

    def __init__(self, variant: PatternGraph, graph: Graph):
        self.variant = variant
        self.graph = graph

    def objection(self, search: Search, step: OpNode | ChainNode) -> Objection:
        """What keeps a step from being mapped where ``search`` stands."""
        return self._chain(search, step) if isinstance(step, ChainNode) else self._op(search, step)

    def _op(self, search: Search, node: OpNode) -> Objection:
        candidates = search.candidates(node)
        if not candidates:
            return 0, "", self._no_candidate(search, node)
        objections = [(*self._objection(search, node, op), op) for op in candidates]
        nearness, objection, op = max(objections, key=lambda o: o[0])
        return nearness, self.op(op), objection

    def _no_candidate(self, search: Search, node: OpNode) -> str:
        for t in node.outputs:
            bound = search.tensors[t]
            if bound is not None:
                return f"{_tensor(self.graph.tensors[bound])} is written by no op"
        read = next(t for t in (search.tensors[i] for i in node.operands) if t is not None)
        return f"no op reads {_tensor(self.graph.tensors[read])}"

    def _objection(self, search: Search, node: OpNode, op: Op) -> tuple[int, str]:
        """What keeps an op from standing for a node, in the order in which the search looks."""
        if op.type not in node.types:
            return 0, f"it is {op.type}, not {spell_types(node.types)}"
        if op.index in search.used_ops:
            other = next(n for n in self.variant.ops if search.ops[n.index] == op.index)
            return 1, f"it stands for {self.node(other)} already"
        if len(op.results) < len(node.outputs):
            return 1, f"it has {len(op.results)} results, not {len(node.outputs)}"
        refused = _attrs_objection(node, op)
        if refused:
            return 2, refused
        if len(op.operands) < len(node.operands):
            return 2, f"it has {len(op.operands)} operands, not {len(node.operands)}"
        return max(self._binding(search, node, op, operands) for operands in operand_orders(op))

    def _binding(self, search: Search, node: OpNode, op: Op, operands: Sequence[int]) -> tuple[int, str]:
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

    def _unbound(self, search: Search, node: int, tensor: int) -> str:
        """Why a tensor of the model cannot stand for one of the pattern."""
        found, label = self.graph.tensors[tensor], self._label(node)
        bound = search.tensors[node]
        if bound is not None:
            return f"it has {_tensor(found)} where {label}, which is {_tensor(self.graph.tensors[bound])}, is wanted"
        holders = search.holders.get(tensor, [])
        if any(search.joined[holder] != search.joined[node] for holder in holders):
            return f"its {_tensor(found)} stands for {self._label(holders[0])} already, so it cannot be {label} too"
        return _refusal(self.variant.tensors[node], found, label)

    def _chain(self, search: Search, chain: ChainNode) -> Objection:
        """Why no way leads through a chain: its far end is mapped, or what it reaches cannot stand for the far end."""
        forward = search.tensors[chain.source] is not None
        here, there = (chain.source, chain.target) if forward else (chain.target, chain.source)
        start, end = search.tensors[here], search.tensors[there]
        assert start is not None, "the order of steps reaches a chain from a mapped tensor"
        origin = _tensor(self.graph.tensors[start])
        way = f"{'from' if forward else 'back from'} {origin} through at most {chain.at_most} of {spell_types(chain.types)}"
        if end is not None:
            return 1, "", f"no way leads {way} to {_tensor(self.graph.tensors[end])}"
        reached = search.index.reach(chain, start, forward, search.budget)
        begun = [t for t in reached if search.may_begin(chain, start if forward else t)]
        if not begun:
            return 1, "", f"{origin} is made by an op of the chain itself"
        refused = self._unbound(search, there, begun[-1])
        return 1, "", f"nothing that is reached {way} can be {self._label(there)}: {refused}"

    # Spelling

    def node(self, step: OpNode | ChainNode) -> str:
        """A step of the pattern: its types, and what it reads."""
        if isinstance(step, ChainNode):
            target = self.variant.tensors[step.target].name
            return f"a chain of {spell_types(step.types)} from {self._label(step.source)}" + (f" to {target}" if target else "")
        return f"{spell_types(step.types)}({', '.join(map(self._label, step.operands))})"

    def _label(self, tensor: int) -> str:
        """A tensor of the pattern: its name, or what makes it."""
        node = self.variant.tensors[tensor]
        if node.name:
            return node.name
        for op in self.variant.ops:
            if tensor in op.outputs:
                return f"the result of {spell_types(op.types)}"
        for chain in self.variant.chains:
            if tensor == chain.target:
                return self._label(chain.source)
        return "a parameter" if node.kind == "param" else "a tensor"

    def op(self, op: Op) -> str:
        """An op of the model: its name, what it reads, and the Layer it comes from."""
        operands = ", ".join(_tensor(t) for t in self.graph.op_inputs(op))
        return f"{op.name}({operands})" + (f" of {op.scope}" if op.scope else "")


def spell_types(types: frozenset[str]) -> str:
    """Op types, the first four of many."""
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
