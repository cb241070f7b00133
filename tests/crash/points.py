"""A command line of the product in a process whose crash points are counted; at a chosen one it fails or is killed.

A crash point is what changes a file under ``CRASH_ROOTS`` (made, written, renamed, removed, synced, cut, punched), the
start of a process, an execve, and each commit of SQLite. Points are named by what they do, with a count: the same story
has the same points, whatever thread comes first. ``CRASH_TRACE`` gets a JSON line for every point, ``CRASH_AT`` is
the name of the chosen one, and ``CRASH_MODE`` says what happens there: ``fail`` (once), ``kill-before``, ``kill-half``
(half of a write is on the disk) or ``kill-after``.

What opens a file for writing in another way than these is written as ``{"escaped": …}``: nothing is left out unnoticed.
"""

# It stands in for calls of any form, below pathlib:
# ruff: noqa: ANN401, PTH100, PTH110, PTH112, PTH115, PTH119

from __future__ import annotations

import builtins
import errno
import functools
import io
import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

WRITES = os.O_WRONLY | os.O_RDWR

_varying = (
    (re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"), "UUID"),
    (re.compile(r"[0-9a-f]{16,64}"), "HASH"),
    (re.compile(r"[0-9]{8}T[0-9]{6}Z"), "TIME"),
    (re.compile(r"GPU-[^/ ]*"), "GPU"),
    (re.compile(r"\.[0-9]+(?=\.|$)"), ".N"),
)


def place(path: object) -> str | None:
    """A path under one of the roots, without what differs from run to run; ``None`` elsewhere."""
    if isinstance(path, int):
        try:
            path = os.readlink(f"/proc/self/fd/{path}")
        except OSError:
            return None
    if not isinstance(path, (str, bytes, os.PathLike)):
        return None
    named = os.path.abspath(os.fsdecode(path))
    for root in filter(None, os.environ.get("CRASH_ROOTS", "").split(os.pathsep)):
        if named == root or named.startswith(root + "/"):
            named = os.path.basename(root) + named[len(root) :]
            for pattern, word in _varying:
                named = pattern.sub(word, named)
            return named
    return None


class Points:
    """Counts the points and acts at the chosen one."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._trace = os.open(os.environ["CRASH_TRACE"], os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._write = os.write
        self._at = os.environ.get("CRASH_AT", "")
        self._life = os.environ.get("CRASH_LIFE", "")
        self._mode = os.environ.get("CRASH_MODE", "")
        self.inside = threading.local()

    def say(self, **what: object) -> None:
        """A line of the trace; whole, whatever happens next."""
        self._write(self._trace, json.dumps(what).encode() + b"\n")

    def chosen(self, name: str) -> bool:
        """Count a point; whether it is the one."""
        with self._lock:
            self._counts[name] += 1
            full = f"{self._life}{name} #{self._counts[name]}"
        self.say(point=full)
        return full == self._at

    def die(self) -> None:
        """As by the kernel or a power cut: nothing runs any more."""
        self.say(killed=self._mode)
        os.kill(os.getpid(), signal.SIGKILL)
        threading.Event().wait()

    def around(
        self,
        name: str,
        do: Callable[[], Any],
        fails: Callable[[], BaseException],
        half: Callable[[], object] | None = None,
    ) -> Any:
        """Do what is done at a point, unless this is the one."""
        if not self.chosen(name):
            return do()
        if self._mode == "fail":
            self.say(failed=name)
            raise fails()
        if self._mode == "kill-half" and half is not None:
            half()
        if self._mode != "kill-after":
            self.die()
        done = do()
        self.die()
        return done


def _error(number: int) -> Callable[[], OSError]:
    return lambda: OSError(number, os.strerror(number))


FULL, BROKEN = _error(errno.ENOSPC), _error(errno.EIO)


def wrap_calls(points: Points) -> None:
    """The calls of `os` that change a file; `pathlib` uses them."""
    module: Any = os
    module.open = _opening(points, os.open)
    module.write = _writing(points, os.write)
    module.pwrite = _writing(points, os.pwrite)
    for verb, fails in _ON_PATHS.items():
        setattr(module, verb, _on_path(points, getattr(os, verb), verb, fails))
    accessor = getattr(sys.modules["pathlib"], "_NormalAccessor", None)  # Python 3.10 has taken them already
    for verb in _ON_PATHS if accessor is not None else ():
        if hasattr(accessor, verb):
            setattr(accessor, verb, staticmethod(getattr(os, verb)))
    builtins.open = io.open = _files(points, open)
    sys.addaudithook(functools.partial(_escaped, points))


_ON_PATHS: dict[str, Callable[[], OSError]] = {
    "rename": BROKEN,
    "replace": BROKEN,
    "unlink": BROKEN,
    "remove": BROKEN,
    "rmdir": BROKEN,
    "mkdir": FULL,
    "fsync": BROKEN,
    "fdatasync": BROKEN,
    "ftruncate": BROKEN,
    "truncate": BROKEN,
    "posix_fallocate": FULL,
    "link": FULL,
    "symlink": FULL,
}


def _opening(points: Points, real: Callable[..., int]) -> Callable[..., int]:
    @functools.wraps(real)
    def call(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        where = place(path) if flags & WRITES else None
        if where is None:
            return real(path, flags, *rest, **named)
        points.inside.counted = True
        try:
            changes = flags & os.O_TRUNC or (flags & os.O_CREAT and not os.path.exists(path))
            if not changes:
                return real(path, flags, *rest, **named)
            made: int = points.around(f"make {where}", lambda: real(path, flags, *rest, **named), FULL)
            return made
        finally:
            points.inside.counted = False

    return call


def _files(points: Points, real: Callable[..., Any]) -> Any:
    @functools.wraps(real)
    def call(file: Any, mode: str = "r", *rest: Any, **named: Any) -> Any:
        where = place(file) if set(mode) & set("wax+") else None
        if where is None:
            return real(file, mode, *rest, **named)
        points.inside.counted = True
        try:
            return points.around(f"make {where}", lambda: real(file, mode, *rest, **named), FULL)
        finally:
            points.inside.counted = False

    return call


def _on_path(points: Points, real: Callable[..., Any], verb: str, fails: Callable[[], OSError]) -> Callable[..., Any]:
    @functools.wraps(real)
    def call(path: Any, *rest: Any, **named: Any) -> Any:
        where = place(path)
        if where is None or (verb == "mkdir" and os.path.isdir(path)):
            return real(path, *rest, **named)
        return points.around(f"{verb} {where}", lambda: real(path, *rest, **named), fails)

    return call


def _writing(points: Points, real: Callable[..., int]) -> Callable[..., int]:
    @functools.wraps(real)
    def call(file: int, data: Any, *rest: Any) -> int:
        where = place(file)
        if where is None:
            return real(file, data, *rest)
        half = bytes(data)[: len(data) // 2]
        name = f"write {where}"
        written: int = points.around(name, lambda: real(file, data, *rest), FULL, lambda: real(file, half, *rest))
        return written

    return call


def _escaped(points: Points, event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and isinstance(arguments[2], int) and arguments[2] & WRITES:
        where = place(arguments[0])
        if where is not None and not getattr(points.inside, "counted", False):
            points.say(escaped=where)


def wrap_processes(points: Points) -> None:
    """The start of a process, and execve."""
    real = subprocess.Popen.__init__

    def begin(self: Any, args: Any, *rest: Any, **named: Any) -> None:
        name = f"spawn {os.path.basename(str(args[0]))}"
        points.around(name, lambda: real(self, args, *rest, **named), _error(errno.ENOMEM))

    def finished(self: Any, *_: object) -> None:  # a Popen that never began has nothing to collect
        if hasattr(self, "_child_created"):
            collect(self)

    collect = subprocess.Popen.__del__
    popen: Any = subprocess.Popen
    popen.__init__ = begin
    popen.__del__ = finished
    execve = os.execve

    def replace(path: Any, argv: Any, env: Any) -> None:
        def do() -> None:
            execve(path, argv, {**env, "CRASH_LIFE": "replaced: "})

        points.around("execve", do, _error(errno.ENOMEM))

    module: Any = os
    module.execve = replace


def wrap_sqlite(points: Points) -> None:
    """Opening a database for writing, what it does outside of transactions, and each commit."""

    class Counted(sqlite3.Connection):
        writes: list[str]

        def execute(self, sql: str, *values: Any) -> sqlite3.Cursor:
            word = sql.split(None, 1)[0].upper()
            if word == "BEGIN":
                self.writes = []
            elif word in ("INSERT", "UPDATE", "DELETE"):
                self.writes.append(_summary(sql, values[0] if values else ()))
            elif word == "COMMIT":
                name = "commit " + ("; ".join(dict.fromkeys(self.writes)) or "tables")
                cursor: sqlite3.Cursor = points.around(name, lambda: super(Counted, self).execute(sql), _sqlite_full)
                return cursor
            elif sql.startswith("PRAGMA journal_mode"):
                found: sqlite3.Cursor = points.around(sql, lambda: super(Counted, self).execute(sql), _sqlite_full)
                return found
            return super().execute(sql, *values)

        def executemany(self, sql: str, rows: Any) -> sqlite3.Cursor:
            self.writes.append(_summary(sql, ()))
            return super().executemany(sql, rows)

        def close(self) -> None:
            points.around("close database", super().close, _sqlite_full)

    real = sqlite3.connect

    def connect(database: Any, *rest: Any, **named: Any) -> sqlite3.Connection:
        text = os.fsdecode(database)
        plain = text.removeprefix("file:").partition("?")[0]
        if place(plain) is None or "mode=ro" in text:
            reading: sqlite3.Connection = real(database, *rest, **named)
            return reading
        points.inside.counted = True
        try:
            connection: Counted = points.around(
                f"open database {place(plain)}", lambda: real(database, *rest, factory=Counted, **named), _sqlite_away
            )
        finally:
            points.inside.counted = False
        connection.writes = []
        return connection

    module: Any = sqlite3
    module.connect = connect


def _summary(sql: str, values: Any) -> str:
    words = sql.replace("(", " ").split()
    verb = words[0].lower()
    table = words[1] if verb == "update" else words[words.index("INTO" if verb == "insert" else "FROM") + 1]
    told = f"{verb} {table}"
    if table == "facts" and verb == "insert":
        told += f" {values[5]}"
    elif table == "meta" and values:
        told += f" {str(values[0]).partition(':')[0]}"
    return told


def _sqlite_full() -> sqlite3.OperationalError:
    return sqlite3.OperationalError("database or disk is full")


def _sqlite_away() -> sqlite3.OperationalError:
    return sqlite3.OperationalError("unable to open database file")


def wrap_holes(points: Points) -> None:
    """Space punched into files or reserved behind them, by the C library's fallocate."""
    from supervisord_vllm import holes

    module: Any = holes
    real = holes._fallocate

    def call(file: int, mode: int, start: int, size: int) -> None:
        points.around(f"fallocate {place(file)}", lambda: real(file, mode, start, size), FULL)

    module._fallocate = call


def main() -> None:
    """The command line, with its points counted; a process that only tries whether it could take over counts none."""
    if "SUPERVISE_UPGRADE_TRIAL" not in os.environ:
        points = Points()
        wrap_holes(points)
        wrap_sqlite(points)
        wrap_processes(points)
        wrap_calls(points)
    from supervisord_vllm.store import writer

    writer_module: Any = writer
    writer_module.BATCH = 1  # each entry is a commit of its own: more points, and the same ones every time
    from supervisord_vllm.cli.main import main as product

    product()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    main()
