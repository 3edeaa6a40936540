"""Metrics: an own registry per process, gauges read at the scrape, one thread that ends."""

from __future__ import annotations

import socket
import threading
import time
import urllib.request

import pytest

from common.metrics import Gauges, Metrics, MetricsServer
from protos.errors import ConfigError
from protos.messages import LedgerAudit, Load


def test_two_processes_worth_of_metrics_do_not_meet() -> None:
    """Guards against the library's global registry."""
    one, two = Metrics("context"), Metrics("context")
    one.request_began()
    one.request_ended("OK")
    assert b'outcome="ok"' in one.render()
    assert b'outcome="ok"' not in two.render()


def test_gauges_are_read_only_when_scraped_and_may_be_unknown() -> None:
    answers = [None, Gauges(load=Load(num_queued=4), audit=LedgerAudit())]
    metrics = Metrics("context", lambda: answers.pop(0))
    assert len(answers) == 2
    assert b"baton_queue_requests" not in metrics.render()
    assert b'baton_queue_requests{role="context"} 4.0' in metrics.render()


def test_later_tokens_share_their_time() -> None:
    metrics = Metrics("generation")
    metrics.later_tokens(0.4, 4)
    text = metrics.render().decode()
    assert 'baton_itl_seconds_count{role="generation"} 4.0' in text
    assert 'baton_itl_seconds_bucket{le="0.1",role="generation"} 4.0' in text


def test_a_silent_scraper_holds_up_neither_others_for_long_nor_the_end() -> None:
    server = MetricsServer(Metrics("context"), "127.0.0.1:0")
    server.start()
    host, _, port = server.address.partition(":")
    with socket.create_connection((host, int(port))):
        begun_s = time.monotonic()
        with urllib.request.urlopen(f"http://{server.address}/metrics", timeout=5) as answer:
            assert answer.headers["Content-Type"].startswith("text/plain")
        server.close()
        assert time.monotonic() - begun_s < 4
    server.close()
    assert "metrics" not in [thread.name for thread in threading.enumerate()]


def test_an_address_that_cannot_be_had_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="must be HOST:PORT"):
        MetricsServer(Metrics("context"), "9000")
    with pytest.raises(ConfigError, match=r"listen on 192\.0\.2\.1:0 for metrics"):
        MetricsServer(Metrics("context"), "192.0.2.1:0")
