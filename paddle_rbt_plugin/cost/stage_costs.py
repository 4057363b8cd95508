"""What pipeline stages cost in a micro step: the rows of their layers summed up, and what they send to their neighbours."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from paddle_rbt_plugin.cluster import ProcessMesh
from paddle_rbt_plugin.completion.work import Completion, Crossing
from paddle_rbt_plugin.cost.candidate import Recompute
from paddle_rbt_plugin.cost.machines import Machine
from paddle_rbt_plugin.cost.segment_table import BACKWARD, FORWARD, KEPT, LAUNCHES, PARAMETERS, RECOMPUTE, Rows
from paddle_rbt_plugin.cost.stages import Cut
from paddle_rbt_plugin.cost.table import CostTable, Strategy
from paddle_rbt_plugin.cost.transfers import copies


@dataclass(frozen=True)
class LayerStrategy:
    """How one layer runs: completed on a mesh of its stage's devices, which may be arranged otherwise than for its
    neighbours, and with its own recomputation."""

    completion: Completion
    recompute: Recompute


@dataclass(frozen=True, eq=False)
class Part:
    """What of each stage runs on one mesh: elements on one device of its parameters, of those that are trained, and of the
    gradients to reduce along dp and along mp."""

    mesh: ProcessMesh
    machines: tuple[Machine, ...]
    parameters: np.ndarray
    trained: np.ndarray
    reduced: Mapping[str, np.ndarray]


@dataclass(frozen=True, eq=False)
class Exchange:
    """The gradient of a parameter that lies on two stages: elements on one device, of ``dp`` replicas."""

    stages: tuple[int, int]
    elements: float
    dp: int


@dataclass(frozen=True, eq=False)
class StageCosts:
    """Micro steps of all stages. Arrays are of micro batches x stages, or of micro batches x chunks x stages."""

    cut: Cut
    mesh: ProcessMesh
    machines: tuple[Machine, ...]
    host_launch_s: float
    seconds: np.ndarray
    """By chunk, x passes x (compute, along mp, along dp)."""
    launches: np.ndarray
    """By chunk, x passes."""
    regrouping: np.ndarray
    """By chunk, x (forward, backward): to bring hidden states to layers on a mesh of another shape."""
    send_ahead: np.ndarray
    """By chunk, in which it sends what other stages read of it."""
    send_back: np.ndarray
    """By chunk, in which it sends gradients back."""
    kept: np.ndarray
    """Bytes that a micro batch in flight keeps."""
    largest: np.ndarray
    """... x (revived, temporary, message) bytes."""
    parts: tuple[Part, ...]
    exchanges: tuple[Exchange, ...]
    forward: np.ndarray = field(init=False)
    """By chunk, seconds of one forward pass with the sending of its result."""
    backward: np.ndarray = field(init=False)
    """By chunk, seconds of one backward pass with its recomputation and the sending of its gradient."""
    backward_alone: np.ndarray = field(init=False)
    """Seconds of the backward passes through all chunks, without recomputation and sending."""
    busy: np.ndarray = field(init=False)
    """Seconds of one micro batch through all chunks, forward and backward."""
    before: np.ndarray = field(init=False)
    """Seconds of the first micro batch in the first chunks of all stages before, and of its last gradient there."""
    device_memory: np.ndarray = field(init=False)
    """Bytes that the device of each stage has."""

    def only(self, index: int) -> StageCosts:
        """Those of one micro batch."""
        arrays = ("seconds", "launches", "regrouping", "send_ahead", "send_back", "kept", "largest")
        return replace(self, **{name: getattr(self, name)[index : index + 1] for name in arrays})

    def __post_init__(self) -> None:
        device = self.seconds.sum(-1)
        device[..., FORWARD] += self.regrouping[..., 0]
        device[..., BACKWARD] += self.regrouping[..., 1]
        host = self.launches * self.host_launch_s
        ahead = np.maximum(device[..., FORWARD], host[..., FORWARD]) + self.send_ahead
        both = np.maximum(device[..., RECOMPUTE:].sum(-1), host[..., RECOMPUTE:].sum(-1)) + self.send_back
        alone = np.maximum(device[..., BACKWARD], host[..., BACKWARD]).sum(1)
        first = ahead[:, 0] + both[:, 0]
        derived = {
            "forward": ahead,
            "backward": both,
            "backward_alone": alone,
            "busy": (ahead + both).sum(1),
            "before": np.cumsum(first, axis=1) - first,
            "device_memory": np.array([machine.memory for machine in self.machines], float),
        }
        for name, values in derived.items():
            object.__setattr__(self, name, values)


def stage_costs(
    table: CostTable,
    completion: Completion,
    cut: Cut,
    strategy: Strategy,
    micro_batches: tuple[int, ...],
    layers: Sequence[LayerStrategy] | None = None,
) -> StageCosts:
    """The stages of a cut. ``layers`` holds the strategy of each layer where they differ; a micro batch is then one of a rank
    of ``completion``, and there is one of them."""
    machines = _machines(table, completion.mesh, cut)
    if layers is None:
        rows = _rows(table, completion, cut, machines, strategy, micro_batches)
        sent = table.sends(completion, cut, strategy, micro_batches)
    else:
        rows = _mixed_rows(table, cut, completion, strategy, micro_batches[0], layers)
        sent = table.mixed_sends(completion, cut, strategy, micro_batches[0], [s.completion for s in layers])
    added = np.add.reduceat(rows.added, cut.starts, axis=1)
    added = added.reshape(len(added), cut.chunks, cut.stages, -1)
    largest = np.maximum.reduceat(rows.largest, cut.starts, axis=1)
    shape = added.shape[:3]
    return StageCosts(
        cut=cut,
        mesh=completion.mesh,
        machines=machines,
        host_launch_s=table.constants.host_launch_s,
        seconds=added[..., :LAUNCHES].reshape(*shape, 3, 3),
        launches=added[..., LAUNCHES:KEPT],
        regrouping=np.zeros((*shape, 2)) if layers is None else _regrouping(table, completion, cut, micro_batches[0], layers),
        send_ahead=sent.ahead.reshape(shape),
        send_back=sent.back.reshape(shape),
        kept=added[..., KEPT].sum(1) + sent.received,
        largest=largest.reshape(*shape, -1).max(1),
        parts=_parts(table, completion, cut, rows.added[0, :, PARAMETERS:], layers),
        exchanges=_exchanges(table, completion, cut, layers),
    )


def _machines(table: CostTable, mesh: ProcessMesh, cut: Cut) -> tuple[Machine, ...]:
    return tuple(table.machines.of(mesh, s * mesh.size) for s in range(cut.stages))


def _rows(
    table: CostTable,
    completion: Completion,
    cut: Cut,
    machines: Sequence[Machine],
    strategy: Strategy,
    micro_batches: tuple[int, ...],
) -> Rows:
    distinct = list(dict.fromkeys(machines))
    found = [table.rows(completion, machine, strategy, micro_batches) for machine in distinct]
    if len(found) == 1:
        return found[0]
    here = [[i for i, stage in enumerate(cut.stage_of_layer) if machines[stage] is machine] for machine in distinct]
    return _put_together(list(zip(found, here, strict=True)))


def _mixed_rows(
    table: CostTable, cut: Cut, completion: Completion, strategy: Strategy, micro_batch: int, layers: Sequence[LayerStrategy]
) -> Rows:
    samples = micro_batch * completion.mesh.degree("dp")
    members: dict[tuple[object, ...], list[int]] = {}
    found: dict[tuple[object, ...], Rows] = {}
    for i, (layer, stage) in enumerate(zip(layers, cut.stage_of_layer, strict=True)):
        mesh = layer.completion.mesh
        machine = table.machines.of(mesh, stage * completion.mesh.size)
        key = (layer.completion.work, mesh.axes, mesh.shape, layer.recompute, machine)
        if key not in found:
            own = strategy._replace(recompute=layer.recompute)
            found[key] = table.rows(layer.completion, machine, own, (samples // mesh.degree("dp"),))
        members.setdefault(key, []).append(i)
    return _put_together([(found[key], some) for key, some in members.items()])


def _put_together(picked: Sequence[tuple[Rows, Sequence[int]]]) -> Rows:
    """Rows of some layers each, together all layers."""
    added, largest = (np.empty_like(columns) for columns in picked[0][0])
    for rows, members in picked:
        added[:, members], largest[:, members] = rows.added[:, members], rows.largest[:, members]
    return Rows(added, largest)


def _parts(
    table: CostTable, completion: Completion, cut: Cut, elements: np.ndarray, layers: Sequence[LayerStrategy] | None
) -> tuple[Part, ...]:
    """The parts of stages by dp; ``elements`` are layers x (parameters, trained, reduced along dp, along mp)."""
    meshes = [completion.mesh] if layers is None else [s.completion.mesh for s in layers]
    degrees = [mesh.degree("dp") for mesh in meshes]
    last = [cut.layers(s)[-1][1] if layers else 0 for s in range(cut.stages)]
    parts = []
    for dp in dict.fromkeys(degrees):
        own = elements * np.array([[degree == dp] for degree in degrees])
        sums = np.add.reduceat(own, cut.starts, axis=0).reshape(cut.chunks, cut.stages, -1).sum(0)
        for crossing, _, other in _copied(table, completion, cut) if table.training.own_copies else ():
            if degrees[last[other]] == dp:
                numel = crossing.value.local_numel(completion.mesh, 1.0)
                sums[other, :2] += numel, numel if crossing.has_gradient else 0
        mesh = meshes[degrees.index(dp)]
        reduced = {"dp": sums[:, 2], "mp": sums[:, 3]}
        parts.append(Part(mesh, _machines(table, mesh, cut), sums[:, 0], sums[:, 1], reduced))
    return tuple(parts)


def _copied(table: CostTable, completion: Completion, cut: Cut) -> Iterator[tuple[Crossing, int, int]]:
    return copies(completion, cut.stage_of_layer) if cut.stages > 1 else iter(())


def _exchanges(
    table: CostTable, completion: Completion, cut: Cut, layers: Sequence[LayerStrategy] | None
) -> tuple[Exchange, ...]:
    """Not counted of stages that hold copies of their own."""
    if table.training.own_copies:
        return ()
    found = []
    for crossing, *stages in _copied(table, completion, cut):
        if crossing.has_gradient:
            own = completion if layers is None else layers[crossing.layer].completion
            numel = crossing.value.local_numel(completion.mesh, 1.0)
            found.append(Exchange((stages[0], stages[1]), numel, own.mesh.degree("dp")))
    return tuple(found)


def _regrouping(
    table: CostTable, completion: Completion, cut: Cut, micro_batch: int, layers: Sequence[LayerStrategy]
) -> np.ndarray:
    """Seconds forward and backward to bring hidden states from a layer to the next one of its chunk on another mesh."""
    mesh, segments = completion.mesh, completion.layers.segments
    samples, chunks = micro_batch * mesh.degree("dp"), cut.chunk_of_layer
    found = np.zeros((len(cut.chunk_layers), 2))
    order = sorted(range(len(segments)), key=lambda i: chunks[segments[i].layer])
    for before, after in pairwise(order):
        chunk = chunks[segments[after].layer]
        ends = [layers[segments[i].layer].completion for i in (before, after)]
        old, new = (c.mesh.degree("dp") for c in ends)
        if old != new and chunk == chunks[segments[before].layer]:
            handed = [
                table.boundary_bytes(c, i, samples // c.mesh.degree("dp")) for c, i in zip(ends, (before, after), strict=True)
            ]
            first = chunk % cut.stages * mesh.size
            found[chunk, int(new > old)] += table.machines.regroup_seconds(max(handed), old, new, mesh.size, int(first))
    return found.reshape(1, cut.chunks, cut.stages, 2)
