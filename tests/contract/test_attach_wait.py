"""A frontend that nobody lets in says so while it waits, and the owner says who knocks in vain.

Found by a newcomer: a wrong secret was silence on both sides for a minute.
"""

from __future__ import annotations

import logging

import pytest

from executor.attach import caller
from executor.attach.keys import AttachKeys
from executor.attach.point import AttachPoint
from executor.config import EngineConfig
from executor.executor import GenerationExecutor
from executor.limits import ExecutorLimits
from protos.errors import EngineDeadError
from tests.support.attach_world import tcp_point, thread_world

STRANGER = AttachKeys({"k1": b"x" * 32})


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caller, "ANSWER_S_MAX", 0.1)
    monkeypatch.setattr(caller, "NOBODY_S", 0.2)


async def wait_in_vain(point: AttachPoint) -> list[str]:
    heard: list[str] = []
    with pytest.raises(EngineDeadError, match=r"nobody answered at .* for 1.2 s"):
        await GenerationExecutor.create(
            EngineConfig(),
            name="front",
            progress=heard.append,
            limits=ExecutorLimits(hello_s_max=1.2),
            point=point,
        )
    return heard


async def test_another_secret_is_told_on_both_sides(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with thread_world(form="rpc") as rig:
        heard = await wait_in_vain(tcp_point(rig.broker.port, STRANGER))
    what = (
        f"nobody answers at 127.0.0.1:{rig.broker.port}: is `baton worker` up there, "
        "with the same secret?"
    )
    assert heard == [what]
    warned = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert f"front: {what} (given up after 1.2 s)" in warned
    assert warned.count("somebody at 127.0.0.1 knocks with another secret") == 1
    assert not any("attached to" in each.getMessage() for each in caplog.records)


async def test_a_worker_that_is_not_there_is_told(
    caplog: pytest.LogCaptureFixture, unused_tcp_port: int
) -> None:
    heard = await wait_in_vain(tcp_point(unused_tcp_port))
    assert heard == [
        f"nobody answers at 127.0.0.1:{unused_tcp_port}: is `baton worker` up there, "
        "with the same secret?"
    ]
    assert "is `baton worker` up there" in caplog.text
