"""HTTP for machines: /livez, /readyz, /metrics, /api/v1/status, /api/v1/series, /api/v1/history. Reading only.

A port that is taken is no reason to stop supervising: the daemon goes on without HTTP, says so, and tries again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from aiohttp import web

from supervisord_vllm.api.control import Control
from supervisord_vllm.api.exporter import CONTENT_TYPE, Exporter
from supervisord_vllm.api.recorded import Recorded
from supervisord_vllm.status import status_document, why_not_ready
from supervisord_vllm.store import StoreError
from supervisord_vllm.store.aside import Warn

RETRY_S = 30.0


class HttpServer:
    """Serves one instance on a host and port (0: any free one, see `address`)."""

    def __init__(
        self,
        control: Control,
        exporter: Exporter,
        store: Path,
        address: tuple[str, int],
        warn: Warn,
        retry_s: float = RETRY_S,
    ) -> None:
        self._control = control
        self._exporter = exporter
        self._recorded = Recorded(store)
        self._host, self._port = address
        self._warn = warn
        self._retry_s = retry_s
        self._retrying: asyncio.Task[None] | None = None
        self._listeners: list[socket.socket] = []
        app = web.Application(client_max_size=1024)
        app.router.add_get("/livez", self._livez)
        app.router.add_get("/readyz", self._readyz)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/api/v1/status", self._status)
        app.router.add_get("/api/v1/series", self._series)
        app.router.add_get("/api/v1/history", self._history)
        self._runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=1.0)

    @property
    def address(self) -> tuple[str, int] | None:
        """Host and port that we listen on; ``None`` while the port is not ours."""
        addresses = self._runner.addresses
        return (str(addresses[0][0]), int(addresses[0][1])) if addresses else None

    async def start(self, given: Sequence[int] = ()) -> None:
        """Listen, or warn and go on trying in the background; never raises for a port. ``given`` are descriptors of
        sockets that listen already."""
        await self._runner.setup()
        if given and await self._take(given):
            return
        problem = await self._listen()
        if problem is not None:
            where = f"{self._host}:{self._port}"
            self._warn(f"HTTP {where}: {problem}; going on without HTTP, trying again every {self._retry_s:g} s")
            self._retrying = asyncio.create_task(self._retry())

    def keep(self) -> tuple[int, ...]:
        """Descriptors of the sockets that go on listening after `stop`; callers that come meanwhile wait."""
        return tuple(os.dup(listener.fileno()) for listener in self._listeners)

    async def _take(self, descriptors: Sequence[int]) -> bool:
        """Whether sockets that were handed over are on the port that is wanted now."""
        listeners = [socket.socket(fileno=descriptor) for descriptor in descriptors]
        if all(self._port in (0, listener.getsockname()[1]) for listener in listeners):
            await self._serve(listeners)
            return True
        for listener in listeners:
            listener.close()
        return False

    async def _serve(self, listeners: list[socket.socket]) -> None:
        for listener in listeners:
            await web.SockSite(self._runner, listener).start()
        self._listeners = listeners

    async def listening(self) -> None:
        """Wait until the port is ours."""
        if self._retrying is not None:
            await asyncio.shield(self._retrying)

    async def stop(self) -> None:
        """Give the port back."""
        if self._retrying is not None:
            self._retrying.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._retrying
        await self._runner.cleanup()

    async def _retry(self) -> None:
        while True:
            await asyncio.sleep(self._retry_s)
            if await self._listen() is None:
                self._warn(f"HTTP {self._host}:{self._port}: listening now")
                return

    async def _listen(self) -> str | None:
        """Why not, if not. Sockets of our own, so that they can be handed over."""
        listeners: list[socket.socket] = []
        try:
            found = await asyncio.get_running_loop().getaddrinfo(
                self._host or None, self._port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )
            for family, address in dict.fromkeys((entry[0], entry[4]) for entry in found):
                listeners.append(_listener(family, address))
        except OSError as error:
            for listener in listeners:
                listener.close()
            return os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
        await self._serve(listeners)
        return None

    async def _livez(self, _request: web.Request) -> web.Response:
        return web.Response(text="alive\n")

    async def _readyz(self, _request: web.Request) -> web.Response:
        reason = why_not_ready(self._control.snapshot())
        return web.Response(text=f"{reason}\n", status=503) if reason else web.Response(text="ready\n")

    async def _metrics(self, _request: web.Request) -> web.Response:
        return web.Response(body=self._exporter.page(), headers={"Content-Type": CONTENT_TYPE})

    async def _status(self, _request: web.Request) -> web.Response:
        return web.json_response(status_document(self._control.snapshot()))

    async def _series(self, _request: web.Request) -> web.Response:
        return web.json_response(self._control.series())

    async def _history(self, _request: web.Request) -> web.Response:
        try:
            return web.json_response(await self._recorded.document(self._control.snapshot().name))
        except StoreError as error:
            return web.json_response({"error": str(error)}, status=503)


def _listener(family: int, address: tuple[Any, ...]) -> socket.socket:
    """A socket that listens, as asyncio's own server makes it."""
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.setblocking(False)
        listener.bind(address)
    except OSError:
        listener.close()
        raise
    return listener
