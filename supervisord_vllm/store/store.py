"""`Store`: what the daemon records, and what it remembers at its start.

Reading happens once, in `Store.open`; afterwards what was read is kept up to date in memory, so no method waits for the
disk. Where the file cannot be opened yet, the run begins without it and is written into it later. Wall times are RFC
3339 and for people; the facts carry CLOCK_BOOTTIME.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path

from supervisord_vllm.clock import rfc3339
from supervisord_vllm.core import codec
from supervisord_vllm.core.codec import Json
from supervisord_vllm.core.decision import Decision
from supervisord_vllm.core.facts import Diagnosed, Fact
from supervisord_vllm.core.levers import Levers
from supervisord_vllm.core.policy import Policy
from supervisord_vllm.store.aside import SET_META, Warn
from supervisord_vllm.store.history import DecisionRecord
from supervisord_vllm.store.launch_logs import written_numbers
from supervisord_vllm.store.remembered import Remembered, glimpsed, remembered
from supervisord_vllm.store.writer import Job, Statement, Writer

CAPACITY = 10_000
FACTS_KEPT = 200_000
"""Facts of earlier runs beyond this many are forgotten when a run begins; launches and decisions are kept."""
_GOOD = "last_known_good:"
_EXHAUSTED = "exhausted"
OPEN_S = 10.0
"""A disk that does not let the file be opened within this is not waited for."""

_FORGET = "DELETE FROM facts WHERE seq <= (SELECT coalesce(max(seq), 0) FROM facts) - ? AND run < ?"
_BEGIN_RUN = "INSERT OR IGNORE INTO runs(run, started, boot_id, version, fingerprint, policy) VALUES(?,?,?,?,?,?)"
_COMPLETE = (
    "UPDATE decisions SET completed_at = ?, outcome = ?, unrecorded = max(unrecorded, ?)"
    " WHERE number = ? AND run = (SELECT max(run) FROM decisions WHERE number = ?)"
)
_ENDED_LEFTOVERS = "UPDATE launches SET ended_at = ?, outcome = ? WHERE ended_at IS NULL"
_LEFT_OPEN = "UPDATE decisions SET outcome = ?, completed_at = ? WHERE completed_at IS NULL AND run < ?"
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

    def __init__(self, path: Path, warn: Warn, clean: Callable[[str], str]) -> None:
        self.path = path
        self.launches = path.parent / "launches"
        self.earlier: DecisionRecord | None = None
        """The last decision of the runs before."""
        self._clean = clean
        self._meta: dict[str, Json] = {}
        self._touched: set[str] = set()
        self._next_launch = 1 + max(written_numbers(self.launches), default=0)
        self._next_decision = 1
        self._run = 0
        self._shift = 0
        self._settled = False
        self._boot_id = ""
        self._begun: Sequence[object] | None = None
        self._writer = Writer(path, self, warn, CAPACITY)

    @classmethod
    def open(cls, path: Path, *, warn: Warn, clean: Callable[[str], str] = _unchanged) -> Store:
        """Open or make the store; see `open_for_writing` for what is set aside. What is away now (locked, full,
        read-only, hung) is said in a warning and tried again until it is there.

        Raises:
            StoreError: the directory is not there and cannot be made; one line that names the place and the fix.
        """
        store = cls(path, warn, clean)
        if not store._writer.started.wait(OPEN_S):
            warn(f"store {path} does not open within {OPEN_S:g} s; going on without what it remembers")
        if store._writer.refused is not None:
            store.close()
            raise store._writer.refused
        return store

    # --- on the writer's thread ---

    def opened(self, connection: sqlite3.Connection) -> None:
        """A file is open: what it remembers counts where nothing newer is known (see `writer.Keeper`)."""
        found = remembered(connection)
        if not self._settled and self._begun is not None:
            # Our run has begun without the file, under a number that the file may know already.
            self._shift = max(0, found.run + 1 - self._run)
        self._recall(found)
        self._settled = True

    def away(self) -> None:
        """The file cannot be used yet, but perhaps be read."""
        self._recall(glimpsed(self.path))

    def restore(self) -> list[Statement]:
        """The run's row and the meta values: for a new file, and after a loss."""
        if self._begun is None and not self._touched:
            return []  # nothing of ours yet
        rows = self._run_row()
        rows += [(SET_META, (key, self._dumps(value))) for key, value in list(self._meta.items())]
        rows += [("DELETE FROM meta WHERE key = ?", (key,)) for key in list(self._touched) if key not in self._meta]
        if self._begun is not None:
            rows.append(("UPDATE runs SET lost = ? WHERE run = ?", (self._writer.lost, self._run + self._shift)))
        return rows

    def _recall(self, found: Remembered) -> None:
        for key, value in found.meta.items():
            if key not in self._touched:
                self._meta[key] = value
        if self._begun is None:
            self.earlier = found.last
            self._run = found.run
            self._next_launch = max(self._next_launch, found.launch + 1)
            self._next_decision = found.decision + 1

    def _run_row(self) -> list[Statement]:
        if self._begun is None:
            return []
        return [(_BEGIN_RUN, (self._run + self._shift, *self._begun))]

    # --- on the loop ---

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
        self._begun = (_wall(), boot_id, version, policy.fingerprint, self._dumps(codec.policy_to_json(policy)))

        begun, number = self._begun, self._run

        def build() -> list[Statement]:
            run = number + self._shift
            left = (_LEFT_OPEN, ("the daemon ended before that was known", _wall(), run))
            return [(_BEGIN_RUN, (run, *begun)), left, (_FORGET, (FACTS_KEPT, run))]

        self._writer.put(Job(build), important=True)
        return number

    def record_fact(self, run: int, fact: Fact) -> None:
        """Record a fact; never waits. A `Diagnosed` is listed among the diagnoses too."""
        wall = _wall()

        def build() -> list[Statement]:
            name, number = type(fact).__name__, run + self._shift
            rows: list[Statement] = [
                (
                    "INSERT INTO facts(run, launch, boot_id, boottime_ns, wall, type, json) VALUES(?,?,?,?,?,?,?)",
                    (number, fact.launch, self._boot_id, fact.at_ns, wall, name, self._dumps(codec.to_json(fact))),
                )
            ]
            if isinstance(fact, Diagnosed):
                found = fact.diagnosis
                values = (number, fact.launch, wall, found.kind.value, self._dumps(codec.to_json(found)))
                rows.append(("INSERT INTO diagnoses(run, launch, wall, kind, json) VALUES(?,?,?,?,?)", values))
            return rows

        self._writer.put(Job(build), important=False)

    def record_decision(self, decision: Decision) -> Future[bool]:
        """Record an intent before it is acted on. The future is true once it is on the disk (see `durable`)."""
        self._next_decision = max(self._next_decision, decision.number + 1)
        wall, run = _wall(), self._run

        def build() -> list[Statement]:
            values = (
                decision.number,
                run + self._shift,
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
        self._put([(_COMPLETE, (_wall(), self._clean(outcome), int(unrecorded), number, number))])

    def launch_started(
        self, number: int, levers: Levers, argv: Sequence[str], pid: int | None, log: str, fingerprint: str = ""
    ) -> None:
        """Record a launch when its process exists, or could not be made (``pid`` is ``None``)."""
        self._next_launch = max(self._next_launch, number + 1)
        run, wall, encoded, command = self._run, _wall(), self._dumps(levers.to_json()), self._dumps(list(argv))
        sql = (
            "INSERT OR REPLACE INTO launches(number, run, fingerprint, started_at, levers, argv, pid, log)"
            " VALUES(?,?,?,?,?,?,?,?)"
        )

        def build() -> list[Statement]:
            return [(sql, (number, run + self._shift, fingerprint, wall, encoded, command, pid, log))]

        self._writer.put(Job(build), important=True)

    def launch_ready(self, number: int) -> None:
        """The launch answered its canary."""
        self._put([("UPDATE launches SET ready_at = ? WHERE number = ?", (_wall(), number))])

    def launch_proven(self, number: int, levers: Levers, fingerprint: str, *, good: bool = True) -> None:
        """The launch passed its proof: its levers become the last known good of this fingerprint, if they are ``good``
        under it."""
        rows: list[Statement] = [("UPDATE launches SET proven_at = ? WHERE number = ?", (_wall(), number))]
        if good:
            key, kept = _GOOD + fingerprint, levers.to_json()
            self._touched.add(key)
            self._meta[key] = kept
            rows.append((SET_META, (key, self._dumps(kept))))
        self._put(rows)  # both or neither

    def launch_ended(self, number: int, outcome: str, *, code: int | None = None, signal: int | None = None) -> None:
        """The launch is over; ``outcome`` is the kind of its failure, ``stopped``, or another word for people."""
        sql = "UPDATE launches SET ended_at = ?, outcome = ?, exit_code = ?, exit_signal = ? WHERE number = ?"
        self._put([(sql, (_wall(), self._clean(outcome), code, signal, number))])

    def leftovers_ended(self) -> None:
        """Nothing of any launch lives: those whose end no daemon saw have ended too."""
        self._put([(_ENDED_LEFTOVERS, (_wall(), "outlived its daemon, then ended as a leftover"))])

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
        self._touched.add(key)
        if value is None:
            self._meta.pop(key, None)
            self._put([("DELETE FROM meta WHERE key = ?", (key,))])
            return
        self._meta[key] = value
        self._put([(SET_META, (key, self._dumps(value)))])

    def keep(self, key: str, value: Callable[[], Json], *, wanted: bool) -> Future[bool]:
        """Remember a value that is made on the writer's thread. The future is true once it is on the disk, if that is
        ``wanted``; else it never resolves."""
        done: Future[bool] = Future()
        self._touched.add(key)
        self._meta.setdefault(key, None)

        def build() -> list[Statement]:
            made = value()
            text = self._dumps(made)
            if key in self._meta:  # not forgotten since: what is forgotten last stays so after a loss
                self._meta[key] = made
            return [(SET_META, (key, text))]

        self._writer.put(Job(build, done if wanted else None), important=True)
        return done

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
