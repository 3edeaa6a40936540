"""An `LLM` over the scripted engine, whose tokens are letters."""

from __future__ import annotations

from typing import Any

from baton import LLM
from executor.config import ScriptedConfig
from executor.engine.scripted_model import scripted_completion
from protos.tokens import pack_token_ids
from tests.support.serving_double import VOCAB_SIZE, LetterTokenizer

SEED = 7
REFUSE, CRASH, HANG = 250, 251, 252
SCRIPT = ScriptedConfig(
    vocab_size=VOCAB_SIZE, refuse_token_id=REFUSE, crash_token_id=CRASH, hang_token_id=HANG
)


def make_llm(*, step_ms: float = 0.0, hang_s: float = 3600.0, **more: Any) -> LLM:
    script = {
        "vocab_size": VOCAB_SIZE,
        "refuse_token_id": REFUSE,
        "crash_token_id": CRASH,
        "hang_token_id": HANG,
        "step_ms": step_ms,
        "hang_s": hang_s,
    }
    return LLM(engine="scripted", scripted=script, tokenizer=LetterTokenizer(), **more)


def expected(prompt: tuple[int, ...] | str, num_tokens: int) -> tuple[int, ...]:
    """What a request with SEED must answer."""
    ids = tuple(map(ord, prompt)) if isinstance(prompt, str) else prompt
    return scripted_completion(pack_token_ids(ids), SEED, num_tokens, SCRIPT)


def letters(token_ids: tuple[int, ...]) -> str:
    return LetterTokenizer().decode(token_ids)
