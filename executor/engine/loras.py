"""The book of loaded LoRA adapters: names and where each came from. Pure."""

from __future__ import annotations

from executor.engine.control_seam import LoraInfo
from protos.errors import (
    DuplicateRequestError,
    InvalidRequestError,
    ModelNotFoundError,
    OverloadedError,
)

LORAS_MAX = 64
NAME_LENGTH_MAX = 256
PATH_LENGTH_MAX = 4096


class LoraBook:
    def __init__(self) -> None:
        self._loaded: dict[str, LoraInfo] = {}

    def load(self, name: str, path: str) -> None:
        """Raises InvalidRequestError, DuplicateRequestError, OverloadedError."""
        for field, value, most in (
            ("name", name, NAME_LENGTH_MAX),
            ("path", path, PATH_LENGTH_MAX),
        ):
            if not 1 <= len(value) <= most:
                raise InvalidRequestError(
                    f"{field} has {len(value)} characters; it must have 1 to {most}",
                    field=field,
                    value=value,
                    limit=f"1 to {most} characters",
                )
        if name in self._loaded:
            raise DuplicateRequestError(
                f"a LoRA adapter {name!r} is loaded already", field="name", value=name
            )
        if len(self._loaded) >= LORAS_MAX:
            raise OverloadedError(
                f"{len(self._loaded)} LoRA adapters are loaded; the limit is {LORAS_MAX}",
                field="name",
                value=name,
                limit=LORAS_MAX,
            )
        self._loaded[name] = LoraInfo(name=name, path=path)

    def unload(self, name: str) -> None:
        """Raises ModelNotFoundError."""
        if self._loaded.pop(name, None) is None:
            known = ", ".join(self._loaded) or "none"
            raise ModelNotFoundError(
                f"no LoRA adapter {name!r} is loaded (loaded: {known})", field="name", value=name
            )

    def loaded(self) -> tuple[LoraInfo, ...]:
        return tuple(self._loaded.values())
