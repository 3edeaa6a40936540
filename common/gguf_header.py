"""Reads the head of a GGUF file: metadata and tensor names, not the tensors.

The format: magic, version, counts, then each key with its typed value, then
each tensor's name, shape, type and offset. The `gguf` package's own reader
takes seconds for a large vocabulary, and a server reads the head several times;
this one takes a fraction, and needs neither `gguf` nor numpy.
Source: docs/gguf.md of ggml-org/ggml.
"""

from __future__ import annotations

import dataclasses
import mmap
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from protos.errors import ConfigError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
STRING, ARRAY = 8, 9


@dataclasses.dataclass(frozen=True)
class GgufHeader:
    """A GGUF file's metadata and the names of its tensors."""

    metadata: Mapping[str, Any]
    tensor_names: tuple[str, ...]


def read_gguf_header(path: Path) -> GgufHeader:
    """Raises ConfigError for a file that cannot be read or is no GGUF of a known version."""
    try:
        with (
            path.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
        ):
            return _Cursor(data).header()
    except (OSError, ValueError, struct.error) as error:
        raise ConfigError(
            f"cannot read {path} as GGUF: {error}", field="model", value=str(path)
        ) from error


class _Cursor:
    """A place in the file that moves on with each read. Raises ValueError or struct.error."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._offset = 0

    def header(self) -> GgufHeader:
        if self._bytes(len(MAGIC)) != MAGIC:
            raise ValueError("it does not start with GGUF")
        version, num_tensors, num_keys = self._numbers("IQQ")
        if version not in VERSIONS:
            raise ValueError(f"its version is {version}, known are {VERSIONS}")
        metadata = {}
        for _ in range(num_keys):
            key = self._string()
            metadata[key] = self._value(self._numbers("I")[0])
        return GgufHeader(metadata, tuple(self._tensor_name() for _ in range(num_tensors)))

    def _tensor_name(self) -> str:
        name = self._string()
        (num_dimensions,) = self._numbers("I")
        self._bytes(8 * num_dimensions + 12)  # shape, type and offset
        return name

    def _value(self, kind: int) -> Any:
        if kind == STRING:
            return self._string()
        if kind == ARRAY:
            return self._array(*self._numbers("IQ"))
        return self._numbers(_scalar(kind))[0]

    def _array(self, kind: int, length: int) -> list[Any]:
        if kind == STRING:
            return [self._string() for _ in range(length)]
        return list(self._numbers(f"{length}{_scalar(kind)}"))

    def _string(self) -> str:
        (length,) = self._numbers("Q")
        return self._bytes(length).decode("utf-8", errors="replace")

    def _numbers(self, codes: str) -> tuple[Any, ...]:
        codes = "<" + codes
        numbers = struct.unpack_from(codes, self._data, self._offset)
        self._offset += struct.calcsize(codes)
        return numbers

    def _bytes(self, length: int) -> bytes:
        if length > len(self._data) - self._offset:
            raise ValueError(f"it ends amid {length} bytes at {self._offset}")
        self._offset += length
        return self._data[self._offset - length : self._offset]


def _scalar(kind: int) -> str:
    if kind not in SCALARS:
        raise ValueError(f"it has a value of the unknown type {kind}")
    return SCALARS[kind]
