"""What a server's file means on the host where it is read."""

from __future__ import annotations

import pytest

from context_server.config import ContextServerConfig
from executor.config import EngineConfig, TransferConfig


@pytest.mark.parametrize(
    ("listen", "given", "devices"),
    [
        ("127.0.0.1:8101", "", "lo"),
        ("127.1.2.3:0", "", "lo"),
        ("localhost:8101", "", "lo"),
        ("[::1]:8101", "", "lo"),
        ("10.0.0.1:8101", "", ""),
        ("0.0.0.0:8101", "", ""),
        ("host.example:8101", "", ""),
        ("127.0.0.1:8101", "eth0", "eth0"),
    ],
)
def test_the_data_plane_stays_where_the_control_plane_is(
    listen: str, given: str, devices: str
) -> None:
    """A cluster on 127.0.0.1 opened UCX ports on the host's network address."""
    engine = EngineConfig(transfer=TransferConfig(ucx_net_devices=given))
    config = ContextServerConfig(listen=listen, secret_file="secret", engine=engine)
    assert config.engine_here().transfer.ucx_net_devices == devices
