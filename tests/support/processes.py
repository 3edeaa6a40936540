"""Looking at processes that come and go."""

from __future__ import annotations

import psutil


def command_of(process: psutil.Process) -> str:
    """Its command line; empty where it has ended, reaped or not."""
    try:
        return " ".join(process.cmdline())
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return ""
