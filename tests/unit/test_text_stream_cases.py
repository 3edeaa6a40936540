"""TextStream at the points where streams usually go wrong."""

from __future__ import annotations

from common.text.stream import TextDelta, TextStream
from tests.support.text_toys import byte_level_backend, sentencepiece_backend, toy


def test_no_half_character_is_shown() -> None:
    """An emoji of four byte tokens appears whole, at the fourth."""
    tokenizer = toy(byte_level_backend(vocab_size=258))
    stream = TextStream(tokenizer, tokenizer.encode("hi"), ())
    shown = [stream.push([token_id]).text for token_id in tokenizer.encode("🐍!")]
    assert shown == ["", "", "", "🐍", "!"]


def test_unfinished_character_is_flushed_at_the_end() -> None:
    """max_tokens may cut a character; the stream must not swallow that it was begun."""
    tokenizer = toy(byte_level_backend(vocab_size=258))
    stream = TextStream(tokenizer, (), ())
    assert stream.push(tokenizer.encode("é")[:1]).text == ""
    assert stream.finish().text == "\ufffd"


def test_special_tokens_amid_a_character_do_not_break_it() -> None:
    """`decode` leaves special tokens out before it joins bytes; so must the stream."""
    tokenizer = toy(byte_level_backend(vocab_size=258))
    first, *rest = tokenizer.encode("é")
    stream = TextStream(tokenizer, (), ())
    assert stream.push([first, *[0] * 100]).text == ""
    stream.check()
    assert stream.push(rest).text == "é"


def test_character_after_long_rubbish_is_whole() -> None:
    """Wherever the window is forced to slide, a character begun just before must survive."""
    tokenizer = toy(byte_level_backend(vocab_size=258))
    snake = tokenizer.encode("🐍")
    for num_rubbish in range(40):
        stream = TextStream(tokenizer, (), ())
        ids = [snake[-1]] * num_rubbish + list(snake)
        shown = "".join(stream.push([token_id]).text for token_id in ids) + stream.finish().text
        assert shown == "\ufffd" * num_rubbish + "🐍"


def test_overlapping_start_of_a_stop_string() -> None:
    """ "aab" in "aaab": the search must go back one character, not to the start."""
    tokenizer = toy(byte_level_backend(vocab_size=258))
    stream = TextStream(tokenizer, (), ("aab",))
    shown = [stream.push([token_id]).text for token_id in tokenizer.encode("aaab")]
    assert shown == ["", "", "a", ""]


def test_leading_space_is_kept_after_a_prompt_and_lost_without() -> None:
    """SentencePiece drops the first word's space: only at the text's start is that right."""
    tokenizer = toy(sentencepiece_backend())
    fox = tokenizer.encode("fox")
    assert tokenizer.decode(fox) == "fox"
    assert TextStream(tokenizer, tokenizer.encode("the"), ()).push(fox).text == " fox"
    assert TextStream(tokenizer, (), ()).push(fox).text == "fox"


def test_start_of_a_stop_string_waits_and_is_released() -> None:
    """Text that turned out to be no stop string must come, at its right offset."""
    tokenizer = toy(byte_level_backend(vocab_size=258))
    stream = TextStream(tokenizer, (), ("END",))
    a, e, n, x = (tokenizer.encode(letter)[0] for letter in "aENx")
    assert stream.push([a, e, n]) == TextDelta("a", 0, None, 3)
    assert stream.push([x]) == TextDelta("ENx", 1, None, 1)
    assert stream.push([e]) == TextDelta("", 4, None, 1)
    assert stream.finish() == TextDelta("E", 4, None, 0)


def test_stop_across_the_hand_off_counts_the_new_tokens_only() -> None:
    """The context server streamed "a" and held "E": the generation server ends the answer."""
    tokenizer = toy(byte_level_backend(vocab_size=258))
    a, e, n, d = (tokenizer.encode(letter)[0] for letter in "aEND")
    stream = TextStream(tokenizer, (), ("END",))
    stream.replay([a, e])
    assert stream.push([n, d, a]) == TextDelta("", 1, "END", 2)
    assert stream.push([a]) == TextDelta("", 1, "END", 0)


def test_a_piece_is_whole_characters_of_a_tokenizer_that_joins_bytes() -> None:
    """Guards pieces that a neighbour changes: half characters, a leading space that only the
    first word loses, tokens that are no text."""
    byte_level, sentencepiece = toy(byte_level_backend()), toy(sentencepiece_backend())
    the, emoji = byte_level.encode("the")[0], byte_level.encode("😀")
    assert byte_level.piece(the) == byte_level.decode((the,))
    assert len(emoji) > 1
    assert [byte_level.piece(token_id) for token_id in emoji] == [None] * len(emoji)
    assert byte_level.piece(0) is None
    assert byte_level.piece(byte_level.vocab_size + 5) is None
    assert sentencepiece.piece(sentencepiece.encode("the")[0]) is None
