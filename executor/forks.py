"""Descriptors that a forked child of this process must not hold on to.

Some of our children take the end of a pipe for our end. A process that is forked from us (a
user's own, by multiprocessing) inherits our side of that pipe, and would keep it open when we
close it, or are killed. So there every such descriptor is put on /dev/null, whose number stays
taken: what closes it later closes nothing else.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Iterator
from typing import Protocol


class HasDescriptor(Protocol):
    def fileno(self) -> int:
        """Negative, or ValueError, once it is closed."""


_lock = threading.RLock()
_ours_alone: weakref.WeakSet[HasDescriptor] = weakref.WeakSet()


@contextlib.contextmanager
def no_forks() -> Iterator[None]:
    """Other threads that fork wait meanwhile: for opening something and telling of it."""
    with _lock:
        yield


def keep_from_forks(holder: HasDescriptor) -> None:
    """From now on, for as long as `holder` is held by anybody."""
    _ours_alone.add(holder)


def _in_child() -> None:
    _lock.release()
    nothing = os.open(os.devnull, os.O_RDWR)
    for holder in _ours_alone:
        with contextlib.suppress(OSError, ValueError):  # it is closed
            os.dup2(nothing, holder.fileno(), inheritable=False)
    os.close(nothing)
    _ours_alone.clear()


os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_in_child)
