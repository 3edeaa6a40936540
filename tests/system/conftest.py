"""No test over real processes leaves anything behind.

In the executor's own the test's process has the executor in it, and must be as it was too; in
others it is a client, and what it started must be gone.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.executor_baseline import nothing_left

AREAS = ("test_executor_", "test_world_", "test_post_")


@pytest.fixture(autouse=True)
def leave_nothing(request: pytest.FixtureRequest) -> Iterator[None]:
    with nothing_left(inside=request.path.name.startswith(AREAS)):
        yield
