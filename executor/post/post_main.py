"""`python -m executor.post.post_main`: a postprocess worker, as a frontend spawns it.

It reads its `PostBootstrap` from standard input, whose end is both its stop and
its parent's end. SIGINT is the whole terminal group's and the parent's to judge.
Exit status: 0 told to stop (or the parent is gone), 1 its tokenizer does not load.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import traceback

import msgspec
import zmq

from executor.ipc import (
    FrameOpener,
    FrameReceiver,
    FrameSealer,
    FrameSender,
    new_context,
    open_pair,
)
from executor.last_words import end, last_words
from executor.packing import body_bytes_max
from executor.parent import die_with_parent, watch_standard_input
from executor.post.desk import Desk
from executor.post.messages import (
    FROM_POST,
    TO_POST,
    Died,
    FromPost,
    Hello,
    PostBootstrap,
    Ready,
    Work,
    read_bootstrap,
)
from executor.post.packing import packed_answers

EXIT_FAILED = 1
SEND_SLICE_S = 1.0
LINGER_MS = 2000
WORKS_A_TURN_MAX = 16


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    bootstrap = read_bootstrap(sys.stdin.buffer)
    if bootstrap.dies_with_parent_thread:
        die_with_parent(bootstrap.parent_pid)
    watch_standard_input(status=0)
    return PostProcess(bootstrap).run()


class PostProcess:
    """Sockets around `Desk`. Ends with the process: by its standard input, or by `run`."""

    def __init__(self, bootstrap: PostBootstrap) -> None:
        self._bootstrap = bootstrap
        self._bytes_max = body_bytes_max(bootstrap.message_bytes_max)
        self._context = new_context()
        answers = self._open(bootstrap.answers_endpoint)
        self._sender = FrameSender(answers, FrameSealer(bootstrap.key, FROM_POST))
        opener: FrameOpener[Work] = FrameOpener(bootstrap.key, TO_POST, Work)
        self._opener = opener
        self._receiver = FrameReceiver(self._open(bootstrap.works_endpoint), opener)

    def run(self) -> int:
        self._say(Hello(os.getpid()))
        try:
            desk = Desk(self._bootstrap.tokenizer.load())
        except Exception as error:
            traceback.print_exception(error)
            self._say(Died(last_words(error)))
            self._context.destroy(linger=LINGER_MS)
            return EXIT_FAILED
        self._say(Ready())
        while True:
            self._receiver.socket.poll(None, zmq.POLLIN)
            for work in self._receiver.drain(WORKS_A_TURN_MAX):
                answer = desk.handle(work, self._opener.num_bad)
                for body in packed_answers(answer, self._bytes_max):
                    self._say(body)

    def _say(self, message: FromPost | msgspec.Raw) -> None:
        """Waits for a frontend that does not read; its end ends us meanwhile."""
        while not self._sender.send(message, timeout_s=SEND_SLICE_S):
            pass

    def _open(self, endpoint: str) -> zmq.Socket[bytes]:
        return open_pair(
            self._context,
            endpoint,
            is_server=False,
            queue_messages_max=self._bootstrap.queue_messages_max,
            message_bytes_max=self._bootstrap.message_bytes_max,
            linger_ms=LINGER_MS,
        )


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    end(main())
