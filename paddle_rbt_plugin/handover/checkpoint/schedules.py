"""The learning-rate schedule of a checkpoint, as plain data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from paddle_rbt_plugin.errors import TunerError


def state_of(optimizer: Any) -> dict[str, Any] | None:
    """The schedule of an optimizer; None for a fixed learning rate, and if there is no optimizer."""
    schedule = _schedule(optimizer)
    if schedule is None:
        return None
    return {"class": type(schedule).__name__, "state": plain(schedule.state_dict(), f"the schedule {type(schedule).__name__}")}


def restore(optimizer: Any, saved: dict[str, Any] | None, path: Path) -> None:
    """Restores a schedule. A fixed learning rate stays the one with which the optimizer was created.

    Raises TunerError if only one of the two has a schedule, or if they differ."""
    schedule = _schedule(optimizer)
    here = type(schedule).__name__ if schedule is not None else None
    there = str(saved.get("class")) if saved is not None else None
    if here != there:
        raise TunerError(
            f"the checkpoint {str(path)!r} has {_told(there)}, but the optimizer has {_told(here)}; create the optimizer with "
            "the former"
        )
    if schedule is not None and saved is not None:
        schedule.set_state_dict(saved["state"])


def plain(value: Any, what: str) -> Any:
    """A value converted to plain JSON. Raises TunerError if that is not possible."""

    def scalar(other: Any) -> Any:
        if isinstance(other, (np.generic, paddle.Tensor)) and np.size(other) == 1:
            return np.asarray(other).item()
        raise TypeError(type(other).__name__)

    try:
        return json.loads(json.dumps(value, default=scalar))
    except (TypeError, ValueError) as error:
        raise TunerError(
            f"{what} cannot be kept in a checkpoint, which holds numbers, text, lists and dicts: {error}"
        ) from error


def _schedule(optimizer: Any) -> Any:
    rate = getattr(optimizer, "_learning_rate", None)
    return rate if isinstance(rate, paddle.optimizer.lr.LRScheduler) else None


def _told(name: str | None) -> str:
    return f"the learning-rate schedule {name}" if name else "a fixed learning rate"
