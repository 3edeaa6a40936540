"""The engine's configuration: one section of a server's YAML."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from common.config import ConfigStruct, parse_config
from common.config_checks import check_name, refusal

Count = Annotated[int, Meta(ge=1, le=(1 << 31) - 1)]
Milliseconds = Annotated[int, Meta(ge=1, le=3_600_000)]
TokenIdDrill = Annotated[int, Meta(ge=-1, le=(1 << 31) - 1)]
DeadlineSeconds = Annotated[float, Meta(gt=0, le=24 * 3600)]


class KvCacheConfig(ConfigStruct, frozen=True, kw_only=True):
    """`num_blocks` blocks of `tokens_per_block` tokens each are allocated at start."""

    num_blocks: Count = 1024
    """Of the whole pool, which is allocated at start."""
    tokens_per_block: Annotated[int, Meta(ge=1, le=65_536)] = 16
    """Servers that hand KV to each other must agree."""
    leased_share_max: Annotated[float, Meta(gt=0, le=1)] = 0.75
    """Share of the pool that leases may pin; a context_only request beyond it waits."""


class SchedulerConfig(ConfigStruct, frozen=True, kw_only=True):
    max_sequences: Count = 64
    """Sequences that run at once."""
    max_batch_tokens: Count = 1024
    """Tokens of one step, decode and prefill chunks together."""
    prefill_chunk_tokens: Count = 512
    """Of one prompt in one step: a long prompt leaves room for others' decoding."""
    max_queued: Count = 1024
    """Requests that may wait; one more is refused with OverloadedError."""


class TransferConfig(ConfigStruct, frozen=True, kw_only=True):
    transport: Literal["ucx", "inproc"] = "ucx"
    """inproc: KV stays in the engine's process, and nobody can fetch it."""
    ucx_tls: str = "tcp,self,posix,cma"
    """UCX_TLS. "tcp,self" keeps shared memory out."""
    ucx_net_devices: str = ""
    """UCX_NET_DEVICES; empty: all."""
    lease_ms: Milliseconds = 10_000
    """How long KV is kept for a server that neither fetches it nor renews."""
    stall_ms: Milliseconds = 3_000
    """A transfer from which nothing was heard for so long has failed."""
    heartbeat_ms: Milliseconds = 1_000
    """How often the two sides of a quiet transfer say that they are there."""
    segment_bytes_max: Annotated[int, Meta(ge=1, le=1 << 40)] = 4 << 20
    """Bytes that cross as one message; never less than a block."""
    segments_in_flight_max: Annotated[int, Meta(ge=1, le=1024)] = 4
    """Messages of one transfer that may be on their way at once."""


class HealthConfig(ConfigStruct, frozen=True, kw_only=True):
    """When the engine's worker counts as unwell: its open requests then fail at once."""

    silence_ms: Annotated[int, Meta(ge=100, le=3_600_000)] = 3_000
    """Nothing was heard from it for so long: it is stopped, swapped out or starved."""
    stall_ms: Annotated[int, Meta(ge=100, le=3_600_000)] = 4_000
    """Under work it finished no step and no layer of the model for so long; with a heartbeat
    and a look it is told within 5 s. A control call is no step: it has its own bound."""
    give_up_ms: Annotated[int, Meta(ge=100, le=3_600_000)] = 30_000
    """From its last sign of life or progress: it is killed, and the server ends."""

    def check(self, at: str = "") -> None:
        """Raises ConfigError where it would be given up before it is in trouble."""
        latest = max(self.silence_ms, self.stall_ms)
        if self.give_up_ms <= latest:
            limit = f"over silence_ms and stall_ms, {latest}"
            raise refusal(f"{at}give_up_ms", self.give_up_ms, limit)


class WorldConfig(ConfigStruct, frozen=True, kw_only=True):
    """The processes that run the engine. Rank 0 leads."""

    launcher: Literal["auto", "spawn", "mpi", "external"] = "auto"
    """auto: external inside an outer mpirun or srun, mpi for several ranks where mpi4py is
    installed, else spawn."""
    num_ranks: Annotated[int, Meta(ge=1, le=1024)] = 1
    """Processes of one engine; today only the scripted engine takes several."""


