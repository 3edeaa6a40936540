"""Our decoder against transformers, family by family, on tiny random checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from executor.engine.attention.paged import Span, plan_attention
from executor.engine.attention.pool import KvPool
from executor.engine.models.config import load_model_config
from executor.engine.models.llama import LlamaModel
from executor.engine.weights import load_weights
from protos.messages import KvLayout
from tests.support.engine_drive import engine_config, make_driver
from tests.support.engine_models import (
    FAMILIES,
    prompt_of,
    reference_greedy,
    reference_logits,
    reference_model,
    save_checkpoint,
)

TOKENS_PER_BLOCK = 8


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    name = str(request.param)
    return name, save_checkpoint(name, tmp_path_factory.mktemp(name)), reference_model(name)


def logits_by_chunks(
    folder: Path, token_ids: list[int], chunks: list[int], dtype: torch.dtype, device: str
) -> torch.Tensor:
    """Logits at every position, computed chunk after chunk over scattered blocks."""
    config = load_model_config(folder)
    target = torch.device(device)
    model = LlamaModel(
        config,
        load_weights(folder, config, dtype, target),
        num_positions=512,
        dtype=dtype,
        device=target,
    )
    layout = KvLayout(
        dtype=str(dtype).removeprefix("torch."),
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        tokens_per_block=TOKENS_PER_BLOCK,
        model_fingerprint="test",
    )
    pool = KvPool(32, layout, target)
    blocks = tuple(range(31, -1, -2)) + tuple(range(0, 32, 2))
    parts, start = [], 0
    for size in chunks:
        plan = plan_attention(pool, [Span(start, size, blocks)], config.sliding_window)
        ids = torch.tensor(token_ids[start : start + size], device=target)
        parts.append(model.forward(ids, plan, torch.arange(size, device=target)))
        start += size
    return torch.cat(parts).cpu()


@pytest.mark.parametrize("chunks", [[70], [16, 30, 1, 1, 22]])
def test_logits_equal_transformers(family: Any, chunks: list[int]) -> None:
    """Guards every term of the forward pass: biases, norms, rope scalings, windows, chunking."""
    _, folder, reference = family
    token_ids = prompt_of(70, seed=3)
    expected = reference_logits(reference, token_ids)
    actual = logits_by_chunks(folder, token_ids, chunks, torch.float32, "cpu")
    torch.testing.assert_close(actual, expected, atol=2e-4, rtol=2e-4)


@pytest.fixture
def quiet_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_greedy_tokens_equal_transformers(family: Any, quiet_threads: None) -> None:
    """Guards batching, chunked prefill mixed with decode, and prefix reuse, on tokens."""
    _, folder, reference = family
    shared = prompt_of(19, seed=1)
    prompts = [shared, shared + prompt_of(30, seed=2), prompt_of(5, seed=4), shared, [7]]
    driver = make_driver(engine_config(folder, prefill_chunk_tokens=11, max_batch_tokens=64))
    try:
        first = driver.submit(prompts[0], max_tokens=12)
        expected = reference_greedy(reference, prompts[0], 12)
        assert driver.answer(first).token_ids == expected
        ids = [driver.submit(prompt, max_tokens=12) for prompt in prompts]
        driver.run()
        for prompt, request_id in zip(prompts, ids, strict=True):
            answer = driver.answers[request_id]
            assert answer.token_ids == reference_greedy(reference, prompt, 12)
        finishes = [driver.answers[request_id].finish for request_id in ids]
        cached = [finish.usage.cached_tokens for finish in finishes if finish]
        assert cached == [16, 16, 0, 16, 0]
    finally:
        driver.engine.close()


def test_bfloat16_is_close(family: Any) -> None:
    """Guards the dtype path: bfloat16 may differ in size of error, not in kind."""
    name, folder, _ = family
    token_ids = prompt_of(40, seed=5)
    expected = reference_logits(reference_model(name), token_ids)
    actual = logits_by_chunks(folder, token_ids, [24, 1, 15], torch.bfloat16, "cpu")
    _assert_close_as_bfloat16(actual, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cuda_is_close(family: Any, dtype: torch.dtype) -> None:
    """Guards the same code on a GPU. Deselected by conftest where there is none."""
    name, folder, _ = family
    token_ids = prompt_of(70, seed=3)
    expected = reference_logits(reference_model(name), token_ids)
    actual = logits_by_chunks(folder, token_ids, [16, 30, 1, 1, 22], dtype, "cuda")
    if dtype is torch.float32:
        torch.testing.assert_close(actual, expected, atol=1e-2, rtol=1e-2)
    else:
        _assert_close_as_bfloat16(actual, expected)


def _assert_close_as_bfloat16(actual: torch.Tensor, expected: torch.Tensor) -> None:
    error = (actual - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert float(error.max()) < 0.08, f"relative error {float(error.max()):.3f}"
