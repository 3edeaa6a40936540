"""The log of KV events: numbers, joined runs, bounds."""

from __future__ import annotations

from executor.engine.control_seam import KvCleared, KvRemoved, KvStored
from executor.engine.kv_events import BLOCKS_PER_EVENT_MAX, KvEventLog


def name(number: int) -> bytes:
    return number.to_bytes(2, "big")


def listening(events_max: int = 100) -> KvEventLog:
    log = KvEventLog(events_max)
    log.listen(True)
    return log


def test_a_chain_of_blocks_is_one_event() -> None:
    log = listening()
    for number in (1, 2, 3):
        log.stored(name(number), name(number - 1), 8)
    log.stored(name(9), name(0), 8)
    log.removed(name(3))
    log.removed(name(2))
    log.cleared()
    assert log.take() == (
        KvStored(
            sequence=1,
            block_hashes=(name(1), name(2), name(3)),
            parent_hash=name(0),
            num_tokens=24,
        ),
        KvStored(sequence=2, block_hashes=(name(9),), parent_hash=name(0), num_tokens=8),
        KvRemoved(sequence=3, block_hashes=(name(3), name(2))),
        KvCleared(sequence=4),
    )
    assert log.take() == ()
    assert log.num_built == 4


def test_a_long_chain_is_cut() -> None:
    """Guards the size of one event."""
    log = listening()
    for number in range(1, BLOCKS_PER_EVENT_MAX + 2):
        log.stored(name(number), name(number - 1), 8)
    assert [len(event.block_hashes) for event in log.take() if isinstance(event, KvStored)] == [
        BLOCKS_PER_EVENT_MAX,
        1,
    ]


def test_what_a_snapshot_names_never_grows_afterwards() -> None:
    """A listener leaves out events up to the snapshot's number: none may still be growing."""
    log = listening()
    log.stored(name(1), name(0), 8)
    assert log.told() == 1
    log.stored(name(2), name(1), 8)
    assert [event.sequence for event in log.take()] == [1, 2]


def test_the_oldest_are_dropped_and_the_numbers_show_it() -> None:
    log = listening(events_max=3)
    for number in range(10):
        log.stored(name(number), b"elsewhere", 8)
    assert [event.sequence for event in log.take()] == [8, 9, 10]
    assert log.num_dropped == 7
    log.stored(name(99), b"elsewhere", 8)
    assert [event.sequence for event in log.take()] == [11]


def test_nobody_listens_and_only_numbers_change() -> None:
    log = KvEventLog()
    log.stored(name(1), name(0), 8)
    log.stored(name(2), name(1), 8)
    assert (log.sequence, log.num_built, log.take()) == (2, 0, ())
    log.listen(True)
    log.removed(name(1))
    assert [event.sequence for event in log.take()] == [3]
