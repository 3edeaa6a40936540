"""The requests that a server is answering now, by external id.

    open -> (attach a result) -> close

`end` records why a request must end and stops its result; whoever streams it
then raises that reason. An id is free again once its request is closed.
"""

from __future__ import annotations

from typing import Protocol

from protos.errors import BatonError, DuplicateRequestError, OverloadedError, shorten


class Stoppable(Protocol):
    """What is needed of a result to end it."""

    def abort(self) -> None: ...


class LiveRequest:
    """One open request; `ending` is why it must end, once somebody asked for that."""

    def __init__(self, external_id: str) -> None:
        self.external_id = external_id
        self.ending: BatonError | None = None
        self._result: Stoppable | None = None

    def attach(self, result: Stoppable) -> None:
        """From now on `end` stops this result too. An end that came before counts."""
        self._result = result
        if self.ending is not None:
            result.abort()

    def end(self, reason: BatonError) -> None:
        """The first reason stays."""
        if self.ending is None:
            self.ending = reason
            if self._result is not None:
                self._result.abort()


class LiveRequests:
    """At most `num_max` at a time."""

    def __init__(self, num_max: int) -> None:
        self._num_max = num_max
        self._requests: dict[str, LiveRequest] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def open(self, external_id: str) -> LiveRequest:
        """Raises DuplicateRequestError for a live id, OverloadedError when full."""
        if external_id in self._requests:
            raise DuplicateRequestError(
                f"external_id is {shorten(external_id)!r}, which is the id of a live request; "
                "it must be unique while live",
                field="external_id",
                value=external_id,
                limit="unique while live",
            )
        if len(self._requests) >= self._num_max:
            raise OverloadedError(
                f"{len(self._requests)} requests are open on this server; it takes at most "
                f"{self._num_max} (max_open_requests)",
                field="max_open_requests",
                value=len(self._requests),
                limit=self._num_max,
            )
        request = self._requests[external_id] = LiveRequest(external_id)
        return request

    def close(self, request: LiveRequest) -> None:
        del self._requests[request.external_id]

    def find(self, external_id: str) -> LiveRequest | None:
        return self._requests.get(external_id)

    def end_all(self, reason: BatonError) -> int:
        """End every open request; returns how many there were."""
        requests = list(self._requests.values())
        for request in requests:
            request.end(reason)
        return len(requests)

    def check(self) -> None:
        assert len(self._requests) <= self._num_max
        for external_id, request in self._requests.items():
            assert request.external_id == external_id
