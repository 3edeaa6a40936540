"""The generation server's YAML: serving/config.py with this role's name and port."""

from __future__ import annotations

from serving.config import ServerConfig


class GenerationServerConfig(ServerConfig, frozen=True, kw_only=True):
    name: str = "generation-0"
    listen: str = "127.0.0.1:8201"
