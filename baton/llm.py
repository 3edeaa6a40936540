"""A model in this program: the executor that the servers stand on, without any server.

    with LLM("/models/smollm2") as llm:
        print(llm.generate("The capital of France is", max_tokens=8).text)
        for done in llm.generate(["one prompt", "and another"], max_tokens=8): ...
        for chunk in llm.stream("Once upon a time", max_tokens=32): ...
        done = await llm.generate_async("from a coroutine", max_tokens=8)

The engine runs in processes of its own (`executor` says otherwise), its results
come to a thread of the LLM's, so the caller's thread and event loop stay its
own: scripts, notebooks and servers alike, with no `__main__` guard.

Life: constructed (the model is loaded; it raises where that fails), in use,
shut down by `shutdown`, the end of `with`, the program's exit, or when nobody
holds it nor any open request of it. An engine that dies ends every open request
and every later one with the same EngineDeadError.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import secrets
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self, Unpack, overload

from baton.batch import Batch, named, one_each
from baton.calls import Message
from baton.engine_thread import EngineThread
from baton.line import Entry
from baton.llm_control import EngineControls
from baton.llm_options import Options, request_of
from baton.llm_start import (
    check_place,
    engine_config_of,
    model_of,
    point_of,
    room_of,
    text_side,
)
from baton.prompts import Prompt, encode_prompt, split_prompts
from common.text.tokenizer import Tokenizer
from executor.config import EngineConfig
from executor.executor import GenerationExecutor
from executor.preflight import check_model
from executor.request import ExecutorRequest, admit_request
from executor.result import GenerationResult, ResultChunk
from protos.completion import Completion
from protos.errors import BatonError, WrongThreadError
from protos.messages import ModelLimits, SamplingParams


class LLM(EngineControls):
    """See the module's docstring. Any thread may use it, and several may at once."""

    def __init__(
        self,
        model: str | Path = "",
        *,
        executor: str | Mapping[str, Any] | None = None,
        tokenizer: Tokenizer | str | Path | None = None,
        config: EngineConfig | None = None,
        secret_file: str | Path | None = None,
        name: str = "llm",
        progress: Callable[[str], None] | None = None,
        **engine: Any,
    ) -> None:
        """Load `model` and wait until it is ready: a Hugging Face folder, a GGUF file, or
        "demo", the demo model.

        `engine` are the keys of a server's `engine:` section, such as
        `dtype="bfloat16", kv_cache={"num_blocks": 4096}`; or give a whole `config`.
        `executor` is the executor's form or that section's `executor` in full.
        `tokenizer` is the model's own where none is given. `secret_file` holds the
        cluster's secret, for an engine that a `baton worker` runs (form "rpc").
        `progress` hears of the stages in words. In a coroutine, where loading must not
        hold the loop up: `await asyncio.to_thread(LLM, ...)`.

        Raises ConfigError for what cannot work, EngineDeadError with the worker's
        own words where the engine does not come up.
        """
        check_place()
        self._config = engine_config_of(model_of(model, progress), executor, config, engine)
        if not self._config.executor.rpc_address:  # else the model is that worker's
            check_model(self._config)
        self.tokenizer, spec = text_side(tokenizer, self._config)
        self._name = name
        self._life = secrets.token_hex(4)
        """In minted external ids: other programs may share the engine, and their names."""
        self._numbers = itertools.count(1)
        create = functools.partial(
            GenerationExecutor.create,
            self._config,
            name=name,
            tokenizer=self.tokenizer,
            progress=progress,
            tokenizer_spec=spec,
            point=point_of(self._config, secret_file),
        )
        self._engine = EngineThread(create, name=name, room=room_of(self._config))
        self._executor, self._home = self._engine.start()
        self._finalizer = weakref.finalize(self, self._engine.stop)

    @property
    def limits(self) -> ModelLimits:
        """The model's name, its vocabulary, and how many tokens a request may have."""
        return self._executor.identity.model_info.limits

    # --- requests -----------------------------------------------------------------

    @overload
    def generate(  # type: ignore[overload-overlap]  # a text is a sequence of texts
        self,
        prompts: Prompt,
        sampling: SamplingParams | None = None,
        **options: Unpack[Options],
    ) -> Completion: ...

    @overload
    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: Callable[[int, int], None] | None = None,
        **options: Unpack[Options],
    ) -> list[Completion]: ...

    @overload
    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        return_exceptions: Literal[True],
        progress: Callable[[int, int], None] | None = None,
        **options: Unpack[Options],
    ) -> list[Completion | BatonError]: ...

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        return_exceptions: bool = False,
        progress: Callable[[int, int], None] | None = None,
        **options: Unpack[Options],
    ) -> Any:
        """Complete one prompt, or many: then a list in their order.

        A prompt is a text, token ids or chat messages. Any number may be given at
        once: they wait for the engine here. `sampling` may be one for all or one for
        each; `progress(num_done, num_all)` is called as they end.

        Of many, the first that fails ends the others and its error is raised, with a
        note that says which it was; with `return_exceptions=True` every other one goes
        on and the error stands in its place, as with `asyncio.gather`. Blocks the
        calling thread; a KeyboardInterrupt ends what is open.
        """
        if self._home.is_waiting_for_us():
            raise WrongThreadError(
                "this thread runs the engine or its results; call generate_async, wait elsewhere"
            )
        items, is_single = split_prompts(prompts)
        batch = Batch(
            len(items),
            return_exceptions=return_exceptions and not is_single,
            is_alive=lambda: self._engine.is_alive,
            progress=progress,
        )
        params = one_each(sampling, len(items))
        outcomes = batch.run(
            lambda index, notify: self._open(
                items[index], params[index], named(options, index, is_single), notify
            )
        )
        return outcomes[0] if is_single else outcomes

    def chat(
        self,
        messages: Sequence[Message],
        sampling: SamplingParams | None = None,
        **options: Unpack[Options],
    ) -> Completion:
        """Answer one conversation, by the model's own chat template; `generate` takes many."""
        return self.generate(list(messages), sampling, **options)

    def generate_async(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        **options: Unpack[Options],
    ) -> GenerationResult:
        """Hand one prompt over and go on.

        `await` the result or iterate it with `async for`, on any event loop; or call
        its `result()` or iterate it, on any thread. One that nobody wants any more is
        ended by its `abort()`. Raises InvalidRequestError for what can be told at once.
        """
        return self._open(prompt, sampling, options, None)

    def stream(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        **options: Unpack[Options],
    ) -> Iterator[ResultChunk]:
        """The answer's chunks as they come; leaving the loop early ends the request."""
        return _chunks(self._open(prompt, sampling, options, None))

    # --- end ----------------------------------------------------------------------

    def shutdown(self) -> None:
        """End open requests, stop the engine, free everything. From any thread; safe twice,
        at exit, and under a dead engine."""
        self._engine.stop()
        self._finalizer.detach()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.shutdown()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await asyncio.to_thread(self.shutdown)

    # --- inside -------------------------------------------------------------------

    def _open(
        self,
        prompt: Any,
        sampling: SamplingParams | None,
        options: Mapping[str, Any],
        notify: Callable[[], None] | None,
    ) -> GenerationResult:
        request = self._request(encode_prompt(prompt, self.tokenizer), sampling, options)
        entry = Entry(request, self._home, owner=self, notify=notify)
        self._engine.submit(entry)
        return entry.result

    def _mint_id(self) -> str:
        return f"{self._name}-{self._life}-{next(self._numbers)}"

    def _request(
        self,
        prompt_token_ids: tuple[int, ...],
        sampling: SamplingParams | None,
        options: Mapping[str, Any],
    ) -> ExecutorRequest:
        request = request_of(
            prompt_token_ids,
            sampling,
            options,
            mint_id=self._mint_id,
            default_deadline_s=self._config.default_deadline_s,
        )
        return admit_request(request, self.limits, self._executor.form)


def _chunks(result: GenerationResult) -> Iterator[ResultChunk]:
    try:
        yield from result
    finally:
        if not result.is_ended:
            result.abort()
