"""Seconds in which pipeline stages send each other what ``transfers`` says, for one cut of a model and many micro batches.

The transfers of a model are the same for all cuts but for how far they go, so its crossings are read into arrays once
(``CrossingTable``), and the transfers of a cut follow from them without a loop. Where the ranks of an mp group hold the same
hidden state, Megatron-LM's send a part of it each, and the receivers gather it (arXiv 2104.04473, section 4.1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np

from paddle_rbt_plugin.cluster import ProcessMesh
from paddle_rbt_plugin.completion.work import Completion, Crossing
from paddle_rbt_plugin.cost.candidate import Training
from paddle_rbt_plugin.cost.communication import GroupNetwork, collective_seconds
from paddle_rbt_plugin.cost.machines import Machines
from paddle_rbt_plugin.cost.sizes import Columns, Values
from paddle_rbt_plugin.cost.stages import Cut


class Sends(NamedTuple):
    """What sending costs in one micro step, a row per micro batch."""

    ahead: np.ndarray
    """Per model chunk, seconds in which it sends what others read of it, or of what it was sent."""
    back: np.ndarray
    """Per model chunk, seconds in which it sends gradients back."""
    received: np.ndarray
    """Per stage, bytes that a micro batch in flight keeps of what it was sent, fed, or computed besides its own layers, hidden
    states left out: these are counted where backward reads them."""


class Transfers(NamedTuple):
    """The transfers of one cut: one entry per value and way between two stages, and one per value that a stage keeps."""

    value: np.ndarray
    """Position of the crossing."""
    source: np.ndarray
    """The sending stage."""
    target: np.ndarray
    sender: np.ndarray
    """The sending chunk; those that send back come behind those that send ahead."""
    kept: np.ndarray
    """Position of the crossing that a stage keeps."""
    keeper: np.ndarray
    """The stage that keeps it."""


class CrossingTable:
    """The crossings of a model as arrays."""

    def __init__(self, crossings: Sequence[Crossing], axes: Sequence[str], training: Training):
        values = Values(axes, training.precision)
        columns = Columns(values)
        self.columns = np.array([columns[c.value] for c in crossings], int)
        self.sizes = values.table()
        self.layer = np.array([c.layer for c in crossings], int)
        hidden = [c.value.is_activation for c in crossings]
        sent = [i for i, c in enumerate(crossings) if c.how == "sent" and (hidden[i] or not training.own_copies)]
        beside = [] if training.own_copies else [i for i, c in enumerate(crossings) if c.how in ("fed", "computed")]
        self._sent = np.array(sent, int)
        self._sent_is_hidden = np.array([hidden[i] for i in sent], bool)
        self._readers = _ragged([crossings[i].readers for i in sent])
        self._returning = _ragged([crossings[i].returning for i in sent])
        self._beside = np.repeat(np.array(beside, int), [len(crossings[i].readers) for i in beside])
        self._beside_reader = np.array(list(chain.from_iterable(crossings[i].readers for i in beside)), int)

    def nbytes(self, mesh: ProcessMesh, batch_scale: np.ndarray, sequence_parallel: bool) -> np.ndarray:
        """Bytes on one rank, micro batches x crossings."""
        return self.sizes.local(mesh, batch_scale, sequence_parallel).stored[:, self.columns]

    def transfers(self, cut: Cut) -> Transfers:
        """What is sent and kept under a cut."""
        pp, chunk_of, chunks = cut.stages, cut.chunk_of_layer, len(cut.chunk_layers)
        made = chunk_of[self.layer[self._sent]]
        reached, returned = (_distance(some, made, chunk_of, pp) for some in (self._readers, self._returning))
        hops = np.repeat(np.arange(len(made)), reached)
        hop = np.arange(len(hops)) - np.repeat(np.cumsum(reached) - reached, reached)
        value, chunk = self._sent[hops], made[hops] + hop
        source, target = chunk % pp, (chunk + 1) % pp
        comes_back = hop < returned[hops]
        is_kept = ~self._sent_is_hidden[hops]
        home = chunk_of[self.layer[self._beside]] % pp
        reading = chunk_of[self._beside_reader] % pp
        elsewhere = np.unique((self._beside * pp + reading)[reading != home])
        return Transfers(
            np.concatenate((value, value[comes_back])),
            np.concatenate((source, target[comes_back])),
            np.concatenate((target, source[comes_back])),
            np.concatenate((chunk, chunks + chunk[comes_back] + 1)),
            np.concatenate((value[is_kept], elsewhere // pp)),
            np.concatenate((target[is_kept], elsewhere % pp)),
        )


def sends(
    table: CrossingTable,
    machines: Machines,
    cut: Cut,
    nbytes: np.ndarray,
    of_layer: Sequence[Completion],
    split_parts: bool,
) -> Sends:
    """What the stages of a cut send each other. ``nbytes`` are those of ``CrossingTable.nbytes``, each crossing's as the
    completion of its layer (``of_layer``) has it. With ``split_parts`` each rank of an mp group sends a part."""
    found, chunks = table.transfers(cut), len(cut.chunk_layers)
    messages = nbytes[:, found.value]
    spent = np.zeros(messages.shape)
    for path, here in _paths(table, machines, cut, found, of_layer, split_parts).items():
        spent[:, here] = _seconds(messages[:, here], *path, machines)
    both = _sums(found.sender, spent, 2 * chunks)
    return Sends(both[:, :chunks], both[:, chunks:], _sums(found.keeper, nbytes[:, found.kept], cut.stages))


_Path = tuple[GroupNetwork, GroupNetwork | None]
"""The network between two ranks, and that of the group that gathers parts, if each rank sends one."""


def _paths(
    table: CrossingTable,
    machines: Machines,
    cut: Cut,
    found: Transfers,
    of_layer: Sequence[Completion],
    split_parts: bool,
) -> dict[_Path, np.ndarray]:
    """The distinct paths, each with the transfers that take it."""
    ranks, pp = of_layer[0].mesh.size, cut.stages
    layer = table.layer[found.value] if len(set(map(id, of_layer))) > 1 else 0
    ways, which = np.unique((layer * pp + found.source) * pp + found.target, return_inverse=True)
    numbers: dict[_Path, int] = {}
    of_way = []
    for way in ways.tolist():
        of, source, target = way // pp**2, way // pp % pp * ranks, way % pp * ranks
        parts = machines.of(of_layer[of].mesh, source).network("mp") if split_parts else None
        of_way.append(numbers.setdefault((machines.pair(source, target), parts), len(numbers)))
    path = np.array(of_way, int)[which]
    return {key: path == number for key, number in numbers.items()}


def _seconds(nbytes: np.ndarray, between: GroupNetwork, parts: GroupNetwork | None, machines: Machines) -> np.ndarray:
    c = machines.constants
    if parts is None:
        return collective_seconds("p2p", nbytes, between, c)
    return collective_seconds("p2p", nbytes / parts.ranks, between, c) + collective_seconds("all_gather", nbytes, parts, c)


@dataclass(frozen=True)
class _Ragged:
    """Lists of layers of different lengths, one after the other: the layers, and which list each is in."""

    layers: np.ndarray
    owner: np.ndarray
    count: int


def _ragged(lists: Sequence[Sequence[int]]) -> _Ragged:
    flat = np.array(list(chain.from_iterable(lists)), int)
    return _Ragged(flat, np.repeat(np.arange(len(lists)), [len(some) for some in lists]), len(lists))


def _distance(readers: _Ragged, made: np.ndarray, chunk_of: np.ndarray, stages: int) -> np.ndarray:
    """How many stages further than the chunk that makes each value the stage farthest from it lies that reads it."""
    chunk, start = chunk_of[readers.layers], made[readers.owner]
    away = np.where(chunk >= start, (chunk - start) % stages, 0)
    found = np.zeros(readers.count, int)
    np.maximum.at(found, readers.owner, away)
    return found


def _sums(place: np.ndarray, values: np.ndarray, places: int) -> np.ndarray:
    """Per row, the sums of the values at each place."""
    count = len(values)
    where = place + np.arange(count)[:, None] * places
    return np.bincount(where.ravel(), values.ravel(), count * places).reshape(count, places)
