"""Whether ports are free, asked before anything is started."""

from __future__ import annotations

import socket
from collections.abc import Iterable

from common.rpc import split_address
from protos.errors import ConfigError


def check_free(addresses: Iterable[tuple[str, str]]) -> None:
    """Raises ConfigError naming the first key whose HOST:PORT cannot be listened on."""
    taken: dict[str, str] = {}
    for key, address in addresses:
        if split_address(address, key)[1] == 0:
            continue
        if address in taken:
            raise ConfigError(
                f"{key} and {taken[address]} both ask for {address}", field=key, value=address
            )
        taken[address] = key
        problem = listen_problem(key, address)
        if problem:
            raise ConfigError(
                f"{key}: {address} {problem}; stop what listens there or choose another port",
                field=key,
                value=address,
            )


def listen_problem(key: str, address: str) -> str:
    """Why nothing can listen on this address; empty where it can."""
    host, port = split_address(address, key)
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(
            host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        return f"is no address of this machine ({error.strerror})"
    with socket.socket(family, kind, protocol) as listener:
        # Connections that linger after a close do not count; a listener does.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(place)
            listener.listen(1)
        except OSError as error:
            return f"is not free ({error.strerror})"
    return ""
