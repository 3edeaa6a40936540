"""Which value of a configuration is wrong, and what its schema wants there, in words.

Both walk plain data along a schema of structs, lists, mappings and plain types.
"""

from __future__ import annotations

import types
import typing
from typing import Annotated, Any, Literal, NamedTuple

import msgspec

_PLAIN = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "text",
    type(None): "empty",
}
_RANGES = {
    "gt": "over {}",
    "ge": "at least {}",
    "lt": "under {}",
    "le": "at most {}",
    "multiple_of": "a multiple of {}",
    "pattern": "like {}",
    "min_length": "of length {} or more",
    "max_length": "of length {} or less",
}


class Fault(NamedTuple):
    path: str
    value: Any
    limit: str
    is_missing: bool = False

    def __str__(self) -> str:
        if self.is_missing:
            return f"key {self.path!r} is missing; it must be {self.limit}"
        where = f"key {self.path!r}" if self.path else "the file"
        return f"{where} is {_shown(self.value)}; it must be {self.limit}"


def find_fault(data: Any, schema: Any, path: str = "") -> Fault | None:
    """The first value, outermost key first, that the schema refuses; None where it takes all."""
    if _fits(data, schema):
        return None
    for inner, inner_schema, inner_path in children(data, schema, path):
        fault = find_fault(inner, inner_schema, inner_path)
        if fault is not None:
            return fault
    struct = struct_in(schema)
    if struct is not None and isinstance(data, dict):
        hints = typing.get_type_hints(struct, include_extras=True)
        for field in msgspec.structs.fields(struct):
            if field.required and field.encode_name not in data:
                limit = describe(hints[field.name])
                return Fault(_join(path, field.encode_name), None, limit, is_missing=True)
    return Fault(path, data, describe(schema))


def children(data: Any, schema: Any, path: str) -> list[tuple[Any, Any, str]]:
    """The values one level down, each with its schema and its path."""
    schema = _bare(schema)
    struct = struct_in(schema)
    if struct is not None:
        hints = typing.get_type_hints(struct, include_extras=True)
        items = data.items() if isinstance(data, dict) else ()
        return [(v, hints[k], _join(path, k)) for k, v in items if k in hints]
    arguments = typing.get_args(schema)
    origin = typing.get_origin(schema)
    if origin in (tuple, list) and isinstance(data, list) and arguments:
        return [(item, arguments[0], f"{path}[{i}]") for i, item in enumerate(data)]
    if origin is dict and isinstance(data, dict):
        return [(value, arguments[1], _join(path, key)) for key, value in data.items()]
    if origin in (typing.Union, types.UnionType) and data is not None:
        inner = [a for a in arguments if a is not type(None)]
        if len(inner) == 1:
            return children(data, inner[0], path)
    return []


def struct_in(schema: Any) -> type[msgspec.Struct] | None:
    schema = _bare(schema)
    if isinstance(schema, type) and issubclass(schema, msgspec.Struct):
        return schema
    return None


def describe(schema: Any) -> str:
    """What a value must be: "an integer, at least 1"."""
    origin, arguments = typing.get_origin(schema), typing.get_args(schema)
    if origin is Annotated:
        ranges = (_range(item) for item in arguments[1:] if isinstance(item, msgspec.Meta))
        return ", ".join([describe(arguments[0]), *(words for words in ranges if words)])
    if origin is Literal:
        return "one of " + ", ".join(str(item) for item in arguments)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(describe(item) for item in arguments)
    if origin in (tuple, list) and arguments:
        return f"a list, each item {describe(arguments[0])}"
    if origin is dict or struct_in(schema) is not None:
        return "a mapping"
    return _PLAIN.get(schema, getattr(schema, "__name__", str(schema)))


def _range(meta: msgspec.Meta) -> str:
    limits = ((words, getattr(meta, name)) for name, words in _RANGES.items())
    return ", ".join(words.format(limit) for words, limit in limits if limit is not None)


def _bare(schema: Any) -> Any:
    return typing.get_args(schema)[0] if typing.get_origin(schema) is Annotated else schema


def _fits(data: Any, schema: Any) -> bool:
    try:
        msgspec.convert(data, schema)
    except msgspec.ValidationError:
        return False
    return True


def _join(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


def _shown(value: Any) -> str:
    if value is None:
        return "empty"
    if isinstance(value, bool):
        return str(value).lower()
    text = repr(value)
    return text if len(text) <= 80 else text[:79] + "…"
