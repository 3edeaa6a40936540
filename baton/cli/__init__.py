"""The command line `baton`. Each command's module loads what it needs when it runs."""

from __future__ import annotations

from baton.cli.app import main

__all__ = ["main"]
