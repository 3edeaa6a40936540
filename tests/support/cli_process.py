"""A process that behaves towards the launcher as a server does; its file says how."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--ready-fd", type=int, required=True)
    parser.add_argument("--die-with-parent", action="store_true")
    options = parser.parse_args()
    what = options.config.read_text()
    if what == "die":
        print("no such model", file=sys.stderr)
        return 3
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    if what == "leave a grandchild":
        grandchild = subprocess.Popen(["sleep", "60"])
        options.config.with_name("grandchild").write_text(str(grandchild.pid))
    with os.fdopen(options.ready_fd, "w") as ready:
        ready.write("READY 127.0.0.1:4242\n")
    while True:
        signal.pause()


if __name__ == "__main__":
    sys.exit(main())
