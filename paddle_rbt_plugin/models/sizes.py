"""What sizes and rates a model can have, and how a config that has others is refused."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Strict

from paddle_rbt_plugin.errors import ModelError
from paddle_rbt_plugin.validation import Kind, number, whole

MAX_LAYERS = 2**10
MAX_SIZE = 2**24
"""Of every other size: far beyond any model."""
MAX_ELEMENTS = 2**56
"""Of one tensor: the bytes of several of them still fit 64 bits."""

LAYERS = whole(1, MAX_LAYERS)
SIZE = whole(1, MAX_SIZE)
COUNT = whole(0, MAX_SIZE)
"""Of what a model may lack."""
RATE = number("of at least 0 and less than 1", ge=0, lt=1)
SMALL = number("above 0 and less than 1", gt=0, lt=1)
STD = number("above 0, and finite", gt=0)
BASE = number("above 1, and finite", gt=1)
TEXT = Kind("text", Annotated[str, Strict()])
SWITCH = Kind("true or false", Annotated[bool, Strict()])


def check_divides(config: Any, whole: str, part: str) -> None:
    """Raises ModelError unless the field ``part`` divides the field ``whole``, with the nearest numbers that do."""
    total, count = getattr(config, whole), getattr(config, part)
    if total % count:
        divisors = [d for d in range(1, total + 1) if total % d == 0]
        near = sorted(sorted(divisors, key=lambda d: abs(d - count))[:4])
        raise ModelError(f"{part} must divide {whole}, but {whole} = {total} and {part} = {count}; near it: {near}")
