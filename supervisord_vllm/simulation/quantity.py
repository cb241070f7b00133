"""Sizes and durations as people write them (``"40GiB"``, ``"1.5s"``), and sizes as torch prints them."""

from __future__ import annotations

import re

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

_UNITS = {"B": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": 1 << 40}
_SIZE = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,9})?) ?(B|KiB|MiB|GiB|TiB)")
_DURATION = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?) ?(ms|s|m|h)")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


def read_size(text: str) -> int | None:
    """Bytes of ``"40GiB"``, or ``None`` if the text is no size."""
    match = _SIZE.fullmatch(text.strip())
    return None if match is None else round(float(match[1]) * _UNITS[match[2]])


def read_duration(text: str) -> float | None:
    """Seconds of ``"1.5s"``, or ``None`` if the text is no duration."""
    match = _DURATION.fullmatch(text.strip())
    return None if match is None else float(match[1]) * _SECONDS[match[2]]


def gib(size: int) -> str:
    """A size as vLLM's log prints it: GiB, rounded to two decimals, not padded (``3.2``, ``139.8``, ``0.0``)."""
    return str(round(size / GIB, 2))


def torch_size(size: int) -> str:
    """A size as torch's allocator prints it (c10 ``format_size``)."""
    if size <= KIB:
        return f"{size} bytes"
    if size <= MIB:
        return f"{size / KIB:.2f} KiB"
    if size <= GIB:
        return f"{size / MIB:.2f} MiB"
    return f"{size / GIB:.2f} GiB"
