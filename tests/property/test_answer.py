"""However pushes and reads interleave: what is read, put together, is what was pushed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from executor.answer import TEXT_PIECES_MAX, Answer, ResultChunk

STEP = st.tuples(
    st.lists(st.integers(0, (1 << 31) - 1), max_size=3),
    st.text(max_size=3),
    st.sampled_from((0, 0, 1, 2)),
)


@given(st.lists(STEP, max_size=40), st.integers(1, 2 * TEXT_PIECES_MAX))
def test_reads_add_up_to_what_was_pushed(
    steps: list[tuple[list[int], str, int]], repeats: int
) -> None:
    answer = Answer()
    token_ids: list[int] = []
    text = ""
    read: list[ResultChunk] = []
    for new_ids, new_text, num_reads in steps * (repeats if len(steps) < 3 else 1):
        answer.add(
            ResultChunk(
                token_index=len(token_ids),
                token_ids=tuple(new_ids),
                text=new_text,
                text_offset=len(text),
            )
        )
        token_ids += new_ids
        text += new_text
        answer.check()
        for _ in range(num_reads):
            if answer.first_unread is not None:
                read.append(answer.take())
                answer.check()
    if answer.first_unread is not None:
        read.append(answer.take())
    assert answer.num_unread_tokens == 0
    index = offset = 0
    for chunk in read:
        assert (chunk.token_index, chunk.text_offset) == (index, offset)
        index += len(chunk.token_ids)
        offset += len(chunk.text)
    assert [item for chunk in read for item in chunk.token_ids] == token_ids
    assert "".join(chunk.text for chunk in read) == text
    assert (answer.token_ids, answer.text) == (tuple(token_ids), text)
