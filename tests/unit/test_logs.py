"""Log lines: one each, escaped, and never with a prompt or a secret in them."""

from __future__ import annotations

import io
import json
import logging
from typing import Any

import pytest

from common.logs import Bridge, Logs
from protos.errors import ConfigError


def logs(**fields: Any) -> tuple[Logs, io.StringIO]:
    stream = io.StringIO()
    return Logs(name="c-0", stream=stream, **fields), stream


def test_a_line_holds_instant_level_name_part_event_and_fields() -> None:
    made, stream = logs()
    made.get("server").info("ready", listen="127.0.0.1:8101", seconds=1.5)
    line = stream.getvalue()
    assert line.endswith(" info c-0 server ready listen=127.0.0.1:8101 seconds=1.5\n")


@pytest.mark.parametrize("kind", ["text", "json"])
def test_no_value_can_forge_a_line(kind: str) -> None:
    """Guards against an external id with a newline that writes a log line of its own."""
    made, stream = logs(format=kind)
    made.get("x").warning("odd", external_id='a\n2026 info "b" \x1b[31m\u2028')
    line = stream.getvalue()
    assert line.count("\n") == 1
    assert line.isascii()
    assert line.strip().isprintable()


def test_json_lines_parse_and_keep_numbers() -> None:
    made, stream = logs(format="json")
    made.get("server").error("died", pid=7, error=ValueError("why"))
    record = json.loads(stream.getvalue())
    assert (record["level"], record["name"], record["event"]) == ("error", "c-0", "died")
    assert (record["pid"], record["error"]) == (7, "why")


def test_prompts_and_secrets_are_refused_and_long_values_cut() -> None:
    made, stream = logs()
    with pytest.raises(AssertionError, match="must not hold"):
        made.get("x").info("request", prompt="my diary")
    made.get("x").info("long", error="y" * 10_000)
    assert len(stream.getvalue()) < 2200


def test_levels_and_closed_streams() -> None:
    made, stream = logs(level="warning")
    made.get("x").info("quiet")
    assert stream.getvalue() == ""
    stream.close()
    made.get("x").error("nobody reads")  # and nobody is hurt
    with pytest.raises(ConfigError, match="'loud' is unknown; it must be one of debug"):
        Logs(level="loud")


def test_library_lines_go_the_same_way() -> None:
    made, stream = logs()
    bridge = Bridge(made)
    bridge.install()
    try:
        logging.getLogger("executor.proxy").warning("worker %d\nsaid", 7)
    finally:
        bridge.uninstall()
    line = stream.getvalue()
    assert line.count("\n") == 1
    assert 'warning c-0 executor "worker 7\\nsaid"' in line
