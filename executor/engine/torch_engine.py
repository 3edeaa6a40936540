"""Puts the torch engine together: model, pool, transceiver, scheduler."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from pathlib import Path

import torch

from executor.config import EngineConfig, TransferConfig
from executor.engine.attention.pool import TORCH_DTYPES, KvPool
from executor.engine.attention.room import make_pool
from executor.engine.control import RankFacts
from executor.engine.core import EngineCore, News
from executor.engine.handoff import KvMover
from executor.engine.kv_cache import BlockManager
from executor.engine.models.config import ModelConfig, load_model_config
from executor.engine.models.llama import LlamaModel, Progress
from executor.engine.runner import TorchRunner
from executor.engine.scheduler import Scheduler, SchedulerLimits
from executor.engine.seam import EngineIdentity
from executor.engine.torch_trace import TorchTracer
from executor.engine.weights import load_weights, model_fingerprint
from kv_transfer.events import PoolMemory, TransferLimits
from kv_transfer.factory import TransportSettings, create_transport
from kv_transfer.transceiver import Transceiver
from kv_transfer.transport import Transport
from protos.errors import ConfigError, RequestFailedError, Severity
from protos.messages import KvLayout, ModelInfo, ModelLimits

WIRES_THAT_PIN_NOTHING = ("tcp", "self", "posix", "sysv", "cma")

TransportMaker = Callable[[KvPool], Transport]


def create_torch_engine(
    config: EngineConfig,
    wake: Callable[[], None],
    *,
    make_transport: TransportMaker | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> EngineCore:
    """Load the model and register the pool. Raises ConfigError naming what to change.

    `make_transport` is for two engines in one process, which need a network
    between them.
    """
    device = _device(config.device)
    if config.num_threads:
        torch.set_num_threads(config.num_threads)
    path = Path(config.model)
    model_config = load_model_config(path)
    limits = _limits(config, model_config)
    progress = Progress()
    model, layout = _load_model(config, model_config, limits.max_total_tokens, device, progress)
    pool = make_pool(config.kv_cache.num_blocks, layout, device)
    incarnation = secrets.randbits(63)
    news = News(wake)
    mover = _transceiver(config, pool, incarnation, make_transport, news)
    runner = TorchRunner(
        model,
        pool,
        load=lambda: _load_again(config, limits, layout, device, progress),
        progress=progress,
        pins_pool=_who_pins_the_pool(config.transfer),
    )
    return EngineCore(
        identity=EngineIdentity(
            incarnation=incarnation,
            model_info=ModelInfo(
                limits=limits,
                dtype=config.dtype,
                num_parameters=model.num_parameters,
                architecture=model_config.architecture,
            ),
            layout=layout,
            transport=config.transfer.transport,
            rank_addresses=(mover.address,),
            wires=mover.wires,
            num_blocks=pool.num_blocks,
        ),
        scheduler=_scheduler(config),
        runner=runner,
        mover=mover,
        news=news,
        facts=RankFacts(rank=0, engine="torch", device=str(device)),
        tracer=TorchTracer(device, lambda: progress.count),
        lease_ms=config.transfer.lease_ms,
        clock=clock,
    )


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"key 'device' is {name!r}; it must be one that torch can use here, such as cpu: "
            f"{str(error).splitlines()[0]}",
            field="device",
            value=name,
            limit="a device that torch can use here",
        ) from error
    return device


def _limits(config: EngineConfig, model_config: ModelConfig) -> ModelLimits:
    """What prompt and completion may come to: the model's positions, the pool, the wish."""
    cache = config.kv_cache
    room = min(model_config.max_position_embeddings, cache.num_blocks * cache.tokens_per_block)
    max_total = min(config.max_total_tokens or room, room)
    return ModelLimits(
        model=config.served_model_name or Path(config.model).resolve().stem,
        vocab_size=model_config.vocab_size,
        max_prompt_tokens=min(config.max_prompt_tokens or max_total - 1, max_total - 1),
        max_total_tokens=max_total,
        eos_token_ids=model_config.eos_token_ids,
    )


