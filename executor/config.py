"""The engine's configuration: one section of a server's YAML."""

from __future__ import annotations

from typing import Literal

from common.config import ConfigStruct


class KvCacheConfig(ConfigStruct, frozen=True, kw_only=True):
    """`num_blocks` blocks of `tokens_per_block` tokens each are allocated at start."""

    num_blocks: int = 1024
    tokens_per_block: int = 16
    leased_share_max: float = 0.75
    """Share of the pool that leases may pin; a context_only request beyond it waits."""


class SchedulerConfig(ConfigStruct, frozen=True, kw_only=True):
    max_sequences: int = 64
    """Sequences that run at once."""
    max_batch_tokens: int = 1024
    """Tokens of one step, decode and prefill chunks together."""
    prefill_chunk_tokens: int = 512
    max_queued: int = 1024
    """Requests that may wait; one more is refused with OverloadedError."""


class TransferConfig(ConfigStruct, frozen=True, kw_only=True):
    transport: Literal["ucx", "inproc"] = "ucx"
    ucx_tls: str = "tcp,self,posix,cma"
    """UCX_TLS. "tcp,self" keeps shared memory out."""
    ucx_net_devices: str = ""
    """UCX_NET_DEVICES; empty: all."""
    lease_ms: int = 10_000
    stall_ms: int = 3_000
    heartbeat_ms: int = 1_000
    segment_bytes_max: int = 4 << 20
    segments_in_flight_max: int = 4


class ScriptedConfig(ConfigStruct, frozen=True, kw_only=True):
    """The scripted engine: deterministic tokens without a model, for tests and drills.

    The `*_token_id` drills happen to a request whose prompt ends with that id;
    -1 is off.
    """

    step_ms: float = 0.0
    load_ms: float = 0.0
    vocab_size: int = 32_000
    max_total_tokens: int = 8192
    eos_token_ids: tuple[int, ...] = ()
    load_error: str = ""
    """Loading fails with this message."""
    refuse_token_id: int = -1
    """`submit` raises RequestFailedError."""
    crash_token_id: int = -1
    """`step` raises: the engine dies."""
    exit_token_id: int = -1
    """The process ends in `step` without a word, as an out-of-memory kill would."""
    hang_token_id: int = -1
    """`step` stands still for `hang_s`."""
    hang_s: float = 3600.0


class EngineConfig(ConfigStruct, frozen=True, kw_only=True):
    model: str = ""
    """A Hugging Face folder or a GGUF file."""
    served_model_name: str = ""
    """The name clients ask for; empty: the folder's or file's name."""
    engine: Literal["torch", "scripted"] = "torch"
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: str = "cpu"
    num_threads: int = 0
    """Threads of torch; 0: torch's default."""
    max_prompt_tokens: int = 0
    """0: what the model and the pool leave room for."""
    max_total_tokens: int = 0
    """Prompt and completion together; 0: what the model and the pool leave room for."""
    default_deadline_s: float = 600.0
    kv_cache: KvCacheConfig = KvCacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    transfer: TransferConfig = TransferConfig()
    scripted: ScriptedConfig = ScriptedConfig()
