"""`baton.LLM` over an engine of another process: `baton worker`, shared by several programs."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton import LLM
from common.security import create_secret
from protos.errors import ConfigError, EngineDeadError
from tests.support.executor_baseline import nothing_left
from tests.support.llm_scripted import SEED, expected, letters
from tests.support.serving_double import VOCAB_SIZE, LetterTokenizer

pytestmark = pytest.mark.system
WORKER = """
listen: 127.0.0.1:0
secret_file: {secret}
engine: {{engine: scripted, scripted: {{vocab_size: {vocab_size}, step_ms: 1}}}}
"""


@contextlib.contextmanager
def worker(folder: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Its address once it is ready."""
    secret = folder / "secret"
    create_secret(secret)
    config = folder / "worker.yaml"
    config.write_text(WORKER.format(secret=secret, vocab_size=VOCAB_SIZE))
    read_fd, write_fd = os.pipe()
    program = [sys.executable, "-m", "executor.attach.worker_server", "--config", str(config)]
    process = subprocess.Popen(
        [*program, "--ready-fd", str(write_fd)],
        pass_fds=[write_fd],
        stderr=subprocess.DEVNULL,
        cwd=Path(__file__).resolve().parents[2],
    )
    os.close(write_fd)
    try:
        with os.fdopen(read_fd) as ready:
            yield ready.readline().split()[1], process
    finally:
        process.terminate()
        process.wait(30)


def make(address: str, folder: Path) -> LLM:
    return LLM(
        executor={"rpc_address": address},
        secret_file=folder / "secret",
        tokenizer=LetterTokenizer(),
    )


def test_programs_share_an_engine_and_end_each_for_itself(tmp_path: Path) -> None:
    """Guards: two programs whose minted ids are the same, and refused by the engine they share."""
    prompts = [[i % 200, i // 200] for i in range(600)]
    with nothing_left(), worker(tmp_path) as (address, process), make(address, tmp_path) as first:
        with make(address, tmp_path) as second:
            begun = [second.generate_async(prompt, max_tokens=3, seed=SEED) for prompt in prompts]
            done = first.generate(prompts, max_tokens=3, seed=SEED)
            wanted = [expected(tuple(prompt), 3) for prompt in prompts]
            assert [item.token_ids for item in done] == wanted
            assert [item.result(30).token_ids for item in begun] == wanted
        text = first.generate("still", max_tokens=4, seed=SEED).text
        assert text == letters(expected("still", 4))
        open_one = first.generate_async("x", max_tokens=8000)
        next(open_one)
        process.send_signal(signal.SIGKILL)
        for _ in range(2):
            with pytest.raises(EngineDeadError):
                open_one.result(30)


def test_an_engine_elsewhere_needs_the_clusters_secret(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="secret_file is not given"):
        LLM(executor={"rpc_address": "127.0.0.1:1"})
    with pytest.raises(ConfigError, match="secret"):
        LLM(executor={"rpc_address": "127.0.0.1:1"}, secret_file=tmp_path / "none")
