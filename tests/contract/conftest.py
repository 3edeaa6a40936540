"""The executor under contract: one per file, over the scripted engine."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio

from executor.executor import GenerationExecutor
from tests.support.executor_scripted import CONTRACT, CharTokenizer, running


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def executor() -> AsyncIterator[GenerationExecutor]:
    async with running(CONTRACT, tokenizer=CharTokenizer(), deadline_grace_s=1.0) as executor:
        yield executor
