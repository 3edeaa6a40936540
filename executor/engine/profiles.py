"""Profiles of an engine: one at a time, bounded in size and time, written off the loop's thread.

    idle ──start──> recording ──stop, drop──> idle
                        ├─ the tracer is full ─> full ──stop, drop──> idle
                        └─ (also full) its time is over ─> ended ──stop, drop, start──> idle

Whoever started one may be gone: when its time is over (`turn`), it is ended and written
by a thread of its own, and stays `ended` until somebody asks what became of it or starts
another one. Its time is looked at between steps, so `due_s` has to wake an idle loop.

A tracer does the recording and says when it has enough; `StepTracer`, which
needs nothing, keeps when each step began and ended. Files are Chrome traces (JSON;
gzipped where the name ends with .gz), for chrome://tracing or Perfetto.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from executor.engine.control import PROFILE_S
from executor.engine.control_seam import TraceExport
from protos.errors import InvalidRequestError, NotNowError, RequestFailedError, shorten

logger = logging.getLogger(__name__)
PROFILE_STEPS_MAX = 10_000
PROFILE_S_MAX = 900.0
WRITE_S_MAX = 600.0
CLOSE_S_MAX = 2.0
PATH_LENGTH_MAX = 4096
NAME_BYTES_MAX = 200
"""Of the file's name: a rank's own and the one of the unfinished file are somewhat longer, and
file systems take 255."""

WriteTrace = Callable[[Path], None]


class Tracer(Protocol):
    """Records from `start` to `stop`, both on the thread that steps."""

    def start(self) -> None: ...

    def on_step(self, began_s: float, ended_s: float, num_outputs: int) -> None: ...

    @property
    def is_full(self) -> bool:
        """Whether it should be stopped after this step: a trace takes memory."""

    def stop(self) -> WriteTrace:
        """What writes the trace, on any thread. Raises OSError or RuntimeError."""


class StepTracer:
    """Steps alone: their times and how many outputs each had."""

    def __init__(self, name: str, steps_max: int = PROFILE_STEPS_MAX) -> None:
        self._name = name
        self._steps_max = steps_max
        self._steps: list[tuple[float, float, int]] = []

    def start(self) -> None:
        self._steps = []

    def on_step(self, began_s: float, ended_s: float, num_outputs: int) -> None:
        self._steps.append((began_s, ended_s, num_outputs))

    @property
    def is_full(self) -> bool:
        return len(self._steps) >= self._steps_max

    def stop(self) -> WriteTrace:
        steps, self._steps = self._steps, []
        return lambda path: _write_steps(path, self._name, steps)


class Profiles:
    """See the module's docstring for its states."""

    def __init__(
        self,
        tracer: Tracer,
        name_bytes_max: int = NAME_BYTES_MAX,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tracer = tracer
        self._name_bytes_max = name_bytes_max
        self._clock = clock
        self._path: Path | None = None
        self._began_s = 0.0
        self._due_s = 0.0
        self._num_steps = 0
        self._full: tuple[WriteTrace, float] | None = None
        """Set once the tracer was full: the trace is complete, after so many seconds."""
        self._ended: TraceExport | None = None
        self._writer: _Writer | None = None

    @property
    def is_under_way(self) -> bool:
        """Whether steps and time still matter to it."""
        return self._path is not None

    @property
    def is_recording(self) -> bool:
        return self.is_under_way and self._full is None

    @property
    def due_s(self) -> float | None:
        """When `turn` has something to do, on our clock."""
        return self._due_s if self.is_under_way else None

    def start(self, path: str, max_s: float = PROFILE_S) -> None:
        """Raises NotNowError, InvalidRequestError."""
        self.turn()
        if self._path is not None:
            left_s = max(self._due_s - self._clock(), 0.0)
            raise NotNowError(
                f"a profile for {self._path} is under way; stop it first,"
                f" or wait: it ends by itself in {left_s:.0f} s",
                field="profile",
                value=str(self._path),
            )
        checked = _checked_path(path, self._name_bytes_max)
        check_seconds(max_s)
        self._tracer.start()
        self._path, self._num_steps, self._ended = checked, 0, None
        self._began_s = self._clock()
        self._due_s = self._began_s + max_s

    def on_step(self, began_s: float, ended_s: float, num_outputs: int) -> None:
        if self.is_recording:
            self._tracer.on_step(began_s, ended_s, num_outputs)
            self._num_steps += 1
            if self._tracer.is_full:
                self._full = self._tracer.stop(), self._clock() - self._began_s
        self.turn()

    def turn(self) -> None:
        """Between steps: a profile whose time is over is ended, and its file written."""
        if self.is_under_way and self._clock() >= self._due_s:
            export = self._take()
            self._writer = _Writer(export)
            self._writer.start()
            self._ended = dataclasses.replace(export, write=self._writer.wait)

    def stop(self) -> TraceExport:
        """The one under way, or the one that its time has ended. Raises NotNowError."""
        if self.is_under_way:
            return self._take()
        ended, self._ended = self._ended, None
        if ended is None:
            raise NotNowError("no profile is under way", field="profile")
        return ended

    def _take(self) -> TraceExport:
        path = self._path
        assert path is not None
        is_full = self._full is not None
        if self._full is None:
            self._full = self._tracer.stop(), self._clock() - self._began_s
        write_trace, recorded_s = self._full
        self._path = self._full = None
        return TraceExport(
            str(path),
            self._num_steps,
            lambda: _write(path, write_trace),
            recorded_s=recorded_s,
            is_full=is_full,
        )

    def drop(self, path: str) -> None:
        """What is recorded is dropped, where it is the one for this path."""
        if self._path == Path(path):
            self._take()

    def close(self) -> None:
        """Recording ends; what was recorded is dropped. A file that is being written is given
        a moment; its thread ends with the process."""
        if self.is_under_way:
            self._take()
        if self._writer is not None:
            self._writer.join(CLOSE_S_MAX)


class _Writer(threading.Thread):
    """Writes what nobody has asked for yet; `wait` tells what came of it, on any thread."""

    def __init__(self, export: TraceExport) -> None:
        super().__init__(name="profile-writer", daemon=True)
        self._export = export
        self._num_bytes = 0
        self._error: RequestFailedError | None = None

    def run(self) -> None:
        try:
            self._num_bytes = self._export.write()
        except RequestFailedError as error:
            logger.warning("a profile whose time was over: %s", error)
            self._error = error
        else:
            logger.info(
                "a profile whose time was over is written: %s, %d steps",
                self._export.path,
                self._export.num_steps,
            )

    def wait(self) -> int:
        """As TraceExport.write."""
        self.join(WRITE_S_MAX)
        if self._error is not None:
            raise self._error
        if self.is_alive():
            raise RequestFailedError(f"the trace {self._export.path} is still being written")
        return self._num_bytes


def check_seconds(max_s: float) -> None:
    """Raises InvalidRequestError."""
    if not 0 < max_s <= PROFILE_S_MAX:  # so is a NaN
        limit = f"above 0 and at most {PROFILE_S_MAX:g}"
        raise InvalidRequestError(
            f"max_s is {max_s:g}; it must be {limit}", field="max_s", value=max_s, limit=limit
        )


def _checked_path(text: str, name_bytes_max: int) -> Path:
    try:
        return _looked_at(text, name_bytes_max)
    except (OSError, ValueError):  # the system refuses even to look at it
        raise _bad_path(text, "in a folder that exists and can be written to") from None


def _looked_at(text: str, name_bytes_max: int) -> Path:
    path = Path(text)
    if not 0 < len(text) <= PATH_LENGTH_MAX or "\0" in text or not path.is_absolute():
        raise _bad_path(text, f"an absolute path of at most {PATH_LENGTH_MAX} characters")
    if len(path.name.encode()) > name_bytes_max:
        raise _bad_path(text, f"a file whose name has at most {name_bytes_max} bytes")
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK | os.X_OK):
        raise _bad_path(text, "in a folder that exists and can be written to")
    if path.is_dir():
        raise _bad_path(text, "a file, not a folder")
    return path


