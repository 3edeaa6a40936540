"""The whole path with the real model: same tokens as one engine, every byte accounted for.

One cluster per wire (shared memory and tcp). The reference ids were made by
`transformers` (tests/support/make_golden.py; tests/numerics checks them again).
A third server, `single`, stands alone and never sees transferred KV.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from baton import AsyncClient, Client, SamplingParams
from tests.support.cluster import Cluster
from tests.support.golden import GOLDEN, GoldenPrompt, demo_engine, demo_model

pytestmark = pytest.mark.system
WIRES = {"shm": "tcp,self,posix,cma", "tcp": "tcp,self"}
MAX_TOKENS = 24
GREEDY = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)


both_wires = pytest.mark.parametrize("cluster", list(WIRES), indirect=True, scope="module")
one_wire = pytest.mark.parametrize("cluster", ["shm"], indirect=True, scope="module")


@pytest.fixture(scope="module")
def cluster(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    engine = demo_engine(transfer={"ucx_tls": WIRES[request.param]})
    folder = tmp_path_factory.mktemp(f"cluster-{request.param}")
    cluster = Cluster.start(folder, engine, tokenizer=demo_model())
    yield cluster
    try:
        cluster.wait_baseline()
    finally:
        exits = cluster.stop()
    assert set(exits.values()) == {0}, exits


@both_wires
@pytest.mark.parametrize("prompt", GOLDEN, ids=lambda p: p.name)
def test_greedy_tokens_and_bytes(cluster: Cluster, prompt: GoldenPrompt) -> None:
    """Cluster == transformers; bytes == blocks x block bytes; nothing is computed twice."""
    num_prompt = len(prompt.prompt_ids)
    with Client(cluster.address()) as client:
        done = client.generate(prompt.prompt_ids, sampling=GREEDY)
    layout = cluster.info("generation-0").layout
    assert layout is not None
    assert list(done.token_ids) == prompt.output_ids[:MAX_TOKENS]
    assert done.usage.prompt_tokens == num_prompt
    assert done.usage.completion_tokens == MAX_TOKENS
    kv = done.kv
    assert kv.recomputed_tokens == 0
    assert kv.transferred_tokens + kv.reused_tokens == num_prompt
    assert kv.reused_tokens % layout.tokens_per_block == 0
    assert kv.transferred_blocks == (
        layout.num_blocks(num_prompt) - kv.reused_tokens // layout.tokens_per_block
    )
    assert kv.transferred_bytes == kv.transferred_blocks * layout.block_bytes
    # SmolLM2-135M: 30 layers, keys and values, 3 heads, 16 tokens, 64 dimensions, 4 bytes.
    assert layout.block_bytes == 30 * 2 * 3 * 16 * 64 * 4


@both_wires
def test_the_wire_is_the_one_that_was_asked_for(
    cluster: Cluster, request: pytest.FixtureRequest
) -> None:
    """Shared memory switches itself off silently under some UCX settings: ask what is in use."""
    with Client(cluster.address()) as client:
        done = client.generate("Which wire?", max_tokens=2)
    is_shared_memory = "shm" in request.node.name
    assert ("posix" in done.kv.transport or "cma" in done.kv.transport) == is_shared_memory


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server that stands alone."""
    alone = Cluster.alone(tmp_path_factory.mktemp("single"), demo_engine())
    yield alone.address("single")
    assert alone.stop() == {"single": 0}


@pytest.mark.parametrize("prompt", GOLDEN, ids=lambda p: p.name)
def test_one_engine_gives_the_same(single: str, prompt: GoldenPrompt) -> None:
    with Client(single) as client:
        done = client.generate(prompt.prompt_ids, sampling=GREEDY)
    assert list(done.token_ids) == prompt.output_ids[:MAX_TOKENS]
    assert done.kv.transferred_bytes == 0


@one_wire
@pytest.mark.parametrize("prompt", GOLDEN[:12], ids=lambda p: p.name)
def test_seeded_sampling_is_the_same_through_the_cluster(
    cluster: Cluster, single: str, prompt: GoldenPrompt
) -> None:
    params = SamplingParams(max_tokens=16, temperature=0.8, seed=1234, ignore_eos=True)
    with Client(cluster.address()) as through, Client(single) as alone:
        left = through.generate(prompt.prompt_ids, sampling=params)
        right = alone.generate(prompt.prompt_ids, sampling=params)
    assert left.token_ids == right.token_ids
    assert left.text == right.text


