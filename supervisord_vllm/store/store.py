"""`Store`: what the daemon records, and what it remembers at its start.

Reading happens once, in `Store.open`; afterwards what was read is kept up to date in memory, so no method waits for the
disk. Wall times are RFC 3339 and for people; the facts carry CLOCK_BOOTTIME.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from supervisord_vllm.clock import rfc3339
from supervisord_vllm.core import codec
from supervisord_vllm.core.codec import Json
from supervisord_vllm.core.decision import Decision
from supervisord_vllm.core.facts import Diagnosed, Fact
from supervisord_vllm.core.levers import Levers
from supervisord_vllm.core.policy import Policy
from supervisord_vllm.store.launch_logs import launch_numbers
from supervisord_vllm.store.schema import Warn, open_for_writing, set_aside
from supervisord_vllm.store.writer import Job, Statement, Writer

CAPACITY = 10_000
FACTS_KEPT = 200_000
"""Facts of earlier runs beyond this many are forgotten when a run begins; launches and decisions are kept."""
_GOOD = "last_known_good:"
_EXHAUSTED = "exhausted"
_SET_META = "INSERT INTO meta VALUES(?, ?) ON CONFLICT(key) DO UPDATE SET value = excluded.value"

_FORGET = "DELETE FROM facts WHERE seq <= (SELECT coalesce(max(seq), 0) FROM facts) - ? AND run < ?"
_ADD_DECISION = (
    "INSERT OR REPLACE INTO decisions(number, run, launch, boot_id, at, kind, action, json) VALUES(?,?,?,?,?,?,?,?)"
)


async def durable(recorded: Future[bool], seconds: float = 2.0) -> bool:
    """Wait for a durable record; false when it failed or is not there within ``seconds`` (act, mark it unrecorded)."""
    try:
        return await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(recorded)), seconds)
    except asyncio.TimeoutError:
        return False


def _unchanged(text: str) -> str:
    return text


class Store:
    """The daemon's side of the history; one per state directory (the daemon's lock sees to that).

    ``clean`` redacts secrets from every string that is stored; the launch logs lie in ``launches/`` beside the file.
    """

    def __init__(self, path: Path, connection: sqlite3.Connection, warn: Warn, clean: Callable[[str], str]) -> None:
        self.path = path
        self.launches = path.parent / "launches"
        self._clean = clean
        self._meta: dict[str, Json] = {}
        for key, value in connection.execute("SELECT key, value FROM meta"):
            self._meta[str(key)] = _loads(value)
        self._next_launch = 1 + max(
            _maximum(connection, "SELECT max(number) FROM launches"),
            _maximum(connection, "SELECT max(launch) FROM facts"),
            max(launch_numbers(self.launches), default=0),
        )
        self._next_decision = 1 + _maximum(connection, "SELECT max(number) FROM decisions")
        self._run = _maximum(connection, "SELECT max(run) FROM runs")
        self._boot_id = ""
        self._begun: Statement | None = None
        self._lost_said = 0
        self._writer = Writer(path, connection, self._restore, warn, CAPACITY)

    @classmethod
    def open(cls, path: Path, *, warn: Warn, clean: Callable[[str], str] = _unchanged) -> Store:
        """Open or make the store; see `open_for_writing` for what is set aside and what is refused.

        Raises:
            StoreError: one line that names the place and the fix.
        """
        connection = open_for_writing(path, warn)
        try:
            return cls(path, connection, warn, clean)
        except sqlite3.Error as error:  # torn where the check at the opening did not look
            connection.close()
            set_aside(path, str(error), warn)
        return cls(path, open_for_writing(path, warn), warn, clean)

    def close(self, timeout: float = 5.0) -> bool:
        """Write what is queued; false when that took longer than ``timeout`` seconds and was given up."""
        return self._writer.close(timeout)

    @property
    def lost(self) -> int:
        """Entries that could not be recorded since the start."""
        return self._writer.lost

    def next_launch(self) -> int:
        """The number of the next launch: one more than the store or a log file knows."""
        return self._next_launch

    def next_decision(self) -> int:
        """The number of the next decision."""
        return self._next_decision

    def start_run(self, policy: Policy, version: str, boot_id: str) -> int:
        """Begin a run; its number goes with every fact. The oldest facts of earlier runs are forgotten."""
        self._run += 1
        self._boot_id = boot_id
        values = (self._run, _wall(), boot_id, version, policy.fingerprint, self._dumps(codec.policy_to_json(policy)))
        self._begun = (
            "INSERT OR IGNORE INTO runs(run, started, boot_id, version, fingerprint, policy) VALUES(?,?,?,?,?,?)",
            values,
        )
        self._put([self._begun, (_FORGET, (FACTS_KEPT, self._run))])
        return self._run

    def record_fact(self, run: int, fact: Fact) -> None:
        """Record a fact; never waits. A `Diagnosed` is listed among the diagnoses too."""
        wall = _wall()

        def build() -> list[Statement]:
            name = type(fact).__name__
            rows: list[Statement] = [
                (
                    "INSERT INTO facts(run, launch, boot_id, boottime_ns, wall, type, json) VALUES(?,?,?,?,?,?,?)",
                    (run, fact.launch, self._boot_id, fact.at_ns, wall, name, self._dumps(codec.to_json(fact))),
                )
            ]
            if isinstance(fact, Diagnosed):
                found = fact.diagnosis
                values = (run, fact.launch, wall, found.kind.value, self._dumps(codec.to_json(found)))
                rows.append(("INSERT INTO diagnoses(run, launch, wall, kind, json) VALUES(?,?,?,?,?)", values))
            lost = self._writer.lost
            if lost != self._lost_said:
                self._lost_said = lost
                rows.append(("UPDATE runs SET lost = ? WHERE run = ?", (lost, run)))
            return rows

        self._writer.put(Job(build), important=False)

    def record_decision(self, decision: Decision) -> Future[bool]:
        """Record an intent before it is acted on. The future is true once it is on the disk (see `durable`)."""
        self._next_decision = max(self._next_decision, decision.number + 1)
        wall, run = _wall(), self._run

        def build() -> list[Statement]:
            values = (
                decision.number,
                run,
                decision.launch,
                self._boot_id,
                wall,
                decision.kind.value,
                decision.action.value,
                self._dumps(codec.to_json(decision)),
            )
            return [(_ADD_DECISION, values)]

        done: Future[bool] = Future()
        self._writer.put(Job(build, done), important=True)
        return done

    def complete_decision(self, number: int, outcome: str, *, unrecorded: bool = False) -> None:
        """Say what came of a decision; ``unrecorded``: it was acted on before its intent was on the disk."""
        sql = "UPDATE decisions SET completed_at = ?, outcome = ?, unrecorded = ? WHERE number = ?"
        self._put([(sql, (_wall(), self._clean(outcome), int(unrecorded), number))])

    def launch_started(
        self, number: int, levers: Levers, argv: Sequence[str], pid: int | None, log: str, fingerprint: str = ""
    ) -> None:
        """Record a launch when its process exists, or could not be made (``pid`` is ``None``)."""
        self._next_launch = max(self._next_launch, number + 1)
        values = (
            number,
            self._run,
            fingerprint,
            _wall(),
            self._dumps(levers.to_json()),
            self._dumps(list(argv)),
            pid,
            log,
        )
        sql = (
            "INSERT OR REPLACE INTO launches(number, run, fingerprint, started_at, levers, argv, pid, log)"
            " VALUES(?,?,?,?,?,?,?,?)"
        )
        self._put([(sql, values)])

    def launch_ready(self, number: int) -> None:
        """The launch answered its canary."""
        self._put([("UPDATE launches SET ready_at = ? WHERE number = ?", (_wall(), number))])

    def launch_proven(self, number: int, levers: Levers, fingerprint: str) -> None:
        """The launch passed its proof: its levers become the last known good of this fingerprint."""
        key, good = _GOOD + fingerprint, levers.to_json()
        self._meta[key] = good
        proven = ("UPDATE launches SET proven_at = ? WHERE number = ?", (_wall(), number))
        self._put([(_SET_META, (key, self._dumps(good))), proven])  # both or neither

    def launch_ended(self, number: int, outcome: str, *, code: int | None = None, signal: int | None = None) -> None:
        """The launch is over; ``outcome`` is the kind of its failure, ``stopped``, or another word for people."""
        sql = "UPDATE launches SET ended_at = ?, outcome = ?, exit_code = ?, exit_signal = ? WHERE number = ?"
        self._put([(sql, (_wall(), self._clean(outcome), code, signal, number))])

    def last_known_good(self, fingerprint: str) -> Levers | None:
        """The levers that last passed the proof under this fingerprint."""
        found = self._meta.get(_GOOD + fingerprint)
        try:
            return None if found is None else codec.from_json(Levers, found)
        except ValueError:
            return None

    def forget_good(self, fingerprint: str) -> None:
        """Forget the last known good of a fingerprint (an operator's ``reset``)."""
        self.set_meta(_GOOD + fingerprint, None)

    def set_meta(self, key: str, value: Json) -> None:
        """Remember a JSON value across restarts (``held``, ...); ``None`` forgets it."""
        if value is None:
            self._meta.pop(key, None)
            self._put([("DELETE FROM meta WHERE key = ?", (key,))])
            return
        self._meta[key] = value
        self._put([(_SET_META, (key, self._dumps(value)))])

    def get_meta(self, key: str) -> Json:
        """A remembered value, or ``None``."""
        return self._meta.get(key)

    def set_exhausted(self, fingerprint: str, text: str, until_ns: int) -> None:
        """Remember that the budget ran out: until ``until_ns`` (CLOCK_BOOTTIME) a start gives up again at once."""
        meta = {"boot_id": self._boot_id, "until_ns": until_ns, "text": text, "fingerprint": fingerprint}
        self.set_meta(_EXHAUSTED, meta)

    def clear_exhausted(self) -> None:
        """Forget it (``run --reset``, a proof)."""
        self.set_meta(_EXHAUSTED, None)

    def exhausted(self, fingerprint: str, boot_id: str, now_ns: int) -> str | None:
        """The text of a give-up of this boot and fingerprint whose window has not passed."""
        found = self._meta.get(_EXHAUSTED)
        if not isinstance(found, Mapping) or (found.get("boot_id"), found.get("fingerprint")) != (boot_id, fingerprint):
            return None
        until = found.get("until_ns")
        return str(found.get("text")) if isinstance(until, int) and now_ns < until else None

    def _put(self, rows: list[Statement]) -> None:
        self._writer.put(Job(lambda: rows), important=True)

    def _restore(self) -> list[Statement]:
        rows: list[Statement] = [(_SET_META, (key, self._dumps(value))) for key, value in list(self._meta.items())]
        return ([self._begun] if self._begun else []) + rows

    def _dumps(self, value: Json) -> str:
        return json.dumps(_scrubbed(value, self._clean), separators=(",", ":"))


def _scrubbed(value: Json, clean: Callable[[str], str]) -> Json:
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, list):
        return [_scrubbed(item, clean) for item in value]
    if isinstance(value, dict):
        return {key: _scrubbed(item, clean) for key, item in value.items()}
    return value


def _wall() -> str:
    return rfc3339(time.time())


def _loads(text: Any) -> Json:  # noqa: ANN401 - a column of a file that anything may have written
    try:
        return json.loads(text)
    except (TypeError, ValueError):
        return None


def _maximum(connection: sqlite3.Connection, sql: str) -> int:
    found = connection.execute(sql).fetchone()[0]
    return int(found) if isinstance(found, int) else 0
