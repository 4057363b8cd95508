"""Which segments a pipeline stage runs, and the parameters that live on it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from paddle_rbt_plugin.completion.work import Completion, SegmentWork, Value
from paddle_rbt_plugin.errors import TunerError


@dataclass(frozen=True)
class Stage:
    """The segments of one pipeline stage, chunk by chunk; ``shared`` are parameters of other stages that it uses as well
    (a head tied to the embedding), of which it holds its own copy (D22)."""

    index: int
    layers: tuple[tuple[int, int], ...]
    """First and last layer of each chunk."""
    chunks: tuple[tuple[int, ...], ...]
    """Positions in ``completion.work`` of each chunk's segments."""
    shared: tuple[Value, ...]

    @property
    def segments(self) -> tuple[int, ...]:
        return tuple(i for chunk in self.chunks for i in chunk)


def even_split(layers: int, parts: int) -> tuple[int, ...]:
    """Layers per part, as even as possible, the first parts taking one more where it does not divide."""
    return tuple(layers // parts + (i < layers % parts) for i in range(parts))


def make_stages(completion: Completion, pp: int, chunks: int, stage_layers: Sequence[int] | None = None) -> tuple[Stage, ...]:
    """The stages of a pipeline. ``stage_layers`` is the number of layers of each of the ``pp * chunks`` model chunks in model
    order; chunk ``j`` runs on stage ``j % pp``. Raises TunerError unless every chunk has a layer."""
    count = completion.layers.count
    sizes = tuple(stage_layers) if stage_layers else even_split(count, pp * chunks)
    if len(sizes) != pp * chunks or min(sizes) < 1 or sum(sizes) != count:
        raise TunerError(
            f"{count} layers cannot be cut into {pp} stages of {chunks} chunks as {list(sizes)}: "
            f"{pp * chunks} chunks of at least one layer each are needed, {count} layers together"
        )
    starts = [sum(sizes[:j]) for j in range(len(sizes))]
    members: list[list[int]] = [[] for _ in sizes]
    chunk_of_layer = [j for j, n in enumerate(sizes) for _ in range(n)]
    for i, segment in enumerate(completion.layers.segments):
        members[chunk_of_layer[segment.layer]].append(i)
    home = _homes(completion)
    foreign = {id(work): foreign_params(work) for work in completion.work}
    stages = []
    for s in range(pp):
        own = range(s, len(sizes), pp)
        segments = {i for j in own for i in members[j]}
        shared = {
            v.name: v
            for i in segments
            for v in foreign[id(completion.work[i])]
            if v.name in home and home[v.name] not in segments
        }
        stages.append(
            Stage(
                index=s,
                layers=tuple((starts[j], starts[j] + sizes[j] - 1) for j in own),
                chunks=tuple(tuple(members[j]) for j in own),
                shared=tuple(shared.values()),
            )
        )
    return tuple(stages)


def foreign_params(work: SegmentWork) -> tuple[Value, ...]:
    """Parameters that a segment reads although another segment reads them first.

    Segments that share their work may name the parameters they own after another layer, so what is neither owned by name
    nor by shape and placement is foreign."""
    names = {v.name for v in work.params}
    used = {v.name: v for k in work.forward for v in k.inputs if v.kind == "param"}
    unnamed = Counter((v.shape, v.placement) for v in work.params if v.name not in used)
    foreign = []
    for value in used.values():
        if value.name in names:
            continue
        if unnamed[value.shape, value.placement] > 0:
            unnamed[value.shape, value.placement] -= 1
        else:
            foreign.append(value)
    return tuple(foreign)


def _homes(completion: Completion) -> dict[str, int]:
    """Segment that first uses each parameter."""
    homes: dict[str, int] = {}
    for i, work in enumerate(completion.work):
        for value in work.params:
            homes.setdefault(value.name, i)
    return homes
