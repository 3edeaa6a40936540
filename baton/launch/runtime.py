"""The runtime folder of a local cluster: lock, secret, logs, and the state file.

lock           held (flock) by the `up` that runs; freed by the kernel when it dies
secret         the cluster's key, mode 0600
cluster.json   addresses and pids, there while the cluster is up
tmp/           the processes' sockets, where the folder's path is short enough
NAME.yaml      the configuration of each process
logs/NAME.log  what it logged
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from pathlib import Path

import msgspec
import yaml

from baton.launch.plan import ProcessPlan
from common.scratch import ScratchFolder
from common.security import create_secret, load_secret
from protos.errors import ConfigError

SCRATCH_LENGTH_MAX = 70
"""Bytes: a socket's path has 107, and what is below takes 36 of them."""


class ProcessState(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    role: str
    address: str
    pid: int


class ClusterState(msgspec.Struct, frozen=True, kw_only=True):
    """What cluster.json holds."""

    router: str
    secret_file: str
    pid: int
    processes: tuple[ProcessState, ...]


class RuntimeDir:
    """One `up` owns it from `acquire` to `release`; anybody may read its state."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.scratch = ""
        """The processes' TMPDIR while acquired."""
        self._elsewhere: ScratchFolder | None = None
        self._lock: int | None = None

    @property
    def state_file(self) -> Path:
        return self.path / "cluster.json"

    def log_file(self, name: str) -> Path:
        return self.path / "logs" / f"{name}.log"

    def acquire(self) -> None:
        """Raises ConfigError where another cluster runs in this folder."""
        try:
            (self.path / "logs").mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise self._unusable(error) from error
        if not _lock(self._lock):
            os.close(self._lock)
            self._lock = None
            raise ConfigError(
                f"a cluster is running in {self.path} already; stop it, or start this one with "
                "another --runtime-dir",
                field="runtime_dir",
                value=str(self.path),
            )
        self.remove_state()
        try:
            self.scratch = self._make_scratch()
        except OSError as error:
            raise self._unusable(error) from error

    def _make_scratch(self) -> str:
        """In our own folder, where nothing is left for good, unless socket paths get too long."""
        folder = self.path / "tmp"
        shutil.rmtree(folder, ignore_errors=True)  # a killed `up` could not
        if len(os.fsencode(folder)) > SCRATCH_LENGTH_MAX:
            self._elsewhere = ScratchFolder("baton-up-")
            return str(self._elsewhere.path)
        folder.mkdir(mode=0o700)
        return str(folder)

    def release(self) -> None:
        """Takes the state back and frees the folder. Idempotent."""
        if self._lock is not None:
            self.remove_state()
            # A killed process leaves its sockets behind; they go with the cluster.
            if self.scratch:
                shutil.rmtree(self.scratch, ignore_errors=True)
            if self._elsewhere is not None:
                self._elsewhere.close()
            os.close(self._lock)
            self._lock = None

    def prepare_secret(self, secret_file: str) -> Path:
        """The secret's path; the file is made where it is missing. Raises ConfigError."""
        path = Path(secret_file).absolute() if secret_file else self.path / "secret"
        if path.exists():
            load_secret(path)
        else:
            try:
                create_secret(path)
            except OSError as error:
                raise self._unusable(error) from error
        return path

    def write_config(self, plan: ProcessPlan) -> Path:
        path = self.path / f"{plan.name}.yaml"
        _write(path, yaml.safe_dump(dict(plan.config), sort_keys=False))
        return path

    def write_state(self, state: ClusterState) -> None:
        _write(self.state_file, msgspec.json.format(msgspec.json.encode(state)).decode() + "\n")

    def remove_state(self) -> None:
        self.state_file.unlink(missing_ok=True)

    def _unusable(self, error: OSError) -> ConfigError:
        return ConfigError(
            f"cannot use {error.filename or self.path}: {error.strerror}; name a folder that can "
            "be written with --runtime-dir",
            field="runtime_dir",
            value=str(self.path),
        )


def read_state(path: Path) -> ClusterState | None:
    """The state of the cluster that runs in this folder; None where none does.

    A state file whose `up` was killed is no state: nobody holds the lock.
    """
    runtime = RuntimeDir(path)
    try:
        state = msgspec.json.decode(runtime.state_file.read_bytes(), type=ClusterState)
        descriptor = os.open(runtime.path / "lock", os.O_RDWR)
    except (OSError, msgspec.MsgspecError):
        return None
    with contextlib.closing(os.fdopen(descriptor)) as lock:
        return None if _lock(lock.fileno(), fcntl.LOCK_SH) else state


def _lock(descriptor: int, kind: int = fcntl.LOCK_EX) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _write(path: Path, text: str) -> None:
    """All of it or nothing: a reader never sees half a file."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    scratch.write_text(text)
    scratch.replace(path)
