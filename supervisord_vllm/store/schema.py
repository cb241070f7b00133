"""The tables, their form, and opening the file for writing.

``PRAGMA user_version`` counts incompatible forms, `APPLICATION_ID` tells our file from anybody else's. What is torn,
foreign or of a newer form is set aside (see `aside`) and a new file begun; what is good but cannot be used now (locked,
no room, read-only) is left as it is, for later.
"""

from __future__ import annotations

import errno
import os
import sqlite3
from pathlib import Path

from supervisord_vllm.store.aside import SET_META, Warn, form_of, newest_of_other_forms, own_form_back, set_aside

VERSION = 1
APPLICATION_ID = 0x764C5376
QUICK_CHECK_BYTES = 64 << 20
"""Above this size a start does not wait for SQLite's ``quick_check``; a torn page is met, and set aside, later."""
BUSY_S = 2.0
"""How long SQLite waits for another program's lock before it says so."""

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
  number INTEGER NOT NULL, run INTEGER NOT NULL, launch INTEGER NOT NULL, boot_id TEXT NOT NULL, at TEXT NOT NULL,
  kind TEXT NOT NULL, action TEXT NOT NULL, json TEXT NOT NULL, unrecorded INTEGER NOT NULL DEFAULT 0,
  completed_at TEXT, outcome TEXT, PRIMARY KEY(run, number));
CREATE TABLE meta(key TEXT PRIMARY KEY, value TEXT NOT NULL);
"""


class StoreError(Exception):
    """The store cannot be used; the message names the place and the fix, in one line."""


class StoreAwayError(StoreError):
    """The store cannot be used now, but may be later; the message is the reason alone ("database is locked")."""


class _UnusableError(Exception):
    """What lies at the path must be set aside: ``label`` becomes part of its name."""

    def __init__(self, why: str, label: str = "unreadable") -> None:
        super().__init__(why)
        self.label = label


def open_for_writing(path: Path, warn: Warn) -> sqlite3.Connection:
    """A connection to a store of our form at ``path``, made where there is none.

    Raises:
        StoreAwayError: it is locked, there is no room, it is read-only or cannot be set aside; try again later.
        StoreError: there is no such directory and none can be made.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o755)
    except OSError as error:
        raise StoreError(f"state directory {path.parent}: {error.strerror}; give another state-dir") from error
    try:
        own_form_back(path, VERSION, APPLICATION_ID, warn)
        try:
            return _prepared(path, warn)
        except _UnusableError as unusable:
            set_aside(path, unusable.label, str(unusable), warn)
        return _prepared(path, warn)
    except (OSError, sqlite3.Error, _UnusableError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise StoreAwayError(why) from error


def is_torn(error: sqlite3.Error) -> bool:
    """Whether an error means damage: SQLite's plain ``DatabaseError`` ("malformed", "not a database"), or tables that
    are not ours."""
    lacking = isinstance(error, sqlite3.OperationalError) and str(error).startswith(("no such ", "table "))
    return lacking or type(error) is sqlite3.DatabaseError


def is_passing(error: sqlite3.Error) -> bool:
    """Whether the same write may succeed later: locked, full, read-only, an I/O error."""
    return isinstance(error, sqlite3.OperationalError) and not is_torn(error)


def _prepared(path: Path, warn: Warn) -> sqlite3.Connection:
    if path.exists() and not path.is_file():
        raise _UnusableError("it is no regular file")
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    except OSError as error:
        hidden = isinstance(error, PermissionError) and not os.access(path, os.R_OK)
        if (hidden and os.access(path.parent, os.W_OK)) or error.errno == errno.ELOOP:
            raise _UnusableError(str(error.strerror)) from error
        raise
    connection = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
    try:
        _check(path, connection, warn)
    except sqlite3.Error as error:
        connection.close()
        if is_torn(error) or (is_passing(error) and _cannot_be_read(path, error)):
            raise _UnusableError(str(error)) from error
        raise
    except BaseException:
        connection.close()
        raise
    return connection


def _check(path: Path, connection: sqlite3.Connection, warn: Warn) -> None:
    form = form_of(connection, APPLICATION_ID)
    if form is not None and form > VERSION:
        raise _UnusableError(f"written by a newer vllm-supervise, form {form}", f"form-{form}")
    tables = int(connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0])
    if tables and form is None:
        raise _UnusableError("some other program's database")
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = NORMAL")
    connection.execute("PRAGMA temp_store = MEMORY")
    if not tables:
        _make_tables(path, connection, warn)
    elif path.stat().st_size <= QUICK_CHECK_BYTES:
        verdict = str(connection.execute("PRAGMA quick_check(1)").fetchone()[0])
        if verdict != "ok":
            raise _UnusableError(verdict)


def _make_tables(path: Path, connection: sqlite3.Connection, warn: Warn) -> None:
    """The tables of a new store, with what a store of a newer form that was set aside remembers: a hold, say."""
    carried, source = newest_of_other_forms(path, VERSION, APPLICATION_ID)
    connection.execute("BEGIN IMMEDIATE")
    try:
        for statement in filter(str.strip, TABLES.split(";")):
            connection.execute(statement)
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {VERSION}")
        for key, value in carried.items():
            connection.execute(SET_META, (key, value))
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
    if carried:
        warn(f"store {path}: a hold, the last known good and the like are taken over from {source}")


def _cannot_be_read(path: Path, error: sqlite3.Error) -> bool:
    """Whether an I/O error means that the file itself cannot be read (a bad disk), rather than that nothing can be
    written beside it."""
    if "I/O" not in str(error):
        return False
    try:
        with path.open("rb") as file:
            while file.read(1 << 20):
                pass
    except OSError:
        return True
    return False
