"""Folders for sockets that do not outlive their process for long, SIGKILL or not.

    made -> locked (flock) -> closed: removed
                           -> its process was killed: nobody holds the lock, and
                              the next one to make such a folder removes it

The lock and not the pid in the name says who lives: it holds across containers that
share a /tmp, and no pid is taken for another's.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

_TRIES_MAX = 8


class ScratchFolder:
    """A fresh 0700 folder in `parent` (none: TMPDIR); `close` removes it and is safe twice."""

    def __init__(self, prefix: str, parent: Path | None = None) -> None:
        sweep(prefix, parent)
        for _ in range(_TRIES_MAX):
            self.path = Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-", dir=parent))
            lock = _lock(self.path)
            if lock is not None:
                self._lock = lock
                return
        raise OSError(f"others remove what is made in {self.path.parent}")

    def close(self) -> None:
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def sweep(prefix: str, parent: Path | None = None) -> None:
    """Remove what killed processes of this user left."""
    for path in (parent or Path(tempfile.gettempdir())).glob(f"{prefix}*"):
        lock = _lock(path)
        if lock is not None:
            shutil.rmtree(path, ignore_errors=True)
            os.close(lock)


def _lock(path: Path) -> int | None:
    """A descriptor that holds the folder; None where it is another's, or gone by now."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        is_ours = os.fstat(descriptor).st_uid == os.geteuid()
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if is_ours and os.path.samestat(os.fstat(descriptor), os.lstat(path)):
            return descriptor
    except OSError:
        pass
    os.close(descriptor)
    return None
