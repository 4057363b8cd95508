"""What is known of a program before any candidate is looked at, and what its patterns ask of one."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from math import prod

from paddle_rbt_plugin.cluster.mesh import ProcessMesh, smallest_factor
from paddle_rbt_plugin.completion import (
    Answers,
    AnyOracle,
    Completion,
    Memo,
    Placement,
    RemoteReads,
    SharedReads,
    complete,
    complete_by_batch,
    data_parallel,
    find_batch_dims,
    make_oracle,
    ops_without_rule,
    reads_apart,
    shared_reads,
)
from paddle_rbt_plugin.completion.forms import FORMS
from paddle_rbt_plugin.graph import Graph, Tensor
from paddle_rbt_plugin.graph.names import CanonicalName, with_canonical_names
from paddle_rbt_plugin.graph.rewrite import rewrite_graph
from paddle_rbt_plugin.layers import cluster_layers
from paddle_rbt_plugin.layers.layers import Layers
from paddle_rbt_plugin.notes import Note
from paddle_rbt_plugin.pattern import (
    CompiledPattern,
    ExpandedSpec,
    Match,
    MatchResult,
    Pattern,
    match_all,
    resolve,
)
from paddle_rbt_plugin.search.dimensions import divisors
from paddle_rbt_plugin.search.rejections import Reason, reason


@dataclass(frozen=True)
class Loss:
    """A match that does not stand under some degrees, the axis that it cannot be sharded along, and why."""

    match: Match
    axis: str
    why: Reason

    def reason(self, degrees: Mapping[str, int]) -> Reason:
        """Why, under these degrees, of which several may lose the same matches."""
        figures = self.why.figures
        return replace(self.why, figures={**figures, "degree": degrees[self.axis]}) if "degree" in figures else self.why


@dataclass(frozen=True)
class Analysis:
    """A graph with its layers and its pattern matches; the same for all candidates."""

    graph: Graph
    layers: Layers
    matches: MatchResult
    batch_dims: Mapping[int, int]
    """The dimension of each tensor that grows with the batch."""
    train: bool = True
    signature: str = ""
    """That of the program as it was read, before any of its ops was written in another way."""
    rewritten: tuple[Note, ...] = ()
    """Notes on those that were."""
    forms: Collection[str] = FORMS
    """The ops that may take another form where their placements ask for it (``completion.forms``)."""
    without_rule: Mapping[str, int] = field(default_factory=dict)
    """How many ops of each type Paddle knows no sharding of."""
    losses: tuple[Loss, ...] = ()
    """The matches that do not stand under the degrees at hand (``under``, ``on``)."""
    _answers: Answers | None = field(default=None, compare=False, repr=False)
    _oracles: dict[tuple, AnyOracle] = field(default_factory=dict, compare=False, repr=False)
    _completions: dict[tuple, Completion] = field(default_factory=dict, compare=False, repr=False)
    _memos: dict[tuple, Memo] = field(default_factory=dict, compare=False, repr=False)
    _aparts: dict[tuple[int, ...], RemoteReads] = field(default_factory=dict, compare=False, repr=False)
    _sharded: dict[int, dict[str, set[int]]] = field(default_factory=dict, compare=False, repr=False)
    _lost: dict[int, Reason | None] = field(default_factory=dict, compare=False, repr=False)
    _under: dict[frozenset[tuple[int, str]], Analysis] = field(default_factory=dict, compare=False, repr=False)
    _on: dict[tuple, Analysis] = field(default_factory=dict, compare=False, repr=False)

    @property
    def batch(self) -> int:
        """How many samples the program was written for."""
        return self.graph.batch.size

    @cached_property
    def claims(self) -> dict[int, tuple[ExpandedSpec, Match]]:
        """Every claimed tensor with its spec and the match that claims it, collected once for all candidates."""
        return self.matches.claims

    @cached_property
    def _claimed_sizes(self) -> tuple[tuple[int, str, int, int], ...]:
        """The sizes that the patterns divide, each with its axis and the first tensor and dimension that has it."""
        first: dict[tuple[int, str], tuple[int, int]] = {}
        for tensor, (spec, _) in self.claims.items():
            for dim, axis in enumerate(spec):
                if axis is not None:
                    first.setdefault((self.graph.tensors[tensor].shape[dim], axis), (tensor, dim))
        return tuple((size, axis, tensor, dim) for (size, axis), (tensor, dim) in first.items())

    @cached_property
    def axes(self) -> frozenset[str]:
        """The axes along which patterns shard anything."""
        return frozenset(axis for spec, _ in self.claims.values() for axis in spec if axis is not None)

    @cached_property
    def unmatched(self) -> tuple[Tensor, ...]:
        """Parameters of two or more dimensions that no pattern claims: what stays whole on every rank unnoticed."""
        return tuple(t for t in self.graph.params if t.ndim > 1 and t.index not in self.claims)

    def placement(self, tensor: Tensor, mesh: ProcessMesh) -> Placement:
        """Where a parameter or data tensor lies: as its pattern says; else data by the batch, parameters whole."""
        if tensor.index in self.claims:
            spec, _ = self.claims[tensor.index]
            return Placement(tuple(map(mesh.index, spec)))
        if tensor.kind == "data" and "dp" in mesh.axes:
            return data_parallel(tensor, self.graph.batch, mesh.axes.index("dp"))
        return Placement.replicated(tensor.ndim)

    def indivisible(self, degrees: Mapping[str, int]) -> Reason | None:
        """Why the shapes forbid these degrees, with the values that would be legal; None where they do not.

        Every tensor that a pattern claims counts, intermediate ones too: that is how the number of heads is seen."""
        if why := self.indivisible_batch(degrees.get("dp", 1)):
            return why
        for size, axis, tensor, dim in self._claimed_sizes:
            if size % degrees.get(axis, 1):
                return self._divides_not(self.claims[tensor][1], tensor, dim, axis, degrees[axis])
        return None

    def indivisible_batch(self, dp: int) -> Reason | None:
        """Why the batch that the program was written for forbids so many replicas; None where it does not."""
        if self.batch % dp:
            return reason("batch", dp=dp, batch=self.batch, legal=_legal(self.batch), what="batch")
        return None

    def _divides_not(self, match: Match, tensor: int, dim: int, axis: str, degree: int) -> Reason:
        size = self.graph.tensors[tensor].shape[dim]
        return reason(
            "divides",
            degree=degree,
            size=size,
            axis=axis,
            meaning=match.dim_name(tensor, dim),
            dim=dim,
            tensor=self.graph.tensors[tensor].name,
            pattern=match.pattern,
            legal=_legal(size),
        )

    # Which matches stand

    def under(self, degrees: Mapping[str, int]) -> Analysis:
        """The analysis with the matches of which these degrees divide every dimension that they shard. The others are lost,
        and so are their claims: matches that gave way to them may stand instead."""
        misfits = frozenset((n, axis) for n, axis in self._all_sizes if n % degrees.get(axis, 1))
        if misfits not in self._under:
            self._under[misfits] = self._without(list(self._misfits(degrees))) if misfits else self
        return self._under[misfits]

    def on(self, mesh: ProcessMesh, degrees: Mapping[str, int]) -> Analysis:
        """The analysis with the matches that stand under these degrees, and whose shardings completion keeps on the mesh."""
        found = self.under(degrees)
        key = (mesh.axes, tuple(n > 1 for n in mesh.shape), mesh.experts)
        if key not in found._on:
            kept = found
            while lost := list(kept._given_up(kept.complete(mesh))):
                kept = kept._without(lost)
            found._on[key] = kept
        return found._on[key]

    def without_axis(self, degrees: Mapping[str, int], asked: Collection[str] = ()) -> Reason | None:
        """Why degrees make no sense for what stands under them: nothing is sharded along an axis, or, unless the axis is
        ``asked`` for, no repeated layer keeps some pattern that it has; None if they do."""
        for axis in ("mp", "ep"):
            if degrees.get(axis, 1) == 1:
                continue
            lost = [loss for loss in self.losses if loss.axis == axis]
            if axis not in self.axes:
                return lost[0].reason(degrees) if lost else reason("axis", axis=axis)
            essential = (loss.reason(degrees) for loss in lost if axis not in asked and self._is_essential(loss))
            if why := next(essential, None):
                return why
        return None

    @cached_property
    def _all_sizes(self) -> frozenset[tuple[int, str]]:
        """The sizes that patterns divide, with the axes; those of matches that gave way, too."""
        dims = (dim for match in self._all_matches for dim in _sharded_dims(match))
        return frozenset((self.graph.tensors[tensor].shape[dim], axis) for tensor, dim, axis in dims)

    @property
    def _all_matches(self) -> Iterator[Match]:
        yield from self.matches.matches
        yield from (dropped.match for dropped in self.matches.dropped if dropped.winner is not None)

    def _misfits(self, degrees: Mapping[str, int]) -> Iterator[Loss]:
        for match in self._all_matches:
            for tensor, dim, axis in _sharded_dims(match):
                if self.graph.tensors[tensor].shape[dim] % degrees.get(axis, 1):
                    yield Loss(match, axis, self._divides_not(match, tensor, dim, axis, degrees[axis]))
                    break

    def _given_up(self, completion: Completion) -> Iterator[Loss]:
        """The matches of which completion gives up a sharding."""
        place = {axis: completion.mesh.index(axis) for axis in self.axes}
        for match in self.matches.matches:
            for tensor, dim, axis in _sharded_dims(match):
                if completion.mesh.degree(axis) > 1 and completion.placements[tensor].dims_mapping[dim] != place[axis]:
                    name = self.graph.tensors[tensor].name
                    why = reason("completion", pattern=match.pattern, dim=dim, tensor=name, axis=axis)
                    yield Loss(match, axis, why)
                    break

    def _without(self, losses: Sequence[Loss]) -> Analysis:
        lost = {id(loss.match) for loss in losses}
        standing, displaced = resolve([m for m in self._all_matches if id(m) not in lost], self.graph)
        unfit = [d for d in self.matches.dropped if d.winner is None]
        matches = replace(self.matches, matches=tuple(standing), dropped=(*unfit, *displaced))
        return replace(
            self,
            matches=matches,
            losses=(*self.losses, *losses),
            _completions={},
            _sharded={},
            _lost={},
            _under={},
            _on={},
        )

    def _is_essential(self, loss: Loss) -> bool:
        """Whether no repeated layer keeps the pattern of a match that was lost in one, nor shards its weights otherwise."""
        blocks = self._ops_of_blocks
        if blocks.isdisjoint(loss.match.ops):
            return False
        if any(m.pattern == loss.match.pattern and not blocks.isdisjoint(m.ops) for m in self.matches.matches):
            return False
        weights = [t for t, spec in loss.match.specs.items() if loss.axis in spec and self.graph.tensors[t].kind == "param"]
        return not any(t in self.claims and loss.axis in self.claims[t][0] for t in weights)

    @cached_property
    def _ops_of_blocks(self) -> frozenset[int]:
        return frozenset(op for segment in self.layers.blocks for op in segment.ops)

    # Completion

    def complete(self, mesh: ProcessMesh, stages: tuple[int, ...] = ()) -> Completion:
        """Completes the graph on a mesh as the patterns ask. ``stages`` holds the pipeline stage of each layer; none for one
        stage.

        What Paddle answers depends on a degree only in what it divides, so the completion of the smallest mesh serves for all
        larger ones whose degrees divide every dimension that it shards. A data-parallel degree divides the batch."""
        apart = self._reads_apart(stages)
        small = ProcessMesh(mesh.axes, tuple(map(smallest_factor, mesh.shape)), (), mesh.experts)
        if not self._divides(self._completion(small, apart), mesh):
            shape = (smallest_factor(n) if axis == "dp" else n for axis, n in zip(mesh.axes, mesh.shape, strict=True))
            small = ProcessMesh(mesh.axes, tuple(shape), (), mesh.experts)
        return replace(self._completion(small, apart), mesh=mesh)

    def _reads_apart(self, stages: tuple[int, ...]) -> RemoteReads:
        if stages not in self._aparts:
            self._aparts[stages] = reads_apart(self._shared_reads, stages) if stages else ()
        return self._aparts[stages]

    @cached_property
    def _shared_reads(self) -> SharedReads:
        return shared_reads(self.graph, self.layers)

    def _completion(self, mesh: ProcessMesh, apart: RemoteReads = ()) -> Completion:
        key = (mesh.axes, mesh.shape, mesh.experts, apart)
        if key not in self._completions:
            mesh = replace(mesh, ranks=tuple(range(prod(mesh.shape))))
            oracle = self._oracle(mesh)
            memo = self._memos.setdefault(key[:2], Memo())
            leaves = {t.index: self.placement(t, mesh) for t in self.graph.tensors if t.kind != "var"}
            self._completions[key] = complete(
                self.graph, self.layers, mesh, leaves, self.batch, self.batch_dims, oracle, self.train, self.forms, apart, memo
            )
        return self._completions[key]

    def _oracle(self, mesh: ProcessMesh) -> AnyOracle:
        """The oracle for a mesh. A one-device mesh reuses the two-device oracle where two divide the batch."""
        if mesh.shape == (1,) and self.batch % 2 == 0:
            mesh = ProcessMesh(mesh.axes, (2,), (0, 1))
        key = (mesh.axes, mesh.shape)
        if key not in self._oracles:
            self._oracles[key] = make_oracle(mesh, self._answers)
        return self._oracles[key]

    def _divides(self, completion: Completion, mesh: ProcessMesh) -> bool:
        """Whether the degrees of a mesh, dp aside, divide what the completion shards along them."""
        sizes = self._sharded_sizes(completion)
        return all(axis == "dp" or all(s % n == 0 for s in sizes[axis]) for axis, n in zip(mesh.axes, mesh.shape, strict=True))

    def _sharded_sizes(self, completion: Completion) -> dict[str, set[int]]:
        """Sizes of the dimensions that a completion shards, by axis."""
        key = id(completion.work)  # the same for all meshes that share a completion, and kept alive by it
        if key not in self._sharded:
            axes = completion.mesh.axes
            sharded: dict[str, set[int]] = {axis: set() for axis in axes}
            distinct = {id(work): work for work in completion.work}.values()
            for shape, dims_mapping in {(v.shape, v.placement.dims_mapping) for work in distinct for v in work.values()}:
                for size, axis in zip(shape, dims_mapping, strict=True):
                    if axis >= 0:
                        sharded[axes[axis]].add(size)
            self._sharded[key] = sharded
        return self._sharded[key]

    def lost_sharding(self, completion: Completion) -> Reason | None:
        """Why a completion cannot be used: it divides a value although that cannot be done evenly, which Paddle computes
        wrongly, or gives up a sharding of a match that stands; None where all is well."""
        mesh = completion.mesh
        for along, sizes in self._sharded_sizes(completion).items():
            uneven = [size for size in sizes if size % mesh.degree(along)]
            if uneven:
                return _uneven(completion, along, min(uneven))
        key = id(completion.work)  # as in ``_sharded_sizes``; what shares it has the same axes of more than one rank
        if key not in self._lost:
            lost = next(self._given_up(completion), None)
            self._lost[key] = None if lost is None else lost.why
        return self._lost[key]


def _sharded_dims(match: Match) -> Iterator[tuple[int, int, str]]:
    """Tensor, dimension and axis of everything that a match shards."""
    for tensor, spec in match.specs.items():
        yield from ((tensor, dim, axis) for dim, axis in enumerate(spec) if axis is not None)


def _uneven(completion: Completion, axis: str, size: int) -> Reason:
    place = completion.mesh.index(axis)
    values = (value for work in completion.work for value in work.values())
    value = next(v for v in values if (size, place) in zip(v.shape, v.placement.dims_mapping, strict=True))
    dim = value.placement.dims_mapping.index(place)
    return reason("uneven", size=size, degree=completion.mesh.degree(axis), dim=dim, tensor=value.name, axis=axis)


def analyse(
    graph: Graph,
    patterns: Iterable[CompiledPattern | type[Pattern]],
    train: bool = True,
    rewrite: bool = True,
    op_names: Mapping[str, CanonicalName] | None = None,
    forms: Collection[str] = FORMS,
    answers: Answers | None = None,
) -> Analysis:
    """Finds layers, matches, and what grows with the batch.

    ``rewrite`` spells ops that Paddle shards badly in another way, as handing over to PIR does. ``op_names`` says what custom
    ops are read as. ``forms`` are the ops that may take another form when they are handed over. ``answers`` are
    what Paddle answered in other runs. Raises UnsupportedProgram for a program without data."""
    signature = graph.signature
    graph = with_canonical_names(graph, op_names or {})
    graph, rewritten = rewrite_graph(graph) if rewrite else (graph, ())
    layers = cluster_layers(graph)
    matches = match_all(graph, patterns, layers)
    by_batch, oracle = complete_by_batch(graph, layers, graph.batch, answers)
    return Analysis(
        graph,
        layers,
        matches,
        find_batch_dims(graph, by_batch),
        train,
        signature,
        rewritten,
        forms,
        ops_without_rule(graph, by_batch),
        _answers=answers,
        _oracles={(oracle.mesh.axes, oracle.mesh.shape): oracle},
    )


@cache
def _legal(size: int) -> str:
    """The divisors of a size in words, the first of them where there are many."""
    found = divisors(size)
    shown = found if len(found) <= 8 else found[:7]
    return ", ".join(map(str, shown)) + (", ..." if len(found) > 8 else "")
