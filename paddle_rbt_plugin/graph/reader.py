"""Reads a static program of either IR."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paddle_rbt_plugin.graph.graph import Graph
from paddle_rbt_plugin.graph.legacy import read_legacy_program
from paddle_rbt_plugin.graph.pir import read_pir_program


def is_legacy(program: Any) -> bool:
    """Whether a program is of the legacy IR: it is described by a protobuf, which PIR knows nothing of."""
    return hasattr(program, "desc")


def read_program(
    program: Any, loss: Any = None, structured_names: Mapping[str, str] | None = None, needs_loss: bool = True
) -> Graph:
    """Graph of a serial forward program, the same whichever IR it is written in.

    ``loss`` is the value to minimise; without it, the program's only floating-point scalar that nothing else reads.
    ``structured_names`` maps parameter names to their paths in ``named_parameters()``. Without ``needs_loss`` the program may
    lack one, as that of prediction does.

    Raises UnsupportedProgram for an empty program, one that is not a forward program, one without a loss, and for dynamic
    shapes and control flow.
    """
    if is_legacy(program):
        return read_legacy_program(program, loss, structured_names, needs_loss).graph
    return read_pir_program(program, loss, structured_names, needs_loss)
