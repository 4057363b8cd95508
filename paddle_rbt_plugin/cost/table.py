"""The table of costs of one search: a row per layer, machine, strategy and micro batch.

A stage is a reduction of these rows (``stage_costs``), an estimate is stages with the schedule between them (``estimates``),
and a layer is a row (level o2). Rows of layers are sums of those of their segments (``segment_table``). What thousands of
candidates have in common is filled once, for all micro batches of a strategy at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np

from paddle_rbt_plugin.cluster import Cluster
from paddle_rbt_plugin.completion.work import Completion, SegmentWork
from paddle_rbt_plugin.cost.candidate import Recompute, Training
from paddle_rbt_plugin.cost.constants import DEFAULT, Constants
from paddle_rbt_plugin.cost.machines import Machine, Machines
from paddle_rbt_plugin.cost.segment_table import Rows, SegmentTable, starts_of
from paddle_rbt_plugin.cost.sends import CrossingTable, Sends, sends
from paddle_rbt_plugin.cost.sizes import Columns, Values
from paddle_rbt_plugin.cost.stages import Cut


class Strategy(NamedTuple):
    """How a layer runs on the devices of its stage, its completion aside."""

    recompute: Recompute
    sequence_parallel: bool


class _Layout(NamedTuple):
    """Which segments each layer has. Layers of equal segments are of one kind."""

    segments: SegmentTable
    members: np.ndarray
    """Positions of the segments of each kind, one kind after the other."""
    starts: np.ndarray
    """Where each kind starts."""
    kind: np.ndarray
    """The kind of each layer."""


class CostTable:
    """Costs of layers for one cluster and one training."""

    def __init__(self, cluster: Cluster, training: Training, constants: Constants = DEFAULT):
        self.cluster = cluster
        self.training = training
        self.machines = Machines(cluster, training.precision, constants)
        self._layouts: dict[tuple[object, ...], _Layout] = {}
        self._crossings: dict[tuple[object, ...], CrossingTable] = {}
        self._flop: dict[tuple[SegmentWork, ...], float] = {}
        self._rows: dict[tuple[object, ...], Rows] = {}
        self._sends: dict[tuple[object, ...], Sends] = {}

    @property
    def constants(self) -> Constants:
        """Of the slowest software of the cluster."""
        return self.machines.constants

    def on(self, cluster: Cluster) -> CostTable:
        """The table for another order of the cluster's groups, which knows what this one knows of segments."""
        other = CostTable(cluster, self.training)
        other.machines = self.machines.on(cluster)
        other._layouts, other._crossings, other._flop = self._layouts, self._crossings, self._flop
        return other

    def rows(self, completion: Completion, machine: Machine, strategy: Strategy, micro_batches: tuple[int, ...]) -> Rows:
        """Micro batches x layers x columns of ``segment_table``."""
        mesh = completion.mesh
        key = (completion.work, mesh.axes, mesh.shape, machine, strategy, micro_batches)
        if key not in self._rows:
            layout = self._layout(completion)
            scale = batch_scale(completion, micro_batches)
            added, largest = layout.segments.rows(mesh, machine, scale, strategy.sequence_parallel, strategy.recompute)
            added = np.add.reduceat(added[:, layout.members], layout.starts, axis=1)
            largest = np.maximum.reduceat(largest[:, layout.members], layout.starts, axis=1)
            self._rows[key] = Rows(added[:, layout.kind], largest[:, layout.kind])
        return self._rows[key]

    def flop(self, completion: Completion) -> float:
        """FLOP of the model's matrix products on whole tensors of the traced batch, backward included in training."""
        if completion.work not in self._flop:
            layout = self._layout(completion)
            of_kind = np.add.reduceat(layout.segments.flop(completion.mesh)[layout.members], layout.starts)
            self._flop[completion.work] = float(of_kind[layout.kind].sum())
        return self._flop[completion.work]

    def sends(self, completion: Completion, cut: Cut, strategy: Strategy, micro_batches: tuple[int, ...]) -> Sends:
        """What the stages of a cut send each other where all layers run on the mesh of the completion."""
        mesh, is_split = completion.mesh, strategy.sequence_parallel
        key = (completion.crossings, mesh.axes, mesh.shape, cut, is_split, micro_batches)
        if key not in self._sends:
            nbytes = self._crossing_bytes(completion, batch_scale(completion, micro_batches), is_split)
            self._sends[key] = self._sum_sends(completion, cut, nbytes, (completion,) * completion.layers.count, is_split)
        return self._sends[key]

    def mixed_sends(
        self, completion: Completion, cut: Cut, strategy: Strategy, micro_batch: int, of_layer: Sequence[Completion]
    ) -> Sends:
        """The same where each layer has a completion of its own; the micro batch is one of a rank of ``completion``."""
        scale, sequence_parallel = batch_scale(completion, (micro_batch,)), strategy.sequence_parallel
        distinct = {(c.mesh.axes, c.mesh.shape): c for c in of_layer}
        nbytes = {mesh: self._crossing_bytes(c, scale, sequence_parallel) for mesh, c in distinct.items()}
        meshes = [of_layer[crossing.layer].mesh for crossing in completion.crossings]
        own = np.array([[nbytes[mesh.axes, mesh.shape][0, i] for i, mesh in enumerate(meshes)]], float)
        return self._sum_sends(completion, cut, own, of_layer, sequence_parallel)

    def boundary_bytes(self, completion: Completion, segment: int, micro_batch: int) -> float:
        """Bytes of the hidden state that a segment hands on, per rank, the sequence unsplit."""
        columns = Columns(values := Values(completion.mesh.axes, self.training.precision))
        handed = [columns[v] for v in completion.work[segment].outputs if v.is_activation]
        local = values.table().local(completion.mesh, np.array(batch_scale(completion, (micro_batch,))), False)
        return float(local.nbytes[0, handed].sum())

    def _sum_sends(
        self, completion: Completion, cut: Cut, nbytes: np.ndarray, of_layer: Sequence[Completion], sequence_parallel: bool
    ) -> Sends:
        split_parts = self.training.own_copies and not sequence_parallel
        return sends(self._crossing_table(completion), self.machines, cut, nbytes, of_layer, split_parts)

    def _crossing_bytes(self, completion: Completion, scale: tuple[float, ...], sequence_parallel: bool) -> np.ndarray:
        return self._crossing_table(completion).nbytes(completion.mesh, np.array(scale), sequence_parallel)

    def _crossing_table(self, completion: Completion) -> CrossingTable:
        key = (completion.crossings, completion.mesh.axes)
        if key not in self._crossings:
            self._crossings[key] = CrossingTable(completion.crossings, completion.mesh.axes, self.training)
        return self._crossings[key]

    def _layout(self, completion: Completion) -> _Layout:
        key = (completion.work, completion.mesh.axes)
        if key not in self._layouts:
            self._layouts[key] = _layout(completion, self.training)
        return self._layouts[key]


def batch_scale(completion: Completion, micro_batches: Sequence[int]) -> tuple[float, ...]:
    """For each micro batch of a rank, the batch that all ranks of a stage hold together over that of the traced program."""
    dp = completion.mesh.degree("dp")
    return tuple(m * dp / completion.batch for m in micro_batches)


def _layout(completion: Completion, training: Training) -> _Layout:
    numbers: dict[tuple[SegmentWork, bool], int] = {}
    of_layer: list[list[int]] = [[] for _ in range(completion.layers.count)]
    for work, segment in zip(completion.work, completion.layers.segments, strict=True):
        of_layer[segment.layer].append(numbers.setdefault((work, segment.is_block), len(numbers)))
    kinds: dict[tuple[int, ...], int] = {}
    kind = [kinds.setdefault(tuple(members), len(kinds)) for members in of_layer]
    table = SegmentTable(list(numbers), completion.mesh.axes, training)
    return _Layout(table, np.array(list(chain.from_iterable(kinds)), int), starts_of(list(kinds)), np.array(kind, int))
