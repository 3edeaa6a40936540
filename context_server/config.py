"""The context server's YAML: serving/config.py with this role's name and port."""

from __future__ import annotations

from serving.config import ServerConfig


class ContextServerConfig(ServerConfig, frozen=True, kw_only=True):
    name: str = "context-0"
    listen: str = "127.0.0.1:8101"
