"""A sleeping torch engine gives its memory back for real, and its wires survive that."""

from __future__ import annotations

import gc
import itertools
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from executor.config import EngineConfig, TransferConfig
from executor.engine.attention.pages import trim_heap
from executor.engine.attention.pool import KvPool
from executor.engine.control import resident_bytes
from executor.engine.core import EngineCore
from executor.engine.models.llama import LlamaModel, Progress
from executor.engine.runner import TorchRunner
from executor.engine.torch_engine import create_torch_engine
from protos.errors import ConfigError, NotNowError, Severity, UnsupportedError
from protos.messages import DisaggRequestId, KvLayout, RequestType
from tests.support.engine_drive import Driver, engine_config, make_driver, run_together, settle
from tests.support.engine_heavy import save_heavy_checkpoint
from tests.support.engine_models import prompt_of, save_checkpoint

MIB = 1 << 20


@pytest.fixture(autouse=True)
def quiet_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def heavy(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    folder = tmp_path_factory.mktemp("heavy")
    return folder, save_heavy_checkpoint(folder)


def resident() -> int:
    gc.collect()
    trim_heap()
    return resident_bytes()


def test_a_pool_gives_its_pages_back_where_it_lies() -> None:
    """Guards the registration with UCX: the address stays, and what comes back is blank."""
    layout = KvLayout(
        dtype="float32",
        num_layers=2,
        num_kv_heads=2,
        head_dim=64,
        tokens_per_block=16,
        model_fingerprint="f",
    )
    pool = KvPool(64 * MIB // layout.block_bytes, layout, torch.device("cpu"))
    address = pool.address
    pool.tensor.fill_(1.0)
    before = resident()
    pool.release_pages()
    assert before - resident() > 60 * MIB
    assert pool.address == address
    assert float(pool.tensor[7].abs().sum()) == 0.0
    pool.tensor.fill_(2.0)
    assert float(pool.tensor[-1].min()) == 2.0
    assert before - resident() < 4 * MIB


def test_weights_and_pool_leave_memory_and_come_back(heavy: tuple[Path, int]) -> None:
    """Guards sleep's purpose in bytes, and progress while the weights are loaded again."""
    folder, weight_bytes = heavy
    driver = make_driver(engine_config(folder, num_blocks=512, tokens_per_block=16))
    try:
        control = driver.engine.control
        runner = driver.engine._runner
        assert isinstance(runner, TorchRunner)
        runner.pool.tensor.add_(0.0)
        first = driver.answer(driver.submit(prompt_of(40, 1), max_tokens=6)).token_ids
        pool_bytes = runner.pool.tensor.nbytes
        held = weight_bytes + pool_bytes
        assert pool_bytes > 30 * MIB
        assert weight_bytes > 60 * MIB
        awake = resident()
        control.sleep()
        freed = awake - resident()
        assert freed > 0.8 * held, f"{freed / MIB:.0f} of {held / MIB:.0f} MiB were freed"
        progress = driver.engine.progress
        control.wake_up()
        assert driver.engine.progress >= progress + 4
        assert resident() > awake - held + 0.8 * weight_bytes
        assert driver.answer(driver.submit(prompt_of(40, 1), max_tokens=6)).token_ids == first
    finally:
        driver.engine.close()


def test_an_engine_whose_files_changed_sleeps_on(tmp_path: Path) -> None:
    """Guards against waking up as another model: KV and tokens would be another's.

    Its error ends the call, not the engine, though a ConfigError elsewhere ends one.
    """
    save_checkpoint("llama", tmp_path / "m")
    shutil.copytree(tmp_path / "m", tmp_path / "kept")
    driver = make_driver(engine_config(tmp_path / "m"))
    try:
        control = driver.engine.control
        first = driver.answer(driver.submit(prompt_of(20, 1))).token_ids
        control.sleep()
        weights = tmp_path / "m" / "model.safetensors"
        weights.rename(tmp_path / "away")
        with pytest.raises(ConfigError) as caught:
            control.wake_up()
        assert caught.value.severity is Severity.REQUEST
        save_checkpoint("qwen3", tmp_path / "m")
        with pytest.raises(ConfigError, match="another model") as caught:
            control.wake_up()
        assert caught.value.severity is Severity.REQUEST
        assert control.is_asleep
        with pytest.raises(NotNowError):
            driver.submit(prompt_of(20, 1))
        shutil.copytree(tmp_path / "kept", tmp_path / "m", dirs_exist_ok=True)
        control.wake_up()
        assert driver.answer(driver.submit(prompt_of(20, 1))).token_ids == first
    finally:
        driver.engine.close()


def ucx_driver(config: EngineConfig, tls: str) -> Driver:
    woken = threading.Event()
    transfer = TransferConfig(transport="ucx", ucx_tls=tls)
    engine = create_torch_engine(msgspec.structs.replace(config, transfer=transfer), woken.set)
    assert isinstance(engine, EngineCore)
    return Driver(engine, woken)


def test_hand_offs_go_on_over_ucx_after_a_sleep_on_both_sides(tmp_path: Path) -> None:
    """Guards the pool's registration: UCX must not read or write pages that are gone."""
    config = engine_config(save_checkpoint("llama", tmp_path))
    tls = "tcp,self,posix,cma"
    context, generation = ucx_driver(config, tls), ucx_driver(config, tls)
    prompts = [prompt_of(30, seed) for seed in (1, 2)]
    ids = (DisaggRequestId(1, n, 0) for n in itertools.count(1))
    try:
        expected = [context.answer(context.submit(p, max_tokens=8)).token_ids for p in prompts]
        for _ in range(2):
            for prompt, tokens in zip(prompts, expected, strict=True):
                asked = context.submit(
                    prompt, request_type=RequestType.CONTEXT_ONLY, disagg_id=next(ids), max_tokens=1
                )
                finish = context.answer(asked).finish
                assert finish is not None
                params = finish.context_phase_params
                assert params is not None
                taken = generation.submit(
                    prompt, request_type=RequestType.GENERATION_ONLY, params=params, max_tokens=8
                )
                run_together([context, generation])
                answer = generation.answers[taken]
                assert [*params.first_token_ids, *answer.token_ids] == tokens
                assert answer.finish is not None
                assert answer.finish.kv.transferred_blocks == 4
            settle([context, generation])
            for driver in (context, generation):
                driver.engine.control.sleep()
                driver.engine.control.wake_up()
    finally:
        context.engine.close()
        generation.engine.close()


def test_an_engine_that_is_not_on_a_cpu_does_not_sleep() -> None:
    """Guards what was never run: releasing a GPU's pool is refused, naming the device."""
    layout = KvLayout(
        dtype="float32",
        num_layers=1,
        num_kv_heads=1,
        head_dim=8,
        tokens_per_block=8,
        model_fingerprint="f",
    )
    pool = KvPool(2, layout, torch.device("meta"))
    runner = TorchRunner(None, pool, load=_never, progress=Progress())
    with pytest.raises(UnsupportedError, match="an engine on meta cannot sleep") as caught:
        runner.check_release()
    assert caught.value.field == "device"


def _never() -> LlamaModel:
    raise AssertionError("nothing is loaded here")


def test_memory_that_may_be_pinned_is_not_given_back(tmp_path: Path) -> None:
    """Guards RDMA: a device that pinned the pool would go on with the pages it had."""
    config = engine_config(save_checkpoint("llama", tmp_path))
    driver = ucx_driver(config, "tcp,self,sm")
    try:
        with pytest.raises(UnsupportedError, match="sm may pin") as caught:
            driver.engine.control.sleep()
        assert caught.value.field == "transfer.ucx_tls"
        assert not driver.engine.control.is_asleep
    finally:
        driver.engine.close()
