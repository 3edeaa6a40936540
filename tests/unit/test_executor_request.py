"""The executor's boundary: what a request may be, what a form carries, what is filled in."""

from __future__ import annotations

from typing import Any

import pytest

from executor.postprocess import Postprocessor, text_params
from executor.request import (
    ExecutorRequest,
    admit_request,
    check_form,
    check_request,
    complete_request,
    to_engine_request,
)
from protos.errors import InvalidRequestError, UnsupportedError
from protos.messages import ModelLimits, RequestType, SamplingParams
from protos.tokens import pack_token_ids
from tests.support.executor_scripted import CharTokenizer, context_request
from tests.support.serving_double import hand_off

LIMITS = ModelLimits(model="m", vocab_size=100, max_prompt_tokens=30, max_total_tokens=40)
WHOLE, CONTEXT, GENERATION = (
    RequestType.CONTEXT_AND_GENERATION,
    RequestType.CONTEXT_ONLY,
    RequestType.GENERATION_ONLY,
)
PARAMS = hand_off(context_request("c", (1, 2)), 9)


def request(**fields: Any) -> ExecutorRequest:
    sampling = {
        name: fields.pop(name) for name in SamplingParams.__struct_fields__ if name in fields
    }
    defaults = {"external_id": "a", "prompt_token_ids": (1, 2), "deadline_s": 5.0}
    return ExecutorRequest(**{**defaults, **fields}, sampling=SamplingParams(**sampling))


def test_what_was_left_open_is_filled_in_once() -> None:
    asked = request()
    done = complete_request(asked, LIMITS)
    assert done.sampling.max_tokens == 38
    assert done.sampling.seed is not None
    assert complete_request(done, LIMITS) is done
    assert complete_request(request(max_tokens=3, seed=0), LIMITS).sampling.seed == 0


