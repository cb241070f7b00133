"""Durations and sizes as a policy writes them: ``"90s"``, ``"4GiB"``."""

from __future__ import annotations

import re
from dataclasses import dataclass

from supervisord_vllm.config.errors import given

_NS = {"ms": 10**6, "s": 10**9, "m": 60 * 10**9, "h": 3600 * 10**9, "d": 86400 * 10**9}
_BYTES = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_DURATION = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)(ms|s|m|h|d)")
_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,9})?)(B|KiB|MiB|GiB|TiB)")
_LONGEST = 366 * _NS["d"]


@dataclass(frozen=True, slots=True, order=True)
class Duration:
    """A span of time; the core reads ``ns``, timers read ``seconds``, people read ``str()``."""

    ns: int

    @property
    def seconds(self) -> float:
        """In seconds, for timers."""
        return self.ns / 10**9

    def __str__(self) -> str:
        unit = next((u for u in ("d", "h", "m", "s", "ms") if self.ns and self.ns % _NS[u] == 0), None)
        return f"{self.ns // _NS[unit]}{unit}" if unit else f"{self.seconds:g}s"


def duration(value: object) -> Duration:
    """Read a duration of zero or more, at most a year; anything else raises ``ValueError`` with what is allowed."""
    match = _DURATION.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise ValueError(f'got {given(value)}; write a duration like "90s", "3m", "1h" or "250ms"')
    ns = round(float(match[1]) * _NS[match[2]])
    if ns > _LONGEST:
        raise ValueError(f"got {given(value)}; at most a year (366d) is allowed")
    return Duration(ns)


def positive_duration(value: object) -> Duration:
    """Read a duration that must be longer than nothing."""
    span = duration(value)
    if span.ns == 0:
        raise ValueError(f"got {given(value)}; it must be longer than zero")
    return span


def size(value: object) -> int:
    """Read a size in bytes; anything else raises ``ValueError`` with what is allowed."""
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise ValueError(f'got {given(value)}; write a size like "4GiB" or "512MiB"')
    return round(float(match[1]) * _BYTES[match[2]])
