"""Corrupt and unauthenticated frames on every socket of the executor: counted, dropped, harmless.

And the suite itself: a handler that raises, obeys or does not count is found.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import executor
from executor.attach.broker import Broker
from executor.attach.caller import Caller
from executor.ipc import SEQUENCE_BYTES, TAG_BYTES, FrameOpener
from protos.errors import BatonError
from tests.support.executor_baseline import nothing_left
from tests.support.frame_inlet import UNTIL_S, Inlet, Opened, Parts
from tests.support.frame_inlets import NAMES, inlets

Open = Callable[[str], Opened]


@pytest.fixture(autouse=True)
def leave_nothing() -> Iterator[None]:
    with nothing_left():
        yield


@pytest.fixture
def opened(tmp_path: Path) -> Open:
    return lambda name: inlets(tmp_path)[name]()


def bad_frames(inlet: Inlet) -> list[Parts]:
    *head, good = inlet.good()
    places = (0, TAG_BYTES, len(good) - 1)
    flipped = [good[:i] + bytes([good[i] ^ 1]) + good[i + 1 :] for i in places]
    garbage = [b"", b"junk", b"\0" * 4096, b"\xff" * len(good)]
    unauthenticated = [bytes(TAG_BYTES) + good[TAG_BYTES:], *flipped]
    cuts = (1, TAG_BYTES - 1, TAG_BYTES, TAG_BYTES + SEQUENCE_BYTES - 1, len(good) - 1)
    truncated = [good[:cut] for cut in cuts]
    changed = [[*head, frame] for frame in (*garbage, *unauthenticated, *truncated)]
    replayed = (inlet.replay or inlet.good)()
    return [*changed, *inlet.strange, replayed, replayed]


async def check(inlet: Inlet, within_s: float = UNTIL_S) -> None:
    """Each is counted once, nothing is raised, and requests are answered afterwards."""
    raised: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: raised.append(context))
    await inlet.probe()
    bad, before = bad_frames(inlet), inlet.num_bad()
    for parts in bad:
        inlet.inject(parts)
    async with asyncio.timeout(within_s):
        while inlet.num_bad() < before + len(bad):  # noqa: ASYNC110 - threads tell nobody
            await asyncio.sleep(0.005)
        for _ in range(3):
            await inlet.probe()
    assert inlet.num_bad() == before + len(bad)
    assert raised == []


@pytest.mark.parametrize("name", NAMES)
async def test_what_is_not_ours_is_counted_and_dropped(name: str, opened: Open) -> None:
    """Guards: a reader that dies of, or obeys, what does not bear our key or came before."""
    async with opened(name) as inlet:
        await check(inlet)


def test_no_socket_is_left_out() -> None:
    """Whoever opens a socket elsewhere adds it to tests/support/frame_inlets.py, and here."""
    opens = re.compile(r"(open_pair|open_router|open_dealer|LoopSocket|context\.socket)\(")
    root = Path(executor.__file__).parent
    found = {
        str(path.relative_to(root)) for path in root.rglob("*.py") if opens.search(path.read_text())
    }
    assert found == {
        *("ipc.py", "world/frames.py", "attach/loop_socket.py"),  # how each kind is opened
        *("channel.py", "worker_lane.py"),
        *("attach/broker.py", "attach/caller.py"),
        *("world/status.py", "world/rank.py", "world/leader.py", "world/member.py"),
        *("post/worker.py", "post/post_main.py"),
    }


# --- the suite can fail -----------------------------------------------------------------

CAREFUL_OPEN = FrameOpener.open


def raising_open(opener: Any, frame: bytes) -> Any:
    message = CAREFUL_OPEN(opener, frame)
    if message is None:
        raise ValueError("not ours")
    return message


def credulous_open(opener: Any, frame: bytes) -> Any:
    """Takes what has come before once more."""
    num_replayed, sequence = opener.num_replayed, opener._sequence
    message = CAREFUL_OPEN(opener, frame)
    if opener.num_replayed > num_replayed:
        opener.num_replayed, opener._sequence = num_replayed, 0
        message = CAREFUL_OPEN(opener, frame)
        opener.num_lost, opener._sequence = 0, sequence
    return message


def silent_open(opener: Any, frame: bytes) -> Any:
    message = CAREFUL_OPEN(opener, frame)
    opener.num_unauthenticated = 0
    return message


def raising_frames(careful: Callable[[Any, Parts], None]) -> Callable[[Any, Parts], None]:
    def on_frames(reader: Any, parts: Parts) -> None:
        before = reader.num_bad_frames
        careful(reader, parts)
        if reader.num_bad_frames > before:
            raise ValueError("not ours")

    return on_frames


PLANTED = [
    *(
        (name, FrameOpener, "open", raising_open)
        for name in (
            "owner-results-ipc",
            "attached-results-tcp",
            "status-owner-ipc",
            "post-works-ipc",
            "post-answers-ipc",
        )
    ),
    ("broker-tcp", Broker, "_on_frames", raising_frames(Broker._on_frames)),
    ("caller-ipc", Caller, "_on_frames", raising_frames(Caller._on_frames)),
    *(
        (name, FrameOpener, "open", bug)
        for name in ("owner-requests-ipc", "status-rank-tcp", "leader-ipc", "member-tcp")
        for bug in (credulous_open, silent_open)
    ),
]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(
    ("name", "owner", "method", "bug"),
    PLANTED,
    ids=[f"{name}-{bug.__name__}" for name, _, _, bug in PLANTED],
)
async def test_a_reader_with_a_bug_is_found(
    name: str, owner: type, method: str, bug: Any, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Readers on the event loop, and one on a thread, that raise; others that obey a replay or
    forget to count."""
    with monkeypatch.context() as patch:
        patch.setattr(owner, method, bug)
        async with opened(name) as inlet:
            with pytest.raises((AssertionError, TimeoutError, BatonError)):
                await check(inlet, within_s=0.5)
