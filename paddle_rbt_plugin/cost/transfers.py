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

from paddle_rbt_plugin.completion.work import Completion, Crossing, Value


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
    first = {stage: made + i for i, stage in reversed(list(enumerate(stage_of[made:])))}
    return max((first[stage_of[chunk_of[reader]]] - made for reader in readers if chunk_of[reader] >= made), default=0)


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


@dataclass(frozen=True)
class Routes:
    """What is sent between the chunks of a pipeline, and what stages have beside it, whatever the sizes."""

    chunk_count: int
    stage_count: int
    sent: tuple[Transfer, ...]
    beside: tuple[tuple[Crossing, int], ...]
    """What is fed to, or computed on, other stages than the first that reads it, each with such a stage."""


def find_routes(completion: Completion, chunk_layers: Sequence[int], stages: int, only_hidden: bool) -> Routes:
    """The routes between model chunks of ``chunk_layers`` layers that run on ``stages`` in turn. ``only_hidden`` leaves out all
    but hidden states."""
    stage_of_layer = [chunk % stages for chunk, n in enumerate(chunk_layers) for _ in range(n)]
    every = transfers(completion, stage_of_layer) if stages > 1 else ()
    sent = tuple(t for t in every if t.crossing.value.is_activation or not only_hidden)
    hows = () if only_hidden else ("fed", "computed")
    beside = tuple((crossing, stage) for how in hows for crossing, _, stage in copies(completion, stage_of_layer, how))
    return Routes(len(chunk_layers), stages, sent, beside)


def chunk_sends(
    routes: Routes, seconds: Callable[[Value, int, int, int], float], nbytes: Callable[[Value, int], float]
) -> Sends:
    """Sums up over the model chunks what the routes cost. ``seconds`` is the time to send a value of a layer from one stage to
    another, ``nbytes`` its size on one rank."""
    ahead, back, received = [0.0] * routes.chunk_count, [0.0] * routes.chunk_count, [0.0] * routes.stage_count
    for t in routes.sent:
        value, layer = t.crossing.value, t.crossing.layer
        ahead[t.chunk] += seconds(value, layer, t.source, t.target)
        if t.returns:
            back[t.chunk + 1] += seconds(value, layer, t.target, t.source)
        if not value.is_activation:
            received[t.target] += nbytes(value, layer)
    for crossing, stage in routes.beside:
        received[stage] += nbytes(crossing.value, crossing.layer)
    return Sends(tuple(ahead), tuple(back), tuple(received))
