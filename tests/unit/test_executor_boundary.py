"""What a caller may hand over as a field, and that nothing else gets past the boundary."""

from __future__ import annotations

import decimal
import enum
import time
from typing import Any

import msgspec
import numpy as np
import pytest

from executor import exact
from executor.engine.seam import EngineRequest
from executor.request import ExecutorRequest, admit_request, to_engine_request
from protos.errors import InvalidRequestError
from protos.messages import DisaggRequestId, ModelLimits, RequestType, SamplingParams
from tests.support.executor_scripted import context_request
from tests.support.serving_double import hand_off

LIMITS = ModelLimits(model="m", vocab_size=100, max_prompt_tokens=40_000, max_total_tokens=50_000)
PARAMS = hand_off(context_request("c", (1, 2)), 9)
FORMS = ("single", "ipc")


class Int(int):
    pass


class Float(float):
    pass


class Text(str):
    pass


class Four(enum.IntEnum):
    FOUR = 4


class Rude:
    def __repr__(self) -> str:
        raise RuntimeError("no")

    def __index__(self) -> int:
        raise RuntimeError("no")


def request(**fields: Any) -> ExecutorRequest:
    of_sampling = SamplingParams.__struct_fields__
    sampling = {name: fields.pop(name) for name in of_sampling if name in fields}
    defaults = {"external_id": "a", "prompt_token_ids": (1, 2), "deadline_s": 5.0}
    given = {"sampling": SamplingParams(**{"max_tokens": 4, "seed": 7, **sampling}), **fields}
    return ExecutorRequest(**{**defaults, **given})


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": np.int64(4), "seed": np.uint64(7), "top_k": np.int32(0)},
        {"temperature": np.float32(0), "top_p": np.float64(1)},
        {"max_tokens": Int(4), "seed": Int(7), "temperature": Float(0)},
        {"max_tokens": Four.FOUR, "temperature": 0, "ignore_eos": np.bool_(False)},
        {"external_id": Text("a"), "stop": [], "stop_token_ids": []},
        {"external_id": np.str_("a"), "deadline_s": np.float32(5)},
        {"prompt_token_ids": [1, Int(2)]},
        {"prompt_token_ids": np.array([1, 2], dtype=np.uint16), "deadline_s": 5},
        {"prompt_token_ids": (np.int64(1), np.int64(2)), "max_unread_tokens": np.int8(0)},
        {"request_type": "context_and_generation"},
    ],
)
def test_other_spellings_of_a_value_become_exactly_its_type(fields: dict[str, Any]) -> None:
    """NumPy's scalars and subclasses of ours passed the checks, could not be encoded, and cost
    the frame's number: the worker saw a gap and closed the lane, for everybody."""
    plain = admit_request(request(), LIMITS, "ipc")
    admitted = admit_request(request(**fields), LIMITS, "ipc")
    assert admitted == plain
    engine_request = to_engine_request(admitted, 5)
    packed = msgspec.msgpack.encode(engine_request)
    assert packed == msgspec.msgpack.encode(to_engine_request(plain, 5))
    assert msgspec.msgpack.decode(packed, type=EngineRequest) == engine_request


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("external_id", {"external_id": b"s"}),
        ("external_id", {"external_id": Text("a\udc80")}),
        ("request_type", {"request_type": None}),
        ("request_type", {"request_type": "bogus"}),
        ("token_ids", {"prompt_token_ids": b"abc"}),
        ("token_ids", {"prompt_token_ids": None}),
        ("token_ids", {"prompt_token_ids": {1: 2}}),
        ("token_ids", {"prompt_token_ids": (n for n in (1, 2))}),
        ("token_ids", {"prompt_token_ids": np.array([[1, 2]])}),
        ("token_ids", {"prompt_token_ids": np.array([1.0])}),
        ("token_ids[1]", {"prompt_token_ids": (1, True)}),
        ("token_ids[0]", {"prompt_token_ids": (1.0,)}),
        ("token_ids", {"prompt_token_ids": (1 << 70,)}),
        ("output_prefix_token_ids[0]", {"output_prefix_token_ids": ("a",)}),
        ("sampling", {"sampling": None}),
        ("sampling.max_tokens", {"max_tokens": True}),
        ("sampling.max_tokens", {"max_tokens": 10**5000}),
        ("sampling.max_tokens", {"max_tokens": Rude()}),
        ("sampling.temperature", {"temperature": decimal.Decimal(0)}),
        ("sampling.temperature", {"temperature": None}),
        ("sampling.temperature", {"temperature": 10**400}),
        ("sampling.top_k", {"top_k": None}),
        ("sampling.seed", {"seed": 1 << 64}),
        ("sampling.stop", {"stop": "abc"}),
        ("sampling.stop[0]", {"stop": (1,)}),
        ("sampling.ignore_eos", {"ignore_eos": 1}),
        ("deadline_s", {"deadline_s": decimal.Decimal(5)}),
        ("deadline_s", {"deadline_s": True}),
        ("deadline_s", {"deadline_s": "5"}),
        ("disagg_request_id", {"disagg_request_id": (1, 2, 3)}),
        ("disagg_request_id.router_epoch", {"disagg_request_id": DisaggRequestId(1 << 70, 2, 3)}),
        ("disagg_request_id.attempt", {"disagg_request_id": DisaggRequestId(1, 2, -3)}),
        (
            "context_phase_params",
            {
                "request_type": RequestType.GENERATION_ONLY,
                "context_phase_params": msgspec.structs.replace(PARAMS, seed=1 << 70),
            },
        ),
        ("return_context_logits", {"return_context_logits": "x"}),
        ("logits_processor", {"logits_processor": 5}),
        ("max_unread_tokens", {"max_unread_tokens": None}),
        ("max_unread_tokens", {"max_unread_tokens": float("nan")}),
    ],
)
def test_what_is_not_of_its_type_is_refused_by_field_in_every_form(
    form: str, field: str, fields: dict[str, Any]
) -> None:
    """A Decimal deadline or a prompt of bytes raised behind the registration: the request's
    entry stayed for ever. In one process nothing is encoded, so nothing noticed at all."""
    with pytest.raises(InvalidRequestError) as raised:
        admit_request(request(**fields), LIMITS, form)
    assert raised.value.field == field