class ExecutorConfig(ConfigStruct, frozen=True, kw_only=True):
    """Where the engine runs, seen from the process that serves."""

    form: Literal["auto", "single", "ipc", "rpc", "ray"] = "auto"
    """auto: rpc where `rpc_address` is given, else ipc."""
    world: WorldConfig = WorldConfig()
    rpc_address: str = ""
    """HOST:PORT of a worker world that `baton worker` has started. Then of the engine's keys
    only `model` (for its tokenizer), `default_deadline_s`, `health` and `executor` are this
    process's; the others are the worker's. Not together with `frontends` over 1."""
    ray_address: str = ""
    """The Ray cluster to join; empty: one on this host, started and stopped with us."""
    postprocess_workers: Annotated[int, Meta(ge=0, le=64)] = 0
    """Processes that make text and match stop strings; 0: the serving process does it.
    One that answers nothing for `health.silence_ms` is killed and replaced."""
    send_batch_max: Annotated[int, Meta(ge=1, le=1024)] = 1
    """Messages to the engine that may share a frame; 1 sends each at once."""
    send_batch_ms: Annotated[float, Meta(ge=0, le=1000)] = 1.0
    """How long a message may wait for its frame; only where `send_batch_max` is over 1."""
    stop_s_max: Annotated[float, Meta(gt=0, le=3600)] = 180.0
    """How long an engine that is well may take to stop before it is killed."""
    lane_silence_ms: Annotated[int, Meta(ge=100, le=3_600_000)] = 10_000
    """A frontend on another host that was not heard for so long is given up by the engine."""

    def check(self, at: str = "") -> None:
        """Raises ConfigError for values that do not go together."""
        if self.form == "rpc" and not self.rpc_address:
            raise refusal(f"{at}rpc_address", "empty", "HOST:PORT of a `baton worker`")
        if self.form not in ("rpc", "auto") and self.rpc_address:
            raise refusal(f"{at}rpc_address", self.rpc_address, f"empty with form {self.form}")
        if self.form != "ray" and self.ray_address:
            raise refusal(f"{at}ray_address", self.ray_address, f"empty with form {self.form}")
        if self.form in ("single", "ray") and self.world.launcher != "auto":
            limit = f"auto with form {self.form}, which starts its ranks its own way"
            raise refusal(f"{at}world.launcher", self.world.launcher, limit)
        if self.form == "single":
            self._check_alone(at)

    def _check_alone(self, at: str) -> None:
        if self.postprocess_workers:
            limit = "0 in the single-process form"
            raise refusal(f"{at}postprocess_workers", self.postprocess_workers, limit)
        if self.world.num_ranks > 1:
            limit = "1 in the single-process form"
            raise refusal(f"{at}world.num_ranks", self.world.num_ranks, limit)


class ScriptedConfig(ConfigStruct, frozen=True, kw_only=True):
    """The scripted engine: tokens without a model, for tests and drills; the same for the same
    prompt and `seed` (a request without one is given one at random).

    The `*_token_id` drills happen to a request whose prompt ends with that id;
    -1 is off.
    """

    step_ms: Annotated[float, Meta(ge=0, le=3_600_000)] = 0.0
    """How long a step takes."""
    load_ms: Annotated[float, Meta(ge=0, le=3_600_000)] = 0.0
    """How long loading takes."""
    vocab_size: Count = 32_000
    """Tokens are 0 up to this."""
    max_total_tokens: Annotated[int, Meta(ge=2, le=(1 << 31) - 1)] = 8192
    """Prompt and completion together."""
    eos_token_ids: tuple[Annotated[int, Meta(ge=0, le=(1 << 31) - 1)], ...] = ()
    """They end a sequence, where the script comes upon them."""
    stamps_tokens: bool = False
    """Instead of the scripted tokens: the monotonic clock in microseconds at the step's end,
    modulo `vocab_size`, so that a consumer can tell how long a token took to reach it."""
    load_error: str = ""
    """Loading fails with this message."""
    refuse_token_id: TokenIdDrill = -1
    """`submit` raises RequestFailedError."""
    crash_token_id: TokenIdDrill = -1
    """`step` raises: the engine dies."""
    exit_token_id: TokenIdDrill = -1
    """The process ends in `step` without a word, as an out-of-memory kill would."""
    hang_token_id: TokenIdDrill = -1
    """`step` stands still for `hang_s`."""
    hang_s: Annotated[float, Meta(ge=0, le=24 * 3600)] = 3600.0
    """See `hang_token_id`."""


