"""Costs of segments: a row per segment, micro batch and recomputation, filled for any mesh and machine.

Rows are of one rank in one micro step. Kernels are costed one by one (``compute``), the collectives before them too
(``communication``). Under *sequence parallelism* (arXiv 2205.05198, section 4.2.2) each all-reduce of the mp group becomes a
reduce-scatter and an all-gather, which move the same bytes; ops on hidden states, and states kept, are split over the group.

Columns have names; who sums rows up takes a pass to last as long as the device needs, or as long as the host needs to issue its
kernels, whichever is longer.
"""

from __future__ import annotations

from collections.abc import Sequence, Sized
from itertools import chain
from typing import NamedTuple

import numpy as np

from paddle_rbt_plugin.cluster import ProcessMesh
from paddle_rbt_plugin.completion.work import CollectiveKind, SegmentWork
from paddle_rbt_plugin.cost.candidate import Recompute, Training
from paddle_rbt_plugin.cost.communication import collective_seconds
from paddle_rbt_plugin.cost.machines import Machine
from paddle_rbt_plugin.cost.segments import Numbers, Segment
from paddle_rbt_plugin.cost.sizes import LocalSizes, Sums, Term, Values

FORWARD, RECOMPUTE, BACKWARD = range(3)
"""The passes of a micro step. Of each there are COMPUTE, ALONG_MP and ALONG_DP, the first nine columns, and launches."""
COMPUTE, ALONG_MP, ALONG_DP = range(3)
"""Seconds of kernels, and of collectives along the two axes."""
LAUNCHES = 9
"""The first of the columns with the kernels that the host issues in each pass."""
KEPT, PARAMETERS, TRAINED, REDUCED_DP, REDUCED_MP = range(12, 17)
"""Bytes that a micro batch in flight keeps until its backward pass; elements of parameters, of those that are trained, and of
gradients to reduce along each axis."""
ADDED = 17
"""Columns that add up over segments."""
REVIVED, TEMPORARY, MESSAGE = range(3)
"""Columns of which the largest counts: bytes that recomputation brings back during a backward pass, that one op needs beside
what is kept (its results and the gradients it reads), and that a collective sends."""


class Rows(NamedTuple):
    """Costs: micro batches x segments (layers, stages) x columns."""

    added: np.ndarray
    largest: np.ndarray


class _Choice(NamedTuple):
    """What a recomputation makes of the segments: sums of seconds for each pass, launches, and sums of bytes."""

    places: np.ndarray
    starts: np.ndarray
    launches: np.ndarray
    nbytes: Sums


class _Largest(NamedTuple):
    """Sums of bytes, and which of them is the first of each segment; the largest of a segment counts."""

    sums: Sums
    starts: np.ndarray


