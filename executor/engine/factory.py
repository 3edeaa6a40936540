"""Makes the configured engine. Imports are late: the scripted one needs no torch."""

from __future__ import annotations

from collections.abc import Callable

from executor.config import EngineConfig, check_engine_config
from executor.engine.seam import Engine


def create_engine(config: EngineConfig, wake: Callable[[], None]) -> Engine:
    """Load it: seconds to minutes. `wake` is called from any thread when `step` has news.

    Raises ConfigError for values no engine can work with, before anything is loaded.
    """
    check_engine_config(config)
    if config.engine == "scripted":
        from executor.engine.scripted import ScriptedEngine

        return ScriptedEngine(config)
    from executor.engine.torch_engine import create_torch_engine

    return create_torch_engine(config, wake)
