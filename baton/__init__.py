"""What a user imports and types: clients, sampling parameters, errors, and the command line.

    import baton

    with baton.Client("127.0.0.1:8000") as client:
        print(client.generate("The capital of France is", max_tokens=8).text)

    with baton.LLM("/models/smollm2") as llm:  # the same without servers
        print(llm.generate("The capital of France is", max_tokens=8).text)

Everything is loaded when it is first asked for, so that `import baton` costs
neither gRPC nor torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from baton.aio import AsyncClient, AsyncTokenStream
    from baton.client import Client, TokenStream
    from baton.llm import LLM
    from protos import errors
    from protos.completion import Completion, Timing
    from protos.errors import BatonError
    from protos.messages import ChatMessage, SamplingParams

__all__ = [
    "LLM",
    "AsyncClient",
    "AsyncTokenStream",
    "BatonError",
    "ChatMessage",
    "Client",
    "Completion",
    "SamplingParams",
    "Timing",
    "TokenStream",
    "errors",
]

__version__ = "0.1.0"

_HOMES = {
    "AsyncClient": "baton.aio",
    "AsyncTokenStream": "baton.aio",
    "BatonError": "protos.errors",
    "ChatMessage": "protos.messages",
    "Client": "baton.client",
    "Completion": "protos.completion",
    "LLM": "baton.llm",
    "SamplingParams": "protos.messages",
    "Timing": "protos.completion",
    "TokenStream": "baton.client",
}


def __getattr__(name: str) -> Any:
    if name == "errors":
        return importlib.import_module("protos.errors")
    if name not in _HOMES:
        raise AttributeError(f"module 'baton' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
