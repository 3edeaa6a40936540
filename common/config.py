"""One frozen configuration per process, read from YAML, refused where it cannot be meant.

An unknown key is refused with the nearest known name; a wrong value with the
path of its key and what it must be. Nothing else in Baton reads configuration or the environment.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import yaml

from common.config_words import children, find_fault, struct_in
from protos.errors import ConfigError

T = TypeVar("T", bound=msgspec.Struct)


class ConfigStruct(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every configuration section. Underscores and dashes in keys are not the same."""

    def check(self, at: str = "") -> None:
        """Raises ConfigError for values that do not go together; `at` is this section's path.

        Called for the outermost section alone, which calls it for those within.
        """


class _Loader(yaml.SafeLoader):
    """Refuses a key given twice, of which YAML silently takes the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    why = f"key {key.value!r} is given twice"
                    raise yaml.constructor.ConstructorError(None, None, why, key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def load_config(path: Path, schema: type[T]) -> T:
    """Read and validate a YAML file.

    Raises ConfigError for a missing or unreadable file, bad YAML, an unknown
    key, a missing key, a key given twice or a value that cannot be meant.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"cannot read configuration {path}: {error.strerror}", field="config", value=str(path)
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"configuration {path} is not UTF-8 text: byte {error.start} is "
            f"0x{error.object[error.start]:02x}",
            field="config",
            value=str(path),
            limit="UTF-8",
        ) from error
    try:
        data = yaml.load(text, _Loader)  # noqa: S506 - a SafeLoader
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: no such date
        raise ConfigError(f"{path} is not valid YAML: {_one_line(error)}") from error
    return parse_config({} if data is None else data, schema, source=str(path))


def parse_config(data: Any, schema: type[T], source: str) -> T:
    """Validate plain data against a schema; `source` names it in errors."""
    _refuse_unknown_keys(data, schema, source, path="")
    try:
        config = msgspec.convert(data, schema)
    except msgspec.ValidationError as error:
        fault = find_fault(data, schema)
        if fault is None:
            raise ConfigError(f"{source}: {error}") from error
        raise ConfigError(
            f"{source}: {fault}",
            field=fault.path,
            value="" if fault.is_missing else fault.value,
            limit=fault.limit,
        ) from error
    if isinstance(config, ConfigStruct):
        _check(config, source)
    return config


def _check(config: ConfigStruct, source: str) -> None:
    try:
        config.check()
    except ConfigError as error:
        raise ConfigError(
            f"{source}: {error.message}", field=error.field, value=error.value, limit=error.limit
        ) from error


def _refuse_unknown_keys(data: Any, schema: Any, source: str, path: str) -> None:
    struct = struct_in(schema)
    if struct is not None and isinstance(data, dict):
        known = struct.__struct_encode_fields__
        for key in data:
            if key not in known:
                here = f"{path}.{key}" if path else str(key)
                raise ConfigError(
                    f"{source}: unknown key {here!r}{_nearest(str(key), known)}",
                    field=here,
                    value=str(key),
                    limit=", ".join(known),
                )
    for inner, inner_schema, inner_path in children(data, schema, path):
        _refuse_unknown_keys(inner, inner_schema, source, inner_path)


def _nearest(key: str, known: tuple[str, ...]) -> str:
    match = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    if match:
        return f"; did you mean {match[0]!r}?"
    return f"; known keys are {', '.join(known)}"


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
