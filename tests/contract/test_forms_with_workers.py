"""Postprocess workers beside the forms whose world is elsewhere: a part of the contract, and the
loss of one. The IPC form's have tests of their own; the soak hurts them in every form."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from protos.errors import PostprocessError
from tests.contract import test_executor_cancels as cancels
from tests.contract import test_executor_contract as contract
from tests.support.executor_baseline import nothing_left
from tests.support.executor_forms import RARE_NAMES, form_of
from tests.support.executor_scripted import (
    CONTRACT,
    CharTokenizer,
    audited,
    collect,
    expected,
    request,
    tokens,
)

pytestmark = pytest.mark.system
WITHIN_S = 5.0
PARTS = (
    contract.test_one_request_streams_its_tokens_and_ends_once,
    contract.test_many_at_once_each_get_their_own,
    contract.test_a_stop_string_ends_by_stop_and_drops_the_rest,
    contract.test_a_stop_string_in_the_context_phase_releases_its_lease,
    contract.test_a_slow_consumer_gets_one_merged_chunk,
    cancels.test_running_and_its_external_id_is_free_again,
)


@pytest.mark.parametrize("name", RARE_NAMES)
async def test_the_contract_holds_and_a_lost_worker_costs_its_bucket_only(
    name: str, cluster: Callable[[], str]
) -> None:
    form = form_of(name, cluster)
    with nothing_left():
        async with form.open(CONTRACT, tokenizer=CharTokenizer(), deadline_grace_s=1.0) as executor:
            for part in PARTS:
                await part(executor)
            await one_is_lost(executor)


async def one_is_lost(executor: Any) -> None:
    results = [executor.submit(request(f"p{i}", (i, i + 1), max_tokens=3000)) for i in range(40)]
    await asyncio.gather(*map(anext, results))
    os.kill(executor.post_pids[0], signal.SIGKILL)
    reads = [asyncio.create_task(collect(result)) for result in results]
    await asyncio.wait(reads, timeout=WITHIN_S, return_when=asyncio.FIRST_COMPLETED)
    for result in results:
        result.abort()
    ends = await asyncio.gather(*reads, return_exceptions=True)
    assert [type(end) for end in ends].count(PostprocessError) == len(results) // 2
    again = [executor.submit(request(f"n{i}", (i,), max_tokens=5)) for i in range(4)]
    for i, result in enumerate(again):
        assert tokens(await collect(result)) == expected((i,), 5)
    await audited(executor)
