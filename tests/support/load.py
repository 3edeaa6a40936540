"""A load of real prompts whose every answer is compared with the reference as it streams."""

from __future__ import annotations

import time

from baton import AsyncClient
from protos.errors import BatonError
from tests.support.golden import GOLDEN

MAX_TOKENS = 32


class Load:
    """Streams of mixed prompts, opened one after the other until told to stop."""

    def __init__(self, client: AsyncClient) -> None:
        self.client = client
        self.num_tokens = 0
        self.num_finished = 0
        self.failures: list[tuple[float, BatonError]] = []
        self.is_over = False

    async def run_stream(self, index: int) -> None:
        turn = index
        while not self.is_over:
            prompt = GOLDEN[turn % len(GOLDEN)]
            turn += 16
            try:
                stream = await self.client.generate(
                    prompt.prompt_ids,
                    max_tokens=MAX_TOKENS,
                    ignore_eos=True,
                    stream=True,
                    timeout_s=60,
                )
                received: list[int] = []
                async for chunk in stream:
                    received += chunk.token_ids
                    self.num_tokens += len(chunk.token_ids)
            except BatonError as error:
                self.failures.append((time.monotonic(), error))
                return
            assert received == prompt.output_ids[: len(received)]
            assert len(received) == MAX_TOKENS
            self.num_finished += 1
