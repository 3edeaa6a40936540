"""What a process counts for Prometheus, in a registry of its own.

| metric | kind | labels | meaning |
| --- | --- | --- | --- |
| baton_requests_total | counter | role, outcome | ended requests; "ok" or a gRPC status |
| baton_requests_open | gauge | role | requests being served now |
| baton_ttft_seconds | histogram | role | from receiving a request to its first token |
| baton_itl_seconds | histogram | role | time per token after the first |
| baton_kv_transfer_bytes_total | counter | role | KV bytes of answered requests (not on context) |
| baton_kv_transfer_seconds | histogram | role | their pulls, until verified (not on context) |
| baton_recomputed_tokens_total | counter | role | computed again (not on context) |
| baton_kv_sent_bytes_total | counter | role | KV bytes that a peer acknowledged (context) |
| baton_kv_sent_seconds_total | counter | role | serving those pulls, summed (context) |
| baton_queue_requests | gauge | role | admitted requests that wait for a place |
| baton_running_requests | gauge | role | sequences in the running batch |
| baton_blocks | gauge | role, kind, name | KV blocks by state and by owner |
| baton_ledger_entries | gauge | role, state | executor ledger entries |

Gauges are read when someone scrapes, never in between: a process that nobody
watches pays nothing. Life of the HTTP side: `MetricsServer(...)` binds,
`start()` serves in one thread, `close()` ends that thread.
"""

from __future__ import annotations

import http.server
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from common.rpc import split_address
from protos.errors import ConfigError
from protos.messages import KvStats, LedgerAudit, Load

LATENCY_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
SENDING_ROLE = "context"
SENT_BYTES, SENT_MS = "engine_sent_bytes", "engine_sent_ms"
"""Counters of an executor's audit."""
SCRAPE_IDLE_S_MAX = 2.0
"""How long a connected scraper may stay silent before it is dropped."""


@dataclass(frozen=True, kw_only=True)
class Gauges:
    """What a scrape finds out beyond the counted."""

    load: Load
    audit: LedgerAudit


class Metrics:
    """The metrics of one process; `read_gauges` may block for a bounded time.

    It is called in the thread that scrapes and returns None where nothing can
    be told, such as before the engine is up.
    """

    def __init__(self, role: str, read_gauges: Callable[[], Gauges | None] | None = None) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self._role = role
        registry = self.registry
        self._requests = Counter(
            "baton_requests", "Ended requests.", ("role", "outcome"), registry=registry
        )
        self._open = Gauge(
            "baton_requests_open", "Requests being served.", ("role",), registry=registry
        ).labels(role)
        self._ttft = _histogram("baton_ttft_seconds", "Time to the first token.", registry, role)
        self._itl = _histogram("baton_itl_seconds", "Time per later token.", registry, role)
        # A context server pulls nothing: a figure that stays 0 for ever would mislead.
        pulling = None if role == SENDING_ROLE else registry
        self._kv_seconds = _histogram("baton_kv_transfer_seconds", "KV pulls.", pulling, role)
        self._kv_bytes = Counter(
            "baton_kv_transfer_bytes", "KV bytes pulled.", ("role",), registry=pulling
        ).labels(role)
        self._recomputed = Counter(
            "baton_recomputed_tokens", "Prompt tokens recomputed.", ("role",), registry=pulling
        ).labels(role)
        if read_gauges is not None:
            registry.register(_GaugeCollector(role, read_gauges))

    def request_began(self) -> None:
        self._open.inc()

    def request_ended(self, outcome: str) -> None:
        """`outcome` is "ok" or the name of a gRPC status."""
        self._open.dec()
        self._requests.labels(self._role, outcome.lower()).inc()

    def first_token(self, seconds: float) -> None:
        self._ttft.observe(seconds)

    def later_tokens(self, seconds: float, num_tokens: int) -> None:
        """`num_tokens` came `seconds` after the ones before; each counts its share."""
        for _ in range(num_tokens):
            self._itl.observe(seconds / num_tokens)

    def kv_transferred(self, num_bytes: int, seconds: float) -> None:
        self._kv_bytes.inc(num_bytes)
        self._kv_seconds.observe(seconds)

    def recomputed(self, num_tokens: int) -> None:
        self._recomputed.inc(num_tokens)

    def render(self) -> bytes:
        """The exposition that a scrape gets."""
        return generate_latest(self.registry)


