"""What becomes of a logits processor that fails: its own request, whatever it raises."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
import torch

from executor.engine.local import LocalExtras
from executor.engine.processing import apply_processors
from executor.engine.seam import EngineRequest
from executor.engine.sequence import Sequence
from protos.messages import RequestType, SamplingParams
from protos.tokens import pack_token_ids

REQUEST = EngineRequest(
    request_id=1,
    request_type=RequestType.CONTEXT_AND_GENERATION,
    prompt_token_ids=pack_token_ids((1, 2)),
    sampling=SamplingParams(max_tokens=1, seed=0),
    deadline_s=1.0,
)


class OddError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def sequence(processor: Any) -> Sequence:
    return Sequence(
        request=msgspec.structs.replace(REQUEST, local=LocalExtras(logits_processor=processor)),
        tokens=[1, 2],
        num_prompt=2,
        max_tokens=1,
        hashes=[],
        root=b"",
        arrived_s=0.0,
        deadline_s=1.0,
    )


def raising(error: BaseException) -> Any:
    def processor(*_: object) -> Any:
        raise error

    return processor


@pytest.mark.parametrize("error", [OddError(), SystemExit(4), asyncio.CancelledError()])
def test_what_a_processor_raises_ends_its_own_request(error: BaseException) -> None:
    """Bug: an exception whose `__str__` raises, and SystemExit, ended the engine, and the requests
    of everyone else with it."""
    rows = [sequence(raising(error)), sequence(lambda _, logits: logits + 1)]
    logits = torch.zeros(2, 3)
    failure, fine = apply_processors(rows, logits)
    assert failure is not None
    assert type(error).__name__ in failure.message
    assert fine is None
    assert logits.tolist() == [[0.0] * 3, [1.0] * 3]


def test_an_interrupt_goes_on() -> None:
    with pytest.raises(KeyboardInterrupt):
        apply_processors([sequence(raising(KeyboardInterrupt()))], torch.zeros(1, 3))