class EngineConfig(ConfigStruct, frozen=True, kw_only=True):
    model: str = ""
    """A Hugging Face folder or a GGUF file. With `executor.rpc_address` the worker's model, for its
    tokenizer alone; empty there: prompts as token ids only."""
    served_model_name: str = ""
    """The name clients ask for; empty: the folder's or file's name."""
    engine: Literal["torch", "scripted"] = "torch"
    """scripted needs no model: see `scripted`. Its tokens are the same for the same `seed`."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the weights, the computation and the KV."""
    device: str = "cpu"
    """As torch names it: cpu, cuda, cuda:1."""
    num_threads: Annotated[int, Meta(ge=0, le=1024)] = 0
    """Threads of torch; 0: torch's default, all cores: give each engine of a host its share."""
    max_prompt_tokens: Annotated[int, Meta(ge=0, le=(1 << 31) - 1)] = 0
    """0: what the model and the pool leave room for."""
    max_total_tokens: Annotated[int, Meta(ge=0, le=(1 << 31) - 1)] = 0
    """Prompt and completion together; 0: what the model and the pool leave room for."""
    default_deadline_s: DeadlineSeconds = 600.0
    """For requests that name none."""
    kv_cache: KvCacheConfig = KvCacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    transfer: TransferConfig = TransferConfig()
    health: HealthConfig = HealthConfig()
    executor: ExecutorConfig = ExecutorConfig()
    scripted: ScriptedConfig = ScriptedConfig()

    def check(self, at: str = "") -> None:
        """Raises ConfigError for values that do not go together; `at` is this section's path."""
        scheduler, cache, transfer = self.scheduler, self.kv_cache, self.transfer
        batch = scheduler.max_batch_tokens
        if self.served_model_name:
            check_name(f"{at}served_model_name", self.served_model_name)
        if self.max_total_tokens == 1:
            raise refusal(f"{at}max_total_tokens", 1, "0 or at least 2")
        if cache.num_blocks * cache.tokens_per_block < _ROOM_MIN:
            raise refusal(
                f"{at}kv_cache.num_blocks",
                cache.num_blocks,
                f"at least {_ROOM_MIN}: one token of prompt and one of completion",
            )
        if batch < scheduler.max_sequences:
            raise refusal(
                f"{at}scheduler.max_batch_tokens",
                batch,
                f"at least max_sequences, {scheduler.max_sequences}: a step decodes every one",
            )
        if scheduler.prefill_chunk_tokens > batch:
            raise refusal(
                f"{at}scheduler.prefill_chunk_tokens",
                scheduler.prefill_chunk_tokens,
                f"at most max_batch_tokens, {batch}",
            )
        if transfer.heartbeat_ms >= transfer.stall_ms:
            raise refusal(
                f"{at}transfer.heartbeat_ms",
                transfer.heartbeat_ms,
                f"under stall_ms, {transfer.stall_ms}",
            )
        if self.engine == "scripted" and self.device != "cpu":
            raise refusal(f"{at}device", self.device, "cpu: the scripted engine uses no device")
        self.health.check(f"{at}health.")
        self.executor.check(f"{at}executor.")
        if self.engine == "torch" and self.executor.world.num_ranks > 1:
            limit = "1: this engine is not split over several ranks yet"
            raise refusal(f"{at}executor.world.num_ranks", self.executor.world.num_ranks, limit)


_ROOM_MIN = 2


def check_engine_config(config: EngineConfig) -> None:
    """The same for one that was not read from a file. Raises ConfigError."""
    parse_config(msgspec.to_builtins(config), EngineConfig, source="the engine's configuration")
