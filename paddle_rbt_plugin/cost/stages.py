"""How the layers of a model are cut into pipeline stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from paddle_rbt_plugin.errors import TunerError
from paddle_rbt_plugin.spelling import counted


@dataclass(frozen=True)
class Cut:
    """Model chunks of neighbouring layers, of which chunk ``j`` runs on stage ``j % stages``."""

    stages: int
    chunk_layers: tuple[int, ...]
    """How many layers each chunk has, in model order."""

    @property
    def chunks(self) -> int:
        """Per stage."""
        return len(self.chunk_layers) // self.stages

    @cached_property
    def starts(self) -> np.ndarray:
        """The first layer of each chunk."""
        return np.cumsum((0, *self.chunk_layers))[:-1]

    @cached_property
    def chunk_of_layer(self) -> np.ndarray:
        """The chunk of each layer."""
        return np.repeat(np.arange(len(self.chunk_layers)), self.chunk_layers)

    @cached_property
    def stage_of_layer(self) -> tuple[int, ...]:
        """The stage of each layer."""
        return tuple((self.chunk_of_layer % self.stages).tolist())

    def layers(self, stage: int) -> tuple[tuple[int, int], ...]:
        """First and last layer of each chunk of a stage."""
        firsts = self.starts.tolist()
        own = range(stage, len(self.chunk_layers), self.stages)
        return tuple((firsts[j], firsts[j] + self.chunk_layers[j] - 1) for j in own)


def even_split(layers: int, parts: int) -> tuple[int, ...]:
    """Layers per part, as even as possible, the first parts taking one more where it does not divide."""
    return tuple(layers // parts + (i < layers % parts) for i in range(parts))


@lru_cache(maxsize=4096)
def even_cut(layers: int, pp: int, chunks: int = 1) -> Cut:
    """Chunks as even as possible. Raises TunerError unless every chunk has a layer."""
    return make_cut(layers, pp, chunks, even_split(layers, pp * chunks))


def make_cut(layers: int, pp: int, chunks: int = 1, chunk_layers: Sequence[int] | None = None) -> Cut:
    """``pp * chunks`` model chunks with so many layers each, as even as possible by default. Raises TunerError unless every
    chunk has a layer."""
    if chunk_layers is None:
        return even_cut(layers, pp, chunks)
    sizes = tuple(chunk_layers)
    if len(sizes) != pp * chunks or min(sizes) < 1 or sum(sizes) != layers:
        counted_layers = counted(layers, "layer")
        raise TunerError(
            f"{counted_layers} cannot be cut into {counted(pp, 'stage')} of {counted(chunks, 'chunk')} as {list(sizes)}: "
            f"{counted(pp * chunks, 'chunk')} of at least one layer each must hold {counted_layers} together"
        )
    return Cut(pp, sizes)
