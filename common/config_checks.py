"""What a configuration must be beyond its fields' types and ranges, which stand at the fields.

Refusals are in the words of common.config_words: key, value, limit.
"""

from __future__ import annotations

from common.config_words import Fault
from protos.errors import ConfigError

NAME_LENGTH_MAX = 128


def refusal(key: str, value: object, limit: str) -> ConfigError:
    return ConfigError(str(Fault(key, value, limit)), field=key, value=value, limit=limit)


def check_name(key: str, name: str) -> None:
    """Names travel in messages and stand in log lines and labels."""
    if not (1 <= len(name) <= NAME_LENGTH_MAX and name.isprintable() and name.strip()):
        raise refusal(key, name, f"1 to {NAME_LENGTH_MAX} printable characters")
