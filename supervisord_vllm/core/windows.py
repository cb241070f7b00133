"""Windows: the times of day, on the host's own clock, in which planned changes may begin.

The core has no time zone. Facts carry the wall time and the host's offset from UTC; both give the local time in seconds
since 1970 as that clock shows it. A change of the offset (summer time) is a fact as well, so that a window which the
clocks jump over does not open on that day, and one which they repeat opens twice.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

DAY_S = 24 * 3600
_MINUTE = 60


@dataclass(frozen=True, slots=True)
class Window:
    """From ``begin`` up to, not including, ``end``: minutes after local midnight, 0 to 1440. An end that is not later
    than the begin is on the next day."""

    begin: int
    end: int

    def __str__(self) -> str:
        return f"{_clock(self.begin)}-{_clock(self.end)}"

    @property
    def seconds(self) -> int:
        """How long it is open."""
        return ((self.end - self.begin) % 1440 or 1440) * _MINUTE

    def until_open(self, local_s: int) -> int:
        """Seconds until it is open; 0 while it is."""
        since = (local_s - self.begin * _MINUTE) % DAY_S
        return 0 if since < self.seconds else DAY_S - since


def until_open(windows: Iterable[Window], local_s: int) -> int:
    """Seconds until one of the windows is open at a local time; 0 while one is, or where none is declared."""
    return min((window.until_open(local_s) for window in windows), default=0)


def _clock(minutes: int) -> str:
    return f"{minutes // 60:02d}:{minutes % 60:02d}"
