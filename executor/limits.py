"""Every bound of the executor in one place, so that a test can make them small."""

from __future__ import annotations

from dataclasses import dataclass, field

from executor.config import EngineConfig
from executor.health import HealthBounds
from executor.post.limits import PostLimits

HEARTBEAT_S_MAX = 0.4
"""A step that hangs is told a beat, `health.stall_ms` and a look later: within 5 s as delivered."""
BEATS_PER_SILENCE = 3
"""A heartbeat or two may be late without the worker counting as silent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorLimits:
    hello_s_max: float = 60.0
    """From spawning the worker to its first message; an interpreter starts meanwhile."""
    load_s_max: float = 1800.0
    """From the worker's first message to READY."""
    heartbeat_s: float = HEARTBEAT_S_MAX
    health: HealthBounds = field(default_factory=HealthBounds)
    """When the worker counts as silent, stalled and lost."""
    deadline_grace_s: float = 2.0
    """The engine ends an expired request by itself; the proxy does so this much later."""
    call_s_max: float = 10.0
    """For an answer to a control call (release, renew, load, audit)."""
    control_s_max: float = 600.0
    """The same for a collective call: weights are loaded again, a trace is written."""
    last_words_s: float = 0.1
    """From seeing the worker's exit to declaring it: what it sent before is read first."""
    stop_live_s_max: float = 180.0
    """From the stop sentinel to SIGKILL, for a world that is well: its step may be long."""
    stop_dead_s_max: float = 5.0
    """The same for one that is not, and from SIGKILL to leaving it behind."""
    send_batch_max: int = 1
    """Messages to the worker that may share a frame; 1: each is sent at once."""
    send_batch_s: float = 0.0
    lane_silence_s: float = 10.0
    """A frontend that nobody watches is given up by the worker after so long without a word."""
    queue_messages_max: int = 1024
    """High-water mark of each socket side and of each in-process queue behind it."""
    message_bytes_max: int = 64 << 20
    tombstones_max: int = 4096
    post: PostLimits = field(default_factory=PostLimits)
    """Of the postprocess workers."""
    log_lines_max: int = 50
    log_line_bytes_max: int = 4096

    @classmethod
    def of(cls, config: EngineConfig) -> ExecutorLimits:
        health = HealthBounds.of(config.health)
        heartbeat_s = min(HEARTBEAT_S_MAX, health.silence_s / BEATS_PER_SILENCE)
        executor = config.executor
        return cls(
            health=health,
            heartbeat_s=heartbeat_s,
            send_batch_max=executor.send_batch_max,
            send_batch_s=executor.send_batch_ms / 1000,
            stop_live_s_max=executor.stop_s_max,
            lane_silence_s=executor.lane_silence_ms / 1000,
            post=PostLimits(answer_s_max=health.silence_s),
        )
