"""Messages over the bound of a frame, on the real sockets: refused by whoever makes them."""

from __future__ import annotations

import pytest

from protos.errors import InvalidRequestError, RequestFailedError
from tests.support.executor_scripted import audited, collect, config, request, running, tokens

pytestmark = pytest.mark.system
FRAME_BYTES_MAX = 40_000
LARGE = config(num_blocks=65_536, max_total_tokens=1 << 20)


@pytest.mark.parametrize("batch_max", [1, 64])
async def test_nothing_that_is_too_large_cuts_the_connection(batch_max: int) -> None:
    """A frame over the bound made zmq cut the connection: every later request ended by its
    deadline alone, while health stayed good. A batch of long prompts was one such frame."""
    limits = {"send_batch_max": batch_max, "send_batch_s": 0.05}
    async with running(LARGE, message_bytes_max=FRAME_BYTES_MAX, **limits) as executor:
        with pytest.raises(InvalidRequestError, match="at most 35904") as raised:
            executor.submit(request(prompt=(5,) * 10_000))
        assert raised.value.field == "prompt"
        with pytest.raises(InvalidRequestError) as raised:
            await executor.collective_rpc("load_lora", name="a", path="x" * FRAME_BYTES_MAX)
        assert raised.value.field == "arguments"
        results = [executor.submit(request(f"r{n}", (n,) * 8000)) for n in range(6)]
        for result in results:
            assert len(tokens(await collect(result))) == 4
        for number in range(16):
            await executor.collective_rpc("load_lora", name=f"{number}", path="x" * 4000)
        with pytest.raises(RequestFailedError, match="the engine's answer cannot be sent: it has"):
            await executor.collective_rpc("list_loras")
        assert tokens(await collect(executor.submit(request())))
        counters = (await audited(executor)).counters
        assert counters["worker_bad_frames"] == counters["proxy_bad_frames"] == 0
