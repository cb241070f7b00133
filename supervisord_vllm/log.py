"""Our own events and the engine's lines, both on their way out without ever holding up the loop.

Own events are structlog's, on standard error: readable on a terminal, JSON lines otherwise. The engine's lines are
copied to standard output as they are but for secrets and control characters. Behind each stream stands one thread with
a bounded queue: a reader that is slow costs lines, which are counted and said; a closed or blocked stream costs nothing
else. The thread notes up to where the engine's lines were copied (`supervisord_vllm.store.copied`).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import threading
from collections import deque
from collections.abc import Callable, Mapping, MutableMapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import structlog

from supervisord_vllm.host.systemd import to_journal, with_priority
from supervisord_vllm.redaction import printable
from supervisord_vllm.store.copied import CopiedCursor, Place

LINES = 10_000
CHARACTERS = 8 << 20
LONGEST_LINE = 64 << 10

Clean = Callable[[str], str]


def _unchanged(text: str) -> str:
    return text


def _nowhere(_: Place) -> None:
    pass


class _Queued(NamedTuple):
    """A line and the place behind it."""

    line: str
    place: Place | None


class LinePipe:
    """A bounded queue of lines and the thread that writes them to a file descriptor.

    `put` never blocks. ``dropped`` counts lines that found no room or no reader; when a reader comes back it is told so
    through ``notice``, which makes the line that says how many are missing. ``clean`` and ``passed`` run on the thread:
    the latter gets the place of a line once it, and all before it, was written or dropped.
    """

    def __init__(
        self,
        descriptor: int,
        notice: Callable[[int], str],
        name: str,
        clean: Clean = _unchanged,
        passed: Callable[[Place], None] = _nowhere,
    ) -> None:
        self.dropped = 0
        self._descriptor = descriptor
        self._notice = notice
        self._clean = clean
        self._passed = passed
        self._lines: deque[_Queued] = deque()
        self._characters = 0
        self._untold = 0
        self._torn = False
        """The last write broke off within a line."""
        self._closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, line: str, place: Place | None = None) -> None:
        """Queue one line (without its newline), or drop it."""
        with self._changed:
            room = len(self._lines) < LINES and self._characters + len(line) <= CHARACTERS
            if self._closing or not room:
                self._drop(1)
                return
            self._lines.append(_Queued(line, place))
            self._characters += len(line)
            self._changed.notify()

    def close(self, timeout: float = 2.0) -> bool:
        """Write what is queued and end; false when the reader did not let us within ``timeout`` seconds."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _drop(self, untold: int) -> None:
        self.dropped += 1
        self._untold += untold

    def _run(self) -> None:
        more = True
        while more:
            with self._changed:
                while not self._lines and not self._closing:
                    self._changed.wait()
                queued = self._lines.popleft() if self._lines else None
                missing, self._untold = self._untold, 0
                if queued is not None:
                    self._characters -= len(queued.line)
            self._tell(queued, missing)
            more = queued is not None

    def _tell(self, queued: _Queued | None, missing: int) -> None:
        """Write how many lines are missing, if any are, and the line; at the end there is none."""
        parts = [self._notice(missing)] if missing else []
        if queued is not None:
            parts.append(self._clean(queued.line))
        text = "".join(f"{part}\n" for part in parts)
        if not self._write(text.encode("utf-8", "backslashreplace")) and queued is not None:
            with self._changed:
                self._drop(1 + missing)
        if queued is not None and queued.place is not None:
            self._passed(queued.place)

    def _write(self, data: bytes) -> bool:
        view = memoryview(b"\n" + data if self._torn and data else data)
        while view:
            try:
                written = os.write(self._descriptor, view)
                self._torn = view[written - 1] != 0x0A
                view = view[written:]
            except BlockingIOError:  # noqa: PERF203 - somebody made the shared terminal or pipe non-blocking
                with contextlib.suppress(OSError, ValueError):
                    select.select([], [self._descriptor], [], 1.0)
            except OSError:  # nobody reads any more, or the disk behind it is full
                return False
        return True