@one_wire
def test_sampling_depends_on_the_seed(cluster: Cluster) -> None:
    """A seeded test that compares two greedy runs would prove nothing."""
    answers = set()
    with Client(cluster.address()) as client:
        for seed in range(4):
            done = client.generate("Once", max_tokens=8, temperature=1.0, seed=seed)
            answers.add(done.token_ids)
    assert len(answers) > 1


async def _stream(client: AsyncClient, prompt: GoldenPrompt, max_tokens: int) -> dict[str, Any]:
    """Collect one stream and check its numbering as it comes."""
    ids: list[int] = []
    text = ""
    finish = None
    stream = await client.generate(
        prompt.prompt_ids, max_tokens=max_tokens, ignore_eos=True, stream=True
    )
    async for chunk in stream:
        assert finish is None, "something came after the terminal message"
        assert chunk.token_index == len(ids) or not chunk.token_ids
        assert chunk.text_offset == len(text) or not chunk.text
        ids += chunk.token_ids
        text += chunk.text
        finish = chunk.finish
    assert finish is not None
    return {"ids": ids, "text": text, "finish": finish}


@both_wires
async def test_32_streams_at_once(cluster: Cluster) -> None:
    """Mixed lengths, all at once: every one right, nothing held afterwards."""
    prompts = [GOLDEN[i % len(GOLDEN)] for i in range(32)]
    lengths = [4 + (5 * i) % 21 for i in range(32)]
    async with AsyncClient(cluster.address()) as client:
        answers = await asyncio.gather(
            *(_stream(client, p, n) for p, n in zip(prompts, lengths, strict=True))
        )
    for prompt, length, answer in zip(prompts, lengths, answers, strict=True):
        assert answer["ids"] == prompt.output_ids[:length], prompt.name
        assert answer["finish"].usage.completion_tokens == length
        assert answer["finish"].kv.recomputed_tokens == 0
    cluster.wait_baseline()


@one_wire
def test_chat_and_stop_string_and_first_token_that_ends_it(cluster: Cluster) -> None:
    question = [{"role": "user", "content": "What is the capital of France?"}]
    with Client(cluster.address()) as client:
        whole = client.chat(question, max_tokens=24)
        assert "Paris" in whole.text
        assert whole.finish_reason == "stop"
        cut = client.chat(question, max_tokens=24, stop=["Par"])
        assert cut.finish_reason == "stop"
        assert cut.text == whole.text[: whole.text.index("Par")]
        first = whole.token_ids[0]
        ended = client.chat(question, max_tokens=24, stop_token_ids=[first])
        assert ended.token_ids == (first,)
        assert ended.finish_reason == "stop"
        assert ended.kv.transferred_bytes == 0
        one = client.chat(question, max_tokens=1)
        assert one.token_ids == (first,)
        assert one.finish_reason == "length"
    cluster.wait_baseline()


@one_wire
def test_metrics_tell_what_happened(cluster: Cluster) -> None:
    """Guards figures that are exported and never move: each is compared with the answer."""
    roles = {"router": "router", "context-0": "context", "generation-0": "generation"}
    before = {name: cluster.processes[name].metrics() for name in roles}
    with Client(cluster.address()) as client:
        done = client.generate("Metrics of a fresh prompt", max_tokens=6, ignore_eos=True)
    cluster.wait_baseline()

    def gain(name: str, metric: str, labels: str = "") -> float:
        sample = f'{metric}{{{labels}role="{roles[name]}"}}'
        after = cluster.processes[name].metrics()
        return after[sample] - before[name].get(sample, 0.0)

    for name in roles:
        sample = f'baton_requests_total{{outcome="ok",role="{roles[name]}"}}'
        gained = cluster.processes[name].metrics()[sample] - before[name].get(sample, 0.0)
        assert gained == 1, name
        assert gain(name, "baton_ttft_seconds_count") == 1
        states = [s for s in before[name] if s.startswith("baton_ledger_entries")]
        assert states
        assert "baton_queue_requests" in " ".join(before[name])
    assert gain("router", "baton_itl_seconds_count") == 5
    assert gain("generation-0", "baton_itl_seconds_count") == 4
    num_bytes = done.kv.transferred_bytes
    assert num_bytes > 0
    assert gain("router", "baton_kv_transfer_bytes_total") == num_bytes
    assert gain("generation-0", "baton_kv_transfer_bytes_total") == num_bytes
    assert gain("generation-0", "baton_kv_transfer_seconds_count") == 1
    assert gain("context-0", "baton_kv_sent_bytes_total") == num_bytes
    assert "baton_kv_transfer_bytes_total" not in " ".join(before["context-0"])
    for name in ("context-0", "generation-0"):
        owners = [s for s in before[name] if 'kind="owner"' in s or 'kind="state"' in s]
        assert owners
