"""A log as a file or a stream: its lines, bounded, and what is wrong with one that cannot be judged.

A hole that the daemon punched into a launch's log is left out (`supervisord_vllm.holes`).
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Protocol

from supervisord_vllm.engine.launches import Launches
from supervisord_vllm.engine.lines import LIMIT
from supervisord_vllm.holes import DataReader

QUIET_S: Final = 2.0
"""A cause and "already dead" come in either order: a verdict falls after this long without a new line."""

_CHUNK: Final = 1 << 18
_POLL_S: Final = 0.25
_BINARY_LOOK: Final = 8192


class Source(Protocol):
    """What lines are read from."""

    def read(self, size: int, /) -> bytes:
        """Some bytes, none at the end."""


class UnreadableLogError(Exception):
    """The input cannot be judged; the message names it and says what to do."""


@contextmanager
def opened(name: str) -> Iterator[Source]:
    """A log by its path, ``-`` for standard input. Raises `UnreadableLogError`."""
    if name == "-":
        yield _standard_input()
    else:
        with _file(name) as stream:
            yield stream


def _standard_input() -> Source:
    try:
        return DataReader(sys.stdin.fileno())
    except OSError:  # a stand-in without a descriptor
        return sys.stdin.buffer


@contextmanager
def _file(name: str) -> Iterator[DataReader]:
    try:
        with Path(name).open("rb", buffering=0) as stream:
            yield DataReader(stream.fileno())
    except FileNotFoundError as error:
        raise UnreadableLogError(
            f"{name}: there is no such file; give the path of a vLLM log, or - for standard input"
        ) from error
    except IsADirectoryError as error:
        raise UnreadableLogError(f"{name} is a directory; give one log file in it") from error
    except PermissionError as error:
        raise UnreadableLogError(f"{name}: not readable for this user; run as its owner or root") from error
    except OSError as error:
        raise UnreadableLogError(f"{name}: {error.strerror or error}; give a readable vLLM log") from error


def bounded_lines(stream: Source) -> Iterator[bytes]:
    """The lines of a stream without their newlines, each cut at `LIMIT` bytes; memory is bounded whatever the file."""
    rest = bytearray()
    while chunk := stream.read(_CHUNK):
        if rest:
            end = chunk.find(b"\n")
            rest += (chunk if end < 0 else chunk[:end])[: LIMIT - len(rest)]
            if end < 0:
                continue
            yield bytes(rest)
            rest.clear()
            chunk = chunk[end + 1 :]
        lines = chunk.split(b"\n")
        last = lines.pop()
        for line in lines:
            yield line if len(line) <= LIMIT else line[:LIMIT]
        rest += last[:LIMIT]
    if rest:
        yield bytes(rest)


def blocks(stream: Source) -> Iterator[bytes]:
    """A stream in blocks of whole lines, each ending with a newline. A line that is longer than a chunk is cut at
    `LIMIT`
    bytes, so that memory is bounded whatever the file.
    """
    rest = b""
    overlong = False
    while chunk := stream.read(_CHUNK):
        cut = chunk.rfind(b"\n") + 1
        if not cut:
            rest += b"" if overlong else chunk[: max(0, LIMIT - len(rest))]
            overlong = len(rest) >= LIMIT
            continue
        if overlong:
            chunk = b"\n" + chunk[chunk.find(b"\n") + 1 :]
            cut = chunk.rfind(b"\n") + 1
            overlong = False
        yield rest + chunk[:cut]
        rest = chunk[cut:]
    if rest:
        yield rest + b"\n"


def judged(name: str) -> Launches:
    """All launches of one file. Raises `UnreadableLogError` for what is no text, empty, or cannot be read."""
    with opened(name) as stream:
        shown = "standard input" if name == "-" else name
        launches = Launches()
        empty = True
        for block in blocks(stream):
            if empty:
                if b"\0" in block[:_BINARY_LOOK]:
                    raise UnreadableLogError(
                        f"{shown} is a binary file; give the text that vLLM printed (unpack it first if it "
                        f"is compressed)"
                    )
                empty = not block.strip()
            launches.feed_block(block)
    if empty:
        raise UnreadableLogError(f"{shown} is empty; capture both outputs of vLLM (`vllm serve … > log 2>&1`)")
    return launches


def followed(name: str, *, poll_s: float = _POLL_S, quiet_s: float = QUIET_S) -> Iterator[Launches]:
    """A growing file, for ever: its launches so far, each time that it has been quiet for ``quiet_s`` after new lines.
    A file that was replaced or cut (log rotation) is read anew. Raises `UnreadableLogError` if it cannot be opened.
    """
    while True:
        with _file(name) as stream:
            yield from _growing(stream, name, poll_s, quiet_s)


def _growing(stream: DataReader, name: str, poll_s: float, quiet_s: float) -> Iterator[Launches]:
    """Until the file is another one."""
    launches, rest, fresh, since = Launches(), bytearray(), False, time.monotonic()
    while True:
        chunk = stream.read(_CHUNK)
        if chunk:
            *lines, last = chunk.split(b"\n")
            for line in lines:
                launches.feed(bytes(rest + line[:LIMIT])[:LIMIT])
                rest.clear()
                fresh = True
            rest += last[: LIMIT - len(rest)]
            since = time.monotonic()
            continue
        if fresh and time.monotonic() - since >= quiet_s:
            fresh = False
            yield launches
        if _replaced(stream, name):
            return
        time.sleep(poll_s)


def _replaced(stream: DataReader, name: str) -> bool:
    try:
        now = Path(name).stat()
    except FileNotFoundError:
        return False
    here = os.fstat(stream.fileno())
    return (now.st_ino, now.st_dev) != (here.st_ino, here.st_dev) or now.st_size < stream.tell()
