"""`python -m tests.support.executor_unclosed forgotten|hurried`: a program that does not
end its executor. It says which processes it has, and when its loop has ended; it holds the
executor until its standard input ends, and then collects its garbage."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import sys
from typing import Any

from executor.executor import GenerationExecutor
from executor.proxy import Proxy
from tests.support.executor_scripted import CharTokenizer, config, posted, request, toy_spec


async def main(how: str) -> Proxy:
    tokenizer: Any = CharTokenizer()
    executor = await GenerationExecutor.create(
        posted(config(), 1), name="test", tokenizer=tokenizer, tokenizer_spec=toy_spec(tokenizer)
    )
    assert isinstance(executor, Proxy)
    print(*executor.worker_pids, *executor.post_pids, flush=True)
    await executor.submit(request())
    if how == "hurried":
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(executor.shutdown(), 0.0005)
    return executor


if __name__ == "__main__":
    held = [asyncio.run(main(sys.argv[1]))]
    print("its loop has ended", flush=True)
    sys.stdin.read()
    held.clear()
    gc.collect()
