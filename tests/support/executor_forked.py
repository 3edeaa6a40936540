"""`python -m tests.support.executor_forked`: a program that forks a child while its executor has
postprocess workers. It prints the child and the workers, and then ends as its standard input
does. The executor lives in a thread, whose end tells the workers nothing."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
import time

from executor.proxy import Proxy
from tests.support.executor_scripted import CharTokenizer, config, posted, running

FORKED_S_MAX = 120.0


def fork() -> int:
    forked = os.fork()
    if forked == 0:
        time.sleep(FORKED_S_MAX)
        os._exit(0)
    return forked


async def main() -> None:
    async with running(posted(config(), 2), tokenizer=CharTokenizer()) as executor:
        assert isinstance(executor, Proxy)
        print(fork(), *executor.worker_pids, *executor.post_pids, flush=True)
        sys.stdin.readline()


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    thread = threading.Thread(target=asyncio.run, args=(main(),))
    thread.start()
    thread.join()
