"""A Ray cluster of this host, as somebody else would run it: `started` for a whole test session.

Run as a program it is the cluster: it prints its address and lives until its input ends. Its
token is in a file, and whoever joins is told of it by the environment, as Ray wants it.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tests.support import executor_baseline

ROOT = Path(__file__).resolve().parents[2]
NUM_CPUS = 2


class Cluster(NamedTuple):
    address: str
    """To join at."""
    pid: int
    """Of the process from which all of it descends."""


@contextlib.contextmanager
def started() -> Iterator[Cluster]:
    with tempfile.TemporaryDirectory(prefix="rc-", ignore_cleanup_errors=True) as folder:
        token = Path(folder) / "token"
        token.write_text(secrets.token_hex(32))
        settings = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.ray_cluster", folder],
            cwd=ROOT,
            env={**os.environ, **settings, "RAY_USAGE_STATS_ENABLED": "0"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        executor_baseline.CLUSTERS.add(process.pid)
        before = {name: os.environ.get(name) for name in settings}
        os.environ.update(settings)
        try:
            assert process.stdout is not None
            yield Cluster(process.stdout.readline().decode().strip(), process.pid)
        finally:
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            executor_baseline.CLUSTERS.discard(process.pid)


def main() -> None:
    ray: Any = importlib.import_module("ray")
    context = ray.init(
        address="local",
        num_cpus=NUM_CPUS,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        object_store_memory=80 << 20,
        _temp_dir=sys.argv[1],
    )
    print(context.address_info["gcs_address"], flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