class EngineOutput:
    """The engine's lines on standard output; ``clean`` redacts secrets."""

    def __init__(self, clean: Clean = _unchanged, descriptor: int = 1) -> None:
        self._clean = clean
        self._cursor: CopiedCursor | None = None
        self._pipe = LinePipe(descriptor, self._missing, "engine-output", self._cleaned, self._copied)

    @property
    def dropped(self) -> int:
        """Lines that were not copied."""
        return self._pipe.dropped

    def keep_place(self, directory: Path) -> None:
        """From now on note in this folder up to where launches' logs were copied.

        Raises:
            OSError: it cannot be written there.
        """
        self._cursor = CopiedCursor(directory)

    def line(self, line: str | bytes, place: Place | None = None) -> None:
        """Copy one line; ``place`` is that behind it in its launch's log. Very long ones are cut: the log has them."""
        head = line[: 4 * LONGEST_LINE]  # cut for good only after redaction: half a secret is no longer recognised
        text = head.decode("utf-8", "backslashreplace") if isinstance(head, bytes) else head
        self._pipe.put(text.rstrip("\r\n"), place)

    def close(self, timeout: float = 2.0) -> bool:
        """Write what is queued; false when that took longer than ``timeout`` seconds and was given up."""
        ended = self._pipe.close(timeout)
        if ended and self._cursor is not None:
            self._cursor.close()
        return ended

    def _copied(self, place: Place) -> None:
        if self._cursor is not None:
            self._cursor.keep(place)

    def _cleaned(self, text: str) -> str:
        return self._clean(printable(text))[:LONGEST_LINE]

    @staticmethod
    def _missing(count: int) -> str:
        return f"vllm-supervise: {count} lines of engine output were not copied here; the launch's log has them"


class Log:
    """Own events, set up for the whole process by `configure`."""

    def __init__(self, pipe: LinePipe) -> None:
        self._pipe = pipe

    @property
    def dropped(self) -> int:
        """Events that were not written."""
        return self._pipe.dropped

    def close(self, timeout: float = 2.0) -> bool:
        """Write what is queued; events after this are dropped."""
        return self._pipe.close(timeout)


def configure(
    level: str = "info",
    form: Literal["auto", "console", "json"] = "auto",
    clean: Clean = _unchanged,
    descriptor: int = 2,
) -> Log:
    """Send structlog's events, and the standard library's (aiohttp, asyncio), to standard error.

    ``auto`` is for people on a terminal and JSON lines elsewhere. ``level`` is debug, info, warning or error. Where
    standard error is systemd's journal, each line has its priority there.
    """
    on_terminal = os.isatty(descriptor)
    as_json = form == "json" or (form == "auto" and not on_terminal)
    pipe = LinePipe(descriptor, _missing_json if as_json else _missing_text, "log")
    renderer: structlog.typing.Processor = _json_line
    if not as_json:
        renderer = structlog.dev.ConsoleRenderer(colors=on_terminal)
    if to_journal(descriptor, os.environ):
        renderer = _ForJournal(renderer)
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            _Cleaner(clean),
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=lambda *_: _PipeLogger(pipe),
        cache_logger_on_first_use=False,
    )
    root = logging.getLogger()
    for handler in root.handlers[:]:
        root.removeHandler(handler)
    root.addHandler(_ToStructlog())
    root.setLevel(max(logging.WARNING, getattr(logging, level.upper())))
    return Log(pipe)


class _PipeLogger:
    """What structlog calls with the rendered line, whatever the level."""

    def __init__(self, pipe: LinePipe) -> None:
        self._pipe = pipe

    def msg(self, message: str) -> None:
        self._pipe.put(message)

    debug = info = warning = warn = error = critical = exception = failure = fatal = msg


class _Cleaner:
    """Takes secrets and control characters out of every string of an event; a traceback keeps its lines."""

    def __init__(self, clean: Clean) -> None:
        self._clean = clean

    def __call__(self, _logger: object, _name: str, event: MutableMapping[str, Any]) -> Mapping[str, Any]:
        return {key: self._value(value) for key, value in event.items()}

    def _value(self, value: object) -> object:
        if isinstance(value, str):
            lines = value[: 4 * LONGEST_LINE].split("\n")
            return "\n".join(self._clean(printable(line)) for line in lines)[:LONGEST_LINE]
        if isinstance(value, (list, tuple)):
            return [self._value(item) for item in value]
        if isinstance(value, Mapping):
            return {str(key): self._value(item) for key, item in value.items()}
        if value is None or isinstance(value, (bool, int, float)):
            return value
        return self._value(str(value))


class _ForJournal:
    """Another renderer's lines, each with the priority of its event."""

    def __init__(self, render: structlog.typing.Processor) -> None:
        self._render = render

    def __call__(self, logger: object, name: str, event: MutableMapping[str, Any]) -> str:
        level = str(event.get("level"))
        return with_priority(str(self._render(logger, name, event)), level)


class _ToStructlog(logging.Handler):
    """Libraries' records as events, named by their logger."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            message = record.getMessage()
        except (TypeError, ValueError):  # the library's own formatting mistake
            message = str(record.msg)
        logger = structlog.get_logger()
        report = logger.error if record.levelno >= logging.ERROR else logger.warning
        report(message, logger=record.name, exc_info=record.exc_info or None)


def _json_line(_logger: object, _name: str, event: MutableMapping[str, Any]) -> str:
    return json.dumps(event, default=str, ensure_ascii=False)


def _missing_json(count: int) -> str:
    return json.dumps({"event": "log lines lost: the reader was too slow", "lost": count, "level": "warning"})


def _missing_text(count: int) -> str:
    return f"vllm-supervise: {count} log lines were lost: the reader was too slow"
