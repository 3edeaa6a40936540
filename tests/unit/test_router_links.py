"""The router's connections to one server."""

from __future__ import annotations

from common.security import ClusterSecret
from router.links import Links

SECRET = ClusterSecret({"k": b"k" * 16})


async def test_connections_to_a_server_take_turns() -> None:
    """Frontends that share a port are each reached by connections of their own."""
    links = Links(["127.0.0.1:1", "127.0.0.1:2"], SECRET, connections_per_server=3)
    link = links["127.0.0.1:1"]
    asked = [link.inference for _ in range(6)]
    assert asked[:3] == asked[3:]
    assert len({id(stub) for stub in asked}) == len(link.channels) == 3
    assert links["127.0.0.1:2"].inference not in asked
    await links.close()


async def test_one_connection_is_the_rule() -> None:
    links = Links(["127.0.0.1:1"], SECRET)
    link = links["127.0.0.1:1"]
    assert link.inference is link.inference
    assert len(link.channels) == 1
    await links.close()
