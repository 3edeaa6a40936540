"""The GGUF head is read as the `gguf` package reads it, and damage is told."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from common.gguf_header import read_gguf_header
from protos.errors import ConfigError


def write(path: Path) -> Path:
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_uint8("a.u8", 200)
    writer.add_int8("a.i8", -5)
    writer.add_uint64("a.u64", 1 << 40)
    writer.add_float32("a.f32", 1e-5)
    writer.add_float64("a.f64", 0.1)
    writer.add_bool("a.yes", True)
    writer.add_string("a.text", "naïve 😀")
    writer.add_array("a.texts", ["x", "", "▁the"])
    writer.add_array("a.numbers", [1, -2, 3])
    writer.add_array("a.floats", [0.5, -1.0])
    writer.add_tensor("one.weight", np.zeros((2, 3), dtype=np.float32))
    writer.add_tensor("two.bias", np.zeros(4, dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_equals_the_reader_of_the_gguf_package(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf")
    header = read_gguf_header(path)
    reader = gguf.GGUFReader(str(path))
    theirs = {key: field.contents() for key, field in reader.fields.items() if "GGUF." not in key}
    assert dict(header.metadata) == theirs
    assert list(header.tensor_names) == [tensor.name for tensor in reader.tensors]


def test_a_file_cut_anywhere_is_a_configuration_error(tmp_path: Path) -> None:
    """A download that broke off must be told as such, wherever it broke."""
    whole = write(tmp_path / "m.gguf").read_bytes()
    head_bytes = whole.index(b"two.bias") + len(b"two.bias")
    cut = tmp_path / "cut.gguf"
    for length in range(head_bytes):
        cut.write_bytes(whole[:length])
        with pytest.raises(ConfigError, match=r"cut\.gguf"):
            read_gguf_header(cut)


@pytest.mark.parametrize(
    ("at", "value", "told"),
    [
        (0, b"GGML", "start with GGUF"),
        (4, b"\x01\0\0\0", "version is 1"),
        (16, b"\xff" * 8, "cannot read"),
    ],
)
def test_other_formats_are_refused(tmp_path: Path, at: int, value: bytes, told: str) -> None:
    """Old versions and nonsense counts must neither hang nor fill the memory."""
    data = bytearray(write(tmp_path / "m.gguf").read_bytes())
    data[at : at + len(value)] = value
    (tmp_path / "bad.gguf").write_bytes(data)
    with pytest.raises(ConfigError, match=told):
        read_gguf_header(tmp_path / "bad.gguf")