def _load_model(
    config: EngineConfig,
    model_config: ModelConfig,
    num_positions: int,
    device: torch.device,
    progress: Progress,
) -> tuple[LlamaModel, KvLayout]:
    path, dtype = Path(config.model), TORCH_DTYPES[config.dtype]
    with torch.inference_mode():
        model = LlamaModel(
            model_config,
            load_weights(path, model_config, dtype, device, progress.step),
            num_positions=num_positions,
            dtype=dtype,
            device=device,
            progress=progress,
        )
    layout = KvLayout(
        dtype=config.dtype,
        num_layers=model_config.num_layers,
        num_kv_heads=model_config.num_kv_heads,
        head_dim=model_config.head_dim,
        tokens_per_block=config.kv_cache.tokens_per_block,
        model_fingerprint=model_fingerprint(path, config.dtype),
    )
    return model, layout


def _load_again(
    config: EngineConfig,
    limits: ModelLimits,
    layout: KvLayout,
    device: torch.device,
    progress: Progress,
) -> LlamaModel:
    """For waking up. Its errors end that call alone: the engine sleeps on."""
    try:
        model_config = load_model_config(Path(config.model))
        model, found = _load_model(config, model_config, limits.max_total_tokens, device, progress)
    except ConfigError as error:
        raise ConfigError(
            f"the engine sleeps on: {error.message}",
            field=error.field,
            value=error.value,
            limit=error.limit,
            severity=Severity.REQUEST,
        ) from error
    except (RuntimeError, MemoryError, OSError) as error:
        raise RequestFailedError(
            f"the engine sleeps on: loading the weights failed: {error}", field="model"
        ) from error
    if found != layout:
        raise ConfigError(
            f"the engine sleeps on: {config.model} is another model now than at the start",
            field="model",
            value=config.model,
            severity=Severity.REQUEST,
        )
    return model


def _who_pins_the_pool(transfer: TransferConfig) -> str:
    """Why the pool's pages must stay where they are; empty: nothing pins them.

    A device that reads memory by itself (RDMA) would go on with the old pages.
    """
    wires = [wire.strip() for wire in transfer.ucx_tls.split(",") if wire.strip()]
    pinning = [wire for wire in wires if wire not in WIRES_THAT_PIN_NOTHING]
    if transfer.transport != "ucx" or (wires and not pinning):
        return ""
    return (
        f"transfer.ucx_tls is {transfer.ucx_tls!r}, and memory that {', '.join(pinning) or 'all'} "
        f"may pin cannot be given back (only {', '.join(WIRES_THAT_PIN_NOTHING)} pin none)"
    )


def _transceiver(
    config: EngineConfig,
    pool: KvPool,
    incarnation: int,
    make_transport: TransportMaker | None,
    news: News,
) -> KvMover:
    transfer = config.transfer

    def make() -> Transport:
        if make_transport is not None:
            return make_transport(pool)
        settings = TransportSettings(
            tls=transfer.ucx_tls,
            net_devices=transfer.ucx_net_devices,
            pool_address=pool.address,
            pool_bytes=pool.tensor.nbytes,
        )
        return create_transport(transfer.transport, settings)

    return Transceiver(
        make,
        incarnation=incarnation,
        memory=PoolMemory(
            base_address=pool.address, num_blocks=pool.num_blocks, layout=pool.layout
        ),
        limits=TransferLimits(
            segment_bytes_max=transfer.segment_bytes_max,
            segments_in_flight_max=transfer.segments_in_flight_max,
            stall_s=transfer.stall_ms / 1000,
            heartbeat_s=transfer.heartbeat_ms / 1000,
        ),
        wake=news.raise_flag,
    )


def _scheduler(config: EngineConfig) -> Scheduler:
    cache, scheduler = config.kv_cache, config.scheduler
    return Scheduler(
        SchedulerLimits(
            max_sequences=scheduler.max_sequences,
            max_batch_tokens=scheduler.max_batch_tokens,
            prefill_chunk_tokens=scheduler.prefill_chunk_tokens,
            max_queued=scheduler.max_queued,
            max_leased_blocks=int(cache.num_blocks * cache.leased_share_max),
        ),
        BlockManager(cache.num_blocks, cache.tokens_per_block),
    )
