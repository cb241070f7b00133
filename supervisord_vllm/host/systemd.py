"""Telling systemd how we are (sd_notify), and how often it wants to hear.

Contract: never blocks and never raises; without ``NOTIFY_SOCKET`` nothing happens. See sd_notify(3).
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

from supervisord_vllm.redaction import printable

STATUS_LIMIT = 500
"""Characters of a status line."""


class Notifier:
    """The notification socket of this service, or nothing."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        address = environ.get("NOTIFY_SOCKET", "")
        # "@" stands for the NUL of an abstract socket; other families (vsock) are for virtual machines only.
        self._address = "\0" + address[1:] if address.startswith("@") else address if address.startswith("/") else None

    def __bool__(self) -> bool:
        return self._address is not None

    def send(self, *assignments: str) -> bool:
        """Sends ``NAME=value`` lines in one datagram; False where nobody took it (its queue is full, it is gone)."""
        if self._address is None:
            return False
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK) as out:
                out.sendto("\n".join(assignments).encode("utf-8", "replace"), self._address)
        except (OSError, ValueError):
            return False
        return True

    def ready(self, status: str) -> bool:
        """The daemon supervises."""
        return self.send("READY=1", _status(status))

    def status(self, text: str) -> bool:
        """One line for people, as ``systemctl status`` shows it."""
        return self.send(_status(text))

    def watchdog(self) -> bool:
        """The decision loop is alive."""
        return self.send("WATCHDOG=1")

    def stopping(self, status: str) -> bool:
        """The daemon ends the engine and then itself."""
        return self.send("STOPPING=1", _status(status))


def _status(text: str) -> str:
    return "STATUS=" + printable(text[:STATUS_LIMIT])


def watchdog_interval(environ: Mapping[str, str], pid: int | None = None) -> float | None:
    """Seconds between two `Notifier.watchdog` calls: half of what systemd allows; ``None`` if it does not watch us."""
    given = environ.get("WATCHDOG_USEC", "")
    watched = environ.get("WATCHDOG_PID", "")
    if not (given.isascii() and given.isdigit()) or int(given) == 0:
        return None
    if watched and watched != str(os.getpid() if pid is None else pid):
        return None
    return int(given) / 2_000_000
