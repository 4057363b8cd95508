"""Argument lists of Paddle's C++ API, read from the headers that every wheel ships.

``paddle._C_ops`` takes its arguments in the order of ``paddle/phi/api/include/api.h`` and ``fused_api.h``. The headers also
say which operands of an op are really attributes that may be given as tensors (``IntArray``, ``Scalar``): these are what the
readers fold.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Literal

from paddle_rbt_plugin.errors import UnsupportedProgram

ArgumentKind = Literal["tensor", "constant", "attribute"]

# Output buffers that newer headers append to each function; the Python binding does not take them.
_OUTPUT_ARGUMENTS = ("predefined_out", "input_out")
_FUNCTION = re.compile(r"PADDLE_API [^;()]*?\b(\w+)\(([^;]*?)\);")
_NAME = re.compile(r".*?(\w+)\s*(?:=.*)?$", re.DOTALL)


@dataclass(frozen=True)
class Argument:
    """``kind`` is ``tensor``, ``constant`` (an attribute that may come as a tensor) or ``attribute``."""

    name: str
    kind: ArgumentKind
    type: str
    """C++ type as written in the header."""


def _split_top_level(arguments: str) -> Iterator[str]:
    """Splits at commas that stand outside of brackets of any kind."""
    depth, start = 0, 0
    for i, char in enumerate(arguments):
        depth += (char in "<({") - (char in ">)}")
        if char == "," and depth == 0:
            yield arguments[start:i]
            start = i + 1
    if arguments[start:].strip():
        yield arguments[start:]


def _argument(declaration: str) -> Argument:
    declaration = declaration.strip()
    match = _NAME.match(declaration)
    assert match is not None, declaration
    name = match.group(1)
    type_ = declaration[: match.start(1)].strip()
    kind: ArgumentKind = "attribute"
    if "IntArray" in type_ or re.search(r"\bScalar\b", type_):
        kind = "constant"
    elif re.search(r"\bTensor\b", type_):
        kind = "tensor"
    return Argument(name, kind, type_)


@lru_cache(maxsize=1)
def _declarations() -> dict[str, str]:
    """The text between the brackets of each function."""
    spec = importlib.util.find_spec("paddle")
    if spec is None or spec.origin is None:
        raise UnsupportedProgram("PaddlePaddle is not installed: pip install 'paddle-rbt-plugin[cpu]' or '[gpu]'")
    headers = Path(spec.origin).parent / "include/paddle/phi/api/include"
    declarations: dict[str, str] = {}
    for header in ("api.h", "fused_api.h"):
        for match in _FUNCTION.finditer((headers / header).read_text(encoding="utf-8")):
            declarations.setdefault(match.group(1), match.group(2))
    return declarations


@lru_cache(maxsize=1)
def known_ops() -> frozenset[str]:
    """The canonical names of all ops of the installed Paddle, those that no C++ function stands for included."""
    import paddle

    functions = (name for name in dir(paddle._C_ops) if not name.startswith("_"))
    return frozenset(name.removesuffix("_") for name in (*_declarations(), *functions))


@cache
def signature(op: str) -> tuple[Argument, ...] | None:
    """Arguments of ``paddle._C_ops.<op>`` in order; None for an op that the installed Paddle does not list."""
    if op not in _declarations():
        return None
    arguments = map(_argument, _split_top_level(_declarations()[op]))
    return tuple(a for a in arguments if a.name not in _OUTPUT_ARGUMENTS)
