"""The worker's heart: it beats on a thread of its own, whatever the engine computes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from executor.engine.factory import create_engine
from executor.engine.seam import EngineRequest
from executor.messages import Heartbeat
from executor.worker import Heart
from protos.messages import RequestType, SamplingParams
from protos.tokens import pack_token_ids
from tests.support.engine_drive import engine_config
from tests.support.engine_models import save_checkpoint

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


def test_a_long_step_shows_its_progress_from_within(tmp_path: Path) -> None:
    """A large model on a few cores takes longer for one step than the stall bound: the watch
    took that for a loop that stands, failed its requests and killed the worker."""
    config = engine_config(save_checkpoint("llama", tmp_path))
    engine = create_engine(config, lambda: None)
    num_layers = engine.identity.layout.num_layers
    assert num_layers > 1
    engine.submit(
        EngineRequest(
            request_id=1,
            request_type=RequestType.CONTEXT_AND_GENERATION,
            prompt_token_ids=pack_token_ids((5, 6, 7)),
            sampling=SamplingParams(max_tokens=2, seed=0, ignore_eos=True),
            deadline_s=30.0,
        )
    )
    before = engine.progress
    engine.step()
    assert engine.progress == before + num_layers
    engine.close()
