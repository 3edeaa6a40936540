"""`python -m tests.support.executor_unclosed forgotten|hurried`: a program that does not
end its executor. It says which processes it has, once its garbage is collected, and then waits
for the end of its standard input."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import sys
from typing import Any

from executor.executor import GenerationExecutor
from executor.proxy import Proxy
from tests.support.executor_scripted import CharTokenizer, config, posted, request, toy_spec


async def main(how: str) -> tuple[int, ...]:
    tokenizer: Any = CharTokenizer()
    executor = await GenerationExecutor.create(
        posted(config(), 1), name="test", tokenizer=tokenizer, tokenizer_spec=toy_spec(tokenizer)
    )
    assert isinstance(executor, Proxy)
    pids = (*executor.worker_pids, *executor.post_pids)
    await executor.submit(request())
    if how == "hurried":
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(executor.shutdown(), 0.0005)
    return pids


if __name__ == "__main__":
    pids = asyncio.run(main(sys.argv[1]))
    gc.collect()
    print(*pids, flush=True)
    sys.stdin.read()
