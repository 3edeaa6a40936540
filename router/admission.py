"""Who is being served: at most so many at once, each external id once.

Pure. A refusal is early and is an answer: nothing was spent on the request.
`admit` and `leave` pair up exactly, around a request's whole life.
"""

from __future__ import annotations

from protos.errors import DuplicateRequestError, OverloadedError, ServerUnavailableError


class Admission:
    def __init__(self, max_in_flight: int, id_prefix: str) -> None:
        """`id_prefix` makes the minted ids differ between routers and their lives."""
        self._max_in_flight = max_in_flight
        self._id_prefix = id_prefix
        self._num_minted = 0
        self._live: dict[str, None] = {}
        self._closed_because = ""
        self.counters = {"admitted": 0, "refused_overload": 0, "refused_duplicate": 0}

    @property
    def num_in_flight(self) -> int:
        return len(self._live)

    def close(self, reason: str) -> None:
        """From now on every request is refused as unavailable."""
        self._closed_because = reason

    def admit(self, external_id: str) -> str:
        """Returns the id, minted where `external_id` is empty.

        Raises OverloadedError, DuplicateRequestError or, once closed,
        ServerUnavailableError.
        """
        if self._closed_because:
            raise ServerUnavailableError(self._closed_because)
        if len(self._live) >= self._max_in_flight:
            self.counters["refused_overload"] += 1
            raise OverloadedError(
                f"{len(self._live)} requests are in flight, the most this router serves at once "
                f"(max_in_flight {self._max_in_flight}); try again later",
                field="max_in_flight",
                value=len(self._live),
                limit=self._max_in_flight,
            )
        if external_id in self._live:
            self.counters["refused_duplicate"] += 1
            raise DuplicateRequestError(
                f"external_id {external_id!r} belongs to a live request; it can be used again "
                "when that one has ended",
                field="external_id",
                value=external_id,
                limit="unique among live requests",
            )
        chosen = external_id or self._mint()
        self._live[chosen] = None
        self.counters["admitted"] += 1
        return chosen

    def leave(self, external_id: str) -> None:
        assert external_id in self._live, f"{external_id!r} left without having been admitted"
        del self._live[external_id]

    def _mint(self) -> str:
        while True:
            self._num_minted += 1
            minted = f"{self._id_prefix}-{self._num_minted}"
            if minted not in self._live:  # a client may have chosen just this one
                return minted

    def check(self) -> None:
        assert len(self._live) <= self._max_in_flight, "more in flight than allowed"
        assert "" not in self._live, "an empty external id was admitted"
