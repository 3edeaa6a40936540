"""Several frontends of one engine as one executor, so that a contract for one runs over all.

A request goes to the frontend that its external id picks, so a second request of that id meets
the first at the same frontend, as it would behind a router. Books are added up.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec

from executor.executor import ExecutorRequest, GenerationExecutor, GenerationResult
from protos.messages import LedgerAudit


class Spread:
    """What is not told apart here is asked of the first frontend."""

    def __init__(self, fronts: Sequence[GenerationExecutor]) -> None:
        self.fronts = tuple(fronts)
        self._owners: dict[int, GenerationExecutor] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.fronts[0], name)

    def submit(self, request: ExecutorRequest) -> GenerationResult:
        front = self.fronts[zlib.crc32(request.external_id.encode()) % len(self.fronts)]
        result = front.submit(request)
        self._owners[result.client_id] = front
        return result

    def abort_request(self, client_id: int) -> None:
        self._owners.get(client_id, self.fronts[0]).abort_request(client_id)

    def find(self, external_id: str) -> int | None:
        found = (front.find(external_id) for front in self.fronts)
        return next((client_id for client_id in found if client_id is not None), None)

    async def audit(self) -> LedgerAudit:
        """Each frontend's own books together; the engine's are the same to all."""
        audits = [await front.audit() for front in self.fronts]
        entries: Counter[str] = Counter()
        own: Counter[str] = Counter()
        for audit in audits:
            entries.update(audit.entries_by_state)
            own.update({k: v for k, v in audit.counters.items() if k.startswith("proxy_")})
        last = audits[-1]
        return msgspec.structs.replace(
            last, entries_by_state=dict(entries), counters={**last.counters, **own}
        )
