"""What all live requests of one router share, and nothing else."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field

from common.text.tokenizer import Tokenizer
from protos.messages import DisaggRequestId
from router.fleet import Fleet
from router.leases import Leases
from router.links import Links

_COUNTER_END = 1 << 32
LEG_ID_HEAD_LENGTH_MAX = 200
"""With our part it stays below protos.codec.EXTERNAL_ID_LENGTH_MAX."""


class DisaggIds:
    """Mints the ids of hand-offs: never the same twice in the life of a cluster.

    The epoch is random, so that two routers, or two lives of one, cannot meet.
    """

    def __init__(self) -> None:
        self.epoch = secrets.randbits(64)
        self._counter = 0

    def mint(self) -> DisaggRequestId:
        if self._counter == _COUNTER_END:  # a new epoch, never a wrap into used ids
            self.epoch, self._counter = secrets.randbits(64), 0
        self._counter += 1
        return DisaggRequestId(self.epoch, self._counter - 1, 0)


@dataclass
class Shared:
    fleet: Fleet
    links: Links
    leases: Leases
    tokenizer: Tokenizer | None
    hands_over: bool
    """Whether context servers hand KV over; else generation servers do both phases."""
    suspect: Callable[[str, str], None]
    """Tells that a server's connection broke: (address, reason)."""
    disagg_ids: DisaggIds = field(default_factory=DisaggIds)
    num_leg_ids: int = 0
    num_late: int = 0

    def mint_disagg_id(self) -> DisaggRequestId:
        return self.disagg_ids.mint()

    def mint_leg_id(self, external_id: str) -> str:
        """The external id of one leg: the client's, as far as it is short, and a part of ours.

        A client may use its id again as soon as its request has ended here,
        which is before a server has seen the cancel of the last leg.
        """
        self.num_leg_ids += 1
        head = external_id[:LEG_ID_HEAD_LENGTH_MAX]
        return f"{head}#{self.disagg_ids.epoch:016x}.{self.num_leg_ids}"

    def count_late(self, num: int) -> None:
        self.num_late += num
