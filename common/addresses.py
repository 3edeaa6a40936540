"""HOST:PORT of others: checked, compared, and told apart from this host's loopback."""

from __future__ import annotations

import contextlib
import ipaddress

from common.config_checks import refusal
from common.rpc import split_address


def check_peer(key: str, address: str) -> None:
    """Somebody listens there, so port 0 is none. Raises ConfigError."""
    _, port = split_address(address, key)
    if port == 0:
        raise refusal(key, address, "HOST:PORT with a port from 1 to 65535")


def same_place(address: str) -> str:
    """One spelling for all of an address's: localhost is 127.0.0.1, and names have no case."""
    host, port = split_address(address)
    host = host.strip("[]").lower().rstrip(".")
    if host == "localhost":
        host = "127.0.0.1"
    # A name stays one: asking the resolver would make a file's meaning depend on the day.
    with contextlib.suppress(ValueError):
        host = ipaddress.ip_address(host).compressed
    return f"{host} {port}"


def is_loopback(listen: str) -> bool:
    host = listen.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
