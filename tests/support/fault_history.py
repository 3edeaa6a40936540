"""What each consumer saw, and whether that was right. Knows nothing of the product.

The machine writes down what it asked for and what it did to the world; the
consumers write down what they read. From these alone the history judges:

- one answer: every admitted request ends once, and stays as it ended;
- the right tokens, text and counts, in order, for the right reader;
- no error without its reason.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Told:
    """One request: what was asked, and what its consumer was told."""

    lane: int
    name: str
    kind: str
    """plain, context or generation."""
    wanted: tuple[int, ...]
    """All that an undisturbed engine would stream to this reader."""
    first_index: int
    num_prompt: int
    stop: str
    asked_at_s: float
    deadline_s: float
    is_bad: bool = False
    brittle_id: int = -1
    """A token of which no text can be made."""
    was_cancelled: bool = False
    may_be_cancelled: bool = False
    """Somebody named its external id, which others bear too."""
    max_unread: int = 0
    chunks: list[Any] = field(default_factory=list)
    ends: list[Exception | None] = field(default_factory=list)
    """None: a normal end. The first, and those that later reads brought."""
    ended_at_s: float = 0.0
    num_chunks_at_end: int = 0

    @property
    def is_over(self) -> bool:
        return bool(self.ends)

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(token for chunk in self.chunks for token in chunk.token_ids)

    @property
    def text(self) -> str:
        return "".join(chunk.text for chunk in self.chunks)

    @property
    def lease(self) -> Any:
        """What a finished context phase hands on, if it does."""
        finish = self.chunks[-1].finish if self.chunks else None
        return None if finish is None else finish.context_phase_params

    def __repr__(self) -> str:
        return f"{self.kind} request {self.name!r} of lane {self.lane} asked at {self.asked_at_s}"


def spell(tokens: Sequence[int]) -> str:
    """Each id is one character."""
    return "".join(chr(0x20000 + token) for token in tokens)


class History:
    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self.told: list[Told] = []
        self.deaths: dict[int, float] = {}
        """By lane: when its engine died, or the lane was closed."""
        self.silences: list[tuple[int, float, float]] = []
        """Lane, and from when to when it had heard nothing for too long."""

    def saw_end(self, told: Told, error: Exception | None) -> None:
        if not told.ends:
            told.ended_at_s = self._now()
            told.num_chunks_at_end = len(told.chunks)
        told.ends.append(error)

    # --- judgement -------------------------------------------------------------------

    def check(self) -> None:
        for told in self.told:
            self._check_stream(told)
            if told.ends:
                self._check_end(told)

    def _check_stream(self, told: Told) -> None:
        index, offset = told.first_index, None
        for chunk in told.chunks:
            if chunk.token_ids:
                assert chunk.token_index == index, f"a hole or a repetition: {told}"
            index += len(chunk.token_ids)
            offset = chunk.text_offset if offset is None else offset
            assert chunk.text_offset == offset or not chunk.text, f"a hole in the text: {told}"
            offset += len(chunk.text)
        assert told.tokens == told.wanted[: len(told.tokens)], f"another's tokens: {told}"
        assert self._whole_text(told).startswith(told.text), f"wrong text: {told}"
        finals = [chunk.finish is not None for chunk in told.chunks]
        assert not any(finals[:-1]), f"something came after the end: {told}"
        if told.is_over:
            is_good = told.ends[0] is None
            assert is_good == (bool(finals) and finals[-1]), f"two ends, or half of one: {told}"

    def _check_end(self, told: Told) -> None:
        first = told.ends[0]
        assert len(told.chunks) == told.num_chunks_at_end, f"something came after the end: {told}"
        assert all(end is first for end in told.ends), f"the end changed: {told} {told.ends}"
        if first is None:
            self._check_finish(told)
        else:
            reason = self._reasons(told).get(type(first).__name__, False)
            assert reason, f"an error for no reason: {told} {first!r}"

    def _check_finish(self, told: Told) -> None:
        last = told.chunks[-1]
        assert not told.is_bad, f"a bad request was served: {told}"
        assert told.brittle_id not in told.tokens, f"text was made of it: {told}"
        assert told.tokens == told.wanted[: self._num_wanted(told)], f"too short: {told}"
        usage, reason = last.finish.usage, last.finish.reason.value
        assert usage.completion_tokens == len(told.tokens), f"wrong count: {told}"
        num_prompt = 0 if told.kind == "generation" else told.num_prompt
        assert usage.prompt_tokens == num_prompt, f"wrong count: {told}"
        if self._is_stopped(told):
            assert (reason, last.stop_string) == ("stop", told.stop)
            assert told.lease is None, f"a lease for nobody: {told}"
            assert told.text == self._whole_text(told)
        elif told.kind == "context":
            assert reason == "context"
            assert told.lease is not None
        else:
            assert reason == "length"
            assert told.text == self._whole_text(told)

    def _is_stopped(self, told: Told) -> bool:
        return bool(told.stop) and told.stop in spell(told.wanted)

    def _num_wanted(self, told: Told) -> int:
        if not self._is_stopped(told):
            return len(told.wanted)
        return spell(told.wanted).index(told.stop) + len(told.stop)

    def _whole_text(self, told: Told) -> str:
        text = spell(told.wanted)
        return text[: text.index(told.stop)] if self._is_stopped(told) else text

    def _reasons(self, told: Told) -> dict[str, bool]:
        """Which errors may end it, by their names, given what happened in its life."""

        overlapping = [t for t in self.told if t is not told and self._overlap(t, told)]
        namesakes = [t for t in overlapping if t.name == told.name and t.lane != told.lane]
        return {
            "RequestCancelledError": told.was_cancelled or told.may_be_cancelled,
            "SlowConsumerError": told.max_unread > 0,
            "RequestFailedError": told.is_bad or told.brittle_id in told.wanted,
            "DeadlineExceededError": told.ended_at_s >= told.asked_at_s + told.deadline_s,
            "EngineDeadError": told.lane in self.deaths,
            "ServerUnavailableError": any(
                lane == told.lane and told.asked_at_s <= until_s and from_s <= told.ended_at_s
                for lane, from_s, until_s in self.silences
            ),
            "DuplicateRequestError": bool(namesakes),
            "OverloadedError": len(overlapping) >= 6,
        }

    def _overlap(self, one: Told, other: Told) -> bool:
        """The worker may hear later than we of an end, so that a finished one still counts."""
        return one.asked_at_s <= other.ended_at_s
