"""Time for people: RFC 3339 in UTC, and the clock that the daemon counts with.

Intervals are counted in CLOCK_BOOTTIME (it goes on during suspend and never jumps); the wall clock is only for people.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import datetime, timezone

SECOND_NS = 1_000_000_000


def boottime_ns() -> int:
    """CLOCK_BOOTTIME in nanoseconds."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def boot_id() -> str:
    """The kernel's id of this boot; boot times of different boots cannot be compared."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:  # noqa: PTH123 - procfs, one line
        return file.read().strip()


def utc_offset_s() -> int:
    """What the host's local time (``TZ``, else /etc/localtime) is ahead of UTC now, in seconds."""
    time.tzset()
    return time.localtime().tm_gmtoff


def rfc3339(unix_seconds: float) -> str:
    """A wall time as ``2026-12-01T09:12:33.250Z``."""
    moment = datetime.fromtimestamp(unix_seconds, tz=timezone.utc)
    return moment.strftime("%Y-%m-%dT%H:%M:%S.") + f"{moment.microsecond // 1000:03d}Z"


def parse_rfc3339(text: str) -> float:
    """The inverse of `rfc3339`, in seconds since 1970; ``ValueError`` for anything else."""
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()


@dataclass(frozen=True, slots=True)
class Now:
    """One moment on both clocks, so that moments of this boot can be told in wall time."""

    boottime_ns: int
    wall: float

    @classmethod
    def read(cls) -> Now:
        """This moment."""
        return cls(boottime_ns(), time.time())

    def show(self, at_ns: int) -> str:
        """A moment of CLOCK_BOOTTIME of this boot as RFC 3339."""
        return rfc3339(self.wall + (at_ns - self.boottime_ns) / SECOND_NS)
