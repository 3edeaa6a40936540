"""What stays in one process is refused by name, and where that was forgotten, by the encoder."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from executor.engine.local import LocalExtras, LocalOutput, check_crosses
from executor.engine.seam import EngineOutput, EngineRequest
from protos.errors import UnsupportedError
from protos.messages import RequestType, SamplingParams
from protos.tokens import pack_token_ids

PLAIN = EngineRequest(
    request_id=1,
    request_type=RequestType.CONTEXT_AND_GENERATION,
    prompt_token_ids=pack_token_ids((1, 2)),
    sampling=SamplingParams(max_tokens=1, seed=0),
    deadline_s=1.0,
    output_prefix_token_ids=pack_token_ids((3,)),
)
LOCAL = LocalExtras(logits_processor=lambda _token_ids, logits: logits)


def test_what_cannot_cross_is_named() -> None:
    check_crosses(PLAIN)
    check_crosses(msgspec.structs.replace(PLAIN, local=LocalExtras()))
    for changes, field in (
        ({"return_context_logits": True}, "return_context_logits"),
        ({"return_generation_logits": True}, "return_generation_logits"),
        ({"local": LOCAL}, "logits_processor"),
    ):
        with pytest.raises(UnsupportedError) as caught:
            check_crosses(msgspec.structs.replace(PLAIN, **changes))
        assert caught.value.field == field


def test_no_encoder_of_ours_sends_it() -> None:
    """Guards against a callable or gigabytes of logits that vanish on the way, or are pickled."""
    crossed = msgspec.msgpack.decode(msgspec.msgpack.encode(PLAIN), type=EngineRequest)
    assert crossed == PLAIN
    with pytest.raises(TypeError):
        msgspec.msgpack.encode(msgspec.structs.replace(PLAIN, local=LOCAL))
    logits = LocalOutput(generation_logits=np.zeros((1, 2), dtype=np.float32))
    with pytest.raises(TypeError):
        msgspec.msgpack.encode(EngineOutput(request_id=1, local=logits))
    forged = msgspec.to_builtins(PLAIN) | {"local": {"logits_processor": 1}}
    frame = msgspec.msgpack.encode(forged)
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(frame, type=EngineRequest)
