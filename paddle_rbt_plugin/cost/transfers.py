"""What pipeline stages send each other in a micro step.

Every value that crosses from the layer that makes it to layers on other stages is sent once to each of those stages, straight
from where it lies: the hidden state, but masks, rotary tables and the weight of a head tied to the embedding as well. Each rank
sends its part to the rank at the same place of the other stage. Where a value has a gradient, it comes back.

Megatron-LM's stages have masks, tables and tied weights of their own and send each other hidden states only
(``Training.own_copies``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from paddle_rbt_plugin.completion.work import Completion, Crossing, Value


@dataclass(frozen=True)
class Transfer:
    """A value sent from a layer to another stage; ``reader`` is the first layer there that reads it."""

    crossing: Crossing
    source: int
    target: int
    reader: int


def transfers(completion: Completion, stages: Sequence[int]) -> Iterator[Transfer]:
    """The transfers of one micro step; ``stages`` holds the pipeline stage of each layer."""
    for crossing in completion.crossings:
        source = stages[crossing.layer]
        reached = {source}
        for reader in crossing.readers:
            if stages[reader] not in reached:
                reached.add(stages[reader])
                yield Transfer(crossing, source, stages[reader], reader)


@dataclass(frozen=True)
class Sends:
    """What sending costs in one micro step."""

    ahead: tuple[float, ...]
    """Per model chunk, seconds in which it sends what others read of it."""
    back: tuple[float, ...]
    """Per model chunk, seconds in which it sends gradients back."""
    received: tuple[float, ...]
    """Per stage, bytes that a micro batch in flight keeps of what was received, hidden states left out: these are counted
    where backward reads them."""


def chunk_sends(
    completion: Completion,
    chunk_layers: Sequence[int],
    stages: int,
    only_hidden: bool,
    seconds: Callable[[Value, int, int, int], float],
    nbytes: Callable[[Value, int], float],
) -> Sends:
    """Sums transfers up over the model chunks, which have ``chunk_layers`` layers and run on ``stages`` in turn.

    ``seconds`` is the time to send a value of a layer from one stage to another, ``nbytes`` its size on one rank.
    ``only_hidden`` leaves out all but hidden states."""
    chunk_of = [chunk for chunk, n in enumerate(chunk_layers) for _ in range(n)]
    ahead, back, received = [0.0] * len(chunk_layers), [0.0] * len(chunk_layers), [0.0] * stages
    for t in transfers(completion, [chunk % stages for chunk in chunk_of]):
        value, layer = t.crossing.value, t.crossing.layer
        if only_hidden and not value.is_activation:
            continue
        ahead[chunk_of[layer]] += seconds(value, layer, t.source, t.target)
        if t.crossing.has_gradient:
            back[chunk_of[t.reader]] += seconds(value, layer, t.target, t.source)
        if not value.is_activation:
            received[t.target] += nbytes(value, layer)
    return Sends(tuple(ahead), tuple(back), tuple(received))
