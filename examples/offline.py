"""The demo model in this program, without any server: `.venv/bin/python examples/offline.py`."""

from __future__ import annotations

import asyncio

from baton import LLM
from baton.demo_model import demo_model_folder


def main() -> None:
    with LLM(demo_model_folder(progress=print), kv_cache={"num_blocks": 512}) as llm:
        prompts = ["The capital of France is", "The sky is blue because", "Bread is made of"]
        for prompt, done in zip(prompts, llm.generate(prompts, max_tokens=12), strict=True):
            print(f"{prompt}{done.text}  [{done.usage.completion_tokens} tokens]")

        print("> Name a planet.")
        for chunk in llm.stream([("user", "Name a planet.")], max_tokens=24):
            print(chunk.text, end="", flush=True)
        print()

        asyncio.run(in_a_coroutine(llm))


async def in_a_coroutine(llm: LLM) -> None:
    answers = [llm.generate_async(f"{n} plus {n} is", max_tokens=6) for n in (2, 3, 4)]
    for done in await asyncio.gather(*answers):
        print(f"{done.external_id}:{done.text}")


if __name__ == "__main__":
    main()
