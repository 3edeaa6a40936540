"""The executor under contract: one per form and file, over the scripted engine."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass

import pytest
import pytest_asyncio

from executor.executor import GenerationExecutor
from tests.support import ray_cluster
from tests.support.executor_baseline import SETTLE_S_MAX, nothing_left, nothing_more
from tests.support.executor_forms import NAMES, NOT_RUN, Form, form_of, told_lines
from tests.support.executor_scripted import CONTRACT, CharTokenizer, audited


@pytest.fixture(scope="session")
def cluster() -> Iterator[Callable[[], str]]:
    """The address of the session's Ray cluster, which starts when somebody asks."""
    addresses: list[str] = []
    with contextlib.ExitStack() as stack:

        def address() -> str:
            if not addresses:
                addresses.append(stack.enter_context(ray_cluster.started()).address)
            return addresses[0]

        yield address


@dataclass(frozen=True)
class Opened:
    """`lines`: what its start told of the form and the launcher, and why."""

    name: str
    executor: GenerationExecutor
    lines: tuple[str, ...]


@pytest_asyncio.fixture(loop_scope="module", scope="module", params=NAMES)
async def opened(
    request: pytest.FixtureRequest, cluster: Callable[[], str]
) -> AsyncIterator[Opened]:
    form = form_of(request.param, cluster)
    with nothing_left():
        async with contextlib.AsyncExitStack() as stack:
            with told_lines() as lines:
                opening = form.open(CONTRACT, tokenizer=CharTokenizer(), deadline_grace_s=1.0)
                executor = await stack.enter_async_context(opening)
            yield Opened(request.param, executor, tuple(lines))


@pytest_asyncio.fixture(loop_scope="module")
async def executor(opened: Opened) -> AsyncIterator[GenerationExecutor]:
    """Each test leaves the shared one as it found it: nothing live in any of its books, and no
    more descriptors, threads, processes or files than before."""
    async with nothing_more():
        yield opened.executor
        await books_are_empty(opened.executor)


async def books_are_empty(executor: GenerationExecutor) -> None:
    ends_at_s = asyncio.get_running_loop().time() + SETTLE_S_MAX
    while True:  # a cancel may still be on its way
        try:
            await audited(executor)
        except AssertionError:
            if asyncio.get_running_loop().time() > ends_at_s:
                raise
            await asyncio.sleep(0.02)
        else:
            return


@pytest.fixture(params=[name for name in NAMES if name != "ipc-post2"])
def form(request: pytest.FixtureRequest, cluster: Callable[[], str]) -> Iterator[Form]:
    """To open an executor of one's own with. Postprocess workers are no form, and have tests of
    their own for that."""
    form = form_of(request.param, cluster)
    with nothing_left():
        yield form


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What a form leaves out is told as not run, with the reason."""
    left_out = [item for item in items if _why_not(item)]
    if left_out:
        config.stash.setdefault(_LEFT_OUT, []).extend(
            f"{item.nodeid}: {_why_not(item)}" for item in left_out
        )
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    for line in config.stash.get(_LEFT_OUT, []):
        terminalreporter.write_line(f"not run: {line}")


_LEFT_OUT = pytest.StashKey[list[str]]()


def _why_not(item: pytest.Item) -> str:
    """By the form in the test's id."""
    test, _, rest = item.name.partition("[")
    return NOT_RUN.get((rest.rstrip("]"), test), "")
