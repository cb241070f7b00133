"""What a start wants to know of the runs before, read once from the store."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

from supervisord_vllm.core.codec import Json
from supervisord_vllm.store.history import DecisionRecord, last_decision


@dataclass(frozen=True)
class Remembered:
    """The highest numbers that were given (0: none), the meta values, the last decision."""

    run: int = 0
    launch: int = 0
    decision: int = 0
    meta: dict[str, Json] = field(default_factory=dict)
    last: DecisionRecord | None = None


def remembered(connection: sqlite3.Connection) -> Remembered:
    """Read it.

    Raises:
        sqlite3.Error: it cannot be read.
    """
    return Remembered(
        run=_maximum(connection, "SELECT max(run) FROM runs"),
        launch=max(
            _maximum(connection, "SELECT max(number) FROM launches"),
            _maximum(connection, "SELECT max(launch) FROM facts WHERE type <> 'GateSampled'"),
        ),
        decision=_maximum(connection, "SELECT max(number) FROM decisions"),
        meta={str(key): loads(value) for key, value in connection.execute("SELECT key, value FROM meta")},
        last=last_decision(connection),
    )


def glimpsed(path: Path) -> Remembered:
    """What can be read of a store that is locked or cannot be written. Where its log cannot be read with it, the file
    as it is, whatever the locks say: nobody else writes it, so it is whole, but the last minutes may be missing. At
    worst nothing.
    """
    for mode in ("mode=ro", "mode=ro&immutable=1"):
        try:
            with closing(sqlite3.connect(f"file:{quote(str(path))}?{mode}", uri=True, timeout=0)) as connection:
                return remembered(connection)
        except sqlite3.Error:  # noqa: PERF203 - two ways, tried in turn
            continue
    return Remembered()


def loads(text: object) -> Json:
    """JSON of a column that anything may have written; ``None`` where it is none."""
    try:
        found: Json = json.loads(str(text))
    except ValueError:
        return None
    return found


def _maximum(connection: sqlite3.Connection, sql: str) -> int:
    found = connection.execute(sql).fetchone()[0]
    return int(found) if isinstance(found, int) else 0
