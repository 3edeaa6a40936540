"""torch's own profiler as an engine's tracer: operators, and kernels on a GPU.

Recording holds some hundred bytes for
every operator of every step, so it ends by itself after a while.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from executor.engine.profiles import WriteTrace
from protos.errors import RequestFailedError


class TorchTracer:
    """Starts and stops on the thread that steps; the trace is written on any."""

    def __init__(self, device: torch.device) -> None:
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

    def on_step(self, began_s: float, ended_s: float, num_outputs: int) -> None:
        """torch records by itself."""

    def stop(self) -> WriteTrace:
        recording, self._profile = self._profile, None
        assert recording is not None, "stopped before it was started"
        recording.stop()
        return lambda path: _export(recording, path)


def _export(recording: profile, path: Path) -> None:
    recording.export_chrome_trace(str(path))
