"""The functions that each writer's latest traceback went through: they tell in which stage an error happened.

Bounded: the newest `MAX_STREAMS` writers and `MAX_FRAMES` frames each.
"""

from __future__ import annotations

import re
from collections import deque

MAX_STREAMS = 64
MAX_FRAMES = 128

_FRAME = re.compile(r'File "(?P<path>[^"]{1,512})", line \d{1,9}, in (?P<function>[\w<>.]{1,128})')
TRACEBACK = "Traceback (most recent call last)"


class Frames:
    """Collects frames as lines arrive."""

    def __init__(self) -> None:
        self._streams: dict[str, deque[str]] = {}

    def feed(self, stream: str, text: str) -> bool:
        """Note a line; true if it belongs to a traceback's frames."""
        if text.startswith(TRACEBACK):
            self._streams.pop(stream, None)
            self._open(stream)
            return True
        if 'File "' not in text:
            return False
        match = _FRAME.search(text)
        if match is None:
            return False
        frames = self._streams[stream] if stream in self._streams else self._open(stream)
        frames.append(f"{match['path'].rpartition('/')[2]}:{match['function']}")
        return True

    def of(self, stream: str) -> tuple[str, ...]:
        """The frames of a writer's latest traceback, ``file.py:function``, outermost first."""
        return tuple(self._streams.get(stream, ()))

    def _open(self, stream: str) -> deque[str]:
        while len(self._streams) >= MAX_STREAMS:
            del self._streams[next(iter(self._streams))]
        frames = self._streams[stream] = deque(maxlen=MAX_FRAMES)
        return frames


def has(frames: tuple[str, ...], names: tuple[str, ...], *, every: bool = False) -> bool:
    """Whether any (or every) of the names, ``function`` or ``file.py:function``, is among the frames."""
    known = set(frames) | {frame.rpartition(":")[2] for frame in frames}
    return all(name in known for name in names) if every else any(name in known for name in names)