def test_something_else_than_a_request_is_refused() -> None:
    wrong: Any = 42
    with pytest.raises(InvalidRequestError, match="request is of type int"):
        admit_request(wrong, LIMITS, "single")


def test_a_long_prompt_is_admitted_in_a_few_passes() -> None:
    """Guards a loop in Python over each token of a prompt: 32,000 are two milliseconds."""
    asked = request(prompt_token_ids=(5,) * 32_000)
    start_s = time.perf_counter()
    for _ in range(10):
        admit_request(asked, LIMITS, "ipc")
    assert time.perf_counter() - start_s < 10 * 5 * 0.002


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize("value", [object(), 1 << 70, "\udc80", nested(3000), {(1,): object()}])
def test_arguments_that_are_not_plain_data_are_refused(value: Any) -> None:
    """A lone surrogate or a nest too deep raised what no caller of ours catches."""
    with pytest.raises(InvalidRequestError) as raised:
        exact.arguments("describe", {"x": value})
    assert raised.value.field == "arguments"


def test_numpy_in_arguments_is_taken_for_what_it_holds() -> None:
    assert msgspec.msgpack.decode(exact.arguments("m", {"x": np.int64(5)})) == {"x": 5}


@pytest.mark.parametrize("method", [5, None, b"describe", "\udc80", "", "x" * 257])
def test_a_method_is_a_name(method: Any) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        exact.text("method", method, exact.TEXT_LENGTH_MAX)
    assert raised.value.field == "method"
