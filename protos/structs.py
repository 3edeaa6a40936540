"""Between plain structs and protobuf messages whose fields have the same names."""

from __future__ import annotations

from typing import Any

from google.protobuf.message import Message


def fields_of(struct: Any, omit: tuple[str, ...] = ()) -> dict[str, Any]:
    names = struct.__struct_fields__
    return {name: getattr(struct, name) for name in names if name not in omit}


def scalars_of(message: Message, struct: type[Any], omit: tuple[str, ...] = ()) -> dict[str, Any]:
    names = struct.__struct_fields__
    return {name: getattr(message, name) for name in names if name not in omit}
