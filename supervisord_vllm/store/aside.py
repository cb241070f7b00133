"""Stores that are set aside: ``history.sqlite3.unreadable-TIME``, and ``history.sqlite3.form-N`` of another form.

A store of a newer form is good, but we would damage it: it keeps lying under the name ``.form-N`` until the version
that wrote it is started again, which takes it back and sets ours aside in the same way. Either version begins with what
the other one remembered.
"""

from __future__ import annotations

import re
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

Warn = Callable[[str], None]

_COMPANIONS = ("-wal", "-journal")
SET_META = "INSERT INTO meta VALUES(?, ?) ON CONFLICT(key) DO UPDATE SET value = excluded.value"


def form_of(connection: sqlite3.Connection, application_id: int) -> int | None:
    """The form of a store of ours; ``None`` for what is not ours or empty.

    Raises:
        sqlite3.Error: it cannot be read.
    """
    if int(connection.execute("PRAGMA application_id").fetchone()[0]) != application_id:
        return None
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


def set_aside(path: Path, label: str, why: str, warn: Warn) -> None:
    """Rename a store that cannot be used to ``PATH.LABEL``, with its write-ahead log, which would damage a new file of
    the same name; what is unreadable gets the time too, and so does a name that is taken.

    Raises:
        OSError: it cannot be renamed either.
    """
    aside = _free(path, label)
    _move(path, aside)
    fate = "a new one is begun" if label == "unreadable" else "a new one is begun; that version takes it back"
    warn(f"store {path} cannot be used ({why}); set aside as {aside.name}, {fate}")


def own_form_back(path: Path, version: int, application_id: int, warn: Warn) -> None:
    """Take a store of our own form back that another version set aside; the other's is set aside instead.

    Raises:
        OSError: a rename failed.
        sqlite3.Error: our own cannot be written now.
    """
    ours = path.with_name(f"{path.name}.form-{version}")
    if not ours.is_file():
        return
    if path.exists():
        other = _read_form(path, application_id) if path.is_file() else None
        if other is None or other == version:
            return  # what lies there is judged by itself
        # First what the other one remembers, then the names: whatever breaks off in between, the next start goes on.
        carried = _meta(path)
        with closing(sqlite3.connect(ours, isolation_level=None)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            connection.executemany(SET_META, carried.items())
            connection.execute("COMMIT")
        _move(path, _free(path, f"form-{other}"))
    _move(ours, path)
    warn(f"store {path}: the history of this version is taken back from {ours.name}")


def newest_of_other_forms(path: Path, version: int, application_id: int) -> tuple[dict[str, str], str]:
    """What the store of a newer form that was set aside last remembers, and its name; nothing where there is none."""
    found: list[tuple[int, Path]] = []
    name = re.compile(re.escape(path.name) + r"\.form-([0-9]{1,4})")
    try:
        for entry in path.parent.iterdir():
            match = name.fullmatch(entry.name)
            if match and int(match[1]) > version and entry.is_file():
                found.append((entry.stat().st_mtime_ns, entry))
    except OSError:
        return {}, ""
    for _, entry in sorted(found, reverse=True):
        try:
            if _read_form(entry, application_id) is not None:
                return _meta(entry), entry.name
        except sqlite3.Error:  # noqa: PERF203 - a few files, each on its own
            continue
    return {}, ""


def _read_form(path: Path, application_id: int) -> int | None:
    try:
        with closing(_reading(path)) as connection:
            return form_of(connection, application_id)
    except sqlite3.Error:
        return None


def _meta(path: Path) -> dict[str, str]:
    with closing(_reading(path)) as connection:
        return {str(key): str(value) for key, value in connection.execute("SELECT key, value FROM meta")}


def _reading(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(f"file:{quote(str(path))}?mode=rw", uri=True, timeout=2)


def _free(path: Path, label: str) -> Path:
    aside = path.with_name(f"{path.name}.{label}")
    if label == "unreadable" or _there(aside):
        stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        aside, count = path.with_name(f"{path.name}.{label}-{stamp}"), 1
        while _there(aside):
            count += 1
            aside = path.with_name(f"{path.name}.{label}-{stamp}-{count}")
    return aside


def _move(path: Path, target: Path) -> None:
    """The log goes before its store: a store without its log is an earlier one, a log without its store is nothing."""
    for suffix in _COMPANIONS:
        companion = Path(f"{path}{suffix}")
        if companion.exists():
            companion.rename(f"{target}{suffix}")
    if _there(path):
        path.rename(target)
    Path(f"{path}-shm").unlink(missing_ok=True)


def _there(path: Path) -> bool:
    return path.exists() or path.is_symlink()
