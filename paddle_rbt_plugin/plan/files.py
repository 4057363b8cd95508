"""Writes files as a whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write_whole(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Puts a file in place once all of it is written, so that whatever interrupts it leaves what was there before, and nothing
    else. Raises OSError."""
    target = Path(path)
    data = content.encode() if isinstance(content, str) else content
    with tempfile.NamedTemporaryFile("wb", dir=target.parent, prefix=".paddle-rbt-", delete=False) as file:
        try:
            file.write(data)
            file.close()
            os.chmod(file.name, 0o644)
            os.replace(file.name, target)
        except BaseException:
            os.unlink(file.name)
            raise
