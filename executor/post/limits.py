"""Every bound of the postprocess workers, so that a test can make them small."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PostLimits:
    works_in_flight_max: int = 4
    """Messages that a worker may have unanswered; what comes meanwhile waits and is merged."""
    work_bytes_max: int = 1 << 20
    """Of outputs merged into one message; a larger single step goes alone."""
    backlog_bytes_max: int = 32 << 20
    """Of outputs that wait for one worker. Beyond it the lane is not read, until the worker
    answers or is given up."""
    answer_s_max: float = 3.0
    """Without an answer, while one is due: the worker is killed and counts as dead."""
    start_s_max: float = 30.0
    """From spawning to its tokenizer being loaded; requests of its bucket wait meanwhile."""
    restarts_max: int = 5
    restarts_window_s: float = 60.0
    """A bucket whose workers die more often is served in the frontend's process from then on."""
    stop_s_max: float = 5.0
    """From the end of its standard input to SIGKILL, and from there to giving it up."""
