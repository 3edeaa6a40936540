"""A frontend's side of the talk with a broker: in by knock and request, out by a goodbye.

    knocking -> challenged -> asking -> attached -> (the world's end is told) -> left, closed

A world that is still loading makes the caller wait, for `load_s_max` in all; a broker that
nobody hears, or that does not know our key, is told of in the log and given up after
`hello_s_max`. Everything runs on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field

import zmq
from zmq.utils import z85

from executor.attach.keys import DOWN, NONCE_BYTES, UP, curve_seed, lane_key
from executor.attach.loop_socket import LoopSocket
from executor.attach.messages import (
    PROTOCOL,
    Attach,
    Attached,
    Challenge,
    FromBroker,
    FromFrontend,
    Goodbye,
    GoodbyeAck,
    Knock,
    Refused,
    Wait,
    WorldEnded,
    frontend_head,
    key_head,
    pack,
    unpack,
)
from executor.attach.point import AttachPoint
from executor.lane import LaneSpec
from executor.limits import ExecutorLimits
from executor.world.orders import ProcessName
from protos.errors import ConfigError, EngineDeadError, from_data

logger = logging.getLogger(__name__)
ANSWER_S_MAX = 1.0
LANE_S_MAX = 15.0
"""From the request to its answer: rank 0 opens the lane meanwhile, between two things it does."""
KNOCK_AGAIN_S = 0.25
CONNECT_POLL_S = 0.02
GOODBYE_S_MAX = 1.0
NOBODY_S = 3.0
"""So long without an answer is told, and then again every so often."""
NOBODY_AGAIN_S = 30.0


@dataclass(frozen=True)
class Place:
    """What an attached frontend has."""

    attached: Attached
    spec: LaneSpec
    """The frontend's view: `worker_binds`, and no key of the worker's."""
    curve_server_key: bytes = field(repr=False)


class Caller:
    """`on_world_ended` is set by whoever uses the place. `close` is safe twice."""

    def __init__(self, point: AttachPoint) -> None:
        self.point = point
        self.on_world_ended: Callable[[], None] = lambda: None
        self.world_ended = ""
        """The cause, once it was told."""
        self.num_bad_frames = 0
        self._key_id = point.keys.first_id
        self._key = point.keys.keys[self._key_id]
        self._head = key_head(self._key_id)
        self._nonce = b""
        self._answer: asyncio.Future[FromBroker] | None = None
        self._link = LoopSocket(zmq.DEALER, self._on_frames)
        socket = self._link.socket
        socket.setsockopt(zmq.IMMEDIATE, 1)  # nothing old is sent to a broker that comes late
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        socket.setsockopt(zmq.IPV6, int("[" in point.endpoint))
        try:
            socket.connect(point.endpoint)
        except zmq.ZMQError as error:
            self._link.close()
            raise ConfigError(f"cannot reach {point.where}: {error}") from None
        self._link.start()

    # --- in -------------------------------------------------------------------

    async def attach(
        self,
        name: str,
        limits: ExecutorLimits,
        progress: Callable[[str], None],
        num_buckets: int = 0,
    ) -> Place:
        """Raises ConfigError for what must be changed, EngineDeadError where nobody lets us in."""
        loop = asyncio.get_running_loop()
        heard_at_s = started_at_s = loop.time()
        warn_at_s = heard_at_s + NOBODY_S
        told = ""
        process = ProcessName.own()
        while True:
            answer = await self._knock(
                lambda nonce, cookie: Attach(
                    nonce, cookie, name, process, limits.heartbeat_s, num_buckets
                )
            )
            now_s = loop.time()
            match answer:
                case Attached():
                    return self._place(answer)
                case Refused():
                    raise _refusal(answer, self.point.where)
                case Wait():
                    heard_at_s, warn_at_s = now_s, now_s + NOBODY_S
                    if answer.what != told:
                        told = answer.what
                        progress(f"attached to nothing yet at {self.point.where}: {told}")
                case _ if now_s >= warn_at_s:
                    warn_at_s, told = now_s + NOBODY_AGAIN_S, ""
                    self._warn(name, progress, limits.hello_s_max)
            if now_s - heard_at_s > limits.hello_s_max:
                raise EngineDeadError(_nobody(self.point, limits.hello_s_max))
            if now_s - started_at_s > limits.load_s_max:
                raise EngineDeadError(
                    f"the world at {self.point.where} did not let us in within "
                    f"{limits.load_s_max:g} s"
                )
            await asyncio.sleep(KNOCK_AGAIN_S)

    def _warn(self, name: str, progress: Callable[[str], None], hello_s_max: float) -> None:
        what = _no_answer(self.point)
        logger.warning("%s: %s (given up after %g s)", name, what, hello_s_max)
        progress(what)

    async def _knock(self, make: Callable[[bytes, bytes], Attach]) -> FromBroker | None:
        """One try; None where no answer came."""
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        answer = await self._ask(Knock(PROTOCOL, self._nonce), ANSWER_S_MAX)
        if not isinstance(answer, Challenge):
            return answer
        self._cookie = answer.cookie
        return await self._ask(make(self._nonce, self._cookie), LANE_S_MAX)

    async def _ask(self, message: FromFrontend, timeout_s: float) -> FromBroker | None:
        answer: asyncio.Future[FromBroker] = asyncio.get_running_loop().create_future()
        self._answer = answer
        frame = [self._head, pack(self._key, UP, self._head, message)]
        try:
            async with asyncio.timeout(timeout_s):
                while not self._link.send(frame):  # noqa: ASYNC110 - zmq tells nobody of a connect
                    await asyncio.sleep(CONNECT_POLL_S)
                return await answer
        except TimeoutError:
            return None
        finally:
            self._answer = None

    def _place(self, attached: Attached) -> Place:
        frontend_id = attached.frontend_id
        key = lane_key(self._key, self._nonce, self._cookie, frontend_id)
        self._key, self._head = key, frontend_head(frontend_id)
        host, curve_server_key = "", b""
        if attached.requests_endpoint.startswith("tcp:"):
            host = attached.leader_host or self.point.host
            curve_server_key = zmq.curve_public(z85.encode(curve_seed(key)))
        spec = LaneSpec(
            frontend_id=frontend_id,
            key=key,
            requests_endpoint=_reached_at(attached.requests_endpoint, host),
            results_endpoint=_reached_at(attached.results_endpoint, host),
            worker_binds=True,
            silence_s=attached.silence_s,
        )
        return Place(attached, spec, curve_server_key)

    # --- frames ---------------------------------------------------------------

    def _on_frames(self, parts: list[bytes]) -> None:
        message: FromBroker | None = None
        if len(parts) == 2 and parts[0] == self._head:
            message = unpack(self._key, DOWN, parts[0], parts[1])
        match message:
            case Challenge() | Wait() | Refused() | Attached() if message.nonce == self._nonce:
                self._hand_over(message)
            case GoodbyeAck():
                self._hand_over(message)
            case WorldEnded():
                self.world_ended = message.cause
                self.on_world_ended()
            case _:
                self.num_bad_frames += 1

    def _hand_over(self, message: FromBroker) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(message)

    # --- out ------------------------------------------------------------------

    def say_goodbye(self) -> None:
        """Without waiting for what becomes of it."""
        self._link.send([self._head, pack(self._key, UP, self._head, Goodbye())])

    async def leave(self) -> bool:
        """True where the broker has read the goodbye, or has none to read it for."""
        if self.world_ended:
            return True
        return await self._ask(Goodbye(), GOODBYE_S_MAX) is not None

    def close(self) -> None:
        self._link.close()


def _reached_at(endpoint: str, host: str) -> str:
    """A tcp port of rank 0's, on the host by which we reach it."""
    return f"tcp://{host}:{endpoint.rpartition(':')[2]}" if host else endpoint


def _refusal(answer: Refused, where: str) -> ConfigError | EngineDeadError:
    error = from_data(answer.error)
    if isinstance(error, ConfigError):
        return ConfigError(error.message, field=error.field, value=error.value, limit=error.limit)
    return EngineDeadError(f"the world at {where} does not let us in: {error.message}")


def _no_answer(point: AttachPoint) -> str:
    if point.form == "attach":
        return f"the launcher's world at {point.where} does not answer yet"
    return f"nobody answers at {point.where}: is `baton worker` up there, with the same secret?"


def _nobody(point: AttachPoint, seconds: float) -> str:
    if point.form == "attach":
        return f"the launcher's world at {point.where} did not answer for {seconds:g} s"
    return (
        f"nobody answered at {point.where} for {seconds:g} s: no `baton worker` listens there, or "
        "its secret file is another cluster's"
    )
