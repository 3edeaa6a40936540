"""Rank 0's leader socket with real members on threads: calls, refusals, silence, strangers."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import zmq

from executor.engine.seam import EngineRequest
from executor.packing import body_bytes_max
from executor.world.collective import LINK, FromMember, Join
from executor.world.frames import RankDealer, open_dealer
from executor.world.member import Member
from executor.world.messages import HelloAck
from protos.errors import EngineDeadError, from_data
from protos.messages import RequestType, SamplingParams
from tests.support.led_members import BOUNDS, BYTES_MAX, KEY, SOCKETS, led, orders

REQUEST = EngineRequest(
    request_id=1,
    request_type=RequestType.CONTEXT_AND_GENERATION,
    prompt_token_ids=b"\x01\x00\x00\x00",
    sampling=SamplingParams(max_tokens=1, seed=1),
    deadline_s=1.0,
)


@pytest.fixture(params=["ipc", "tcp"])
def endpoint(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/leader" if request.param == "ipc" else "tcp://127.0.0.1:*"


def test_every_member_answers_in_order_of_rank(endpoint: str) -> None:
    with led(endpoint, 4, members=3) as leader:
        calls = [leader.call_all("describe", {}, 5.0) for _ in range(20)]
        for call in calls:
            values = call.result(5.0)
            assert [(answer.rank, answer.error) for answer in values] == [
                (rank, None) for rank in (1, 2, 3)
            ]
            assert [answer.value["rank"] for answer in values] == [1, 2, 3]


def test_a_submit_to_a_member_is_answered_by_who_could_take_it(endpoint: str) -> None:
    """Guards: a script whose every rank submits, and hangs in all but one."""
    with led(endpoint, 2, members=1) as leader:
        (answer,) = leader.submit_to_members(REQUEST, 5.0).result(5.0)
        assert answer.error is not None
        error = from_data(answer.error)
        assert type(error).__name__ == "InvalidRequestError"
        assert (error.field, error.value, error.limit) == ("rank", "1", "0")
        assert "rank 0 alone" in error.message
        assert '`if __name__ == "__main__":`' in error.message


def test_one_members_failure_is_its_own(endpoint: str) -> None:
    with led(endpoint, 2, members=1) as leader:
        (failed,) = leader.call_all("sleep", {"hard": True}, 5.0).result(5.0)
        assert failed.error is not None
        assert failed.error.kind == "InvalidRequestError"
        (answer,) = leader.call_all("sleep", {}, 5.0).result(5.0)
        assert answer.error is None


def test_a_call_that_no_frame_holds_is_refused_and_costs_no_member(endpoint: str) -> None:
    """Bug: an answer over the frame's bound cut the member's connection, and its call waited for
    600 s; what could not be encoded ended the link's thread, and with it the world."""
    with led(endpoint, 3, members=2) as leader:
        for method, arguments, field in (
            ("load_lora", {"name": "a", "path": "x" * BYTES_MAX}, "arguments"),
            ("load_lora", {"name": object(), "path": "x"}, "arguments"),
            ("large", {}, "answer"),
            ("strange", {}, "answer"),
        ):
            for told in leader.call_all(method, arguments, 5.0).result(5.0):
                assert told.error is not None
                assert (told.error.kind, told.error.field) == ("RequestFailedError", field)
                assert told.error.limit == f"{body_bytes_max(BYTES_MAX)} bytes"
                assert f"the {field} of {method} cannot be sent: it" in told.error.message
        answers = leader.call_all("describe", {}, 5.0).result(5.0)
        assert [told.error for told in answers] == [None, None]


def test_who_does_not_answer_is_named_in_time(endpoint: str) -> None:
    with led(endpoint, 3, members=1) as leader:
        present, absent = leader.call_all("describe", {}, 0.5).result(5.0)
        assert present.error is None
        assert absent.error is not None
        assert "rank 2" in absent.error.message


def test_calls_that_wait_when_the_world_ends_are_answered(tmp_path: Path) -> None:
    with led(f"ipc://{tmp_path}/leader", 3, members=1) as leader:
        waits = leader.call_all("describe", {}, 60.0)
    assert any(answer.error is not None for answer in waits.result(1.0))
    (late, _) = leader.call_all("describe", {}, 60.0).result(1.0)
    assert late.error is not None


def test_strangers_are_counted_and_change_nothing(endpoint: str) -> None:
    """Guards: a loop that dies of, or obeys, what does not bear the world's key; a frame of
    one rank passed off as another's; a frame sent twice."""
    with led(endpoint, 3, members=1) as leader:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        socket = open_dealer(context, leader.endpoint, leader.curve_key, SOCKETS, 0)
        stranger: RankDealer[FromMember] = RankDealer(socket, LINK, bytes(32), 2, FromMember)
        other_link: RankDealer[FromMember] = RankDealer(socket, "status", KEY, 2, FromMember)
        for _ in range(3):
            assert stranger.send(Join())
            assert other_link.send(Join())
        for parts in ([b""], [b"\x01\x00"], [b"\xff\xff", b"x"], [b"a", b"b", b"c"]):
            socket.send_multipart(parts)
        (answer, _) = leader.call_all("describe", {}, 0.3).result(5.0)
        assert answer.error is None
        assert not leader.wait_joined(0.2)
        assert leader.num_bad_frames == 10
        socket.close()
        context.term()


def test_a_member_whose_leader_is_gone_says_so(tmp_path: Path) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    short = msgspec.structs.replace(BOUNDS, hello_s_max=0.2)
    told = msgspec.structs.replace(orders(1, 2), bounds=short)
    member = Member(told, context, SOCKETS, HelloAck(f"ipc://{tmp_path}/nobody", ""))
    with pytest.raises(EngineDeadError, match=r"rank 0 did not answer within 0\.2 s"):
        member.join()
    member.close()
    context.destroy(linger=0)
