"""The page of every configuration key, drawn from the structs that read the files.

A key's type, bounds and default are those of the struct; its meaning is the text below it
there. So what this page says is what a process takes.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
import typing
from typing import Any

import msgspec

from baton.launch.config import ClusterConfig
from common.config_words import describe, struct_in
from context_server.config import ContextServerConfig
from executor.attach.worker_config import WorkerConfig
from executor.config import EngineConfig
from generation_server.config import GenerationServerConfig
from router.config import RouterConfig
from serving.config import ServerConfig

Struct = type[msgspec.Struct]
INT_MAX = (1 << 31) - 1

FILES: tuple[tuple[str, str, Struct], ...] = (
    (
        "Context and generation servers",
        "`baton context --config FILE`, `baton generation --config FILE`; "
        "[context.yaml](../configs/context.yaml) and "
        "[generation.yaml](../configs/generation.yaml) are examples; "
        "[attached.yaml](../configs/attached.yaml) is one of a server whose engine is a worker's.",
        ServerConfig,
    ),
    (
        "Router",
        "`baton router --config FILE`; [router.yaml](../configs/router.yaml) is an example.",
        RouterConfig,
    ),
    (
        "Worker",
        "`baton worker --config FILE`; [worker.yaml](../configs/worker.yaml) is an example.",
        WorkerConfig,
    ),
    (
        "Cluster",
        "`baton up --config FILE`; [local.yaml](../configs/local.yaml) is an example. `context` "
        "and `generation` are alike. Their `engine` and the cluster's own are sections of any of "
        "the [engine's keys](#engine) but `model`, `dtype` and `device`, which stand here.",
        ClusterConfig,
    ),
)
OF_ROLES: dict[str, str] = {
    key: f"`{getattr(ContextServerConfig(secret_file=''), key)}`, "
    f"`{getattr(GenerationServerConfig(secret_file=''), key)}`"
    for key in ("name", "listen")
}
"""Defaults that the two roles set for themselves."""

PAGE = """# Configuration
<!-- Made by `scripts/docs` from the structs that read the files. Do not edit. -->
Every key of every file, with what it may be and what it is where it is absent. An unknown key is
refused with the nearest known name, a wrong value with its path and what it must be. Some values
must also go together (`health.give_up_ms` over `health.silence_ms`, say): the refusal says how.
`LLM(...)` takes the keys of the [engine](#engine) as keyword arguments, sections as mappings.

{sections}
"""


def config_page() -> str:
    parts: list[str] = []
    for title, about, struct in FILES:
        parts += [f"## {title}", about, *_tables(struct, "")]
    parts += ["## Engine", "The section `engine` of servers and workers.", *_tables(EngineConfig)]
    return PAGE.format(sections="\n\n".join(parts))


def _tables(struct: Struct, path: str = "engine") -> list[str]:
    """The struct's own table, then one for each section in it; an engine has its own chapter."""
    hints = typing.get_type_hints(struct, include_extras=True)
    meanings = meanings_of(struct)
    rows, sections = [], []
    for field in msgspec.structs.fields(struct):
        key = f"{path}.{field.name}" if path else field.name
        hint = hints[field.name]
        inner = struct_in(hint)
        if inner is EngineConfig:
            rows.append(f"| `{key}` | a section | | see [Engine](#engine) |")
        elif inner is not None:
            sections += _section(key, inner)
        else:
            default = OF_ROLES.get(field.name, "") if struct is ServerConfig else ""
            meaning = meanings.get(field.name, "")
            rows.append(f"| `{key}` | {_kind(hint)} | {default or _default(field)} | {meaning} |")
    head = "| key | what it may be | default | meaning |\n| --- | --- | --- | --- |\n"
    return [head + "\n".join(rows), *sections]


def _section(key: str, struct: Struct) -> list[str]:
    about = _one_line(inspect.cleandoc(struct.__doc__ or ""))
    return [f"### `{key}`", *([about] if about else []), *_tables(struct, key)]


def meanings_of(struct: Struct) -> dict[str, str]:
    """The text below each field, of the struct and of those that it extends."""
    found: dict[str, str] = {}
    for each in reversed(struct.__mro__):
        if issubclass(each, msgspec.Struct) and each is not msgspec.Struct:
            found |= _own_meanings(each)
    return found


def _own_meanings(struct: type) -> dict[str, str]:
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(struct))).body
    assert isinstance(node, ast.ClassDef)
    found = {}
    for field, text in zip(node.body, node.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            value = text.value if isinstance(text, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                found[field.target.id] = _one_line(value.value)
    return found


def _kind(hint: Any) -> str:
    """The bound of a 32-bit integer says nothing to a reader."""
    return describe(hint).replace(f", at most {INT_MAX}", "").replace("|", "\\|")


def _default(field: msgspec.structs.FieldInfo) -> str:
    if field.default_factory is not msgspec.NODEFAULT:
        return "`{}`"
    if field.default is msgspec.NODEFAULT:
        return "must be given"
    if field.default is None:
        return ""
    return f"`{msgspec.json.encode(field.default).decode()}`"


def _one_line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
