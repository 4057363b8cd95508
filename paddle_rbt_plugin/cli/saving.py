"""Files that a command is asked to write: refused before the work where they cannot be written."""

from __future__ import annotations

import tempfile
from pathlib import Path

from paddle_rbt_plugin.errors import TunerError
from paddle_rbt_plugin.plan.files import write_whole


def check_writable(path: str) -> None:
    """Raises TunerError, with the reason, where no file can be written; leaves nothing behind."""
    target = Path(path)
    try:
        if not path:
            raise TunerError("a file needs a name, and '' is none")
        if not target.absolute().parent.is_dir():
            raise TunerError(f"{path!r} cannot be written: there is no folder {str(target.parent)!r}")
        target.exists()  # a name that is too long is an error
        tempfile.TemporaryFile(dir=target.parent).close()
    except OSError as error:
        raise _error(path, error) from error


def save_file(path: str, content: str | bytes) -> None:
    """Writes a file as a whole or not at all. Raises TunerError."""
    try:
        write_whole(path, content)
    except OSError as error:
        raise _error(path, error) from error


def _error(path: str, error: OSError) -> TunerError:
    return TunerError(f"{path!r} cannot be written: {error.strerror or error}")
