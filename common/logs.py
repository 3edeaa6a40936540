"""One line per event on stderr: an instant, a level, an event name and named fields.

Standard output stays free for answers. Prompts, generated text, token ids and
secrets are never logged; a field that is named like one is a mistake of ours
and refused on the spot. What clients choose (ids, addresses) is escaped, so that
no value can forge a line.

    log = Logs(name="context-0").get("serving")
    log.info("request_ended", external_id="r1", outcome="ok")
"""

from __future__ import annotations

import datetime
import json
import logging
import re
import sys
import traceback
from dataclasses import dataclass
from typing import IO, Literal

from protos.errors import ConfigError, shorten

LogFormat = Literal["text", "json"]
LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}
VALUE_LENGTH_MAX = 2000
SECRET_FIELDS = frozenset(
    {"prompt", "text", "messages", "token_ids", "secret", "key", "pull_token", "control_token"}
)

_PLAIN = re.compile(r"[\w.:/@+,\-\[\]]+")


@dataclass(frozen=True, kw_only=True)
class Logs:
    """Where and how one process logs; made once, handed to whoever logs.

    `stream` None means whatever sys.stderr is when a line is written.
    """

    name: str = ""
    level: str = "info"
    format: LogFormat = "text"
    stream: IO[str] | None = None

    def __post_init__(self) -> None:
        if self.level not in LEVELS:
            raise ConfigError(
                f"log level {shorten(self.level)!r} is unknown; it must be one of "
                f"{', '.join(LEVELS)}",
                field="log_level",
                value=self.level,
                limit=", ".join(LEVELS),
            )

    def get(self, part: str) -> Log:
        return Log(self, part)

    def write(self, level: str, part: str, event: str, fields: dict[str, object]) -> None:
        assert not SECRET_FIELDS & fields.keys(), f"a log line must not hold {sorted(fields)}"
        if LEVELS[level] < LEVELS[self.level]:
            return
        instant = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        head = {"time": instant, "level": level, "name": self.name, "part": part, "event": event}
        line = _json_line(head, fields) if self.format == "json" else _text_line(head, fields)
        stream = self.stream or sys.stderr
        try:
            stream.write(line + "\n")
            stream.flush()
        except (OSError, ValueError):
            return  # whoever read our stderr is gone; serving goes on


class Bridge(logging.Handler):
    """Lines of libraries and modules that use `logging` go the same way as ours.

    Installed by a process's entry point, never by an import.
    """

    def __init__(self, logs: Logs) -> None:
        super().__init__()
        self._logs = logs

    def emit(self, record: logging.LogRecord) -> None:
        level = next((name for name, n in LEVELS.items() if record.levelno <= n), "error")
        part = record.name.partition(".")[0]
        if record.exc_info and record.exc_info[1] is not None:
            Log(self._logs, part).exception(record.getMessage(), record.exc_info[1])
        else:
            self._logs.write(level, part, record.getMessage(), {})

    def install(self) -> None:
        root = logging.getLogger()
        root.addHandler(self)
        root.setLevel(LEVELS[self._logs.level])

    def uninstall(self) -> None:
        logging.getLogger().removeHandler(self)


@dataclass(frozen=True)
class Log:
    """The logging voice of one part of a process."""

    logs: Logs
    part: str

    def debug(self, event: str, **fields: object) -> None:
        self.logs.write("debug", self.part, event, fields)

    def info(self, event: str, **fields: object) -> None:
        self.logs.write("info", self.part, event, fields)

    def warning(self, event: str, **fields: object) -> None:
        self.logs.write("warning", self.part, event, fields)

    def error(self, event: str, **fields: object) -> None:
        self.logs.write("error", self.part, event, fields)

    def exception(self, event: str, error: BaseException, **fields: object) -> None:
        """An error that we did not expect, with its traceback in one escaped field."""
        story = "".join(traceback.format_exception(error))
        self.logs.write("error", self.part, event, {**fields, "traceback": story})


def _text_line(head: dict[str, str], fields: dict[str, object]) -> str:
    words = [head["time"], head["level"], *filter(None, (head["name"],)), head["part"]]
    words.append(_one_line(head["event"]))
    words.extend(f"{name}={_text_value(value)}" for name, value in fields.items())
    return " ".join(words)


def _one_line(text: str) -> str:
    """An event of another library may hold anything; ours are plain words."""
    text = shorten(text, VALUE_LENGTH_MAX)
    return text if text.isprintable() else json.dumps(text, ensure_ascii=True)


def _text_value(value: object) -> str:
    text = shorten(value if isinstance(value, str) else str(value), VALUE_LENGTH_MAX)
    return text if _PLAIN.fullmatch(text) else json.dumps(text, ensure_ascii=True)


def _json_line(head: dict[str, str], fields: dict[str, object]) -> str:
    plain = {
        name: value
        if isinstance(value, bool | int | float)
        else shorten(value if isinstance(value, str) else str(value), VALUE_LENGTH_MAX)
        for name, value in fields.items()
    }
    return json.dumps({**head, **plain}, ensure_ascii=True)
