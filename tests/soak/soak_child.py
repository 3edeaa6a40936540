"""A process of the soak's own that is told its orders by a line, and judged by what it says.

orders on its standard input, a line -> its first word: it is up -> its input ends: it is to
end, and says "well" or what it complains of. Whoever hurts it expects no word any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from typing import Any

UP_S_MAX = 30.0


class Child:
    def __init__(self, module: str, orders: dict[str, Any]) -> None:
        self._module = module
        self._orders = orders
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int:
        """0 before it is started and after its end."""
        process = self._process
        return 0 if process is None or process.returncode is not None else process.pid

    async def spawn(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            self._module,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(self._orders).encode() + b"\n")

    async def first_word(self) -> str:
        assert self._process is not None
        assert self._process.stdout is not None
        line = await asyncio.wait_for(self._process.stdout.readline(), UP_S_MAX)
        assert line, f"{self._module} did not come up"
        return line.decode().strip()

    async def end(self, *, was_hurt: bool) -> None:
        """Raises AssertionError with what it has to complain of."""
        process = self._process
        if process is None:
            return
        try:
            if was_hurt:  # a stopped one never ends by itself
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
            told, _ = await asyncio.wait_for(process.communicate(b""), UP_S_MAX)
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        assert was_hurt or process.returncode == 0, told.decode()
        assert was_hurt or told == b"well\n", told.decode()

    async def ended(self, within_s: float) -> tuple[int, str]:
        """Its status and its last words, where it was told to end by a signal."""
        assert self._process is not None
        told, _ = await asyncio.wait_for(self._process.communicate(), within_s)
        assert self._process.returncode is not None
        return self._process.returncode, told.decode()