def test_max_tokens_counts_what_exists_already() -> None:
    begun = request(output_prefix_token_ids=(5,) * 37)
    assert complete_request(begun, LIMITS).sampling.max_tokens == 38
    handed = request(request_type=GENERATION, context_phase_params=PARAMS)
    assert complete_request(handed, LIMITS).sampling.max_tokens == 38
    alone = request(request_type=CONTEXT, disagg_request_id=PARAMS.disagg_request_id)
    assert complete_request(alone, LIMITS).sampling.max_tokens == 1


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"prompt_token_ids": (1,) * 31}, "prompt is 31 tokens; it must be at most 30"),
        (
            {"max_tokens": 39},
            "sampling.max_tokens is 39; it must be at most 38 after a prompt of 2",
        ),
        (
            {"output_prefix_token_ids": (5,) * 38},
            "prompt is 2 tokens, followed by 38 of the answer; it must be at most 39 tokens",
        ),
        (
            {"output_prefix_token_ids": (5, 6), "max_tokens": 2},
            "sampling.max_tokens is 2; it must be at least 3: 2 tokens of the answer exist",
        ),
        ({"prompt_token_ids": (1, 100)}, r"token_ids\[1\] is 100; it must be 0 to 99"),
        ({"output_prefix_token_ids": (100,)}, r"output_prefix_token_ids\[0\] is 100"),
        ({"stop_token_ids": (100,)}, r"sampling.stop_token_ids\[0\] is 100"),
    ],
)
def test_what_leaves_no_room_is_refused_in_numbers_the_caller_knows(
    fields: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        admit_request(request(**fields), LIMITS, "ipc")


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("external_id", {"external_id": ""}),
        ("external_id", {"external_id": "x" * 257}),
        ("external_id", {"external_id": "\ud800"}),
        ("prompt", {"prompt_token_ids": ()}),
        ("token_ids", {"prompt_token_ids": (-1,)}),
        ("token_ids", {"prompt_token_ids": (1 << 31,)}),
        ("output_prefix_token_ids", {"output_prefix_token_ids": (-1,)}),
        ("deadline_s", {"deadline_s": 0}),
        ("deadline_s", {"deadline_s": float("nan")}),
        ("deadline_s", {"deadline_s": 1e9}),
        ("max_unread_tokens", {"max_unread_tokens": -1}),
        ("sampling.max_tokens", {"max_tokens": 0}),
        ("sampling.max_tokens", {"max_tokens": "5"}),
        ("sampling.temperature", {"temperature": -1.0}),
        ("sampling.stop", {"stop": ("",)}),
        ("context_phase_params", {"request_type": GENERATION}),
        ("context_phase_params", {"context_phase_params": PARAMS}),
        ("disagg_request_id", {"request_type": CONTEXT}),
    ],
)
def test_each_field_is_judged_by_name(field: str, fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        check_request(request(**fields))
    assert raised.value.field == field


@pytest.mark.parametrize(
    ("field", "kind", "fields"),
    [
        ("output_prefix_token_ids", GENERATION, {"output_prefix_token_ids": (1,)}),
        ("output_prefix_token_ids", CONTEXT, {"output_prefix_token_ids": (1,)}),
        ("return_context_logits", GENERATION, {"return_context_logits": True}),
        ("return_generation_logits", CONTEXT, {"return_generation_logits": True}),
        ("sampling.max_tokens", CONTEXT, {"max_tokens": 2}),
    ],
)
def test_parts_that_do_not_go_together_are_refused_by_the_one_to_drop(
    field: str, kind: RequestType, fields: dict[str, Any]
) -> None:
    needed: dict[str, Any] = (
        {"context_phase_params": PARAMS}
        if kind is GENERATION
        else {"disagg_request_id": PARAMS.disagg_request_id}
    )
    check_request(request(request_type=kind, **needed))
    with pytest.raises(InvalidRequestError, match=kind) as raised:
        check_request(request(request_type=kind, **needed, **fields))
    assert raised.value.field == field


@pytest.mark.parametrize(
    "fields",
    [
        {"return_context_logits": True},
        {"return_generation_logits": True},
        {"logits_processor": lambda ids, logits: logits},
    ],
)
def test_what_stays_in_one_process_is_refused_by_forms_of_several(fields: dict[str, Any]) -> None:
    """Guards: logits asked for and silently not there, a callable that a queue cannot take."""
    asked = request(**fields)
    check_form(asked, "single")
    for form in ("ipc", "rpc", "ray", "attach"):
        with pytest.raises(UnsupportedError, match=form) as raised:
            check_form(asked, form)
        assert raised.value.field == next(iter(fields))


@pytest.mark.parametrize("form", ["single", "ipc"])
def test_multimodal_input_is_refused_and_not_dropped(form: str) -> None:
    with pytest.raises(UnsupportedError) as raised:
        check_form(request(multimodal={"image": b"..."}), form)
    assert raised.value.field == "multimodal"


def test_every_field_reaches_the_engine() -> None:
    """Guards: a field that the boundary takes and the engine never hears of."""

    def processor(ids: Any, logits: Any) -> Any:
        return logits

    asked = request(
        output_prefix_token_ids=(3, 4),
        return_context_logits=True,
        return_generation_logits=True,
        logits_processor=processor,
        max_tokens=9,
        seed=1,
    )
    sent = to_engine_request(asked, 5)
    assert (sent.request_id, sent.prompt_token_ids) == (5, pack_token_ids((1, 2)))
    assert sent.output_prefix_token_ids == pack_token_ids((3, 4))
    assert sent.return_context_logits
    assert sent.return_generation_logits
    assert sent.local is not None
    assert sent.local.logits_processor is processor


def test_text_goes_on_behind_an_output_prefix_as_if_never_interrupted() -> None:
    """Guards: a stop string that lies across the place where an answer was taken up."""
    from executor.engine.seam import EngineOutput

    tokenizer = CharTokenizer()
    stop = tokenizer.decode((4, 5))
    asked = request(output_prefix_token_ids=(3, 4), stop=(stop,))
    post = Postprocessor(text_params(asked, tokenizer), tokenizer)
    chunk = post.absorb(EngineOutput(request_id=1, token_index=2, token_ids=(5, 6)))
    assert chunk is not None
    assert (chunk.token_index, chunk.token_ids, chunk.text) == (2, (5,), "")
    assert chunk.text_offset == 1
    assert post.stop_string == stop