class StreamFigures:
    """One stream's figures, told as its chunks are written."""

    def __init__(self, metrics: Metrics, received_s: float) -> None:
        """`received_s` is when the request came, by the clock of `tokens`."""
        self._metrics = metrics
        self._last_s = received_s
        self._has_first_token = False

    def tokens(self, num_tokens: int, now_s: float) -> None:
        """A chunk's tokens; what comes with the first one counts as the first."""
        if num_tokens == 0:
            return
        if self._has_first_token:
            self._metrics.later_tokens(now_s - self._last_s, num_tokens)
        else:
            self._has_first_token = True
            self._metrics.first_token(now_s - self._last_s)
        self._last_s = now_s

    def transfer(self, kv: KvStats, transfer_ms: float) -> None:
        """What crossed for this stream, with its finish."""
        if kv.transferred_bytes:
            self._metrics.kv_transferred(kv.transferred_bytes, transfer_ms / 1000)
        if kv.recomputed_tokens:
            self._metrics.recomputed(kv.recomputed_tokens)


def _histogram(name: str, text: str, registry: CollectorRegistry | None, role: str) -> Histogram:
    histogram = Histogram(name, text, ("role",), buckets=LATENCY_BUCKETS_S, registry=registry)
    return histogram.labels(role)


class _GaugeCollector(Collector):
    def __init__(self, role: str, read: Callable[[], Gauges | None]) -> None:
        self._role = role
        self._read = read

    def describe(self) -> Iterable[Metric]:
        """Nothing: the registry must not scrape in order to learn the names."""
        return []

    def collect(self) -> Iterable[Metric]:
        gauges = self._read()
        if gauges is None:
            return
        load, audit = gauges.load, gauges.audit
        yield self._plain("baton_queue_requests", "Requests that wait.", load.num_queued)
        yield self._plain("baton_running_requests", "Sequences that run.", load.num_running)
        blocks = GaugeMetricFamily("baton_blocks", "KV blocks.", labels=("role", "kind", "name"))
        for kind, counts in (("state", audit.blocks_by_state), ("owner", audit.blocks_by_owner)):
            for name, count in sorted(counts.items()):
                blocks.add_metric((self._role, kind, name), count)
        yield blocks
        entries = GaugeMetricFamily(
            "baton_ledger_entries", "Ledger entries.", labels=("role", "state")
        )
        for state, count in sorted(audit.entries_by_state.items()):
            entries.add_metric((self._role, state), count)
        yield entries
        if self._role == SENDING_ROLE:
            yield from self._sent(audit.counters)

    def _sent(self, counters: Mapping[str, int]) -> Iterable[Metric]:
        """What left a context server: its engine alone knows when a transfer has ended."""
        for name, text, value in (
            ("baton_kv_sent_bytes", "KV bytes sent.", counters.get(SENT_BYTES, 0)),
            ("baton_kv_sent_seconds", "Time spent sending.", counters.get(SENT_MS, 0) / 1000),
        ):
            family = CounterMetricFamily(name, text, labels=("role",))
            family.add_metric((self._role,), value)
            yield family

    def _plain(self, name: str, text: str, value: int) -> Metric:
        family = GaugeMetricFamily(name, text, labels=("role",))
        family.add_metric((self._role,), value)
        return family


class MetricsServer:
    """HTTP `GET /metrics` in one thread."""

    def __init__(self, metrics: Metrics, listen: str) -> None:
        """Binds at once. Raises ConfigError where the address cannot be had."""
        host, port = split_address(listen, "metrics_listen")
        try:
            self._server = _HttpServer((host, port), _handler(metrics))
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {listen} for metrics: {error.strerror}; stop what uses the "
                "port, or set metrics_listen to another one (port 0 picks a free one)",
                field="metrics_listen",
                value=listen,
            ) from error
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.25}, name="metrics"
        )
        self.address = f"{host}:{self._server.server_address[1]}"

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Idempotent; returns when the thread has ended (a scrape in progress is bounded)."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()


class _HttpServer(http.server.HTTPServer):
    allow_reuse_address = True
    allow_reuse_port = False

    def handle_error(self, request: object, client_address: object) -> None:
        """A scraper that goes away in mid-answer is no news."""


def _handler(metrics: Metrics) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        timeout = SCRAPE_IDLE_S_MAX

        def do_GET(self) -> None:
            if self.path.partition("?")[0] not in ("/metrics", "/"):
                self.send_error(404)
                return
            body = metrics.render()
            self.send_response(200)
            self.send_header("Content-Type", CONTENT_TYPE_LATEST)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            """A scrape every few seconds is nothing to log."""

    return Handler
