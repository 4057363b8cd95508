"""Reads a PIR program from a file, as ``paddle.static.save`` and ``paddle.jit.save`` write it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import paddle

from paddle_rbt_plugin.errors import ModelError


def load_program(path: str) -> Any:
    """The program of a ``.json`` file; reading it executes nothing. Raises ModelError for a file that holds none."""
    program = paddle.static.Program()
    try:
        Path(path).open("rb").close()
        paddle.base.core.deserialize_pir_program(path, program)
    except OSError as error:
        raise ModelError(f"the program {path!r} cannot be read: {error.strerror}") from error
    except (RuntimeError, ValueError) as error:
        cause = str(error).strip().splitlines()[0]
        raise ModelError(f"{path!r} is not a PIR program as paddle.static.save writes it (.json): {cause}") from error
    return program
