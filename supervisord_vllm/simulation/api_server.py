"""The stand-in's main process: vLLM's API server. It parses the command line, binds the port, starts EngineCore,
serves.

Exit status as in vLLM: 2 for a wrong command line, 1 for a start that failed, 0 for an ordered end and also when
EngineCore died in service, killed by SIGINT (130 in a shell) when it is told to stop while it starts.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import os
import signal
import socket
import ssl
import sys
from collections.abc import Coroutine, Sequence
from typing import Any, NoReturn

from supervisord_vllm.simulation import texts
from supervisord_vllm.simulation.arguments import non_default, parse
from supervisord_vllm.simulation.card import CardError
from supervisord_vllm.simulation.console import Console
from supervisord_vllm.simulation.engine_client import EngineClient
from supervisord_vllm.simulation.fault import FaultError
from supervisord_vllm.simulation.fault_plan import FaultPlan
from supervisord_vllm.simulation.ledger import Settings
from supervisord_vllm.simulation.resolve import RefusedError, find_model, print_engine_notes, resolve
from supervisord_vllm.simulation.shared_card import SharedCard
from supervisord_vllm.simulation.tracebacks import HEADER, SERVER, frames

KILL_AFTER = 0.3
"""Seconds between SIGTERM and SIGKILL to EngineCore; vLLM waits none with its default of ``--shutdown-timeout 0``."""
ANSWERS_AFTER_DEATH = 2.0
"""Seconds that requests in flight have to get their error answers."""
STATS_EVERY = 10.0
"""Seconds between two lines of statistics."""


def serve(arguments: Sequence[str]) -> NoReturn:
    """Run ``serve MODEL [flags]`` until its end; never returns."""
    options = parse(arguments)
    try:
        shared = SharedCard.from_environment(os.environ)
        launch = shared.count_launch()
        server = ApiServer(options, shared, FaultPlan(shared, os.environ, launch), launch)
    except (CardError, FaultError) as error:
        print(f"simulation: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    asyncio.run(server.run())
    raise SystemExit(0)


class ApiServer:
    """One run of the server."""

    def __init__(self, options: argparse.Namespace, shared: SharedCard, plan: FaultPlan, launch: int) -> None:
        self.options = options
        self.shared = shared
        self.card = shared.card()
        self.plan = plan
        self.launch = launch
        self.console = Console("APIServer")
        self.started = False
        self.stop = asyncio.Event()
        self.again = asyncio.Event()
        self.engine_pid: int | None = None

    async def run(self) -> None:
        """Start, serve, end the process."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled, number)
        options, console = self.options, self.console
        for line in texts.LOGO:
            console.info("api_utils.py:345", line.replace("{model}", options.model))
        console.info("api_utils.py:273", f"non-default args: {non_default(options)}")
        listener = self._bind()
        await self._imports()
        try:
            model = find_model(self.card, options, self.plan.find("missing-model") is not None)
            settings = resolve(self.card, model, options, console)
        except RefusedError as refused:
            self._fail(refused.trace, *refused.texts)
        print_engine_notes(settings, console)
        await self._serve(listener, model.name, settings)

    # --- start ------------------------------------------------------------------------------------------------------

    def _bind(self) -> socket.socket:
        """Bind before anything is loaded, as vLLM does; listening begins when the server is ready."""
        options = self.options
        if options.uds:
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            address: Any = options.uds
        else:
            host = options.host or "127.0.0.1"
            listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            address = (host, 8000 if options.port is None else options.port)
        try:
            listener.bind(address)
            if not options.uds and address[1] and _someone_listens(address):
                raise OSError(98, "Address already in use")
        except OSError as error:
            self._fail("port", f"OSError: {error}")
        return listener

    async def _imports(self) -> None:
        """The time that vLLM's imports take, and what strikes meanwhile."""
        for fault in self.plan.at("importing"):
            if fault.kind in ("neighbour-takes", "await-neighbour"):
                await asyncio.get_running_loop().run_in_executor(None, self.plan.neighbour, fault)
            elif fault.kind == "exit":
                os._exit(fault.code)
            elif fault.kind == "hang":
                await asyncio.Event().wait()
        await asyncio.sleep(self.card.timing.imports * self.plan.slowness / self.card.timing.speed)

    async def _serve(self, listener: socket.socket, model: str, settings: Settings) -> None:
        options = self.options
        served = options.served_model_name or [options.model]
        client = EngineClient()
        await client.spawn(
            {
                "card": str(self.shared.path),
                "launch": self.launch,
                "model": model,
                "name": options.model,
                "served": served[0],
                "load_format": options.load_format or "auto",
                "prefix_caching": options.enable_prefix_caching is not False,
                "settings": dataclasses.asdict(settings),
            }
        )
        self.engine_pid = client.process.pid if client.process is not None else None
        ready = await client.ready()
        if client.exit_code is not None:
            await self._leave_silently(client)
        if ready is None:
            await client.end(0)
            await asyncio.sleep(self.card.timing.failed_start / self.card.timing.speed)
            self._fail("engine_failed", texts.ENGINE_FAILED)
        # Only now: aiohttp is most of what the stand-in has to import, and a start that fails does without it.
        from aiohttp import web

        from supervisord_vllm.simulation.http_api import Face, make_app
        from supervisord_vllm.simulation.metrics_page import MetricsPage

        self._print_ready(listener)
        length = int(ready["max_model_len"])
        client.listen(MetricsPage(served[0], length, self._cache_labels(settings, ready)))
        keys = [*(options.api_key or []), *filter(None, [os.environ.get("VLLM_API_KEY")])]
        access = not options.disable_uvicorn_access_log and options.uvicorn_log_level not in (
            "warning",
            "error",
            "critical",
        )
        face = Face(client, self.console, served, options.model, length, keys, access)
        runner = web.AppRunner(make_app(face), handle_signals=False, access_log=None, shutdown_timeout=0.05)
        await runner.setup()
        await web.SockSite(runner, listener, ssl_context=self._tls()).start()
        self.started = True
        self.console.uvicorn("Application startup complete.")
        statistics = asyncio.create_task(self._statistics(client))
        await _first_of(self.stop.wait(), client.died.wait(), client.exit_asked.wait())
        if client.exit_asked.is_set():
            await self._leave_silently(client)
        if self.stop.is_set():
            await self._ordered_end(client)
        else:
            await self._engine_died(client)
        statistics.cancel()
        self.console.uvicorn("Waiting for application shutdown.")
        self.console.uvicorn("Application shutdown complete.")
        self.console.uvicorn(f"Finished server process [{os.getpid()}]")
        await runner.cleanup()
        os._exit(0)

    def _print_ready(self, listener: socket.socket) -> None:
        log, options = self.console.info, self.options
        log("api_server.py:673", "Supported tasks: ['generate']")
        log(
            "hf.py:540",
            "Detected the chat template content format to be 'string'. You can set `--chat-template-content-format` to "
            "override this.",
        )
        where = f"unix:{options.uds}" if options.uds else "{}:{}".format(*listener.getsockname()[:2])
        scheme = "" if options.uds else ("https://" if options.ssl_certfile else "http://")
        log("api_server.py:677", f"Starting vLLM server on {scheme}{where}")
        log("launcher.py:37", "Available routes are:")
        for path, methods in texts.ROUTES:
            log("launcher.py:46", f"Route: {path}, Methods: {methods}")
        self.console.uvicorn(f"Started server process [{os.getpid()}]")
        self.console.uvicorn("Waiting for application startup.")

    def _cache_labels(self, settings: Settings, ready: dict[str, object]) -> dict[str, str]:
        return {
            "block_size": "16",
            "cache_dtype": settings.kv_cache_dtype,
            "enable_prefix_caching": str(self.options.enable_prefix_caching is not False),
            "gpu_memory_utilization": str(settings.utilization),
            "kv_cache_max_concurrency": str(ready["concurrency"]),
            "kv_cache_memory_bytes": str(settings.kv_cache_memory_bytes),
            "kv_cache_size_tokens": str(ready["tokens"]),
            "num_gpu_blocks": str(ready["blocks"]),
            "num_gpu_blocks_override": "None",
        }

    def _tls(self) -> ssl.SSLContext | None:
        if not self.options.ssl_certfile:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.options.ssl_certfile, self.options.ssl_keyfile)
        return context

    # --- end --------------------------------------------------------------------------------------------------------

    async def _ordered_end(self, client: EngineClient) -> None:
        log, timing = self.console.info, self.card.timing
        log("launcher.py:100", "[shutdown] API server: shutdown triggered")
        log("launcher.py:116", "[shutdown] API server: stopping engine client mode=abort timeout=0s")
        log("core_client.py:655", "[shutdown] MPClient: start timeout=0s")
        log("core_client.py:657", "[shutdown] MPClient: stopping engine manager")
        self.console.warning("utils.py:626", "[shutdown] Process manager: force killing remaining processes count=1")
        await client.end(KILL_AFTER)
        self._print_client_closed()
        log("launcher.py:125", "[shutdown] API server: engine client stopped")
        log("launcher.py:128", "[shutdown] API server: signalling HTTP server shutdown")
        log("launcher.py:149", "[shutdown] API server: shutting down FastAPI HTTP server")
        self.console.uvicorn("Shutting down")
        if client.in_flight and self.plan.find("term-hang") is not None:
            self.console.uvicorn("Waiting for connections to close. (CTRL+C to force quit)")
            await _first_of(self.again.wait(), client.idle.wait())
        await asyncio.sleep(timing.stop / timing.speed)

    async def _engine_died(self, client: EngineClient) -> None:
        """The window in which /health says 503: until the watchdog looks, or a request fails."""
        busy = client.in_flight > 0
        code = 0 if client.process is None else await client.process.wait()
        if code < 0:
            log = self.console.info
            text = "[shutdown] MPClient: engine core exited unexpectedly; starting cleanup"
            self.console.warning("core_client.py:702", text)
            log("core_client.py:655", "[shutdown] MPClient: start timeout=default")
            log("core_client.py:657", "[shutdown] MPClient: stopping engine manager")
            self._print_client_closed()
        trace = (
            HEADER,
            *frames(SERVER["output_handler"]),
            f"vllm.v1.engine.exceptions.EngineDeadError: {texts.ENGINE_DEAD}",
        )
        self.console.error("async_llm.py:704", "AsyncLLM output_handler failed.", *trace)
        timing = self.card.timing
        await asyncio.sleep((min(0.5, timing.death_window) if busy else timing.death_window) / timing.speed)
        self.console.uvicorn("Shutting down")
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(client.idle.wait(), ANSWERS_AFTER_DEATH)

    def _print_client_closed(self) -> None:
        log = self.console.info
        log("core_client.py:659", "[shutdown] MPClient: engine manager stopped")
        log("core_client.py:660", "[shutdown] MPClient: cleaning up background resources")
        log("core_client.py:662", "[shutdown] MPClient: complete")

    async def _leave_silently(self, client: EngineClient) -> NoReturn:
        """The ``exit`` fault: the whole tree goes without a word."""
        if client.process is not None and client.process.returncode is None:
            client.process.kill()
            await client.process.wait()
        os._exit(client.exit_code or 0)

    def _fail(self, trace: str, *last: str) -> NoReturn:
        self.console.bare((HEADER, *frames(SERVER[trace]), *"\n".join(last).split("\n")))
        os._exit(1)

    def _signalled(self, number: int) -> None:
        if self.plan.find("ignore-term") is not None:
            return
        if self.started:
            (self.again if self.stop.is_set() else self.stop).set()
            return
        if number == signal.SIGTERM and self.plan.find("swallow-term") is not None:
            return
        if self.engine_pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.engine_pid, signal.SIGKILL)
        self.console.bare((HEADER, *frames(SERVER["interrupted"]), "KeyboardInterrupt: terminated"))
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
        os._exit(130)

    async def _statistics(self, client: EngineClient) -> None:
        """VLLM's line every ten seconds while there is something to say."""
        before = dict(client.totals)
        while True:
            await asyncio.sleep(STATS_EVERY)
            rates = {key: (client.totals[key] - before[key]) / STATS_EVERY for key in before}
            before = dict(client.totals)
            stats = client.stats
            if stats["running"] or stats["waiting"] or any(rates.values()):
                self.console.info(
                    "loggers.py:310",
                    f"Engine 000: Avg prompt throughput: {rates['prompt']:.1f} tokens/s, Avg generation throughput: "
                    f"{rates['generation']:.1f} tokens/s, Running: {stats['running']} reqs, Waiting: "
                    f"{stats['waiting']} reqs, GPU KV cache usage: {100 * stats['kv_usage']:.1f}%, Prefix cache hit "
                    "rate: 0.0%",
                )


async def _first_of(*waits: Coroutine[Any, Any, Any]) -> None:
    tasks = [asyncio.create_task(wait) for wait in waits]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()


def _someone_listens(address: tuple[str, int]) -> bool:
    """Whether a connection is taken: two sockets may be bound at once as long as neither listens."""
    with socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.settimeout(0.2)
        return probe.connect_ex(address) == 0
