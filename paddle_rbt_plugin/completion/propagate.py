"""Completion: from the placements of parameters and inputs to those of every tensor, forward and backward.

The graph is walked once forward and once backward, segment by segment; what each op does there is told by ``kernels``, what
layers read of each other by ``crossings``. A segment whose inputs lie as those of an equal segment did before is not walked
again: it shares the other's work, so time grows with distinct segments, not with layers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from paddle_rbt_plugin.cluster.mesh import ProcessMesh
from paddle_rbt_plugin.completion.answers import Answers
from paddle_rbt_plugin.completion.crossings import RemoteReads, crossings, externals_of, results_of
from paddle_rbt_plugin.completion.forms import FORMS
from paddle_rbt_plugin.completion.kernels import AnyOracle, BatchDims, Copies, Gradients, Kernels, Saved
from paddle_rbt_plugin.completion.oracle import Oracle
from paddle_rbt_plugin.completion.placement import Placement
from paddle_rbt_plugin.completion.rules import RuleOracle
from paddle_rbt_plugin.completion.work import Collective, Completion, Kernel, SegmentWork, Value
from paddle_rbt_plugin.graph import Graph
from paddle_rbt_plugin.layers.layers import Layers, Segment


def make_oracle(mesh: ProcessMesh, answers: Answers | None = None) -> AnyOracle:
    """What asks the installed Paddle: it builds ops where PIR knows distributed types (3.0 on), else it asks the rules, which
    is too fast to be worth a cache. ``answers`` are remembered from other runs."""
    import paddle

    distributed = hasattr(paddle.base.libpaddle.pir, "create_tensor_dist_attribute")
    return Oracle(mesh, answers.of(mesh) if answers else None) if distributed else RuleOracle(mesh)


def complete(
    graph: Graph,
    layers: Layers,
    mesh: ProcessMesh,
    leaves: Mapping[int, Placement],
    batch: int,
    batch_dims: BatchDims | None = None,
    oracle: AnyOracle | None = None,
    train: bool = True,
    forms: Collection[str] = FORMS,
    apart: RemoteReads = (),
    memo: Memo | None = None,
) -> Completion:
    """Completes a graph on a mesh.

    ``leaves`` places parameters and data by tensor position; one that is missing is replicated. ``batch_dims`` says which
    dimension of a tensor grows with the batch, see ``find_batch_dims``. ``oracle`` keeps answers from one call to the next;
    its mesh has the same axes, and degrees that divide the same dimensions. Without ``train`` there is no backward pass.
    ``forms`` are the ops that may take another form. ``apart`` says which parameters are read on other stages, see
    ``reads_apart``. ``memo`` keeps the work of segments for completions that differ in nothing but ``apart``.
    Raises UnsupportedProgram for an op that Paddle cannot build.
    """
    oracle = oracle or make_oracle(mesh)
    return _Completer(graph, layers, mesh, oracle, leaves, batch_dims or {}, train, forms, apart, memo or Memo()).run(batch)


@dataclass(frozen=True)
class _Forward:
    results: tuple[Placement, ...]
    kernels: tuple[Kernel, ...]
    copies: Copies


@dataclass(frozen=True)
class _Backward:
    kernels: tuple[Kernel, ...]
    gradients: tuple[tuple[int, tuple[Placement, ...]], ...]
    """Per external tensor of the segment (by its place), the gradients it receives."""
    trained: tuple[int, ...]
    """Which of the segment's own parameters (by their place) get a gradient."""
    arrived: tuple[Value, ...]
    """Their gradients, before they are brought to the placements of the parameters."""
    syncs: tuple[Collective, ...]
    saved: tuple[Value, ...]
    copies: Copies


@dataclass(frozen=True)
class Memo:
    """What equal segments share, forward, backward and put together."""

    forward: dict[tuple, _Forward] = field(default_factory=dict)
    backward: dict[tuple, _Backward] = field(default_factory=dict)
    work: dict[tuple[tuple, int, tuple[int, ...], tuple[int, ...]], SegmentWork] = field(default_factory=dict)


