"""``status --watch``: the live view, on the terminal's other screen until Ctrl-C.

Reading only, and little: one ``GET /status`` every 2 s, the series when a new page of /metrics can have come, the
history when there is another decision. A daemon that goes away is said and asked for again; until it is back the store
tells the last known. However it ends, the terminal is as it was, with the last picture in its scrollback.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import termios
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from types import FrameType
from typing import TextIO, final

from rich.console import Console, ConsoleDimensions, Group

from supervisord_vllm.cli.daemon import DaemonError, NoDaemonError, ask, fail
from supervisord_vllm.cli.drawing import Pen
from supervisord_vllm.cli.instance import Instance, InstanceError
from supervisord_vllm.cli.paper import clock, listed, table
from supervisord_vllm.cli.timeline import Timeline, joined, timeline
from supervisord_vllm.cli.view import DECISIONS, Scene, view
from supervisord_vllm.exitcodes import ExitCode
from supervisord_vllm.status import NO_DAEMON, Document, history_document, status_from_history
from supervisord_vllm.store.history import History
from supervisord_vllm.store.schema import StoreError

ASK_EVERY_S = 2.0
DRAW_EVERY_S = 1.0
"""Also without news: what comes next is counted down."""
ANSWER_S = 3.0
"""A daemon that takes longer is said to be silent, and what it said last stays."""
SIZE = (80, 24)
"""Of a terminal that does not say."""


class Watching:
    """What is known of one instance, from whoever can tell it. ``which`` finds the instance."""

    def __init__(self, which: Callable[[], Instance]) -> None:
        self._which = which
        self._instance = which()
        self._status: Document = {"name": self._instance.name, "state": NO_DAEMON}
        self._timeline = Timeline()
        self._decisions: list[Document] = []
        self._told: object = None
        self._trouble = ""
        self._seen: float | None = None
        self._refused = False
        self._series_at = 0.0

    def look(self, now: float) -> None:
        """Ask once. Never raises for a daemon that is not there."""
        try:
            self._status = ask(self._instance.socket, "/status", timeout=ANSWER_S)
        except NoDaemonError:
            since = "" if self._seen is None else f" since {clock(self._seen)} UTC"
            self._trouble = f"no daemon listens at {self._instance.socket}{since}; trying again every {ASK_EVERY_S:g} s"
            with suppress(InstanceError):  # the next daemon may listen elsewhere
                self._instance = self._which()
            self._remember()
            return
        except DaemonError as error:
            at = "" if self._seen is None else f"; what is shown is of {clock(self._seen)} UTC"
            self._trouble = f"{error}{at}"
            self._refused = self._seen is None
            return
        self._refused = False
        self._seen, self._trouble = now, ""
        with suppress(NoDaemonError, DaemonError):  # gone this very moment, or of a version without a series
            if now - self._series_at >= self._timeline.every_s or now < self._series_at:
                self._timeline = joined(self._timeline, timeline(self._ask("/series")), now)
                self._series_at = now
            decision = table(self._status.get("decision"))
            told = (decision.get("number"), decision.get("outcome"))
            if told != self._told:
                self._decisions = [table(one) for one in listed(self._ask("/history").get("decisions"))][-DECISIONS:]
                self._told = told

    @property
    def trouble(self) -> str:
        """What is wrong with the daemon; empty where it answers."""
        return self._trouble

    @property
    def refused(self) -> bool:
        """Whether there is a daemon, and it has not answered once."""
        return self._refused

    def scene(self, now: float) -> Scene:
        """What is known, for a picture of now."""
        return Scene(self._status, now, self._timeline, self._decisions, self._trouble)

    def _ask(self, target: str) -> Document:
        return ask(self._instance.socket, target, timeout=ANSWER_S)

    def _remember(self) -> None:
        """The store's word about an instance without a daemon; where there is none, what is known stays."""
        self._told = None
        self._status = {**self._status, "state": NO_DAEMON, "ready": False, "load": None}
        with suppress(StoreError):
            history = History.open(self._instance.store)
            if history is not None:
                with closing(history):
                    self._status = status_from_history(self._instance.name, history)
                    self._decisions = history_document(self._instance.name, history, DECISIONS)["decisions"]


def watch(which: Callable[[], Instance]) -> None:
    """Draw until somebody ends it; ends the program with one line where that cannot be."""
    if not sys.stdout.isatty() or os.environ.get("TERM") in {None, "", "dumb", "unknown"}:
        wanted = "a terminal that can move its cursor (over ssh: ssh -t)"
        fail(f"status --watch needs {wanted}; programs read status --json", ExitCode.USAGE)
    try:
        watching = Watching(which)
        watching.look(time.time())
    except InstanceError as error:
        fail(str(error), error.code)
    except KeyboardInterrupt:
        return
    if watching.refused:
        fail(watching.trouble, ExitCode.REFUSED)
    with _Signals() as signals, suppress(OSError):  # the terminal itself has gone
        _draw_until_ended(watching, sys.stdout, signals)
    signals.die_of_it()


