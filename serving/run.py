"""The life of one server process, the same for both roles.

    arguments, YAML, secret -> ports taken -> answering "starting"
      -> tokenizer and engine up -> ready
      -> the worker falls silent or stalls: every open request ends UNAVAILABLE,
         new ones are refused until it is back
      -> SIGTERM or SIGINT: no new requests, a grace for open ones, the rest end
         UNAVAILABLE, the engine stops                            -> exit 0
      -> the engine dies: every open request ends UNAVAILABLE     -> exit 70

What cannot work at the start is one line on stderr and exit 2. Ports are taken
before the model is loaded, so that a port in use is told at once. A second
signal ends the process on the spot.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from common.config import load_config, parse_config
from common.logs import Bridge, Logs
from common.metrics import Gauges, Metrics, MetricsServer
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
from common.rpc import Health, add_services, bind, enable_reflection, new_server
from common.security import load_secret
from executor.attach.point import rpc_point
from executor.executor import GenerationExecutor
from executor.ipc import sweep_folders
from executor.preflight import check_model, load_own_tokenizer, why_no_text
from executor.world.outer import refuse_bare_command
from protos.errors import BatonError, ConfigError, EngineDeadError, ServerUnavailableError
from serving.config import ServerConfig
from serving.control import ControlServicer
from serving.front import FrontOrders, read_orders
from serving.inference import InferenceServicer
from serving.launcher import FrontendsProcess
from serving.live import LiveRequests
from serving.role import Role
from serving.state import ServerState, Serving

HEALTH_INTERVAL_S = 0.5
SCRAPE_S_MAX = 2.0
ENDING_S_MAX = 1.0
"""How long ended streams may take to tell their clients so."""
EXECUTOR_STOP_S_MAX = 30.0
LAST_WRITES_S = 0.3


def main(
    role: type[Role],
    config_type: type[ServerConfig],
    program: str,
    argv: Sequence[str] | None = None,
) -> int:
    """A server process from its command line to its exit status."""
    options = parse_options(
        program,
        f"One {role.name} server of a Baton cluster.",
        argv,
        more=("frontends", "attach_fd"),
    )
    try:
        if options.die_with_parent:
            die_with_parent()
        process = _process(role, load_config(options.config, config_type), program, options)
        bridge = Bridge(process.logs)
        bridge.install()
        try:
            return asyncio.run(process.run())
        finally:
            bridge.uninstall()
    except ConfigError as error:
        sys.stderr.write(f"{program}: {error.message}\n")
        return EXIT_CONFIG
    except BatonError as error:
        sys.stderr.write(f"{program}: {error.message}\n")
        return EXIT_ENGINE_DEAD


def _process(
    role: type[Role], config: ServerConfig, program: str, options: ProcessOptions
) -> ServerProcess | FrontendsProcess:
    """The server itself, one frontend of it, or the launcher of several."""
    if options.attach_fd is not None:
        orders = read_orders(options.attach_fd)
        orders.check_launcher()
        return ServerProcess(orders.seat(config), role, options, orders)
    refuse_bare_command("a server")
    if options.frontends is not None:
        config = msgspec.structs.replace(config, frontends=options.frontends)
        config = parse_config(msgspec.to_builtins(config), type(config), source="--frontends")
    if config.frontends > 1:
        return FrontendsProcess(config, program, options)
    return ServerProcess(config, role, options)


class ServerProcess:
    """One life; `run` is called once, on the main thread's event loop."""

    def __init__(
        self,
        config: ServerConfig,
        role: type[Role],
        options: ProcessOptions,
        front: FrontOrders | None = None,
    ) -> None:
        """`front`: this is one of several frontends. Raises ConfigError for a secret or an
        address that cannot be used."""
        self._config = config
        self._options = options
        self._is_front = front is not None
        secret = load_secret(Path(config.secret_file))
        self._point = rpc_point(config.engine, secret) if front is None else front.point
        level = options.log_level or config.log_level
        name = config.name if front is None else f"{config.name}/{front.index}"
        self.logs = Logs(name=name, level=level, format=config.log_format)
        self._log = self.logs.get("server")
        self.state = ServerState(name=config.name, role=role.name, secret=secret)
        self._live = LiveRequests(config.max_open_requests)
        self._metrics = Metrics(role.name, self._read_gauges)
        self._role = role(config.name, secret)

    async def run(self) -> int:
        """Until a signal or the engine's death; returns the exit status.

        Raises ConfigError or EngineDeadError where the start fails.
        """
        with StopSignals(is_led=self._is_front) as signals:
            return await self.serve(signals.stopping)

    async def serve(self, stopping: asyncio.Event) -> int:
        """The same, stopped by `stopping`."""
        self._loop = asyncio.get_running_loop()
        await self._open()
        try:
            return await self._live_and_die(stopping)
        finally:
            await self._close()

    async def _open(self) -> None:
        """Take the ports and answer, though no request is served yet."""
        self._server = new_server(shares_port=self._is_front)
        self.state.address = bind(self._server, self._config.listen, shares_port=self._is_front)
        metrics_listen = self._config.metrics_listen
        self._metrics_server = (
            MetricsServer(self._metrics, metrics_listen) if metrics_listen else None
        )
        self._inference = InferenceServicer(
            self.state,
            self._role,
            live=self._live,
            metrics=self._metrics,
            log=self.logs.get("inference"),
            default_deadline_s=self._config.engine.default_deadline_s,
            max_unread_tokens=self._config.max_unread_tokens,
        )
        control = ControlServicer(self.state, self.logs.get("control"))
        add_services(self._server, self._inference, control)
        self._health = Health(self._server)
        enable_reflection(self._server)
        await self._health.set_ready(False)
        await self._health.set_live(True)
        await self._server.start()
        if self._metrics_server is not None:
            self._metrics_server.start()
            self._log.info("metrics", listen=self._metrics_server.address)
        self._log.info("starting", role=self.state.role, listen=self.state.address)

    async def _close(self) -> None:
        """Idempotent parts, each bounded; streams get a moment for their last words."""
        await self._inference.close()
        await self._server.stop(LAST_WRITES_S)
        if self._metrics_server is not None:
            await asyncio.to_thread(self._metrics_server.close)
        if self._is_front:
            sweep_folders()  # the launcher's, where it was killed and cannot
        self._log.info("stopped")

    async def _live_and_die(self, stopping: asyncio.Event) -> int:
        serving = await self._start(stopping)
        if serving is None:
            return EXIT_OK
        try:
            self.state.set_ready(serving)
            await self._health.set_ready(True)
            self._log.info("ready", name=self._config.name, listen=self.state.address)
            tell_ready(self._options.ready_fd, self.state.address)
            return await self._serve_until_end(serving.executor, stopping)
        finally:
            await self._shut_executor(serving.executor)

    async def _serve_until_end(self, executor: GenerationExecutor, stopping: asyncio.Event) -> int:
        death = asyncio.create_task(executor.wait_dead())
        stop = asyncio.create_task(stopping.wait())
        watch = asyncio.create_task(self._watch_health())
        try:
            await asyncio.wait((death, stop, watch), return_when=asyncio.FIRST_COMPLETED)
            if watch.done():
                watch.result()  # it never ends but by a defect of ours, which is raised here
            watch.cancel()
            if death.done():
                return await self._on_death(death.result())
            return await self._on_stop(executor)
        finally:
            for task in (death, stop, watch):
                task.cancel()
            await asyncio.gather(death, stop, watch, return_exceptions=True)

    async def _start(self, stopping: asyncio.Event) -> Serving | None:
        """The engine, or None where a signal came first. Raises ConfigError, EngineDeadError."""
        start = asyncio.create_task(self.start_serving())
        stop = asyncio.create_task(stopping.wait())
        await asyncio.wait({start, stop}, return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if start.done():
            return start.result()
        self._log.info("stopping", why="a signal came during the start")
        start.cancel()
        outcome = (await asyncio.gather(start, return_exceptions=True))[0]
        if isinstance(outcome, Serving):  # it was up before the cancel reached it
            await outcome.executor.shutdown()
        return None

    async def start_serving(self) -> Serving:
        """Load the tokenizer, then start the engine's worker. Raises ConfigError first."""
        config = self._config.engine_here()
        if self._point is None:  # else the model is looked at where the engine is
            await asyncio.to_thread(check_model, config, "engine.model")
        tokenizer = await asyncio.to_thread(load_own_tokenizer, config)
        executor = await GenerationExecutor.create(
            config,
            name=self.logs.name,
            progress=self._on_progress,
            tokenizer=tokenizer,
            point=self._point,
        )
        why = why_no_text(config, executor.identity.model_info)
        if why:
            self._log.warning("no text", why=why)
        return Serving(executor=executor, tokenizer=tokenizer)

    def _on_progress(self, what: str) -> None:
        self._log.info("progress", what=what)
        if self.state.phase == "starting":
            self.state.detail = what

    async def _watch_health(self) -> None:
        """State and readiness follow the engine's progress, both ways.

        The executor fails every open result when the trouble begins, and refuses new ones.
        """
        told = self.state.phase
        while True:
            await asyncio.sleep(HEALTH_INTERVAL_S)
            self.state.follow_engine()
            phase = self.state.phase
            if phase == told:
                continue
            if phase == "ready":
                self._log.warning("recovered", was=told)
            else:
                self._log.warning(phase, why=self.state.detail)
            await self._health.set_ready(phase == "ready")
            told = phase

    async def _on_stop(self, executor: GenerationExecutor) -> int:
        self._log.info("stopping", open_requests=len(self._live))
        self.state.move("draining", "")
        await self._health.set_ready(False)
        if not await self._inference.wait_idle(self._config.shutdown_grace_s):
            reason = ServerUnavailableError(
                f"{self.state.role} server {self.state.name!r} is shutting down"
            )
            self._log.info("streams_ended", num=self._live.end_all(reason))
            await self._inference.wait_idle(ENDING_S_MAX)
        executor.pre_shutdown()
        return EXIT_OK

    async def _on_death(self, error: EngineDeadError) -> int:
        """The executor fails every open result; what is left here is to say so and go."""
        cause, *lines = error.message.splitlines()
        self._log.error("engine_dead", error=cause, open_requests=len(self._live))
        for line in lines:
            self._log.error("worker_said", line=line.strip())
        self.state.move("dead", cause)
        await self._health.set_ready(False)
        await self._health.set_live(False)
        self._live.end_all(error)
        await self._inference.wait_idle(ENDING_S_MAX)
        return EXIT_ENGINE_DEAD

    async def _shut_executor(self, executor: GenerationExecutor) -> None:
        try:
            await asyncio.wait_for(executor.shutdown(), EXECUTOR_STOP_S_MAX)
        except (BatonError, TimeoutError) as error:
            self._log.error("executor_left_behind", error=str(error) or type(error).__name__)

    def _read_gauges(self) -> Gauges | None:
        """Called in the thread that scrapes; the loop answers within a bound or not at all."""
        reading = asyncio.run_coroutine_threadsafe(self._gauges(), self._loop)
        try:
            return reading.result(SCRAPE_S_MAX)
        except (BatonError, TimeoutError, asyncio.CancelledError):
            reading.cancel()
            return None

    async def _gauges(self) -> Gauges:
        executor = self.state.running().executor
        return Gauges(load=await executor.load(), audit=await executor.audit())
