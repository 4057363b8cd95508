"""Writes files as a whole or not at all, and says beforehand whether they can be written."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from paddle_rbt_plugin.errors import TunerError


def check_writable(path: str | os.PathLike[str]) -> None:
    """Raises TunerError, with the reason, where no file can be written; leaves nothing behind."""
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
    """Writes a file as ``write_whole`` does. Raises TunerError."""
    try:
        write_whole(path, content)
    except OSError as error:
        raise _unwritable(path, error) from error


def write_whole(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Puts a file in place once all of it is written, so that whatever interrupts it leaves what was there before, and nothing
    else; what is no regular file, as /dev/stdout, is written to. Raises OSError."""
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
    """Whether it is there and no regular file: a device or a pipe, which must not be replaced by one."""
    return target.exists() and not target.is_file()


def _real(target: Path) -> Path:
    """The file that a link leads to, so that the link stays one."""
    return Path(os.path.realpath(target))