def _draw_until_ended(watching: Watching, out: TextIO, signals: _Signals) -> None:
    pen = Pen(ascii=not shows_unicode(out, os.environ))
    console = Console(file=out, highlight=False, emoji=False, markup=False, soft_wrap=False)
    asked = time.monotonic()
    while not signals.over():
        with _quiet(out), _other_screen(console):
            while not signals.over() and not signals.suspended:
                _draw(console, watching.scene(time.time()), pen, _size(out))
                signals.wait(DRAW_EVERY_S)
                if time.monotonic() - asked >= ASK_EVERY_S:
                    asked = time.monotonic()
                    signals.during(lambda: watching.look(time.time()))
        if signals.suspended and not signals.over():
            signals.suspend()
    width, height = _size(out)
    for line in view(watching.scene(time.time()), width, height - 1, pen):
        console.print(line, overflow="crop", no_wrap=True, crop=False)


def _draw(console: Console, scene: Scene, pen: Pen, size: tuple[int, int]) -> None:
    console.size = ConsoleDimensions(*size)
    console.update_screen(Group(*view(scene, *size, pen)))


@contextmanager
def _other_screen(console: Console) -> Iterator[None]:
    console.set_alt_screen(True)
    console.show_cursor(False)
    try:
        yield
    finally:
        console.show_cursor(True)
        console.set_alt_screen(False)


@contextmanager
def _quiet(out: TextIO) -> Iterator[None]:
    """What is typed is not shown, and Ctrl-C throws no output away: both would break a control sequence in the middle.
    A terminal that belongs to another job is left alone."""
    descriptor, before = out.fileno(), None
    with suppress(OSError, termios.error):
        if os.tcgetpgrp(descriptor) == os.getpgrp():
            before = termios.tcgetattr(descriptor)
            flags = before[3] & ~termios.ECHO | termios.NOFLSH
            termios.tcsetattr(descriptor, termios.TCSANOW, [*before[:3], flags, *before[4:]])
    try:
        yield
    finally:
        with suppress(OSError, termios.error):
            if before is not None and os.tcgetpgrp(descriptor) == os.getpgrp():
                termios.tcsetattr(descriptor, termios.TCSANOW, before)


def _size(out: TextIO) -> tuple[int, int]:
    """Columns and lines of the terminal, as it is now; $COLUMNS may be of yesterday."""
    with suppress(OSError, ValueError):
        size = os.get_terminal_size(out.fileno())
        if size.columns > 0 and size.lines > 0:
            return size.columns, size.lines
    return SIZE


def shows_unicode(out: TextIO, environ: Mapping[str, str]) -> bool:
    """Whether block characters can be shown: by the encoding, the locale, and a console that has no such glyphs."""
    if "utf" not in (out.encoding or "").lower() or environ.get("TERM") == "linux":
        return False
    locale = next((value for name in ("LC_ALL", "LC_CTYPE", "LANG") if (value := environ.get(name))), "utf")
    return "utf" in locale.lower()


class _Interrupted(BaseException):
    """A signal ended a question to the daemon."""


@final
class _Signals:
    """The signals of a terminal, noted and not acted on at once: no drawing is torn. INT ends the program with 0; of
    TERM and HUP it dies once the terminal is restored."""

    def __init__(self) -> None:
        self.ended: int | None = None
        self.suspended = False
        self._interrupting = False
        self._before: dict[int, object] = {}
        self._woken, self._wakes = socket.socketpair()

    def __enter__(self) -> _Signals:
        for end in (self._woken, self._wakes):
            end.setblocking(False)
        signal.set_wakeup_fd(self._wakes.fileno(), warn_on_full_buffer=False)
        handlers = {
            **dict.fromkeys((signal.SIGINT, signal.SIGTERM, signal.SIGHUP), self._end),
            signal.SIGTSTP: self._suspend,
            signal.SIGWINCH: self._nothing,
        }
        self._before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(-1)
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._woken.close()
        self._wakes.close()

    def over(self) -> bool:
        """Whether it is time to end."""
        return self.ended is not None

    def wait(self, seconds: float) -> None:
        """Let time pass, until a signal comes."""
        ready, _, _ = select.select([self._woken], [], [], seconds)
        if ready:
            with suppress(BlockingIOError):
                self._woken.recv(4096)

    def during(self, work: Callable[[], None]) -> None:
        """Work that an ending signal breaks off."""
        try:
            self._interrupting = True
            if not self.ended:
                work()
            self._interrupting = False
        except _Interrupted:
            pass

    def suspend(self) -> None:
        """Stop as Ctrl-Z would have it, and go on when the shell says so."""
        self.suspended = False
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, self._suspend)

    def die_of_it(self) -> None:
        """Die of the signal that ended it, as whoever sent it expects; of Ctrl-C nobody has to."""
        if self.ended not in {None, signal.SIGINT}:
            signal.signal(self.ended, signal.SIG_DFL)
            os.kill(os.getpid(), self.ended)

    def _end(self, number: int, _frame: FrameType | None) -> None:
        self.ended = self.ended or number
        if self._interrupting:
            self._interrupting = False
            raise _Interrupted

    def _suspend(self, _number: int, _frame: FrameType | None) -> None:
        self.suspended = True

    def _nothing(self, _number: int, _frame: FrameType | None) -> None:
        """The waiting has ended, that is all."""
