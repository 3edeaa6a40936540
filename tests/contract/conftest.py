"""The executor under contract: one per form and file, over the scripted engine."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from executor.executor import GenerationExecutor
from tests.support.executor_scripted import CONTRACT, CharTokenizer, posted, running


@pytest_asyncio.fixture(
    loop_scope="module", scope="module", params=[0, 2], ids=["ipc", "ipc-post2"]
)
async def executor(request: pytest.FixtureRequest) -> AsyncIterator[GenerationExecutor]:
    engine = posted(CONTRACT, request.param)
    async with running(engine, tokenizer=CharTokenizer(), deadline_grace_s=1.0) as executor:
        yield executor
