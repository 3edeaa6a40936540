"""What an operator asks of one server's engine: sleep, profiles, LoRA adapters."""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import grpc

from baton.stubs import (
    CHANNEL_OPTIONS,
    CONTROL_TIMEOUT_S,
    Stubs,
    check_address,
    control_metadata,
    error_of_call,
)
from protos import control_pb2 as pb

ENGINE_S_MAX = 600.0
"""Weights are loaded again, a trace is written: minutes, at the worst."""


@dataclass(frozen=True)
class TraceFile:
    """On the host of the rank that wrote it."""

    path: str
    num_steps: int
    num_bytes: int
    recorded_s: float
    is_full: bool
    """It ended by itself, being large enough: later steps are not in it."""


@dataclass(frozen=True)
class LoraAdapter:
    name: str
    path: str


class EngineOperator:
    """Talks to a context or generation server; a router has no engine (UnsupportedError).

    Every call raises the errors of `baton.errors`.
    """

    def __init__(self, address: str, *, control_token: str) -> None:
        check_address(address)
        self.address = address
        self._channel = grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
        self._control = Stubs(self._channel).control
        self._metadata = control_metadata(control_token)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        self._channel.close()

    def sleep(self) -> None:
        """Give the KV pool's memory and the weights back. Raises NotNowError, naming who
        holds on, while requests, leases or transfers are live."""
        self._ask("Sleep", pb.SleepRequest())

    def wake_up(self) -> None:
        self._ask("WakeUp", pb.WakeUpRequest(), ENGINE_S_MAX)

    def start_profile(self, path: str, max_s: float = 0.0) -> None:
        """Record steps for a trace file at this absolute path of the server's host, for `max_s`
        at most (0: the engine's default)."""
        self._ask("StartProfile", pb.StartProfileRequest(path=path, max_s=max_s))

    def stop_profile(self) -> tuple[TraceFile, ...]:
        """Returns once the files are written, one a rank."""
        answer = self._ask("StopProfile", pb.StopProfileRequest(), ENGINE_S_MAX)
        return tuple(
            TraceFile(file.path, file.num_steps, file.num_bytes, file.recorded_s, file.is_full)
            for file in answer.files
        )

    def load_lora(self, name: str, path: str) -> None:
        self._ask("LoadLora", pb.LoadLoraRequest(name=name, path=path), ENGINE_S_MAX)

    def unload_lora(self, name: str) -> None:
        self._ask("UnloadLora", pb.UnloadLoraRequest(name=name))

    def list_loras(self) -> tuple[LoraAdapter, ...]:
        answer = self._ask("ListLoras", pb.ListLorasRequest())
        return tuple(LoraAdapter(lora.name, lora.path) for lora in answer.loras)

    def _ask(self, method: str, request: Any, timeout_s: float = CONTROL_TIMEOUT_S) -> Any:
        try:
            return getattr(self._control, method)(
                request, timeout=timeout_s, metadata=self._metadata
            )
        except grpc.RpcError as error:
            raise error_of_call(error, self.address) from None
