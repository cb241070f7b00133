"""Telling systemd how we are (sd_notify), how often it wants to hear, and what a line of ours is worth to its journal.

Contract: never blocks and never raises; without ``NOTIFY_SOCKET`` nothing happens. See sd_notify(3), sd-daemon(3).
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

from supervisord_vllm.redaction import printable

STATUS_LIMIT = 500
"""Characters of a status line."""
PULSE_S = 5.0
"""The loop is heard of at least this often."""
EXTENSION_S = 30
"""How long systemd waits for the next sign of a start or a stop that lasts."""
_EXTEND = f"EXTEND_TIMEOUT_USEC={EXTENSION_S * 1_000_000}"
PRIORITIES = {"critical": 2, "error": 3, "warning": 4, "info": 6, "debug": 7}
"""syslog's numbers for our levels."""


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

    def extend(self) -> bool:
        """A start or a stop goes on and is not to be broken off within `EXTENSION_S`, whatever the unit's time-out."""
        return self.send(_EXTEND)

    def stopping(self, status: str) -> bool:
        """The daemon ends the engine and then itself, which may take longer than the unit's time-out."""
        return self.send("STOPPING=1", _EXTEND, _status(status))


class Pulse:
    """What systemd hears of a loop that turns: the watchdog's word, and that a start or a stop is still being made."""

    def __init__(self, notifier: Notifier, environ: Mapping[str, str]) -> None:
        self._notifier = notifier
        watched = watchdog_interval(environ)
        self._watched = watched is not None
        self._every_s = PULSE_S if watched is None else min(watched, PULSE_S)
        self._due = 0.0

    def beat(self, now: float, *, awaited: bool) -> None:
        """The loop turned at this time (of any monotonic clock). ``awaited``: systemd waits for READY or our end."""
        if now < self._due:
            return
        self._due = now + self._every_s
        if self._watched:
            self._notifier.watchdog()
        if awaited:
            self._notifier.extend()


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


def to_journal(descriptor: int, environ: Mapping[str, str]) -> bool:
    """Whether what is written to a descriptor goes to journald itself, and not to a file or a pipe of somebody else."""
    try:
        found = os.fstat(descriptor)
    except OSError:
        return False
    return environ.get("JOURNAL_STREAM") == f"{found.st_dev}:{found.st_ino}"


def with_priority(text: str, level: str) -> str:
    """The text as journald reads it: every line begins with its priority."""
    prefix = f"<{PRIORITIES.get(level, PRIORITIES['info'])}>"
    return "\n".join(prefix + line for line in text.split("\n"))


def is_main_process(environ: Mapping[str, str], pid: int | None = None) -> bool:
    """Whether systemd started this very process. Its variables are inherited: a shell in a unit has them too."""
    if (started := environ.get("SYSTEMD_EXEC_PID")) is not None:  # since systemd 248
        return started == str(os.getpid() if pid is None else pid)
    return bool(environ.get("INVOCATION_ID") or environ.get("NOTIFY_SOCKET"))
