"""`python -m executor.attach.worker_server`, or `baton worker`: a world for frontends elsewhere.

    port taken -> engine loading (whoever comes is told to wait) -> ready
      -> SIGTERM or SIGINT: a grace for what runs, then the engine stops   -> exit 0
      -> the engine dies: every frontend is told                           -> exit 70

Frontends are servers whose `engine.executor.rpc_address` names this one's port; several may share
it. Inside an outer mpirun or srun it runs behind `python -m executor.world.under_mpi`.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from common.config import load_config
from common.logs import Bridge, Logs
from common.process import (
    EXIT_CONFIG,
    EXIT_ENGINE_DEAD,
    EXIT_OK,
    ProcessOptions,
    StopSignals,
    die_with_parent,
    parse_options,
    tell_ready,
)
from common.rpc import split_address
from common.security import load_secret
from executor.attach.broker import Broker
from executor.attach.owner import share_engine
from executor.attach.point import cluster_keys
from executor.attach.worker_config import WorkerConfig
from executor.limits import ExecutorLimits
from executor.preflight import check_model
from executor.proxy import Proxy
from executor.world.outer import refuse_bare_command
from protos.errors import BatonError, ConfigError

PROGRAM = "worker"
OF_SERVERS = ("frontends", "max_open_requests", "max_unread_tokens", "metrics_listen")
"""Keys of a server's file that a worker has no use for."""
IDLE_POLL_S = 0.05
SHUT_DOWN = "it was shut down"


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 stopped as asked, 2 cannot start, 70 the engine died."""
    about = "An engine that servers elsewhere attach to."
    options = parse_options(PROGRAM, about, argv, more=("listen",))
    try:
        if options.die_with_parent:
            die_with_parent()
        refuse_bare_command("a worker")
        server = WorkerServer(_config(options), options)
        bridge = Bridge(server.logs)
        bridge.install()
        try:
            return asyncio.run(server.run())
        finally:
            bridge.uninstall()
    except ConfigError as error:
        sys.stderr.write(f"{PROGRAM}: {error.message}\n")
        return EXIT_CONFIG
    except BatonError as error:
        sys.stderr.write(f"{PROGRAM}: {error.message}\n")
        return EXIT_ENGINE_DEAD


def _config(options: ProcessOptions) -> WorkerConfig:
    try:
        config = load_config(options.config, WorkerConfig)
    except ConfigError as error:
        if error.field in OF_SERVERS:
            takes = ", ".join(WorkerConfig.__struct_encode_fields__)
            raise ConfigError(
                f"{options.config}: {error.field} is a server's key; a worker takes {takes}",
                field=error.field,
                limit=takes,
            ) from None
        raise
    if options.listen is None:
        return config
    split_address(options.listen, "--listen")
    return msgspec.structs.replace(config, listen=options.listen)


class WorkerServer:
    """One life; `run` is called once, on the main thread's event loop."""

    def __init__(self, config: WorkerConfig, options: ProcessOptions) -> None:
        """Raises ConfigError for a secret that cannot be used."""
        self._config = config
        self._options = options
        self._keys = cluster_keys(load_secret(Path(config.secret_file)))
        level = options.log_level or config.log_level
        self.logs = Logs(name=config.name, level=level, format=config.log_format)
        self._log = self.logs.get("worker")

    async def run(self) -> int:
        """The exit status. Raises ConfigError or EngineDeadError where the start fails."""
        config = self._config
        limits = ExecutorLimits.of(config.engine)
        broker = Broker.on_tcp(config.listen, self._keys, limits)
        try:
            with StopSignals() as signals:
                return await self._serve(broker, limits, signals.stopping)
        finally:
            await broker.close()
            self._log.info("stopped", **broker.counters())

    async def _serve(self, broker: Broker, limits: ExecutorLimits, stopping: asyncio.Event) -> int:
        config = self._config
        address = f"{config.listen.rpartition(':')[0]}:{broker.port}"
        self._log.info("starting", listen=address)
        await asyncio.to_thread(check_model, config.engine, "engine.model")
        start = asyncio.create_task(
            share_engine(
                config.engine_here(),
                broker,
                name=config.name,
                limits=limits,
                progress=lambda what: self._log.info("progress", what=what),
            )
        )
        executor = await unless_stopped(start, stopping)
        if executor is None:
            self._log.info("stopping", why="a signal came during the start")
            return EXIT_OK
        try:
            self._log.info("ready", name=config.name, listen=address)
            tell_ready(self._options.ready_fd, address)
            return await self._until_end(executor, stopping)
        finally:
            broker.world_ended(SHUT_DOWN)  # now: how long the world takes to end is not known
            await executor.shutdown()

    async def _until_end(self, executor: Proxy, stopping: asyncio.Event) -> int:
        death = asyncio.create_task(executor.wait_dead())
        stop = asyncio.create_task(stopping.wait())
        try:
            await asyncio.wait((death, stop), return_when=asyncio.FIRST_COMPLETED)
            if death.done():
                self._log.error("engine_dead", error=death.result().message)
                return EXIT_ENGINE_DEAD
            self._log.info("stopping")
            await self._let_run(executor)
            return EXIT_OK
        finally:
            for task in (death, stop):
                task.cancel()
            await asyncio.gather(death, stop, return_exceptions=True)

    async def _let_run(self, executor: Proxy) -> None:
        """Until nothing runs, or the grace is over."""
        try:
            async with asyncio.timeout(self._config.shutdown_grace_s):
                while True:
                    load = await executor.load()
                    if load.num_running + load.num_queued == 0:
                        return
                    await asyncio.sleep(IDLE_POLL_S)
        except (TimeoutError, BatonError):
            return


async def unless_stopped(start: asyncio.Task[Proxy], stopping: asyncio.Event) -> Proxy | None:
    """What `start` makes; None where a signal came first, and nothing is left of it then."""
    stop = asyncio.create_task(stopping.wait())
    await asyncio.wait({start, stop}, return_when=asyncio.FIRST_COMPLETED)
    stop.cancel()
    if start.done():
        return start.result()
    start.cancel()
    outcome = (await asyncio.gather(start, return_exceptions=True))[0]
    if isinstance(outcome, Proxy):  # it was up before the cancel reached it
        await outcome.shutdown()
    return None


if __name__ == "__main__":
    sys.exit(main())
