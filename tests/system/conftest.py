"""Tests of the executor, its worlds and its text workers leave nothing behind, each of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.executor_baseline import nothing_left

AREAS = ("test_executor_", "test_world_", "test_post_")


@pytest.fixture(autouse=True)
def leave_nothing(request: pytest.FixtureRequest) -> Iterator[None]:
    if not request.path.name.startswith(AREAS):
        yield
        return
    with nothing_left():
        yield
