"""The matcher finds what trying every combination finds, on random small graphs and random small patterns."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product, zip_longest

from hypothesis import event, given, settings
from hypothesis import strategies as st

from paddle_rbt_plugin.graph import Graph, Op, Tensor
from paddle_rbt_plugin.pattern import Pattern, match_all

ARITY = {"add": 2, "matmul": 2, "relu": 1, "split": 1}
KINDS = ("tensor", "tensor", "tensor", "param", "data", "var")


@dataclass(frozen=True)
class Step:
    """Pattern op, optional op or chain. ``operands`` are handles (int) or new leaves (kind)."""

    what: str
    types: frozenset[str]
    operands: tuple[int | str, ...]


@st.composite
def graphs(draw):
    tensors, ops = [], []

    def tensor(kind):
        tensors.append(Tensor(len(tensors), f"t{len(tensors)}", (4,) * draw(st.integers(1, 2)), "float32", kind))
        return tensors[-1].index

    for kind in draw(st.lists(st.sampled_from(("param", "data")), min_size=1, max_size=3)):
        tensor(kind)
    for i in range(draw(st.integers(2, 7))):
        type_ = draw(st.sampled_from(sorted(ARITY)))
        operands = tuple(draw(st.integers(0, len(tensors) - 1)) for _ in range(ARITY[type_]))
        results = tuple(tensor("var") for _ in range(2 if type_ == "split" else 1))
        ops.append(Op(i, f"op{i}", type_, {"x": operands}, {"out": results}))
    return Graph(tuple(tensors), tuple(ops))


@st.composite
def steps(draw):
    """The first step is an op; every later one reads what is there already, so that the pattern hangs together."""
    result: list[Step] = []
    for i in range(draw(st.integers(1, 4))):
        what = "op" if i == 0 else draw(st.sampled_from(("op", "optional", "chain")))
        types = frozenset(draw(st.sets(st.sampled_from(sorted(ARITY)), min_size=1, max_size=3)))
        new, old = st.sampled_from(KINDS), st.integers(0, max(i - 1, 0))
        operands = [draw(old if i else new)]
        if what != "chain" and draw(st.booleans()):
            operands.append(draw(st.one_of(new, old) if i and what == "op" else new))
        if what == "op" and len(operands) == 2 and draw(st.booleans()):
            operands.reverse()
        result.append(Step(what, types, tuple(operands)))
    return tuple(result)


def as_pattern(drawn: tuple[Step, ...], claimed: frozenset[str]) -> type[Pattern]:
    class Drawn(Pattern):
        name = "drawn"

        def build(self, g):
            handles = []
            for i, step in enumerate(drawn):
                operands = [
                    handles[o] if isinstance(o, int) else getattr(g, o)(f"leaf{i}.{k}") for k, o in enumerate(step.operands)
                ]
                if step.what == "chain":
                    handles.append(g.chain(step.types, *operands, at_most=2, name=f"out{i}"))
                else:
                    handles.append(getattr(g, step.what)(step.types, *operands, name=f"out{i}"))

        def shard(self, match):
            return {name: ("dp", ...) for name in claimed if name in match}

    return Drawn


def by_trying_everything(graph: Graph, drawn: tuple[Step, ...], claimed: frozenset[str]):
    """Own ops and specs of every match, each with the sets of ops, chains included, that such a match may show."""
    found: dict[tuple[frozenset, frozenset], set[tuple[int, ...]]] = {}
    optional = [i for i, step in enumerate(drawn) if step.what == "optional"]
    for present in product((True, False), repeat=len(optional)):
        skipped = {i for i, there in zip(optional, present, strict=True) if not there}
        for names, ops, chains in interpretations(graph, drawn, skipped):
            own = frozenset(ops)
            specs = frozenset((t, ("dp",) + (None,) * (graph.tensors[t].ndim - 1)) for n, t in names.items() if n in claimed)
            found.setdefault((own, specs), set()).add(tuple(sorted(own.union(*chains))))
    return {key: shown for key, shown in found.items() if not any(key[0] < other for other, _ in found)}


def interpretations(graph: Graph, drawn: tuple[Step, ...], skipped: set[int]):
    output = {}  # step -> name of what it returns
    op_steps, chain_steps, kinds = [], [], {}
    for i, step in enumerate(drawn):
        named = [output[o] if isinstance(o, int) else f"leaf{i}.{k}" for k, o in enumerate(step.operands)]
        output[i] = named[0] if i in skipped else f"out{i}"
        if i in skipped:
            continue
        kinds |= {f"leaf{i}.{k}": o for k, o in enumerate(step.operands) if isinstance(o, str)}
        if step.what == "chain":
            chain_steps.append((step.types, named[0], f"out{i}"))
        else:
            op_steps.append((step.types, named, f"out{i}"))
    joined = {frozenset((source, target)) for _, source, target in chain_steps}
    candidates = [[op for op in graph.ops if op.type in types] for types, _, _ in op_steps]
    for chosen in product(*candidates):
        if len({op.index for op in chosen}) < len(chosen):
            continue
        for swaps in product((False, True), repeat=len(chosen)):
            wanted = []
            for (_, operands, out), op, swap in zip(op_steps, chosen, swaps, strict=True):
                order = op.operands[1::-1] + op.operands[2:] if swap and op.type == "add" else op.operands
                wanted += [*zip_longest(operands, order[: len(operands)]), (out, op.results[0])]
            names = dict(wanted)
            if None in names.values() or any(names[name] != t for name, t in wanted):
                continue
            free = [target for _, _, target in chain_steps if target not in names]
            for ends in product(range(len(graph.tensors)), repeat=len(free)):
                full = names | dict(zip(free, ends, strict=True))
                ways = [list(walks(graph, full[source], full[target], types, 2)) for types, source, target in chain_steps]
                if (
                    all(ways)
                    and all(kinds[n] in ("tensor", graph.tensors[full[n]].kind) for n in kinds)
                    and injective(full, joined)
                ):
                    yield full, [op.index for op in chosen], [{op for walk in way for op in walk} for way in ways]


def walks(graph: Graph, source: int, target: int, types: frozenset[str], at_most: int):
    if source == target:
        yield ()
    if at_most:
        for op in graph.consumers(source):
            if op.type in types:
                for t in op.results:
                    yield from ((op.index, *rest) for rest in walks(graph, t, target, types, at_most - 1))


def injective(names: dict[str, int], joined: set[frozenset[str]]) -> bool:
    groups = {name: {name} for name in names}
    for a, b in (tuple(pair) for pair in joined if len(pair) == 2):
        merged = groups[a] | groups[b]
        groups.update(dict.fromkeys(merged, merged))
    return all(b in groups[a] for a in names for b in names if names[a] == names[b])


@settings(max_examples=600, deadline=None)
@given(graphs(), steps(), st.data())
def test_the_matches_are_those_that_trying_every_combination_finds(graph, drawn, data):
    names = [f"out{i}" for i in range(len(drawn))] + [
        f"leaf{i}.{k}" for i, s in enumerate(drawn) for k, o in enumerate(s.operands) if isinstance(o, str)
    ]
    claimed = frozenset(data.draw(st.sets(st.sampled_from(names), min_size=1)))
    result = match_all(graph, [as_pattern(drawn, claimed)])
    found = by_trying_everything(graph, drawn, claimed)
    expected = {key: ways for key, ways in found.items() if key[1]}  # an empty answer of shard declines the place
    shown = [(m.ops, frozenset(m.specs.items())) for m in result.matches]
    event(f"{min(len(expected), 3)} matches")
    assert not result.dropped and not result.failed and not result.incomplete
    assert len(shown) == len(expected)
    assert all(any(specs == s and ops in ways for (_, s), ways in expected.items()) for ops, specs in shown)
    assert all(any(specs == s and ops in ways for ops, s in shown) for (_, specs), ways in expected.items())