def _bad_path(value: str, limit: str) -> InvalidRequestError:
    shown = shorten(value)
    return InvalidRequestError(
        f"path is {shown!r}; it must be {limit}", field="path", value=repr(shown), limit=limit
    )


def _write(path: Path, write_trace: WriteTrace) -> int:
    """Nobody sees half a file: it gets its name when it is complete."""
    partial = path.with_name(f".{os.getpid()}.{path.name}")
    try:
        write_trace(partial)
        num_bytes = partial.stat().st_size
        partial.replace(path)
    except (OSError, RuntimeError) as error:
        partial.unlink(missing_ok=True)
        raise RequestFailedError(
            f"the trace {path} was not written: {error}", field="path", value=str(path)
        ) from error
    return num_bytes


def _write_steps(path: Path, name: str, steps: list[tuple[float, float, int]]) -> None:
    process = os.getpid()
    events = [
        {
            "name": f"{name} step",
            "ph": "X",
            "ts": began_s * 1e6,
            "dur": (ended_s - began_s) * 1e6,
            "pid": process,
            "tid": 0,
            "args": {"step": index, "outputs": num_outputs},
        }
        for index, (began_s, ended_s, num_outputs) in enumerate(steps)
    ]
    text = json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
    data = text.encode()
    path.write_bytes(gzip.compress(data) if path.name.endswith(".gz") else data)
