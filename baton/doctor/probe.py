"""`python -m baton.doctor.probe NAME`: loads one library and prints what it finds as JSON.

A process of its own, since a broken driver may hang, crash or print; the doctor
bounds it in time and believes the last line only.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

PROBE_TIMEOUT_S = 30.0
UCX_INFO_TIMEOUT_S = 10.0


def run_probe(name: str, timeout_s: float = PROBE_TIMEOUT_S) -> tuple[Mapping[str, Any], str]:
    """What the probe found, or why it found nothing."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "baton.doctor.probe", name],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {}, f"no answer within {timeout_s:.0f} s"
    last_out = done.stdout.strip().rpartition("\n")[2]
    if done.returncode == 0:
        try:
            found: dict[str, Any] = json.loads(last_out)
        except ValueError:
            return {}, f"an answer that is no JSON: {last_out[:200]!r}"
        return found, ""
    last_error = done.stderr.strip().rpartition("\n")[2]
    return {}, last_error[:300] or f"it ended with code {done.returncode}"


def probe_torch() -> dict[str, Any]:
    import torch

    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "version": torch.__version__,
        "cuda_build": torch.version.cuda,
        "devices": devices,
        "num_threads": torch.get_num_threads(),
    }


def probe_ucx() -> dict[str, Any]:
    """Opens our own transport, by the settings that servers use when nothing else is said."""
    from executor.config import TransferConfig
    from kv_transfer.factory import TransportSettings, create_transport

    tls = TransferConfig().ucx_tls
    transport = create_transport("ucx", TransportSettings(tls=tls))
    num_bytes = len(transport.address)
    transport.close()
    return {
        "ucxx": metadata.version("ucxx-cu12"),
        "libucx": metadata.version("libucx-cu12"),
        "tls": tls,
        "address_bytes": num_bytes,
        "transports": _ucx_transports(),
    }


def _ucx_transports() -> list[str]:
    """Those that `ucx_info` of the same libucx can open here."""
    import libucx

    home = Path(libucx.__file__).parent
    done = subprocess.run(
        [str(home / "bin" / "ucx_info"), "-d"],
        capture_output=True,
        text=True,
        timeout=UCX_INFO_TIMEOUT_S,
        env={**os.environ, "LD_LIBRARY_PATH": str(home / "lib")},
        check=True,
    )
    lines = (line for line in done.stdout.splitlines() if "Transport:" in line)
    return list(dict.fromkeys(line.split("Transport:")[1].strip() for line in lines))


def probe_mpi() -> dict[str, Any]:
    """Without starting MPI: MPICH would leave a file in /dev/shm."""
    import mpi4py

    mpi4py.rc.initialize = False
    from mpi4py import MPI

    return {"mpi4py": metadata.version("mpi4py"), "library": MPI.Get_library_version().strip()}


PROBES = {"torch": probe_torch, "ucx": probe_ucx, "mpi": probe_mpi}

if __name__ == "__main__":
    sys.stdout.write(json.dumps(PROBES[sys.argv[1]]()) + "\n")
    sys.stdout.flush()
    # A library whose unloading crashes shall not spoil what it found.
    os._exit(0)
