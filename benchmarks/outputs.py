"""Where a benchmark writes what it found."""

from __future__ import annotations

import argparse
from pathlib import Path

from paddle_rbt_plugin.errors import TunerError
from paddle_rbt_plugin.plan.files import check_writable


def output_file(name: str) -> Path:
    """An argument that names a file to write, refused before the minutes of work where it cannot be written."""
    try:
        check_writable(name)
    except TunerError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return Path(name)
