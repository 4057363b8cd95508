"""The random state of a checkpoint.

The state of Paddle's generators cannot be read as data, and would be that of one rank of one plan. A checkpoint therefore
stores a seed, drawn on saving: every rank is seeded with it then, and again on loading. The streams of an engine's random ops
are described by a seed and the number of the step. For NumPy and Python, every rank loads the state of rank 0 from the index.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist

from paddle_rbt_plugin.errors import TunerError
from paddle_rbt_plugin.handover.dygraph import random as dygraph_random
from paddle_rbt_plugin.handover.pir.engine_outputs import dygraph
from paddle_rbt_plugin.handover.shared.engine_random import source_of


def renewed(engine: Any, model: Any) -> dict[str, Any]:
    """Seeds all ranks anew, and returns what restores the same state."""
    with dygraph():
        seed = paddle.randint(1, 2**31 - 1, [1], dtype="int64")
        if dist.get_world_size() > 1:
            dist.broadcast(seed, src=0)
        number = int(seed.item())
    _seed(model, number)
    state: Any = np.random.get_state(legacy=True)
    kind, keys, position, *_ = state
    version, words, gauss = random.getstate()
    return {
        "seed": number,
        "streams": _streams(engine),
        "numpy": [str(kind), [int(k) for k in keys], int(position), 0],
        "python": [version, list(words), gauss],
    }


def restore(saved: dict[str, Any], engine: Any, model: Any) -> None:
    """Sets the random state of this rank. Raises TunerError for numbers that are not a valid state."""
    _seed(model, saved["seed"])
    try:
        kind, keys, position, _ = saved["numpy"]
        state: Any = (kind, np.array(keys, "uint32"), position)
        np.random.set_state(state)
        version, words, gauss = saved["python"]
        random.setstate((version, tuple(words), gauss))
    except (TypeError, ValueError, OverflowError) as error:
        raise TunerError(f"the checkpoint is damaged: its random state: {error}") from error
    if engine is not None:
        begin = saved["streams"] or {"seed": saved["seed"], "step": 0}
        source = source_of(engine)
        source.seed, source.step = begin["seed"], begin["step"]


def _seed(model: Any, seed: int) -> None:
    with dygraph():
        if dygraph_random.is_on_streams(model):
            dygraph_random.restart(model, seed)
        paddle.seed(seed)  # the generators that the script itself uses, whatever the model is


def _streams(engine: Any) -> dict[str, int] | None:
    source = None if engine is None else source_of(engine)
    return None if source is None else {"seed": int(source.seed), "step": int(source.step)}