class _Completer:
    def __init__(
        self,
        graph: Graph,
        layers: Layers,
        mesh: ProcessMesh,
        oracle: AnyOracle,
        leaves: Mapping[int, Placement],
        batch_dims: BatchDims,
        train: bool,
        forms: Collection[str],
        apart: RemoteReads,
        memo: Memo,
    ):
        self.graph = graph
        self.layers = layers
        self.mesh = mesh
        self.train = train
        self.memo = memo
        self.placements = {t.index: leaves.get(t.index, Placement.replicated(t.ndim)) for t in graph.tensors if t.kind != "var"}
        self.kernels = Kernels(graph, mesh, oracle, self.placements, batch_dims, forms)
        self.gradients: Gradients = {}
        self.of_copies: dict[tuple[int, int], list[Placement]] = {}  # gradients of parameters on other stages, stage by stage
        self.returning: dict[int, set[int]] = {}  # the layers that give a tensor of another one a gradient
        self.to_come: dict[tuple[int, int], list[Placement]] = {}  # gradients of values that a later stage has summed
        self.apart: dict[int, dict[int, int]] = {}
        self.before: dict[tuple[int, int], int] = {}
        for i, t, stage, before in apart:
            self.apart.setdefault(i, {})[t] = stage
            self.before[t, stage] = before
        self.externals = [externals_of(graph, s) for s in layers.segments]
        self.owned = self._owned_params()
        self.unread = tuple(t.index for t in graph.params if not graph.consumers(t.index))

    def run(self, batch: int) -> Completion:
        segments = self.layers.segments
        forward, shared = self.memo.forward, self.memo.work
        keys = []
        for i, (segment, externals) in enumerate(zip(segments, self.externals, strict=True)):
            self.kernels.remote_params = self.apart.get(i, {})
            key = (segment.kind, tuple(self.placements[t] for t in externals), self.kernels.copies_of(externals))
            results = results_of(self.graph, segment)
            if key not in forward:
                forward[key] = self._forward(segment, (*externals, *results))
            else:
                self.placements.update(zip(results, forward[key].results, strict=True))
                self.kernels.take_copies((*externals, *results), forward[key].copies)
            keys.append(key)
        backward = self._backward_pass(keys) if self.train else [_Backward((), (), (), (), (), (), ())] * len(segments)
        work = []
        for i, segment in enumerate(segments):
            parts = (keys[i], id(backward[i]), self._places_of_owned(i), () if i else self.unread)
            if parts not in shared:
                shared[parts] = self._work(i, segment, forward[keys[i]], backward[i])
            work.append(shared[parts])
        crossing = tuple(crossings(self.graph, self.layers, self.externals, self.kernels.value, self.returning))
        return Completion(self.mesh, batch, self.layers, tuple(work), self.placements, crossing)

    def _owned_params(self) -> list[tuple[int, ...]]:
        """Per segment, the parameters that it is the first of its stage to read."""
        seen: set[tuple[int, int | None]] = set()
        owned = []
        for i, externals in enumerate(self.externals):
            stage_of = self.apart.get(i, {})
            params = [t for t in externals if self.graph.tensors[t].kind == "param"]
            owned.append(tuple(t for t in params if (t, stage_of.get(t)) not in seen))
            seen.update((t, stage_of.get(t)) for t in params)
        return owned

    def _places_of_owned(self, index: int) -> tuple[int, ...]:
        return tuple(self.externals[index].index(t) for t in self.owned[index])

    # Forward

    def _forward(self, segment: Segment, tensors: Sequence[int]) -> _Forward:
        kernels = [self.kernels.forward(self.graph.ops[i]) for i in segment.ops]
        results = tuple(self.placements[t] for t in results_of(self.graph, segment))
        return _Forward(results, tuple(kernels), self.kernels.copies_of(tensors))

    # Backward

    def _backward_pass(self, keys: Sequence[tuple]) -> list[_Backward]:
        if self.graph.loss is not None:
            self.gradients[self.graph.loss] = [Placement.replicated(self.graph.tensors[self.graph.loss].ndim)]
        self.kernels.begin_backward()
        memo = self.memo.backward
        done: list[_Backward] = []
        for i in reversed(range(len(keys))):
            here = self.kernels.remote_params = self.apart.get(i, {})
            segment, externals = self.layers.segments[i], self.externals[i]
            results = results_of(self.graph, segment)
            moved = [k for t in results for k in self._received(t, -1)] if self.to_come else []
            arriving = tuple([tuple(self._arrived(t, here)) for t in (*results, *self.owned[i])])
            tensors = (*externals, *results)
            key = (keys[i], arriving, self._places_of_owned(i), self.kernels.copies_of(tensors))
            if key not in memo:
                memo[key] = self._backward(i, segment, externals, tensors)
            else:
                self.kernels.take_copies(tensors, memo[key].copies)
            for place, placements in memo[key].gradients:
                t = externals[place]
                self.returning.setdefault(t, set()).add(segment.layer)
                if t in here:
                    self.of_copies.setdefault((t, here[t]), []).extend(placements)
                else:
                    self.gradients.setdefault(t, []).extend(placements)
            moved += [k for t, first in here.items() if first == i for k in self._handed_back(t, i)]
            done.append(replace(memo[key], kernels=(*memo[key].kernels, *moved)) if moved else memo[key])
        return done[::-1]

    def _arrived(self, tensor: int, remote: Mapping[int, int]) -> list[Placement]:
        """The gradients that later segments gave a tensor; ``remote`` are the parameters of which this stage has copies."""
        found = self.of_copies.get((tensor, remote[tensor])) if tensor in remote else self.gradients.get(tensor)
        return found or []

    def _received(self, tensor: int, stage: int) -> list[Kernel]:
        """The gradients of a value that come from the next stage that reads it, reduced where they arrive."""
        whole, kernels = Placement(self.placements[tensor].dims_mapping), []
        for placement in self.to_come.pop((tensor, stage), ()):
            sent, arrived = self.kernels.gradient(tensor, placement), self.kernels.gradient(tensor, whole)
            kernels.append(Kernel("reshard", "backward", (sent,), (arrived,), self.kernels.changes(sent, whole, "backward")))
            mine = self.gradients.setdefault(tensor, []) if stage < 0 else self.of_copies.setdefault((tensor, stage), [])
            mine.append(whole)
        return kernels

    def _handed_back(self, tensor: int, stage: int) -> list[Kernel]:
        """What a stage sums of the gradients of a value, which it sends back to where it has the value from."""
        if self.graph.tensors[tensor].kind == "param":
            return []
        kernels = self._received(tensor, stage)
        placements = self.of_copies.get((tensor, stage))
        if placements:
            total, summed = self.kernels.summed(tensor, placements)
            kernels += summed
            self.to_come.setdefault((tensor, self.before[tensor, stage]), []).append(total)
        return kernels

    def _backward(self, index: int, segment: Segment, externals: tuple[int, ...], tensors: Sequence[int]) -> _Backward:
        remote = self.apart.get(index, {})
        gradients = {t: list(g) for t, g in self.gradients.items()} | {t: list(self._arrived(t, remote)) for t in remote}
        before = {t: len(gradients.get(t, ())) for t in externals}
        kernels: list[Kernel] = []
        saved: Saved = {}
        for i in reversed(segment.ops):
            kernels += self.kernels.backward(self.graph.ops[i], gradients, saved)
        received = tuple(
            (place, tuple(gradients[t][before[t] :]))
            for place, t in enumerate(externals)
            if len(gradients.get(t, ())) > before[t]
        )
        trained: list[int] = []
        arrivals: list[Value] = []
        syncs: list[Collective] = []
        for place, t in enumerate(self.owned[index]):
            if gradients.get(t):
                trained.append(place)
                total, summed = self.kernels.summed(t, gradients[t])
                kernels += summed
                arrivals.append(self.kernels.gradient(t, total))
                syncs += self.kernels.changes(arrivals[-1], self.placements[t], "optimizer")
        return _Backward(
            tuple(kernels),
            received,
            tuple(trained),
            tuple(arrivals),
            tuple(syncs),
            tuple(saved.values()),
            self.kernels.copies_of(tensors),
        )

    # Result

    def _work(self, index: int, segment: Segment, forward: _Forward, backward: _Backward) -> SegmentWork:
        value, externals, results = self.kernels.value, self.externals[index], results_of(self.graph, segment)
        own = set(segment.ops)
        return SegmentWork(
            forward=forward.kernels,
            backward=backward.kernels,
            params=tuple(value(t) for t in self.owned[index]),
            trained=tuple(value(self.owned[index][place]) for place in backward.trained),
            gradients=backward.arrived,
            gradient_syncs=backward.syncs,
            saved=backward.saved,
            inputs=tuple(value(t) for t in externals if self.graph.tensors[t].kind != "param"),
            outputs=tuple(value(t) for t in results if any(c.index not in own for c in self.graph.consumers(t))),
            unread=() if index else tuple(map(value, self.unread)),
        )
