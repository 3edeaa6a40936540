"""torch, UCX, MPI and GPUs, by what their probes found."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from typing import Any

from baton.doctor.finding import Finding, ok, problem, warning

UCX_VARIABLE_HARM = {
    "UCX_TLS": "it decides which transports may be used at all",
    "UCX_NET_DEVICES": "it decides which network cards may be used",
    "UCX_MM_ERROR_HANDLING": "n turns shared memory off without a word",
    "UCX_ERROR_SIGNALS": "it changes how a crash is reported",
    "UCX_LOG_LEVEL": "a low level costs much time",
}
UCX_VARIABLES_HARMLESS = frozenset({"UCX_WARN_UNUSED_ENV_VARS"})


def check_torch(found: Mapping[str, Any], failure: str) -> Iterator[Finding]:
    if failure:
        yield problem(f"torch cannot be loaded: {failure}", "run scripts/install")
        return
    yield ok(f"torch {found['version']}, {found['num_threads']} threads")
    devices = found["devices"]
    if devices:
        yield ok(f"GPUs: {', '.join(devices)}")
    elif found["cuda_build"]:
        yield ok("GPUs: none found, the CPU serves (torch is a CUDA build; see nvidia-smi)")
    else:
        yield ok("GPUs: none, the CPU serves (torch is a CPU build)")


def check_ucx(found: Mapping[str, Any], failure: str) -> Iterator[Finding]:
    if failure:
        yield problem(
            f"UCX cannot be opened: {failure}", "run scripts/install, and unset UCX_* variables"
        )
        return
    yield ok(f"UCX {found['libucx']} by ucxx {found['ucxx']}, opened with {found['tls']}")
    there = found["transports"]
    what = f"UCX transports here: {', '.join(there)}"
    if not {"posix", "sysv"} & set(there):
        yield warning(what + " (no shared memory)", "check /dev/shm; servers use tcp meanwhile")
    else:
        yield ok(what)


def check_ucx_variables(environ: Mapping[str, str]) -> Iterator[Finding]:
    """UCX reads the environment by itself, beside what Baton tells it."""
    for name in sorted(environ):
        if name.startswith("UCX_") and name not in UCX_VARIABLES_HARMLESS:
            harm = UCX_VARIABLE_HARM.get(name, "UCX reads it beside Baton's own settings")
            yield warning(
                f"{name}={environ[name]} is set: {harm}",
                f"unset {name}; Baton's own settings are under engine.transfer",
            )


def has_mpi() -> bool:
    return importlib.util.find_spec("mpi4py") is not None


def check_mpi(found: Mapping[str, Any], failure: str) -> Finding:
    if failure:
        return warning(
            f"MPI: mpi4py is there, but {failure}", "pip install mpich (nothing here needs MPI)"
        )
    return ok(f"MPI: mpi4py {found['mpi4py']}, {found['library'].splitlines()[0]}")
