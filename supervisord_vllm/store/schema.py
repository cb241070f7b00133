"""The tables, their version, and opening the file for writing.

``PRAGMA user_version`` counts incompatible forms. A newer one is refused for writing (an older daemon would damage it),
reading is tried. `application_id` tells our file from anybody else's.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path

VERSION = 1
APPLICATION_ID = 0x764C5376
QUICK_CHECK_BYTES = 64 << 20
"""Above this size a start does not wait for SQLite's ``quick_check``; a torn page is met, and set aside, later."""

Warn = Callable[[str], None]

TABLES = """
CREATE TABLE runs(
  run INTEGER PRIMARY KEY, started TEXT NOT NULL, boot_id TEXT NOT NULL, version TEXT NOT NULL,
  fingerprint TEXT NOT NULL, policy TEXT NOT NULL, lost INTEGER NOT NULL DEFAULT 0);
CREATE TABLE facts(
  seq INTEGER PRIMARY KEY AUTOINCREMENT, run INTEGER NOT NULL, launch INTEGER NOT NULL, boot_id TEXT NOT NULL,
  boottime_ns INTEGER NOT NULL, wall TEXT NOT NULL, type TEXT NOT NULL, json TEXT NOT NULL);
CREATE INDEX facts_of_run ON facts(run, seq);
CREATE TABLE launches(
  number INTEGER PRIMARY KEY, run INTEGER NOT NULL, fingerprint TEXT NOT NULL, started_at TEXT NOT NULL,
  levers TEXT NOT NULL, argv TEXT NOT NULL, pid INTEGER, log TEXT NOT NULL, ready_at TEXT, proven_at TEXT,
  ended_at TEXT, exit_code INTEGER, exit_signal INTEGER, outcome TEXT);
CREATE TABLE diagnoses(
  seq INTEGER PRIMARY KEY AUTOINCREMENT, run INTEGER NOT NULL, launch INTEGER NOT NULL, wall TEXT NOT NULL,
  kind TEXT NOT NULL, json TEXT NOT NULL);
CREATE TABLE decisions(
  number INTEGER PRIMARY KEY, run INTEGER NOT NULL, launch INTEGER NOT NULL, boot_id TEXT NOT NULL, at TEXT NOT NULL,
  kind TEXT NOT NULL, action TEXT NOT NULL, json TEXT NOT NULL, unrecorded INTEGER NOT NULL DEFAULT 0,
  completed_at TEXT, outcome TEXT);
CREATE TABLE meta(key TEXT PRIMARY KEY, value TEXT NOT NULL);
"""


class StoreError(Exception):
    """The store cannot be used; the message names the place and the fix, in one line."""


class StoreTooNewError(StoreError):
    """A newer version of this program wrote the store."""


def open_for_writing(path: Path, warn: Warn) -> sqlite3.Connection:
    """A connection to a store of our version at ``path``, made where there is none.

    What is torn, unreadable or not ours is renamed and said in a warning. Where not even a new file can be made though
    the directory is writable (a full disk), the history of this run stays in memory, said in a warning.

    Raises:
        StoreTooNewError: a newer version wrote it; nothing was touched.
        StoreError: the directory cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o755)
    except OSError as error:
        raise StoreError(f"state directory {path.parent}: {error.strerror}; give another state-dir") from error
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise StoreError(f"state directory {path.parent} cannot be written; run as its owner or give another state-dir")
    try:
        return _prepared(path)
    except (sqlite3.Error, OSError) as error:
        if isinstance(error, sqlite3.OperationalError) and "locked" in str(error):
            # Somebody reads it in a way that shuts us out (a backup): it is good, and it is theirs for now.
            warn(f"store {path} is locked by another program; the history of this run is kept in memory only")
            return _with_tables(sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False))
        set_aside(path, str(error), warn)
    try:
        return _prepared(path)
    except (sqlite3.Error, OSError) as error:
        warn(f"store {path} cannot be made ({error}); the history of this run is kept in memory only")
        return _with_tables(sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False))


def set_aside(path: Path, why: str, warn: Warn) -> None:
    """Rename a store that cannot be used, with its write-ahead log, which would damage a new file of the same name.

    Raises:
        StoreError: it cannot be renamed either.
    """
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    aside = path.with_name(f"{path.name}.unreadable-{stamp}")
    count = 1
    while aside.exists():
        count += 1
        aside = path.with_name(f"{path.name}.unreadable-{stamp}-{count}")
    try:
        if path.exists() or path.is_symlink():
            path.rename(aside)
        for suffix in ("-wal", "-journal"):
            companion = Path(f"{path}{suffix}")
            if companion.exists():
                companion.rename(f"{aside}{suffix}")
        Path(f"{path}-shm").unlink(missing_ok=True)
    except OSError as error:
        message = f"store {path} is unreadable ({why}) and cannot be set aside: {error.strerror}; move it by hand"
        raise StoreError(message) from error
    warn(f"store {path} is unreadable ({why}); set aside as {aside.name}, a new one is begun")


def is_torn(error: sqlite3.Error) -> bool:
    """Whether an error means damage ("malformed", "not a database"): SQLite's plain ``DatabaseError``."""
    return type(error) is sqlite3.DatabaseError


def _prepared(path: Path) -> sqlite3.Connection:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    os.close(descriptor)
    connection = sqlite3.connect(path, timeout=5, isolation_level=None, check_same_thread=False)
    try:
        version = int(connection.execute("PRAGMA user_version").fetchone()[0])
        tables = int(connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0])
        ours = int(connection.execute("PRAGMA application_id").fetchone()[0]) == APPLICATION_ID
        if ours and version > VERSION:
            raise StoreTooNewError(
                f"store {path} was written by a newer vllm-supervise (form {version}, this one writes {VERSION}); "
                "run the newer version, or move the file away"
            )
        if tables and not ours:
            raise sqlite3.DatabaseError("file is some other program's database")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        if not tables:
            return _with_tables(connection)
        if path.stat().st_size <= QUICK_CHECK_BYTES:
            verdict = str(connection.execute("PRAGMA quick_check(1)").fetchone()[0])
            if verdict != "ok":
                raise sqlite3.DatabaseError(verdict)
    except BaseException:
        connection.close()
        raise
    return connection


def _with_tables(connection: sqlite3.Connection) -> sqlite3.Connection:
    script = f"BEGIN;{TABLES}PRAGMA application_id = {APPLICATION_ID};PRAGMA user_version = {VERSION};COMMIT;"
    connection.executescript(script)
    return connection
