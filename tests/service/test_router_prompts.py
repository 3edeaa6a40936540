"""Text and chat prompts: tokenised once, at the router; the servers see token ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from common.security import create_secret
from common.text.tokenizer import load_tokenizer
from protos import inference_pb2 as pb
from protos.errors import InvalidRequestError
from protos.messages import ChatMessage
from tests.support.router_client import assert_at_rest, running_router
from tests.support.router_servers import scripted_pair
from tests.support.text_toys import byte_level_backend, write_folder

TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}"


async def test_text_and_chat_reach_both_legs_as_the_same_ids(tmp_path: Path) -> None:
    """Guards against tokenising twice, which a generation server refuses, and against a long
    text that is tokenised in a thread coming out different."""
    file = tmp_path / "secret"
    secret = create_secret(file)
    folder = tmp_path / "model"
    folder.mkdir()
    write_folder(folder, byte_level_backend(), {"chat_template": TEMPLATE})
    tokenizer = load_tokenizer(folder)
    long_text = "the quick brown fox jumps over the lazy dog again and again " * 80
    chat = pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="the lazy dog")])
    async with (
        scripted_pair(secret) as (context, generation),
        running_router(file, [context.address], [generation.address], model=str(folder)) as client,
    ):
        cases: list[tuple[dict[str, Any], tuple[int, ...]]] = [
            ({"text": "the dog"}, tokenizer.encode("the dog")),
            ({"chat": chat}, tokenizer.encode_chat([ChatMessage("user", "the lazy dog")])),
        ]
        for fields, expected in cases:
            answer = await client.generate(max_tokens=3, stop=["never"], **fields)
            assert answer.error is None
            assert context.seen.requests[-1].token_ids == expected
            assert generation.seen.requests[-1].token_ids == expected
            assert generation.seen.requests[-1].sampling.stop == ("never",)
        num_tokens = len(tokenizer.encode(long_text))
        refused = await client.generate(max_tokens=3, text=long_text)
        assert isinstance(refused.error, InvalidRequestError)
        assert f"{num_tokens} tokens" in refused.error.message
        hopeless = await client.generate(max_tokens=3, text="x" * 200_000)
        assert isinstance(hopeless.error, InvalidRequestError)
        assert hopeless.error.value == "200000 characters"
        await assert_at_rest(client, context, generation)
