"""An answer that was begun elsewhere, and what a form cannot carry, in every form."""

from __future__ import annotations

import pytest

from executor.executor import GenerationExecutor
from protos.errors import InvalidRequestError, UnsupportedError
from tests.support.executor_scripted import (
    CharTokenizer,
    audited,
    collect,
    expected,
    request,
    tokens,
)

pytestmark = [pytest.mark.system, pytest.mark.asyncio(loop_scope="module")]


async def test_an_answer_goes_on_behind_its_prefix(executor: GenerationExecutor) -> None:
    """Guards: tokens streamed or counted twice, or drawn anew, where an answer is taken up."""
    whole = expected((1, 2, 3), 20)
    text = CharTokenizer().decode(whole)
    asked = request(max_tokens=20)
    begun = type(asked)(
        external_id="begun",
        prompt_token_ids=asked.prompt_token_ids,
        sampling=asked.sampling,
        deadline_s=asked.deadline_s,
        output_prefix_token_ids=whole[:8],
    )
    chunks = await collect(executor.submit(begun))
    assert (chunks[0].token_index, chunks[0].text_offset) == (8, 8)
    assert tokens(chunks) == whole[8:]
    assert "".join(chunk.text for chunk in chunks) == text[8:]
    finish = chunks[-1].finish
    assert finish is not None
    assert (finish.usage.prompt_tokens, finish.usage.completion_tokens) == (3, 12)
    await audited(executor)


async def test_the_whole_answer_is_awaited_again_and_again(executor: GenerationExecutor) -> None:
    result = executor.submit(request("w", max_tokens=6))
    whole = await result
    assert whole.token_ids == expected((1, 2, 3), 6)
    assert (whole.external_id, whole.prompt_token_ids, whole.seed) == ("w", (1, 2, 3), 7)
    assert await result is whole
    assert tokens(await collect(result)) == whole.token_ids
    await audited(executor)


async def test_what_a_form_cannot_carry_leaves_nothing(executor: GenerationExecutor) -> None:
    asked = request("l")
    more = {"return_generation_logits": True} if executor.form != "single" else {"multimodal": 1}
    with pytest.raises(UnsupportedError, match=next(iter(more))):
        executor.submit(
            type(asked)(
                external_id="l",
                prompt_token_ids=asked.prompt_token_ids,
                sampling=asked.sampling,
                deadline_s=5,
                **more,
            )
        )
    with pytest.raises(InvalidRequestError, match="vocabulary"):
        executor.submit(request("l", (1, 32_000)))
    assert executor.find("l") is None
    await audited(executor)
