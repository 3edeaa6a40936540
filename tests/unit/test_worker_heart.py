"""The worker's heart: it beats on a thread of its own, whatever the engine computes."""

from __future__ import annotations

import time
from typing import Any

import torch

from executor.messages import Heartbeat
from executor.worker import Heart

PERIOD_S = 0.01
ALLOWANCE = 5
SILENCE_S = 3.0


class Outbox:
    """Notes when the heart beat."""

    def __init__(self) -> None:
        self.beats_s: list[float] = []

    def beat(self, _: Heartbeat) -> None:
        self.beats_s.append(time.monotonic())


class Worker:
    def heartbeat(self) -> Heartbeat:
        return Heartbeat(0, is_busy=True)


def test_the_heart_beats_during_a_long_step_of_torch() -> None:
    """Guards a long model step that looks like silence."""
    outbox: Any = Outbox()
    worker: Any = Worker()
    heart = Heart(worker, outbox, PERIOD_S)
    matrix = torch.rand(2048, 2048)
    began_s = time.monotonic()
    heart.start()
    matrix @ matrix  # one call of some hundred milliseconds
    heart.stop()
    took_s = time.monotonic() - began_s
    gaps = [b - a for a, b in zip([began_s, *outbox.beats_s], outbox.beats_s, strict=False)]
    assert max(gaps) < SILENCE_S
    assert len(outbox.beats_s) >= took_s / PERIOD_S / ALLOWANCE
