"""Which form is taken and why, and the words in which `create` tells it."""

from __future__ import annotations

from typing import Any, Literal

import pytest

from executor.attach.keys import AttachKeys
from executor.attach.point import AttachPoint
from executor.config import EngineConfig, ExecutorConfig
from executor.forms import choose_form
from protos.errors import ConfigError

IPC = "IPC proxy, a worker world of its own on this host"
SINGLE = "single process, the engine in a thread of this one"
RAY = "Ray, a world of its own under actors of a cluster"


def point(form: Literal["rpc", "attach"]) -> AttachPoint:
    keys = AttachKeys({"k": b"k" * 32})
    return AttachPoint(form=form, endpoint="tcp://h:1", keys=keys, where="h:1")


def choose(at: Literal["rpc", "attach", ""] = "", **executor: Any) -> tuple[str, str]:
    config = EngineConfig(executor=ExecutorConfig(**executor))
    choice = choose_form(config, point(at) if at else None)
    return choice.what, choice.why


@pytest.mark.parametrize(
    ("at", "executor", "told"),
    [
        ("", {}, (IPC, "nothing else is asked")),
        ("", {"form": "ipc"}, (IPC, "executor.form is ipc")),
        ("", {"form": "single"}, (SINGLE, "executor.form is single")),
        ("", {"form": "ray"}, (RAY, "executor.form is ray")),
        ("attach", {}, ("attaches to our launcher's world", "it started us so")),
        (
            "rpc",
            {"rpc_address": "h:1"},
            ("RPC proxy, which attaches to the world at h:1", "executor.rpc_address is given"),
        ),
    ],
)
def test_each_form_says_what_it_is_and_why(
    at: Literal["rpc", "attach", ""], executor: dict[str, Any], told: tuple[str, str]
) -> None:
    assert choose(at, **executor) == told


def test_rpc_without_the_secret_is_refused_by_name() -> None:
    refused_ones: list[dict[str, Any]] = [
        {"form": "rpc", "rpc_address": "h:1"},
        {"rpc_address": "h:1"},
    ]
    for executor in refused_ones:
        with pytest.raises(ConfigError, match="needs the cluster's secret") as refused:
            choose(**executor)
        assert refused.value.field == "executor.form"
