"""What pipeline stages send each other in a micro step.

A value that crosses from the layer that makes it to layers on other stages goes from stage to stage until it has reached all of
them: to the next model chunk's, from there to the one after it. Each rank sends its part to the rank at the same place of the
next stage. Gradients come back the same way and are summed on it. Inputs are fed to all stages that read them, constants are
computed there, and parameters lie there (``copies``), so none of these is sent.

Megatron-LM's stages send each other hidden states only (``Training.own_copies``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from paddle_rbt_plugin.completion.work import Completion, Crossing


@dataclass(frozen=True)
class Transfer:
    """A value sent from one model chunk to the next one, which runs on another stage."""

    crossing: Crossing
    chunk: int
    """The chunk that sends it."""
    source: int
    target: int
    returns: bool
    """Whether a gradient comes back."""


def transfers(completion: Completion, stages: Sequence[int]) -> Iterator[Transfer]:
    """The transfers of one micro step; ``stages`` holds the pipeline stage of each layer."""
    chunk_of = _chunks(stages)
    stage_of = [stage for i, stage in enumerate(stages) if i == 0 or stage != stages[i - 1]]
    for crossing in completion.crossings:
        if crossing.how != "sent":
            continue
        made = chunk_of[crossing.layer]
        reached = _distance(crossing.readers, made, chunk_of, stage_of)
        returning = _distance(crossing.returning, made, chunk_of, stage_of)
        for hop in range(reached):
            source, target = stage_of[made + hop], stage_of[made + hop + 1]
            yield Transfer(crossing, made + hop, source, target, hop < returning)


def _distance(readers: Sequence[int], made: int, chunk_of: Sequence[int], stage_of: Sequence[int]) -> int:
    """How many stages further than the chunk ``made`` the stage farthest from it lies that runs one of some layers."""
    wanted = {stage_of[chunk_of[reader]] for reader in readers if chunk_of[reader] >= made}
    return max((stage_of.index(stage, made) - made for stage in wanted), default=0)


def _chunks(stages: Sequence[int]) -> list[int]:
    """The model chunk of each layer: neighbours run on different stages."""
    chunks = [0]
    for before, after in pairwise(stages):
        chunks.append(chunks[-1] + (before != after))
    return chunks


def copies(completion: Completion, stages: Sequence[int], how: str = "copied") -> Iterator[tuple[Crossing, int, int]]:
    """What more than one stage has without its being sent: parameters, or what is ``fed`` or ``computed``; each with the stage
    that reads it first and another one that reads it."""
    for crossing in completion.crossings:
        if crossing.how == how:
            home = stages[crossing.layer]
            others = dict.fromkeys(stages[reader] for reader in crossing.readers if stages[reader] != home)
            yield from ((crossing, home, other) for other in others)


@dataclass(frozen=True)
class Sends:
    """What sending costs in one micro step."""

    ahead: tuple[float, ...]
    """Per model chunk, seconds in which it sends what others read of it, or of what it was sent."""
    back: tuple[float, ...]
    """Per model chunk, seconds in which it sends gradients back."""
    received: tuple[float, ...]
    """Per stage, bytes that a micro batch in flight keeps of what it was sent, fed, or computed besides its own layers, hidden
    states left out: these are counted where backward reads them."""


Path = tuple[int, int, int]
"""The layer that makes a value, and the stages that it is sent from and to."""


@dataclass(frozen=True)
class Routes:
    """The transfers of one cut of a model as arrays, whatever is sent: one entry per value that is sent one way between two
    stages, and one per value that a stage keeps."""

    value: np.ndarray
    """Position of the crossing."""
    path: np.ndarray
    """Which of ``paths`` it takes."""
    paths: tuple[Path, ...]
    sender: np.ndarray
    """The sending chunk; those that send back come behind those that send ahead."""
    kept: np.ndarray
    """Position of the crossing that a stage keeps."""
    keeper: np.ndarray
    """The stage that keeps it."""
    chunks: int
    stages: int

    def sends(self, nbytes: np.ndarray, seconds: Callable[[np.ndarray, Path], np.ndarray]) -> Sends:
        """Sums up what the chunks send; ``nbytes`` is per crossing, ``seconds`` the time of messages on a path."""
        messages = nbytes[self.value]
        spent = np.zeros(len(messages))
        for i, path in enumerate(self.paths):
            here = self.path == i
            spent[here] = seconds(messages[here], path)
        both = np.bincount(self.sender, spent, 2 * self.chunks).tolist()
        received = np.bincount(self.keeper, nbytes[self.kept], self.stages).tolist()
        return Sends(tuple(both[: self.chunks]), tuple(both[self.chunks :]), tuple(received))


def routes(
    completion: Completion,
    chunk_layers: Sequence[int],
    stages: int,
    only_hidden: bool,
    path_of: Callable[[int, int, int], Path],
) -> Routes:
    """The transfers of model chunks that have ``chunk_layers`` layers and run on ``stages`` in turn.

    ``path_of`` a layer and two stages is the first path that takes as long as theirs. ``only_hidden`` leaves out all but hidden
    states."""
    place = {id(c): i for i, c in enumerate(completion.crossings)}
    chunks = len(chunk_layers)
    sent: list[tuple[int, int, Path]] = []
    kept: list[tuple[int, int]] = []
    stage_of_layer = [chunk % stages for chunk, n in enumerate(chunk_layers) for _ in range(n)]
    for t in transfers(completion, stage_of_layer) if stages > 1 else ():
        if only_hidden and not t.crossing.value.is_activation:
            continue
        i, layer = place[id(t.crossing)], t.crossing.layer
        sent.append((i, t.chunk, path_of(layer, t.source, t.target)))
        if t.returns:
            sent.append((i, chunks + t.chunk + 1, path_of(layer, t.target, t.source)))
        if not t.crossing.value.is_activation:
            kept.append((i, t.target))
    if not only_hidden:
        for how in ("fed", "computed"):
            kept += [(place[id(c)], stage) for c, _, stage in copies(completion, stage_of_layer, how)]
    numbers: dict[Path, int] = {}
    rows = np.array([(i, sender, numbers.setdefault(path, len(numbers))) for i, sender, path in sent], int).reshape(-1, 3)
    keeps = np.array(kept, int).reshape(-1, 2)
    return Routes(rows[:, 0], rows[:, 2], tuple(numbers), rows[:, 1], keeps[:, 0], keeps[:, 1], chunks, stages)
