"""Files that keep for later runs what depends on nothing but its key: their folder, their form, and how they give way.

    FOLDER/BUILD/NAME.jsonl      the first line: identity of the build, checksum of what follows; then lines of data

Files hold data only, and can be deleted at any time. A file that is broken, or another build's, is ignored and written anew.
Files are replaced atomically, so several processes can share a folder, also on a network file system. A folder that cannot be
written is not an error.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from zlib import crc32

from platformdirs import user_cache_path

from paddle_rbt_plugin.errors import TunerError

CACHE_VARIABLE = "PADDLE_RBT_CACHE"
MOST_BYTES = 256 * 2**20
"""What all files take together; those that were used least recently go first."""

_OFF = ("off", "0", "false", "no")
_ON = ("", "on", "1", "true", "yes")
_SUFFIX = ".jsonl"
_ABANDONED_S = 3600.0
_FLAGS = (
    "FLAGS_enable_auto_parallel_align_mode",
    "FLAGS_enable_fuse_parallel_matmul_pass",
    "FLAGS_prim_backward",
    "FLAGS_prim_forward",
    "FLAGS_prim_forward_blacklist",
)
"""Flags of Paddle that change which ops it builds, or how they are sharded."""


def cache_folder(setting: bool | str | os.PathLike[str] | None) -> Path | None:
    """The folder of the cache; None where it is off. ``setting`` is a folder, ``"off"`` or False, ``"on"`` or True, or None for
    what ``PADDLE_RBT_CACHE`` says, by default the user's cache folder. Raises TunerError for something that is not a folder."""
    chosen = os.environ.get(CACHE_VARIABLE, "") if setting is None else setting
    if chosen is False or (isinstance(chosen, str) and chosen.lower() in _OFF):
        return None
    if chosen is True or (isinstance(chosen, str) and chosen.lower() in _ON):
        return user_cache_path("paddle-rbt-plugin", appauthor=False) / "answers"
    folder = Path(chosen).expanduser()
    if folder.exists() and not folder.is_dir():
        where = CACHE_VARIABLE if setting is None else "cache"
        raise TunerError(f"{where} must be a folder, 'on' or 'off', not the file {str(folder)!r}")
    return folder


def build_of_paddle() -> list[object]:
    """What tells builds and settings of Paddle apart that may answer differently."""
    import paddle
    from paddle.base import core

    about = paddle.version
    known = core.globals()
    flags = {name: str(known[name]) for name in _FLAGS if name in known.keys()}  # noqa: SIM118
    prim = [getattr(core, f"_is_{direction}_prim_enabled")() for direction in ("fwd", "bwd")]
    return [(about.full_version, about.commit, str(about.cuda())), flags, prim]


def file_of(folder: Path, identity: str, name: str) -> Path:
    """Where a file of that name is kept for a build."""
    return folder / blake2b(identity.encode(), digest_size=8).hexdigest() / f"{name}{_SUFFIX}"


def read_lines(path: Path, identity: str) -> list[bytes]:
    """The lines of a file after the first; none if it is missing, broken, or another build's."""
    try:
        header, _, body = path.read_bytes().partition(b"\n")
        first = json.loads(header)
        if first["build"] != identity or first["checksum"] != crc32(body):
            return []
        return body.splitlines()
    except (OSError, ValueError, TypeError, LookupError):
        return []


def mark_used(path: Path) -> None:
    """Files that were used least recently are deleted first."""
    with suppress(OSError):
        os.utime(path)


def write_lines(path: Path, identity: str, lines: Iterable[bytes]) -> None:
    """Replaces a file atomically. Raises OSError."""
    body = b"\n".join(lines)
    header = json.dumps({"build": identity, "checksum": crc32(body)}).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(header + b"\n" + body)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise


def prune(folder: Path) -> None:
    """Deletes the files that were used least recently while all take too much, and what processes that were killed left."""
    left = MOST_BYTES
    with suppress(OSError):
        found = [(path.stat(), path) for path in folder.glob("*/*") if path.suffix in (_SUFFIX, ".tmp")]
        for stat, path in sorted(found, key=lambda entry: -entry[0].st_mtime):
            if path.suffix == _SUFFIX:
                left -= stat.st_size
                unwanted = left < 0
            else:
                unwanted = time.time() - stat.st_mtime > _ABANDONED_S
            if unwanted:
                path.unlink(missing_ok=True)
