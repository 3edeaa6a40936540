"""Run by scripts/wheel in a clean environment: every module of the wheel loads, from there."""

from __future__ import annotations

import importlib
import pkgutil
import sys

PACKAGES = (
    "baton",
    "common",
    "context_server",
    "executor",
    "generation_server",
    "kv_transfer",
    "protos",
    "router",
    "serving",
)


def main() -> None:
    for name in PACKAGES:
        package = importlib.import_module(name)
        if not str(package.__file__).startswith(sys.prefix):
            sys.exit(f"{name} was loaded from {package.__file__}, not from the wheel")
        for module in pkgutil.walk_packages(package.__path__, f"{name}."):
            importlib.import_module(module.name)


if __name__ == "__main__":
    main()
