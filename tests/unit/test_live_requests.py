"""The table of open requests."""

from __future__ import annotations

import pytest

from protos.errors import DuplicateRequestError, OverloadedError, RequestCancelledError
from serving.live import LiveRequests


class Result:
    num_aborts = 0

    def abort(self) -> None:
        self.num_aborts += 1


def test_ids_are_unique_while_live_and_bounded() -> None:
    live = LiveRequests(2)
    one = live.open("one")
    with pytest.raises(DuplicateRequestError, match="'one'"):
        live.open("one")
    live.open("two")
    with pytest.raises(OverloadedError, match="at most 2") as caught:
        live.open("three")
    assert caught.value.is_retryable
    live.close(one)
    live.open("one")
    live.check()


@pytest.mark.parametrize("is_attached_first", [True, False])
def test_an_end_stops_the_result_whichever_comes_first(is_attached_first: bool) -> None:
    """Guards an abort that comes while the prompt is still being tokenised."""
    request, result = LiveRequests(1).open("one"), Result()
    first = RequestCancelledError("first")
    if is_attached_first:
        request.attach(result)
    request.end(first)
    if not is_attached_first:
        request.attach(result)
    request.end(RequestCancelledError("second"))
    assert request.ending is first
    assert result.num_aborts == 1
