"""Finds stop strings in streamed text, one character at a time.

    searching ── a stop string is complete ──> matched (for ever)

The result does not depend on how the text is cut into pieces: the stop string
that is complete first wins, and of several that end at the same character the
longest. Each string keeps a Knuth-Morris-Pratt state, so a character costs the
same however long the strings are.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Lets text through until a stop string; holds back what may be the start of one."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._automata = [_Automaton(string) for string in stop if string]
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """The text that is now known to come before any stop string."""
        if self.matched is not None:
            return ""
        if not self._automata:
            return text
        text = self._held + text
        for position in range(len(self._held), len(text)):
            complete = self._step(text[position])
            if complete is not None:
                self.matched = complete
                self._held = ""
                return text[: position + 1 - len(complete)]
        cut = len(text) - max(automaton.state for automaton in self._automata)
        self._held = text[cut:]
        return text[:cut]

    def finish(self) -> str:
        """What was held back: no stop string will be complete any more."""
        held, self._held = self._held, ""
        return held

    def check(self) -> None:
        longest = max((automaton.state for automaton in self._automata), default=0)
        if self.matched is None:
            assert len(self._held) in (0, longest), (self._held, longest)

    def _step(self, character: str) -> str | None:
        complete: str | None = None
        for automaton in self._automata:
            is_complete = automaton.step(character)
            if is_complete and (complete is None or len(automaton.string) > len(complete)):
                complete = automaton.string
        return complete


class _Automaton:
    """Knuth-Morris-Pratt: `state` is how much of the string the text's end matches."""

    def __init__(self, string: str) -> None:
        self.string = string
        self.state = 0
        self._fallback = _fallbacks(string)

    def step(self, character: str) -> bool:
        """True when the string is complete."""
        state = self.state
        while state and self.string[state] != character:
            state = self._fallback[state]
        if self.string[state] == character:
            state += 1
        self.state = state
        return state == len(self.string)


def _fallbacks(string: str) -> list[int]:
    """For each length, the longest proper prefix that also ends the prefix of that length."""
    fallbacks = [0, 0]
    length = 0
    for character in string[1:]:
        while length and string[length] != character:
            length = fallbacks[length]
        if string[length] == character:
            length += 1
        fallbacks.append(length)
    return fallbacks
