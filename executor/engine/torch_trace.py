"""torch's own profiler as an engine's tracer: operators, and kernels on a GPU.

A layer leaves some 250 events a step. Ending a recording takes torch about 16
microseconds and 6 kB for each event, holding the interpreter's lock throughout
(measured, torch 2.13): a trace of a million events would make the worker look
dead. So a recording is full after a number of layers run, which takes under a
second to end; steps behind it are not in the trace.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from executor.engine.profiles import WriteTrace
from protos.errors import RequestFailedError

LAYERS_MAX = 160
"""Layers run, over all steps of a recording."""


class TorchTracer:
    """Starts and stops on the thread that steps; the trace is written on any.

    `num_layers_run` counts over the engine's life.
    """

    def __init__(self, device: torch.device, num_layers_run: Callable[[], int]) -> None:
        self._num_layers_run = num_layers_run
        self._num_layers_before = 0
        self._activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            self._activities.append(ProfilerActivity.CUDA)
        self._profile: profile | None = None

    def start(self) -> None:
        recording = profile(activities=self._activities)
        try:
            recording.start()
        except RuntimeError as error:
            raise RequestFailedError(f"torch's profiler did not start: {error}") from error
        self._profile = recording
        self._num_layers_before = self._num_layers_run()

    def on_step(self, began_s: float, ended_s: float, num_outputs: int) -> None:
        """torch records by itself."""

    @property
    def is_full(self) -> bool:
        return self._num_layers_run() - self._num_layers_before >= LAYERS_MAX

    def stop(self) -> WriteTrace:
        recording, self._profile = self._profile, None
        assert recording is not None, "stopped before it was started"
        failure: RuntimeError | None = None
        try:
            recording.stop()
        except RuntimeError as error:  # told to whoever wants the file; the engine steps on
            failure = error

        def write(path: Path) -> None:
            if failure is not None:
                raise failure
            recording.export_chrome_trace(str(path))

        return write