class SegmentTable:
    """Costs of segments whose values lie on meshes with the given axes. Of each is told whether it is a block."""

    def __init__(self, segments: Sequence[tuple[SegmentWork, bool]], axes: Sequence[str], training: Training):
        numbers = Numbers(Values(axes, training.precision))
        self._segments = [Segment(work, is_block, numbers, training) for work, is_block in segments]
        self._train = training.mode == "train"
        self._sizes = numbers.values.table()
        self._kernels = numbers.kernels.frozen(self._sizes)
        self._elements = self._sizes.sums([terms for segment in self._segments for terms in segment.elements])
        self._temporaries = self._largest([segment.temporaries for segment in self._segments])
        self._messages = self._largest([segment.messages for segment in self._segments])
        self._collectives = numbers.collectives
        self._hidden = np.array([collective for collective, _ in numbers.hidden], int)
        beside = [(0, *(1 + p for p in products)) for _, products in numbers.hidden]
        self._beside = np.array(list(chain.from_iterable(beside)), int), starts_of(beside)
        self._choices: dict[Recompute, _Choice] = {}
        self._local: dict[tuple[object, ...], LocalSizes] = {}
        self._seconds: dict[tuple[object, ...], np.ndarray] = {}

    def rows(
        self, mesh: ProcessMesh, machine: Machine, batch_scale: tuple[float, ...], sequence_parallel: bool, recompute: Recompute
    ) -> Rows:
        """The rows of all segments on a mesh, for micro batches as in ``SizeTable.local``."""
        key = (mesh.shape, batch_scale, sequence_parallel)
        if key not in self._local:
            self._local[key] = self._sizes.local(mesh, np.array(batch_scale), sequence_parallel)
        local = self._local[key]
        if (key, machine) not in self._seconds:
            splits_sequence = sequence_parallel and mesh.degree("mp") > 1
            self._seconds[key, machine] = self._item_seconds(local, machine, splits_sequence)
        choice = self._choice(recompute)
        count, segments = len(batch_scale), len(self._segments)
        seconds = np.add.reduceat(self._seconds[key, machine][:, choice.places], choice.starts, axis=1)
        nbytes = local.sums(choice.nbytes).reshape(count, segments, 2)
        added = np.empty((count, segments, ADDED))
        added[:, :, :LAUNCHES] = seconds.reshape(count, segments, -1)
        added[:, :, LAUNCHES:KEPT] = choice.launches
        added[:, :, KEPT] = nbytes[:, :, 0]
        added[:, :, PARAMETERS:] = local.sums(self._elements).reshape(count, segments, -1)
        revived = nbytes[:, :, 1] if self._train else np.zeros((count, segments))
        largest = [
            np.maximum.reduceat(local.sums(sums), starts, axis=1) for sums, starts in (self._temporaries, self._messages)
        ]
        return Rows(added, np.stack((revived, *largest), axis=2))

    def flop(self, mesh: ProcessMesh) -> np.ndarray:
        """Per segment, FLOP of its matrix products on whole tensors of the traced batch, backward included in training."""
        whole = ProcessMesh(mesh.axes, (1,) * len(mesh.axes), mesh.ranks[:1])
        products = self._kernels.products(self._sizes.local(whole, np.ones(1), sequence_parallel=False))
        of_kernel = self._kernels.by_kernel(products.flop)[0]
        every = ((*s.kernels[0], *(s.kernels[1] if self._train else ())) for s in self._segments)
        return np.array([sum(of_kernel[k] for k in kernels if k is not None) for kernels in every])

    def _largest(self, of_segments: Sequence[Sequence[Sequence[Term]]]) -> _Largest:
        sums = [some or [()] for some in of_segments]
        return _Largest(self._sizes.sums(list(chain.from_iterable(sums))), starts_of(sums))

    def _choice(self, recompute: Recompute) -> _Choice:
        """Seconds are those of ``_item_seconds``: none, then those of kernels, of collectives, and what is hidden of these."""
        if recompute not in self._choices:
            collectives = 1 + len(self._kernels.launched)
            hidden = collectives + len(self._collectives)
            found = [segment.recomputed[recompute] for segment in self._segments]
            passes = [(s.forward, r.again, s.backward) for s, r in zip(self._segments, found, strict=True)]
            places: list[list[int]] = []
            for made in chain.from_iterable(passes):
                sent = {axis: [collectives + i for i in numbers] for axis, numbers in made.along.items()}
                places.append([0, *(1 + i for i in made.kernels)])
                places.append([0, *sent["mp"], *(hidden + i for i in made.hidden)])
                places.append([0, *sent["dp"]])
            self._choices[recompute] = _Choice(
                np.array(list(chain.from_iterable(places))),
                starts_of(places),
                np.array([[made.launches for made in three] for three in passes], float),
                self._sizes.sums([terms for r in found for terms in (r.kept, r.revived)]),
            )
        return self._choices[recompute]

    def _item_seconds(self, local: LocalSizes, machine: Machine, splits_sequence: bool) -> np.ndarray:
        """Micro batches x (nothing, kernels, collectives, what is hidden of collectives, below 0)."""
        c, device = machine.constants, machine.device
        products = self._kernels.products(local).seconds(device, c)
        kernels = self._kernels.seconds(local, products, device, c)
        collectives, reductions = self._collective_seconds(local, machine, splits_sequence)
        nothing = np.zeros((len(kernels), 1))
        parts = [nothing, kernels, collectives]
        if len(self._hidden):
            places, starts = self._beside
            beside = np.add.reduceat(np.concatenate((nothing, products), axis=1)[:, places], starts, axis=1)
            parts.append(-np.minimum(reductions[:, self._hidden], beside))
        return np.concatenate(parts, axis=1)

    def _collective_seconds(self, local: LocalSizes, machine: Machine, splits_sequence: bool) -> tuple[np.ndarray, np.ndarray]:
        """Seconds of the collectives as the training runs them, and those of them in which sums are made: under sequence
        parallelism an all-reduce of the mp group runs in two."""
        seconds, reductions = np.zeros((2, len(local.dims), len(self._collectives)))
        alike: dict[tuple[str, CollectiveKind], list[tuple[int, int]]] = {}
        for (axis, kind, value), number in self._collectives.items():
            alike.setdefault((axis, kind), []).append((number, value))
        for (axis, kind), some in alike.items():
            numbers, values = np.array(some).T
            net = machine.network(axis)
            if net is None:
                continue
            kinds: tuple[CollectiveKind, ...] = (kind,)
            if splits_sequence and axis == "mp" and kind == "all_reduce":
                kinds = ("reduce_scatter", "all_gather")
            each = [collective_seconds(kind, local.nbytes[:, values], net, machine.constants) for kind in kinds]
            seconds[:, numbers] = sum(each)
            if kinds[0] in ("all_reduce", "reduce_scatter"):
                reductions[:, numbers] = each[0]
        return seconds, reductions


def starts_of(parts: Sequence[Sized]) -> np.ndarray:
    """Where each of some lists starts when they stand one after the other."""
    return np.cumsum([0, *map(len, parts)])[:-1]
