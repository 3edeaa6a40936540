"""The log of what becomes reusable in a KV cache and what does not any more.

Changes take numbers, listened to or not, so that a listener sees by a gap in the
numbers that it missed something. An event is built only while somebody listens;
changes that follow one another become one event, with one number. Bounded: the
oldest events go first.

Pure.
"""

from __future__ import annotations

from collections import deque

import msgspec

from executor.engine.control_seam import KvCleared, KvEvent, KvRemoved, KvStored

KV_EVENTS_MAX = 4096
BLOCKS_PER_EVENT_MAX = 256


class KvEventLog:
    def __init__(self, events_max: int = KV_EVENTS_MAX) -> None:
        self.sequence = 0
        """Of the last change."""
        self.num_built = 0
        self.num_dropped = 0
        self.is_listening = False
        self._events: deque[KvEvent] = deque(maxlen=events_max)
        self._may_join = False
        """The next change may be told by the last event: nobody has been told its number."""

    def listen(self, is_listening: bool) -> None:
        self.is_listening = is_listening
        if not is_listening:
            self._events.clear()

    def stored(self, block_hash: bytes, parent_hash: bytes, num_tokens: int) -> None:
        """One full block of `num_tokens` tokens."""
        last = self._joinable()
        if isinstance(last, KvStored) and last.block_hashes[-1] == parent_hash:
            self._events[-1] = msgspec.structs.replace(
                last,
                block_hashes=(*last.block_hashes, block_hash),
                num_tokens=last.num_tokens + num_tokens,
            )
            return
        self.sequence += 1
        if self.is_listening:
            self._put(
                KvStored(
                    sequence=self.sequence,
                    block_hashes=(block_hash,),
                    parent_hash=parent_hash,
                    num_tokens=num_tokens,
                )
            )

    def removed(self, block_hash: bytes) -> None:
        last = self._joinable()
        if isinstance(last, KvRemoved):
            hashes = (*last.block_hashes, block_hash)
            self._events[-1] = msgspec.structs.replace(last, block_hashes=hashes)
            return
        self.sequence += 1
        if self.is_listening:
            self._put(KvRemoved(sequence=self.sequence, block_hashes=(block_hash,)))

    def cleared(self) -> None:
        self.sequence += 1
        if self.is_listening:
            self._put(KvCleared(sequence=self.sequence))

    def missed(self) -> None:
        """Changes came about that were never counted: the next number is not the next one."""
        self.sequence += 1

    def take(self) -> tuple[KvEvent, ...]:
        events = tuple(self._events)
        self._events.clear()
        return events

    def told(self) -> int:
        """The number of the last change, which from now on means what it means today."""
        self._may_join = False
        return self.sequence

    def _joinable(self) -> KvEvent | None:
        if not (self._events and self._may_join):
            return None
        last = self._events[-1]
        is_full = not isinstance(last, KvCleared) and (
            len(last.block_hashes) >= BLOCKS_PER_EVENT_MAX
        )
        return None if is_full else last

    def _put(self, event: KvEvent) -> None:
        self.num_built += 1
        self.num_dropped += len(self._events) == self._events.maxlen
        self._events.append(event)
        self._may_join = True
