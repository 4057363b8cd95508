"""Which segments a pipeline stage runs, and the parameters that live on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from paddle_rbt_plugin.completion.work import Completion, Crossing
from paddle_rbt_plugin.cost.transfers import copies
from paddle_rbt_plugin.errors import TunerError
from paddle_rbt_plugin.spelling import counted


@dataclass(frozen=True)
class Stage:
    """The segments of one pipeline stage, chunk by chunk."""

    index: int
    layers: tuple[tuple[int, int], ...]
    """First and last layer of each chunk."""
    chunks: tuple[tuple[int, ...], ...]
    """Positions in ``completion.work`` of each chunk's segments."""
    shared: tuple[Crossing, ...]
    """Parameters that lie on other stages as well and are read there first (a head tied to the embedding)."""
    exchanged: tuple[tuple[Crossing, int], ...]
    """Parameters whose gradients it sums with another stage once per step, and that stage."""

    @property
    def segments(self) -> tuple[int, ...]:
        """Positions in ``completion.work`` of all its segments."""
        return tuple(i for chunk in self.chunks for i in chunk)


def even_split(layers: int, parts: int) -> tuple[int, ...]:
    """Layers per part, as even as possible, the first parts taking one more where it does not divide."""
    return tuple(layers // parts + (i < layers % parts) for i in range(parts))


@lru_cache(maxsize=4096)
def even_stages(layers: int, pp: int, chunks: int) -> tuple[int, ...]:
    """The stage of each layer where they are split as evenly as possible; chunk ``j`` runs on stage ``j % pp``."""
    return tuple(j % pp for j, n in enumerate(even_split(layers, pp * chunks)) for _ in range(n))


def make_stages(completion: Completion, pp: int, chunks: int, stage_layers: Sequence[int] | None = None) -> tuple[Stage, ...]:
    """The stages of a pipeline. ``stage_layers`` is the number of layers of each of the ``pp * chunks`` model chunks in model
    order; chunk ``j`` runs on stage ``j % pp``. Raises TunerError unless every chunk has a layer."""
    count = completion.layers.count
    sizes = tuple(stage_layers) if stage_layers else even_split(count, pp * chunks)
    if len(sizes) != pp * chunks or min(sizes) < 1 or sum(sizes) != count:
        layers = counted(count, "layer")
        raise TunerError(
            f"{layers} cannot be cut into {counted(pp, 'stage')} of {counted(chunks, 'chunk')} as {list(sizes)}: "
            f"{counted(pp * chunks, 'chunk')} of at least one layer each must hold {layers} together"
        )
    starts = [sum(sizes[:j]) for j in range(len(sizes))]
    members: list[list[int]] = [[] for _ in sizes]
    chunk_of_layer = [j for j, n in enumerate(sizes) for _ in range(n)]
    for i, segment in enumerate(completion.layers.segments):
        members[chunk_of_layer[segment.layer]].append(i)
    shared: list[list[Crossing]] = [[] for _ in range(pp)]
    exchanged: list[list[tuple[Crossing, int]]] = [[] for _ in range(pp)]
    for crossing, home, other in copies(completion, [j % pp for j in chunk_of_layer]):
        shared[other].append(crossing)
        if crossing.has_gradient:
            exchanged[other].append((crossing, home))
            exchanged[home].append((crossing, other))
    stages = []
    for s in range(pp):
        own = range(s, len(sizes), pp)
        stages.append(
            Stage(
                index=s,
                layers=tuple((starts[j], starts[j] + sizes[j] - 1) for j in own),
                chunks=tuple(tuple(members[j]) for j in own),
                shared=tuple(shared[s]),
                exchanged=tuple(exchanged[s]),
            )
        )
    return tuple(stages)
