"""The control socket: HTTP over a Unix socket, for this machine's operators.

``GET /status``, ``GET /series``, ``GET /history``, ``POST /command`` with ``{"verb": …, "reason": …}`` (``hold``:
``"for": "2h"``). The file's permissions (0660) admit owner, group and root; the peer's credentials decide again:
reading for owner, root and the socket's group, changing for owner and root. Requests are bounded.
"""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import socket
import stat
import struct
from pathlib import Path
from typing import cast

from aiohttp import web

from supervisord_vllm.api.control import VERBS, Control, RefusedError, Verb
from supervisord_vllm.api.recorded import Recorded
from supervisord_vllm.config.units import positive_duration
from supervisord_vllm.redaction import printable
from supervisord_vllm.status import status_document
from supervisord_vllm.store import StoreError

LARGEST_REQUEST = 16 << 10
LONGEST_REASON = 500
LONGEST_PATH = 107
"""Bytes of ``sun_path`` without its final NUL (unix(7))."""
_SO_PEERGROUPS = 59
_PEER = struct.Struct("3i")


class ControlSocket:
    """Serves one instance's operators at ``path``."""

    def __init__(self, control: Control, path: Path, store: Path) -> None:
        self.path = path
        self._control = control
        self._recorded = Recorded(store)
        app = web.Application(client_max_size=LARGEST_REQUEST)
        app.router.add_get("/status", self._status)
        app.router.add_get("/series", self._series)
        app.router.add_get("/history", self._history)
        app.router.add_post("/command", self._command)
        self._runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=1.0)
        self._inode: int | None = None
        self._listener: socket.socket | None = None

    async def start(self, given: int | None = None) -> None:
        """Listen; a socket that an earlier daemon left is replaced (the daemon's lock says that it is gone). ``given``
        is the descriptor of one that listens already.

        Raises:
            OSError: in one line that names the place and the fix.
        """
        await self._runner.setup()
        try:
            listener = self._bound() if given is None else self._taken(given)
        except OSError as error:
            await self._runner.cleanup()
            reason = error.strerror or str(error)
            raise OSError(f"control socket {self.path}: {reason}; give another runtime-dir") from error
        self._listener = listener
        await web.SockSite(self._runner, listener).start()

    def keep(self) -> int | None:
        """A descriptor of the socket that goes on listening after `stop`, which then leaves the file alone; callers
        that come meanwhile wait."""
        if self._listener is None:
            return None
        self._inode = None
        return os.dup(self._listener.fileno())

    async def stop(self) -> None:
        """Answer no more and remove the socket, if it is still ours."""
        await self._runner.cleanup()
        with contextlib.suppress(OSError):
            if self.path.stat().st_ino == self._inode:
                self.path.unlink()

    def _taken(self, descriptor: int) -> socket.socket:
        listener = socket.socket(fileno=descriptor)
        listener.setblocking(False)
        self._inode = self.path.stat().st_ino
        return listener

    def _bound(self) -> socket.socket:
        if len(os.fsencode(self.path)) > LONGEST_PATH:
            raise OSError(f"path is longer than {LONGEST_PATH} bytes")
        self.path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISSOCK(self.path.lstat().st_mode):
                raise OSError("something else than a socket lies there")
            self.path.unlink()
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.setblocking(False)
            os.fchmod(listener.fileno(), 0o660)  # before bind: the file is never open to others
            listener.bind(str(self.path))
            self.path.chmod(0o660)  # the umask took the group's write permission away
            self._inode = self.path.stat().st_ino
        except OSError:
            listener.close()
            raise
        return listener

    async def _status(self, request: web.Request) -> web.Response:
        self._admit(request, change=False)
        return web.json_response(status_document(self._control.snapshot()))

    async def _series(self, request: web.Request) -> web.Response:
        self._admit(request, change=False)
        return web.json_response(self._control.series())

    async def _history(self, request: web.Request) -> web.Response:
        self._admit(request, change=False)
        try:
            return web.json_response(await self._recorded.document(self._control.snapshot().name))
        except StoreError as error:
            return _refusal(503, str(error))

    async def _command(self, request: web.Request) -> web.Response:
        by = self._admit(request, change=True)
        try:
            body = json.loads(await request.text())
        except (ValueError, RecursionError):
            return _refusal(400, "the request is no JSON")
        verb = body.get("verb") if isinstance(body, dict) else None
        if not isinstance(verb, str) or verb not in VERBS:
            return _refusal(400, f"unknown verb; known are {', '.join(VERBS)}")
        reason = body.get("reason") or ""
        if not isinstance(reason, str):
            return _refusal(400, "the reason is no text")
        lever, direction = body.get("lever") or "", body.get("direction") or "down"
        if not isinstance(lever, str) or direction not in {"up", "down"}:
            return _refusal(400, "step wants a lever and up or down")
        try:
            for_ns = _for_ns(verb, body.get("for"))
        except ValueError as error:
            return _refusal(400, f"for: {error}")
        why = printable(reason)[:LONGEST_REASON]
        try:
            if verb == "step":
                answer = await self._control.command(
                    "step", why, by, printable(lever)[:64], "up" if direction == "up" else "down"
                )
            elif verb == "hold":
                answer = await self._control.command("hold", why, by, for_ns=for_ns)
            else:
                answer = await self._control.command(cast("Verb", verb), why, by)
        except RefusedError as error:
            return _refusal(409, str(error))
        return web.json_response({"message": answer})

    def _admit(self, request: web.Request, *, change: bool) -> str:
        """Who asks, by name; who may not is answered 403."""
        connection = request.transport.get_extra_info("socket") if request.transport is not None else None
        if connection is None:
            raise web.HTTPForbidden(text="the connection is gone")
        _, uid, gid = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
        if uid in {0, os.geteuid()}:
            return _user(uid)
        if change:
            message = f"{_user(uid)} may read but not change; ask {_user(os.geteuid())} or root"
            raise web.HTTPForbidden(text=json.dumps({"error": message}), content_type="application/json")
        try:
            group = self.path.stat().st_gid
        except OSError:
            group = os.getegid()
        if group != gid and group not in _groups(connection, uid, gid):
            message = f"{_user(uid)} is not in the group of {self.path}"
            raise web.HTTPForbidden(text=json.dumps({"error": message}), content_type="application/json")
        return _user(uid)


def _groups(connection: socket.socket, uid: int, gid: int) -> frozenset[int]:
    """The peer's supplementary groups, from the kernel; before Linux 4.13, or beyond 256 of them, its user's groups."""
    try:
        packed = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, 1024)  # as much as Python asks for
        return frozenset(struct.unpack(f"{len(packed) // 4}I", packed))
    except OSError:
        pass
    try:
        return frozenset(os.getgrouplist(pwd.getpwuid(uid).pw_name, gid))
    except KeyError:
        return frozenset()


def _for_ns(verb: str, text: object) -> int | None:
    """How long a hold lasts; a bad duration, and one for another verb, raise ``ValueError``."""
    if text is None:
        return None
    if verb != "hold":
        raise ValueError(f"only a hold lasts for a time, {verb} does not")
    return positive_duration(text).ns


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"


def _refusal(status: int, message: str) -> web.Response:
    return web.json_response({"error": message}, status=status)
