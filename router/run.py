"""One router's life: open the port, watch the servers, serve, drain, go.

    starting ──open──> serving ──stop signal──> draining ──idle or grace over──> closed

The router is ready as soon as it listens: servers may come before or after it.
Health says whether requests can be served right now.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from common.logs import Logs
from common.metrics import Gauges, Metrics, MetricsServer
from common.process import EXIT_OK, ProcessOptions, StopSignals, tell_ready
from common.rpc import Health, add_services, bind, enable_reflection, new_server
from common.security import ClusterSecret, load_secret
from common.text.tokenizer import load_tokenizer
from protos.messages import LedgerAudit
from router import signals as sig
from router.admission import Admission
from router.config import RouterConfig
from router.control import ControlServicer
from router.fleet import Fleet
from router.identity import RouterIdentity
from router.leases import Leases
from router.links import Links
from router.policies import create_policy
from router.service import InferenceServicer
from router.shared import Shared
from router.watch import Watcher

ENDING_S_MAX = 1.0
"""How long interrupted streams may take to tell their clients so."""
LAST_WRITES_S = 0.3


class Router:
    """`open`, then serve, then `close`, each once, on one event loop."""

    def __init__(self, config: RouterConfig, logs: Logs) -> None:
        """Raises ConfigError for a secret or a model that cannot be used."""
        self._config = config
        self._logs = logs
        self._log = logs.get("router")
        self._secret: ClusterSecret = load_secret(Path(config.secret_file))
        self._tokenizer = load_tokenizer(Path(config.model)) if config.model else None
        self.identity = RouterIdentity(config.name)
        self.fleet = Fleet(
            config.context_servers,
            config.generation_servers,
            context_policy=create_policy(config.context_policy),
            generation_policy=create_policy(config.generation_policy),
            needs_pairs=config.disaggregation == "always",
        )
        self.admission = Admission(
            config.max_in_flight, f"{config.name}-{self.identity.incarnation:016x}"
        )
        self._watchers: dict[str, Watcher] = {}
        self._watching: list[asyncio.Task[None]] = []

    # --- open ---------------------------------------------------------------------------

    async def open(self) -> str:
        """Listen and begin to watch; returns HOST:PORT. Raises ConfigError for a taken port."""
        self._server = new_server()
        self.identity.address = bind(self._server, self._config.listen)
        self._metrics = Metrics("router", self._read_gauges)
        listen = self._config.metrics_listen
        self._metrics_server = MetricsServer(self._metrics, listen) if listen else None
        self._make_parts()
        self._health = Health(self._server)
        enable_reflection(self._server)
        await self._health.set_ready(False)
        await self._health.set_live(True)
        await self._server.start()
        if self._metrics_server is not None:
            self._metrics_server.start()
            self._log.info("metrics", listen=self._metrics_server.address)
        self._watch()
        return self.identity.address

    def _make_parts(self) -> None:
        addresses = [server.address for server in self.fleet.servers]
        self._links = Links(addresses, self._secret, self._config.connections_per_server)
        self._leases = Leases(self._links, self._logs.get("leases"))
        self._shared = Shared(
            fleet=self.fleet,
            links=self._links,
            leases=self._leases,
            tokenizer=self._tokenizer,
            hands_over=self._config.disaggregation == "always",
            suspect=self._suspect,
        )
        self.inference = InferenceServicer(
            self._shared,
            self.admission,
            metrics=self._metrics,
            log=self._logs.get("inference"),
            default_deadline_s=self._config.default_deadline_s,
        )
        self._control = ControlServicer(
            self.identity,
            self._shared,
            self.admission,
            self.inference,
            secret=self._secret,
            log=self._logs.get("control"),
        )
        add_services(self._server, self.inference, self._control)

    def _watch(self) -> None:
        for server in self.fleet.servers:
            watcher = self._watchers[server.address] = Watcher(
                self._links[server.address],
                self.fleet,
                heartbeat_s=self._config.heartbeat_s,
                heartbeat_timeout_s=self._config.heartbeat_timeout_s,
                on_change=self._on_change,
                on_silent=self.inference.server_silent,
                log=self._logs.get("fleet"),
            )
            self._watching.append(asyncio.create_task(watcher.run()))

    # --- while it serves ----------------------------------------------------------------

    async def _on_change(self) -> None:
        self.inference.servers_changed()
        await self._health.set_ready(self.fleet.is_usable and not self.identity.is_draining)

    def _suspect(self, address: str, reason: str) -> None:
        self._watchers[address].suspect(reason)

    def _read_gauges(self) -> Gauges:
        """Called in the thread that scrapes; it reads numbers, and never waits."""
        load = self._control.load()
        return Gauges(load=load, audit=self.audit())

    def audit(self) -> LedgerAudit:
        """The router's own requests, reservations and calls."""
        return self._control.audit()

    async def wait_broken(self) -> None:
        """Returns never; raises what ended a watcher, which only a defect of ours does."""
        await asyncio.gather(*self._watching)

    # --- close --------------------------------------------------------------------------

    async def close(self) -> None:
        """Streams may go on for shutdown_grace_s, then they are told. Every wait is bounded."""
        self.identity.is_draining = True
        self.admission.close("the router is shutting down")
        await self._health.set_ready(False)
        self._log.info("stopping", open_requests=self.admission.num_in_flight)
        if not await self.inference.wait_idle(self._config.shutdown_grace_s):
            # A launcher stops us because a server died: the client should hear of that.
            drained = sig.Drained(self.fleet.why_not_usable())
            self._log.info("streams_ended", num=self.inference.interrupt_all(drained))
            await self.inference.wait_idle(ENDING_S_MAX)
        for task in self._watching:
            task.cancel()
        await asyncio.gather(*self._watching, return_exceptions=True)
        await self._leases.close(ENDING_S_MAX)
        await self._server.stop(LAST_WRITES_S)
        await self._links.close()
        if self._metrics_server is not None:
            await asyncio.to_thread(self._metrics_server.close)
        self._log.info("stopped")


async def run_router(config: RouterConfig, options: ProcessOptions) -> int:
    """Returns the exit status. Raises ConfigError."""
    level = options.log_level or config.log_level
    logs = Logs(name=config.name, level=level, format=config.log_format)
    with StopSignals() as signals:
        router = Router(config, logs)
        address = await router.open()
        logs.get("router").info("ready", name=config.name, listen=address)
        tell_ready(options.ready_fd, address)
        stop = asyncio.create_task(signals.stopping.wait())
        broken = asyncio.create_task(router.wait_broken())
        try:
            await asyncio.wait({stop, broken}, return_when=asyncio.FIRST_COMPLETED)
            if broken.done():
                broken.result()
        finally:
            stop.cancel()
            await router.close()
            await asyncio.gather(stop, broken, return_exceptions=True)
    return EXIT_OK
