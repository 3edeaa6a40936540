"""Calls by name on a rank: what collective_rpc may ask for, and what a rank says of itself.

A table of methods, so that nothing else can be called. Arguments come by name
and, like results, are what msgspec calls builtins: they cross processes as plain
data. *Coordinated* methods change what all ranks must agree on; they are asked
of every rank at the same place in the ordered queue. The others only look, or
touch one rank's own books.

A member rank (rank > 0), which has no engine, answers from a table too: member.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from protos.errors import InvalidRequestError, shorten

if TYPE_CHECKING:
    from executor.engine.control_seam import EngineControl, TraceExport

Builtin: TypeAlias = Any
"""None, bool, int, float, str, bytes, and lists and dictionaries of these."""

PROFILE_S = 60.0
"""How long a profile may last where nobody says."""
_STATM = Path("/proc/self/statm")


@dataclass(frozen=True, slots=True)
class Deferred:
    """A result that takes long and touches no engine: call `finish` on another thread."""

    finish: Callable[[], Builtin]


@dataclass(frozen=True, slots=True)
class Method:
    """`parameters` by name; those without one of the `defaults` are required. `undo` names the
    method that takes back what some ranks did where another one refused; its parameters are
    some of this one's required ones."""

    name: str
    run: Callable[..., Builtin | Deferred]
    is_coordinated: bool = False
    parameters: Mapping[str, type] = field(default_factory=dict)
    undo: str = ""
    defaults: Mapping[str, Builtin] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RankFacts:
    """What does not change about a rank."""

    rank: int
    engine: str
    device: str


def call_method(
    methods: Mapping[str, Method], name: str, arguments: Mapping[str, Builtin]
) -> Builtin | Deferred:
    """Raises InvalidRequestError that names the method and the argument, or what it raises."""
    method = methods.get(name)
    if method is None:
        known = ", ".join(methods)
        raise InvalidRequestError(
            f"the method {shorten(name)!r} cannot be called; these can: {known}",
            field="method",
            value=name,
            limit=known,
        )
    return method.run(**_checked(method, arguments))


def _checked(method: Method, arguments: Mapping[str, Builtin]) -> dict[str, Builtin]:
    for name in arguments:
        if name not in method.parameters:
            raise _bad_argument(method, name, "given", "left out: it takes no such argument")
    checked: dict[str, Builtin] = {}
    for name, kind in method.parameters.items():
        if name not in arguments:
            if name in method.defaults:
                checked[name] = method.defaults[name]
                continue
            raise _bad_argument(method, name, "absent", f"given, as {kind.__name__}")
        try:
            checked[name] = msgspec.convert(arguments[name], kind)
        except msgspec.ValidationError:
            given = arguments[name]
            raise _bad_argument(method, name, given, f"of type {kind.__name__}") from None
    return checked


def _bad_argument(method: Method, name: str, value: Builtin, limit: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{method.name}: the argument {shorten(name)!r} is {shorten(value)}; it must be {limit}",
        field=f"{method.name}.{shorten(name)}",
        value=value,
        limit=limit,
    )


_UCX = {"tls": str, "net_devices": str}


def control_methods(control: EngineControl, facts: RankFacts) -> dict[str, Method]:
    """The table over a rank's control."""
    path, name = {"path": str}, {"name": str}
    methods = (
        Method("sleep", control.sleep, is_coordinated=True),
        Method("wake_up", control.wake_up, is_coordinated=True),
        Method(
            "start_profile",
            control.start_profile,
            is_coordinated=True,
            parameters=path | {"max_s": float},
            defaults={"max_s": PROFILE_S},
            undo="drop_profile",
        ),
        Method("stop_profile", lambda: _written(control.stop_profile()), is_coordinated=True),
        Method("drop_profile", control.drop_profile, is_coordinated=True, parameters=path),
        Method(
            "load_lora",
            control.load_lora,
            is_coordinated=True,
            parameters=name | path,
            undo="unload_lora",
        ),
        Method("unload_lora", control.unload_lora, is_coordinated=True, parameters=name),
        Method("list_loras", lambda: [msgspec.to_builtins(lora) for lora in control.list_loras()]),
        Method("describe", lambda: describe(facts, is_asleep=control.is_asleep)),
        Method("reset_counters", control.reset_counters),
        Method("check_transport", check_transport, is_coordinated=True, parameters=_UCX),
    )
    return {method.name: method for method in methods}


def _written(export: TraceExport) -> Deferred:
    def finish() -> Builtin:
        return {
            "path": export.path,
            "steps": export.num_steps,
            "bytes": export.write(),
            "recorded_s": export.recorded_s,
            "is_full": export.is_full,
        }

    return Deferred(finish)


def check_transport(tls: str, net_devices: str) -> Deferred:
    """Open UCX in this very process and send a frame through an endpoint of it.

    Raises ConfigError or KvTransferError where that cannot be done.
    """

    def finish() -> Builtin:
        from executor.engine.transport_check import send_frame_over_ucx

        return {"wires": send_frame_over_ucx(tls, net_devices)}

    return Deferred(finish)


def describe(facts: RankFacts, *, is_asleep: bool) -> dict[str, Builtin]:
    """Who and where this rank is, and how much memory it holds."""
    return {
        "rank": facts.rank,
        "engine": facts.engine,
        "device": facts.device,
        "host": os.uname().nodename,
        "pid": os.getpid(),
        "rss_bytes": resident_bytes(),
        "is_asleep": is_asleep,
    }


def resident_bytes() -> int:
    """Memory of this process that lies in RAM now."""
    return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
