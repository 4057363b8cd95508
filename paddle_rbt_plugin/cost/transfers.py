"""What pipeline stages send each other in a micro step.

A value that crosses from the layer that makes it to layers on other stages goes from stage to stage until it has reached all of
them: to the next model chunk's, from there to the one after it. Each rank sends its part to the rank at the same place of the
next stage. Gradients come back the same way and are summed on it. Inputs are fed to all stages that read them, constants are
computed there, and parameters lie there (``copies``), so none of these is sent.

Megatron-LM's stages send each other hidden states only (``Training.own_copies``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

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
