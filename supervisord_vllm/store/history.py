"""`History`: reading the store, whether a daemon runs or not, without making, locking or changing anything.

While a daemon runs, SQLite's write-ahead log lets readers read beside it. When none runs and the log was folded in, the
file is opened as immutable, because opening it otherwise would make files beside it.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar, final
from urllib.parse import quote

from supervisord_vllm.core import codec
from supervisord_vllm.core.codec import Json
from supervisord_vllm.core.decision import Decision
from supervisord_vllm.core.diagnosis import Diagnosis
from supervisord_vllm.core.facts import Fact
from supervisord_vllm.core.policy import Policy
from supervisord_vllm.store.schema import APPLICATION_ID, StoreError

T = TypeVar("T")
ALL = -1
"""No limit, for SQLite."""


@dataclass(frozen=True)
class LaunchRecord:
    """One launch as recorded; times are RFC 3339, ``levers`` in their public form."""

    number: int
    run: int
    fingerprint: str
    started_at: str
    levers: dict[str, Json]
    argv: list[str]
    pid: int | None
    log: str
    ready_at: str | None
    proven_at: str | None
    ended_at: str | None
    exit_code: int | None
    exit_signal: int | None
    outcome: str | None


@dataclass(frozen=True)
class DecisionRecord:
    """One decision as recorded: the codec's JSON (of a newer minor too) and what came of it.

    ``at`` is the wall time; ``unrecorded``: it was acted on before its intent was on the disk.
    """

    run: int
    at: str
    json: dict[str, Json]
    unrecorded: bool
    completed_at: str | None
    outcome: str | None

    def decision(self) -> Decision:
        """The decision itself; ``ValueError`` where this version cannot read it."""
        return codec.from_json(Decision, self.json)


@dataclass(frozen=True)
class RunRecord:
    """One run of the daemon. ``lost`` entries could not be recorded: such a run cannot be replayed for certain."""

    run: int
    started: str
    boot_id: str
    version: str
    fingerprint: str
    lost: int


@final
class History:
    """A read-only view of one store. Every method raises `StoreError` in one line where the file cannot be read."""

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self.path = path
        self._connection = connection

    @classmethod
    def open(cls, path: Path) -> History | None:
        """The history at ``path``, or ``None`` where there is none.

        Raises:
            StoreError: it is there and cannot be read.
        """
        try:
            if not path.is_file():
                return None
            beside = Path(f"{path}-wal").exists()
        except OSError as error:
            raise StoreError(f"store {path} cannot be read: {error.strerror}; run as its owner or root") from error
        # Without a write-ahead log nobody has the file open; with one it must be read too, unless we may not.
        modes = ("mode=ro", "mode=ro&immutable=1") if beside else ("mode=ro&immutable=1", "mode=ro")
        last: sqlite3.Error | None = None
        for mode in modes:
            try:
                return cls(path, _opened(path, mode))
            except sqlite3.Error as error:  # noqa: PERF203 - two ways, tried in turn
                last = error
        raise StoreError(f"store {path} cannot be read: {last}") from last

    def __enter__(self) -> History:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the file."""
        self._connection.close()

    def runs(self) -> list[RunRecord]:
        """The runs of the daemon, the oldest first."""
        rows = self._rows("SELECT run, started, boot_id, version, fingerprint, lost FROM runs ORDER BY run")
        return [RunRecord(*row) for row in rows]

    def policy(self, run: int) -> Policy:
        """The policy of one run."""
        rows = self._rows("SELECT policy FROM runs WHERE run = ?", run)
        if not rows:
            raise StoreError(f"store {self.path} has no run {run}")
        return self._decoded(codec.policy_from_json, rows[0][0], f"the policy of run {run}")

    def launches(self, limit: int = ALL) -> list[LaunchRecord]:
        """The last ``limit`` launches, the oldest first."""
        names = [field.name for field in fields(LaunchRecord)]
        sql = f"SELECT {', '.join(names)} FROM launches ORDER BY number DESC LIMIT ?"  # noqa: S608 - our own names
        records = []
        for row in self._rows(sql, limit):
            columns = dict(zip(names, row, strict=True))
            columns["levers"] = _json(columns["levers"], {})
            columns["argv"] = _json(columns["argv"], [])
            records.append(LaunchRecord(**columns))
        return records[::-1]

    def decisions(self, limit: int = ALL, run: int | None = None) -> list[DecisionRecord]:
        """The last ``limit`` decisions (of one run), the oldest first."""
        rows = self._rows(
            "SELECT run, at, json, unrecorded, completed_at, outcome FROM decisions WHERE ? IS NULL OR run = ?"
            " ORDER BY run DESC, number DESC LIMIT ?",
            run,
            run,
            limit,
        )
        return [_decision(row) for row in rows[::-1]]

    def last_decision(self) -> DecisionRecord | None:
        """The newest decision."""
        found = self.decisions(limit=1)
        return found[0] if found else None

    def facts(self, run: int) -> Iterator[Fact]:
        """The facts of one run in the order in which `decide` saw them."""
        for name, text in self._rows("SELECT type, json FROM facts WHERE run = ? ORDER BY seq", run):
            yield self._decoded(partial(codec.fact_from_json, name), text, f"a fact of run {run}")

    def diagnoses(self, limit: int = ALL) -> list[tuple[int, str, Diagnosis]]:
        """The last ``limit`` diagnoses as (launch, wall time, diagnosis), the oldest first."""
        rows = self._rows("SELECT launch, wall, json FROM diagnoses ORDER BY seq DESC LIMIT ?", limit)
        decode = partial(codec.from_json, Diagnosis)
        return [(launch, wall, self._decoded(decode, text, "a diagnosis")) for launch, wall, text in rows[::-1]]

    def meta(self, key: str) -> Json:
        """A remembered value, or ``None``."""
        for (text,) in self._rows("SELECT value FROM meta WHERE key = ?", key):
            return _json(text, None)
        return None

    def _rows(self, sql: str, *values: object) -> list[tuple[Any, ...]]:
        try:
            with closing(self._connection.execute(sql, values)) as cursor:
                return cursor.fetchall()
        except sqlite3.Error as error:
            raise StoreError(f"store {self.path} cannot be read: {error}") from error

    def _decoded(self, decode: Callable[[Json], T], text: str, what: str) -> T:
        try:
            return decode(json.loads(text))
        except (TypeError, ValueError) as error:
            raise StoreError(f"store {self.path}: {what} is unreadable: {error}") from error


def last_decision(connection: sqlite3.Connection) -> DecisionRecord | None:
    """The newest decision of a store.

    Raises:
        sqlite3.Error: it cannot be read.
    """
    sql = (
        "SELECT run, at, json, unrecorded, completed_at, outcome FROM decisions ORDER BY run DESC, number DESC LIMIT 1"
    )
    row = connection.execute(sql).fetchone()
    return None if row is None else _decision(row)


def _decision(row: tuple[Any, ...]) -> DecisionRecord:
    return DecisionRecord(row[0], row[1], _json(row[2], {}), bool(row[3]), *row[4:])


def _json(text: object, default: Json) -> Json:
    try:
        found = json.loads(str(text))
    except ValueError:
        return default
    return found if default is None or isinstance(found, type(default)) else default


def _opened(path: Path, mode: str) -> sqlite3.Connection:
    connection = sqlite3.connect(f"file:{quote(str(path))}?{mode}", uri=True, timeout=2, check_same_thread=False)
    try:
        if int(connection.execute("PRAGMA application_id").fetchone()[0]) != APPLICATION_ID:
            raise sqlite3.DatabaseError("file is no history of vllm-supervise")
    except BaseException:
        connection.close()
        raise
    return connection
