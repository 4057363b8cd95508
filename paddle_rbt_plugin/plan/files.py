"""Writes files completely or not at all, and checks in advance whether they can be written."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from paddle_rbt_plugin.errors import TunerError


def check_writable(path: str | os.PathLike[str]) -> None:
    """Raises TunerError, with the reason, if the file cannot be written; leaves nothing behind."""
    target = Path(path)
    try:
        if not str(path):
            raise TunerError("a file needs a name, and '' is none")
        if target.is_dir():
            raise TunerError(f"{str(path)!r} cannot be written: it is a folder; name a file in it")
        if _is_special(target):
            return
        folder = _real(target).parent
        if not folder.is_dir():
            raise TunerError(f"{str(path)!r} cannot be written: there is no folder {str(target.parent)!r}")
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise _unwritable(path, error) from error


def save_file(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Like ``write_whole``, but raises TunerError."""
    try:
        write_whole(path, content)
    except OSError as error:
        raise _unwritable(path, error) from error


def write_whole(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Moves a file into place once it is written completely, so that an interruption leaves the previous file and nothing else.
    A path that is not a regular file, such as /dev/stdout, is written to directly. Raises OSError."""
    data = content.encode() if isinstance(content, str) else content
    if _is_special(Path(path)):
        Path(path).write_bytes(data)
        return
    target = _real(Path(path))
    with tempfile.NamedTemporaryFile("wb", dir=target.parent, prefix=".paddle-rbt-", delete=False) as file:
        try:
            file.write(data)
            file.close()
            os.chmod(file.name, 0o644)
            os.replace(file.name, target)
        except BaseException:
            os.unlink(file.name)
            raise


def _unwritable(path: str | os.PathLike[str], error: OSError) -> TunerError:
    return TunerError(f"{str(path)!r} cannot be written: {error.strerror or error}")


def _is_special(target: Path) -> bool:
    """Whether the path exists but is not a regular file: a device or a pipe, which must not be replaced."""
    return target.exists() and not target.is_file()


def _real(target: Path) -> Path:
    """The target of a symbolic link, so that the link is kept."""
    return Path(os.path.realpath(target))
