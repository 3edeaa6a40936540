"""What holds for every test: those that need a GPU are not collected where there is none, and
listed as not run; and the garbage collector leaves alone what the session has loaded."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

_NOT_RUN = pytest.StashKey[list[str]]()


@pytest.fixture(autouse=True, scope="module")
def _cheap_collections() -> Iterator[None]:
    """The checks for leaks collect garbage around each test: half a second each, were torch and
    thousands of collected tests looked through every time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items or _has_cuda():
        return
    config.stash[_NOT_RUN] = [item.nodeid for item in gpu_items]
    config.hook.pytest_deselected(items=gpu_items)
    items[:] = [item for item in items if not item.get_closest_marker("gpu")]


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    for nodeid in config.stash.get(_NOT_RUN, []):
        terminalreporter.write_line(f"not run (no CUDA device here): {nodeid}")


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()
