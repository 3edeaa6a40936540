"""Profiles of an engine: one at a time, bounded, written by whoever has the time.

    idle ──start──> recording ──stop, drop──> idle
                        └─ the tracer is full ─> full ──stop, drop──> idle

A tracer does the recording and says when it has enough; `StepTracer`, which
needs nothing, keeps when each step began and ended. Files are Chrome traces (JSON;
gzipped where the name ends with .gz), for chrome://tracing or Perfetto.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from executor.engine.control_seam import TraceExport
from protos.errors import InvalidRequestError, NotNowError, RequestFailedError, shorten

PROFILE_STEPS_MAX = 10_000
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

    def __init__(self, tracer: Tracer, name_bytes_max: int = NAME_BYTES_MAX) -> None:
        self._tracer = tracer
        self._name_bytes_max = name_bytes_max
        self._path: Path | None = None
        self._num_steps = 0
        self._write: WriteTrace | None = None
        """Set once the tracer was full: the trace is complete."""

    @property
    def is_recording(self) -> bool:
        return self._path is not None and self._write is None

    def start(self, path: str) -> None:
        """Raises NotNowError, InvalidRequestError."""
        if self._path is not None:
            raise NotNowError(
                f"a profile for {self._path} is under way; stop it first",
                field="profile",
                value=str(self._path),
            )
        checked = _checked_path(path, self._name_bytes_max)
        self._tracer.start()
        self._path, self._num_steps = checked, 0

    def on_step(self, began_s: float, ended_s: float, num_outputs: int) -> None:
        if not self.is_recording:
            return
        self._tracer.on_step(began_s, ended_s, num_outputs)
        self._num_steps += 1
        if self._tracer.is_full:
            self._write = self._tracer.stop()

    def stop(self) -> TraceExport:
        """Raises NotNowError."""
        path = self._path
        if path is None:
            raise NotNowError("no profile is under way", field="profile")
        write_trace = self._write or self._tracer.stop()
        self._path = self._write = None
        return TraceExport(str(path), self._num_steps, lambda: _write(path, write_trace))

    def drop(self, path: str) -> None:
        """As `close`, where it is the one for this path."""
        if self._path == Path(path):
            self.close()

    def close(self) -> None:
        """Recording ends; what was recorded is dropped."""
        if self._path is not None:
            self.stop()


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
