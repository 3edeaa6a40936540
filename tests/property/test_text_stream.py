"""Streamed text equals text decoded at once, however the tokens arrive."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.text.stops import StopMatcher
from common.text.stream import TextDelta, TextStream
from common.text.tokenizer import Tokenizer
from tests.support.text_toys import byte_level_backend, sentencepiece_backend, toy

BYTE_LEVEL = toy(byte_level_backend())
SENTENCEPIECE = toy(sentencepiece_backend())
KINDS = {"byte_level": BYTE_LEVEL, "sentencepiece": SENTENCEPIECE}

texts = st.text(alphabet=st.sampled_from("ab  the€é你😀🎉.\n1"), max_size=60)
byte_level_ids = st.lists(st.integers(0, BYTE_LEVEL.vocab_size - 1), max_size=60)
cuts = st.lists(st.integers(0, 60), max_size=6)
longer_stops = st.lists(st.text(alphabet="ab", min_size=3, max_size=7), min_size=1, max_size=3)
stops = st.lists(st.text(alphabet="ab", min_size=1, max_size=5), max_size=3)


def pieces(items: Sequence[int], cut_at: Sequence[int]) -> list[Sequence[int]]:
    bounds = [0, *sorted(min(cut, len(items)) for cut in cut_at), len(items)]
    return [items[a:b] for a, b in itertools.pairwise(bounds)]


def run(stream: TextStream, parts: Sequence[Sequence[int]]) -> tuple[str, list[TextDelta]]:
    deltas = []
    for part in parts:
        deltas.append(stream.push(part))
        stream.check()
    deltas.append(stream.finish())
    return "".join(delta.text for delta in deltas), deltas


def whole_text(tokenizer: Tokenizer, prompt: Sequence[int], output: Sequence[int]) -> str:
    """What the output adds to the prompt's text, a character cut by the boundary included."""
    before = tokenizer.decode(prompt).rstrip("\ufffd")
    return tokenizer.decode([*prompt, *output])[len(before) :]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None)
@given(prompt=texts, output=texts, cut_at=cuts)
def test_deltas_join_to_the_decoded_text(
    kind: str, prompt: str, output: str, cut_at: list[int]
) -> None:
    """Guards lost leading spaces and characters torn between pushes."""
    tokenizer = KINDS[kind]
    prompt_ids, output_ids = tokenizer.encode(prompt), tokenizer.encode(output)
    stream = TextStream(tokenizer, prompt_ids, ())
    text, deltas = run(stream, pieces(output_ids, cut_at))
    assert text == whole_text(tokenizer, prompt_ids, output_ids)
    offset = 0
    for delta in deltas:
        assert delta.text_offset == offset
        offset += len(delta.text)
    assert not any(delta.text.endswith("\ufffd") for delta in deltas)


@settings(max_examples=150, deadline=None)
@given(prompt=byte_level_ids, output=byte_level_ids, cut_at=cuts)
def test_random_bytes_come_out_as_they_decode(
    prompt: list[int], output: list[int], cut_at: list[int]
) -> None:
    """A model may emit any bytes: text must neither be lost nor come twice."""
    stream = TextStream(BYTE_LEVEL, prompt, ())
    text, _ = run(stream, pieces(output, cut_at))
    assert text == whole_text(BYTE_LEVEL, prompt, output)


@settings(max_examples=60, deadline=None)
@given(random=st.randoms(use_true_random=False), continuation_share=st.floats(0.3, 1))
def test_endless_rubbish_keeps_the_window_bounded(
    random: Random, continuation_share: float
) -> None:
    """Bytes that never become a character must not make each token dearer (see `check`)."""
    alphabet = {BYTE_LEVEL.decode([i]): i for i in range(2, 258)}
    rubbish = [i for i in range(2, 258) if BYTE_LEVEL.decode([i]) == "\ufffd"]
    letter, special = alphabet["a"], 0
    ids = [
        random.choice(rubbish) if random.random() < continuation_share else random.choice(others)
        for others in [[letter, special]] * 200
    ]
    text, _ = run(TextStream(BYTE_LEVEL, [letter], ()), [[i] for i in ids])
    assert text == BYTE_LEVEL.decode(ids)


def first_stop(text: str, stop: Sequence[str]) -> tuple[str, str | None]:
    """The naive oracle: the match that ends first, of equal ends the longest."""
    ends = [
        (text.find(string) + len(string), -len(string), string) for string in stop if string in text
    ]
    if not ends:
        return text, None
    end, minus_length, string = min(ends)
    return text[: end + minus_length], string


@settings(max_examples=600, deadline=None)
@given(text=st.text(alphabet="ab", min_size=4, max_size=20), stop=longer_stops, cut_at=cuts)
def test_stop_matcher_agrees_with_find(text: str, stop: list[str], cut_at: list[int]) -> None:
    """Guards matches that span pushes, overlapping starts and text shown too early."""
    matcher = StopMatcher(stop)
    bounds = [0, *sorted(min(cut, len(text)) for cut in cut_at), len(text)]
    shown = ""
    for a, b in itertools.pairwise(bounds):
        shown += matcher.push(text[a:b])
        matcher.check()
    shown += matcher.finish()
    assert (shown, matcher.matched) == first_stop(text, stop)


def test_stop_string_after_its_own_start() -> None:
    """Each string over two letters, begun and begun again: the fallbacks must be exact."""
    words = ["".join(word) for word in itertools.product("ab", repeat=7)]
    for letters, length in itertools.product(words, range(7)):
        text = letters[:length] + letters
        matcher = StopMatcher([letters])
        shown = "".join(matcher.push(character) for character in text)
        assert (shown, matcher.matched) == first_stop(text, [letters])


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None)
@given(output=st.text(alphabet="ab é😀", max_size=30), stop=stops, cut_at=cuts)
def test_stream_stops_where_the_text_does(
    kind: str, output: str, stop: list[str], cut_at: list[int]
) -> None:
    """`num_tokens` must count the token that completes the stop string, and none after it."""
    tokenizer = KINDS[kind]
    prompt_ids, output_ids = tokenizer.encode("the"), tokenizer.encode(output)
    text, deltas = run(TextStream(tokenizer, prompt_ids, tuple(stop)), pieces(output_ids, cut_at))
    expected, stop_string = first_stop(whole_text(tokenizer, prompt_ids, output_ids), stop)
    assert (text, deltas[-1].stop_string) == (expected, stop_string)
    counted = sum(delta.num_tokens for delta in deltas)
    if stop_string is None:
        assert counted == len(output_ids)
    else:
        assert stop_string in whole_text(tokenizer, prompt_ids, output_ids[:counted])
        assert stop_string not in whole_text(tokenizer, prompt_ids, output_ids[: counted - 1])


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=80, deadline=None)
@given(output=texts, stop=stops, boundary=st.integers(0, 60))
def test_replay_goes_on_as_if_unbroken(
    kind: str, output: str, stop: list[str], boundary: int
) -> None:
    """The generation server must neither repeat nor lose what lies across the hand-off."""
    tokenizer = KINDS[kind]
    prompt_ids, output_ids = tokenizer.encode("a b"), tokenizer.encode(output)
    boundary = min(boundary, len(output_ids))
    unbroken = TextStream(tokenizer, prompt_ids, tuple(stop))
    unbroken.push(output_ids[:boundary])
    resumed = TextStream(tokenizer, prompt_ids, tuple(stop))
    resumed.replay(output_ids[:boundary])
    for token_id in output_ids[boundary:]:
        assert resumed.push([token_id]) == unbroken.push([token_id])
    assert resumed.finish() == unbroken.finish()
