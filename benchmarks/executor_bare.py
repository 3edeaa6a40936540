"""The ceiling beside the executor: a bare loop over the same bytes.

It receives a frame, decodes it, looks each token's stream up in a dict and wakes
a future: no authentication, no ledger, no results, no bounds. Its frames are
what the worker would send, sealed as there (the seal is skipped here). The
sender is a process of its own, `python -m benchmarks.executor_bare ENDPOINT`,
and sends what the loop asks for.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import zmq

from benchmarks.executor_load import QUEUE_MESSAGES_MAX, STAMP_US_MAX, Figures, Meter, Span
from executor.engine.seam import EngineOutput
from executor.ipc import SEQUENCE_BYTES, TAG_BYTES, TO_PROXY, FrameSealer
from executor.messages import Outputs
from protos.messages import SamplingParams

HEADER_BYTES = TAG_BYTES + SEQUENCE_BYTES
STOP_S_MAX = 10.0
SETTLE_S = 0.03


class Order(msgspec.Struct, frozen=True):
    """What the sender shall send: until the next order, one frame a step."""

    num_streams: int = 0
    step_s: float = 0.0
    has_params: bool = False


class OutputWithParams(msgspec.Struct, frozen=True):
    """What a response would be if its request's parameters came with each."""

    output: EngineOutput
    external_id: str
    sampling: SamplingParams


class OutputsWithParams(msgspec.Struct, frozen=True, array_like=True, tag=True):
    accepted: tuple[int, ...]
    outputs: tuple[OutputWithParams, ...]


_FRAME: Any = Outputs | OutputsWithParams


def _outputs_of(frame: Outputs | OutputsWithParams) -> tuple[EngineOutput, ...]:
    if isinstance(frame, Outputs):
        return frame.outputs
    return tuple(response.output for response in frame.outputs)


class BareLoop:
    """Open from construction to `close`; `window` measures one order."""

    def __init__(self, num_streams_max: int) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="baton-bench-")
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.setsockopt(zmq.RCVHWM, QUEUE_MESSAGES_MAX)
        endpoint = f"ipc://{Path(self._folder.name) / 'bare'}"
        self._socket.bind(endpoint)
        command = [sys.executable, "-m", "benchmarks.executor_bare", endpoint]
        self._sender = subprocess.Popen(command)
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[int, asyncio.Future[tuple[int, ...]]] = {}
        self._meter = Meter()
        self._readable = asyncio.Event()
        self._num_bytes = {False: 0, True: 0}
        self._num_received = {False: 0, True: 0}
        self._tasks = [self._loop.create_task(self._receive())]
        for stream in range(num_streams_max):
            self._tasks.append(self._loop.create_task(self._consume(stream)))

    async def window(
        self, num_streams: int, step_ms: float, span: Span, *, has_params: bool = False
    ) -> Figures:
        self._send(Order(num_streams, step_ms / 1000, has_params))
        await asyncio.sleep(span.warm_up_s)
        figures = await self._meter.measure(span.half_s, self._sender.pid)
        self._send(Order())
        await self._settle()
        if self._tasks[0].done():
            self._tasks[0].result()  # raises what ended it
        return figures

    def bytes_per_token(self, *, has_params: bool) -> float:
        """Of the frames that came in such windows until now, their seals included."""
        return self._num_bytes[has_params] / max(self._num_received[has_params], 1)

    async def close(self) -> None:
        self._loop.remove_reader(int(self._socket.FD))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._sender.terminate()
        self._sender.wait(STOP_S_MAX)
        self._socket.close(linger=0)
        self._context.term()
        self._folder.cleanup()

    def _send(self, order: Order) -> None:
        self._socket.send(msgspec.msgpack.encode(order))
        self._readable.set()  # a send may swallow the descriptor's word of what has come

    async def _settle(self) -> None:
        """Until the sender has stopped: nothing comes any more."""
        num_received: dict[bool, int] = {}
        while num_received != self._num_received:
            num_received = dict(self._num_received)
            await asyncio.sleep(SETTLE_S)

    async def _receive(self) -> None:
        """One frame a turn of the loop, so that who was woken waits again when the next comes."""
        self._loop.add_reader(int(self._socket.FD), self._readable.set)
        decode = msgspec.msgpack.Decoder(_FRAME).decode
        while True:
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                self._readable.clear()
                await self._readable.wait()
                continue
            message = decode(frame[HEADER_BYTES:])
            outputs = _outputs_of(message)
            has_params = isinstance(message, OutputsWithParams)
            self._num_bytes[has_params] += len(frame)
            self._num_received[has_params] += len(outputs)
            for output in outputs:
                self._waiting[output.request_id].set_result(output.token_ids)
            await asyncio.sleep(0)

    async def _consume(self, stream: int) -> None:
        while True:
            waiter = self._waiting[stream] = self._loop.create_future()
            self._meter.add(await waiter)


def main() -> None:
    """The sender: frames at the ordered pace until the next order, or a parent that is gone."""
    socket = zmq.Context().socket(zmq.PAIR)
    socket.setsockopt(zmq.SNDTIMEO, 1000)
    socket.setsockopt(zmq.SNDHWM, QUEUE_MESSAGES_MAX)
    socket.connect(sys.argv[1])
    sealer, order, step = FrameSealer(b"k" * 32, TO_PROXY), Order(), 0
    while True:
        is_idle = order.num_streams == 0
        if socket.poll(1000 if is_idle else 0):
            order = msgspec.msgpack.decode(socket.recv(), type=Order)
        elif os.getppid() == 1:
            return
        if order.num_streams == 0:
            continue
        if order.step_s:
            time.sleep(order.step_s)
        with contextlib.suppress(zmq.Again):
            socket.send(sealer.seal(_frame(order, step)))
        step += 1


def _frame(order: Order, step: int) -> Outputs | OutputsWithParams:
    stamp = (int(time.monotonic() * 1e6) % STAMP_US_MAX,)
    outputs = tuple(
        EngineOutput(request_id=stream, token_index=step, token_ids=stamp)
        for stream in range(order.num_streams)
    )
    if not order.has_params:
        return Outputs((), outputs)
    sampling = SamplingParams(max_tokens=512, temperature=0.7, top_p=0.9, seed=7, stop=("\n\n",))
    return OutputsWithParams(
        (), tuple(OutputWithParams(output, "stream-1", sampling) for output in outputs)
    )


if __name__ == "__main__":
    main()
