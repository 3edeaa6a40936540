"""One postprocess worker as the frontend holds it: its process and the sockets to it.

Life: spawned (sockets bound, bootstrap told), connected (the socket files go),
and one of: exited by itself, `kill`ed, or told to end. `close` frees all. What a
death or a word means is decided by whoever is called.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import threading
from collections.abc import Callable

import zmq

from executor.child import WorkerChild
from executor.dispatcher import Dispatcher
from executor.ipc import (
    KEY_BYTES,
    FrameOpener,
    FrameReceiver,
    FrameSealer,
    FrameSender,
    PrivateDirectory,
    open_pair,
)
from executor.limits import ExecutorLimits
from executor.post.messages import (
    FROM_POST,
    FROM_POST_UNION,
    TO_POST,
    FromPost,
    PostBootstrap,
    Work,
    pack_bootstrap,
)
from executor.post.spec import TokenizerSpec

MODULE = "executor.post.post_main"


class PostWorker:
    """Constructed on the event loop. Raises ConfigError or OSError; nothing is left then."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        tokenizer: TokenizerSpec,
        *,
        name: str,
        limits: ExecutorLimits,
        on_messages: Callable[[list[FromPost]], None],
        on_crash: Callable[[Exception], None],
        on_exit: Callable[[], None],
    ) -> None:
        self._context = context
        self._limits = limits
        self._key = secrets.token_bytes(KEY_BYTES)
        self._directory = PrivateDirectory()
        self._sockets: list[zmq.Socket[bytes]] = []
        try:
            works, answers = self._bind("works"), self._bind("answers")
            self._child = WorkerChild(
                pack_bootstrap(self._bootstrap(tokenizer, name)),
                name=name,
                limits=limits,
                on_exit=on_exit,
                module=MODULE,
                kind="postprocess worker",
            )
        except BaseException:
            self._close_sockets()
            raise
        self._sender = FrameSender(works, FrameSealer(self._key, TO_POST))
        opener: FrameOpener[FromPost] = FrameOpener(self._key, FROM_POST, FROM_POST_UNION)
        self._opener = opener
        self._dispatcher = Dispatcher(
            FrameReceiver(answers, opener),
            asyncio.get_running_loop(),
            on_messages=on_messages,
            on_crash=on_crash,
        )
        self._dispatcher.start()

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def exited(self) -> asyncio.Event:
        return self._child.exited

    @property
    def log_lines(self) -> tuple[str, ...]:
        return self._child.log_lines

    @property
    def num_bad_frames(self) -> int:
        return self._opener.num_bad

    def has_exited(self) -> bool:
        return self._child.has_exited()

    def send(self, work: Work) -> bool:
        """False where it is not connected any more."""
        return self._sender.send(work)

    def forget_files(self) -> bool:
        """Once connected nobody else can come, and a SIGKILL of ours leaves nothing behind."""
        if not self._sender.has_room():
            return False
        self._directory.close()
        return True

    def describe_exit(self) -> str:
        return self._child.describe_exit()

    def kill(self) -> None:
        self._child.kill()

    def end_input(self) -> None:
        """How it is told to stop."""
        self._child.end_input()

    def disconnect(self) -> None:
        """Nothing is delivered after it. Idempotent."""
        self._dispatcher.stop()
        self._close_sockets()

    def close(self) -> None:
        """Frees everything; reaps where the process has ended. Idempotent."""
        self.disconnect()
        self._child.close()

    def _bind(self, name: str) -> zmq.Socket[bytes]:
        socket = open_pair(
            self._context,
            self._directory.endpoint(name),
            is_server=True,
            queue_messages_max=self._limits.queue_messages_max,
            message_bytes_max=self._limits.message_bytes_max,
            linger_ms=0,
        )
        self._sockets.append(socket)
        return socket

    def _bootstrap(self, tokenizer: TokenizerSpec, name: str) -> PostBootstrap:
        return PostBootstrap(
            name=name,
            key=self._key,
            works_endpoint=self._directory.endpoint("works"),
            answers_endpoint=self._directory.endpoint("answers"),
            tokenizer=tokenizer,
            queue_messages_max=self._limits.queue_messages_max,
            message_bytes_max=self._limits.message_bytes_max,
            parent_pid=os.getpid(),
            dies_with_parent_thread=threading.current_thread() is threading.main_thread(),
        )

    def _close_sockets(self) -> None:
        for socket in self._sockets:
            socket.close(linger=0)
        self._directory.close()
