"""Tests of a service with an executor leave nothing behind, each of them. What this process keeps
for good is grpc's: its descriptors and threads count in the executor's own tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.executor_baseline import nothing_left

AREAS = ("test_engine_", "test_lane_", "test_serving_", "test_world_", "test_bad_frames")


@pytest.fixture(autouse=True)
def leave_nothing_outside(request: pytest.FixtureRequest) -> Iterator[None]:
    if not request.path.name.startswith(AREAS):
        yield
        return
    with nothing_left(inside=False):
        yield
