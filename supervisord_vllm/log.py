"""Our own events and the engine's lines, both on their way out without ever holding up the loop.

Own events are structlog's, on standard error: readable on a terminal, JSON lines otherwise. The engine's lines are
copied to standard output as they are but for secrets and control characters. Behind each stream stands one thread with
a bounded queue: a reader that is slow costs lines, which are counted and said; a closed or blocked stream costs nothing
else.
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
from typing import Any, Literal

import structlog

from supervisord_vllm.redaction import printable

LINES = 10_000
CHARACTERS = 8 << 20
LONGEST_LINE = 64 << 10

Clean = Callable[[str], str]


def _unchanged(text: str) -> str:
    return text


class LinePipe:
    """A bounded queue of lines and the thread that writes them to a file descriptor.

    `put` never blocks. ``dropped`` counts lines that found no room or no reader; when a reader comes back it is told so
    through ``notice``, which makes the line that says how many are missing. ``clean`` runs on the thread.
    """

    def __init__(self, descriptor: int, notice: Callable[[int], str], name: str, clean: Clean = _unchanged) -> None:
        self.dropped = 0
        self._descriptor = descriptor
        self._notice = notice
        self._clean = clean
        self._lines: deque[str] = deque()
        self._characters = 0
        self._untold = 0
        self._closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, line: str) -> None:
        """Queue one line (without its newline), or drop it."""
        with self._changed:
            room = len(self._lines) < LINES and self._characters + len(line) <= CHARACTERS
            if self._closing or not room:
                self._drop()
                return
            self._lines.append(line)
            self._characters += len(line)
            self._changed.notify()

    def close(self, timeout: float = 2.0) -> bool:
        """Write what is queued and end; false when the reader did not let us within ``timeout`` seconds."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _drop(self) -> None:
        self.dropped += 1
        self._untold += 1

    def _run(self) -> None:
        while (text := self._next()) is not None:
            if not self._write(text.encode("utf-8", "backslashreplace")):
                with self._changed:
                    self._drop()

    def _next(self) -> str | None:
        with self._changed:
            while not self._lines and not self._closing:
                self._changed.wait()
            if not self._lines:
                return None
            missing, self._untold = self._untold, 0
            line = self._lines.popleft()
            self._characters -= len(line)
        line = self._clean(line)
        return f"{self._notice(missing)}\n{line}\n" if missing else f"{line}\n"

    def _write(self, data: bytes) -> bool:
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(self._descriptor, view) :]
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
        self._pipe = LinePipe(descriptor, self._missing, "engine-output", self._cleaned)

    @property
    def dropped(self) -> int:
        """Lines that were not copied."""
        return self._pipe.dropped

    def line(self, line: str | bytes) -> None:
        """Copy one line. Very long ones are cut: the launch's log file has them in full."""
        head = line[: 4 * LONGEST_LINE]  # cut for good only after redaction: half a secret is no longer recognised
        text = head.decode("utf-8", "backslashreplace") if isinstance(head, bytes) else head
        self._pipe.put(text.rstrip("\r\n"))

    def close(self, timeout: float = 2.0) -> bool:
        """Write what is queued; false when that took longer than ``timeout`` seconds and was given up."""
        return self._pipe.close(timeout)

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

    ``auto`` is for people on a terminal and JSON lines elsewhere. ``level`` is debug, info, warning or error.
    """
    on_terminal = os.isatty(descriptor)
    as_json = form == "json" or (form == "auto" and not on_terminal)
    pipe = LinePipe(descriptor, _missing_json if as_json else _missing_text, "log")
    renderer = _json_line if as_json else structlog.dev.ConsoleRenderer(colors=on_terminal)
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
