"""Every bound of the executor in one place, so that a test can make them small."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorLimits:
    hello_s_max: float = 60.0
    """From spawning the worker to its first message; an interpreter starts meanwhile."""
    load_s_max: float = 1800.0
    """From the worker's first message to READY."""
    heartbeat_s: float = 1.0
    stall_s: float = 10.0
    """Health turns bad when the worker says nothing, or its loop stands still under
    work, for this long."""
    deadline_grace_s: float = 2.0
    """The engine ends an expired request by itself; the proxy does so this much later."""
    call_s_max: float = 10.0
    """For an answer to a control call (release, renew, load, audit)."""
    last_words_s: float = 0.1
    """From seeing the worker's exit to declaring it: what it sent before is read first."""
    stop_s_max: float = 10.0
    """From the stop sentinel to SIGKILL."""
    queue_messages_max: int = 1024
    """High-water mark of each socket side and of each in-process queue behind it."""
    message_bytes_max: int = 64 << 20
    tombstones_max: int = 4096
    log_lines_max: int = 50
    log_line_bytes_max: int = 4096
