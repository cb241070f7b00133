"""The one thread that touches the store's file: opens it, writes it, opens it again, behind a bounded queue.

The caller never waits for the disk. What cannot be written now (locked, full, read-only, an I/O error) is kept and
tried again every `RETRY_S`; what finds no room in the queue meanwhile is lost and counted. Jobs are committed in the
order they were given; a batch that holds a durable job is synced to the disk before its futures are answered, and while
nothing can be written they are answered at once: not recorded.
"""

from __future__ import annotations

import queue
import sqlite3
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from supervisord_vllm.store.aside import Warn, set_aside
from supervisord_vllm.store.schema import StoreAwayError, StoreError, is_passing, is_torn, open_for_writing

Statement = tuple[str, tuple[Any, ...]]
BATCH = 500
RETRY_S = 1.0
"""Between two attempts while nothing can be written."""


@dataclass(frozen=True, slots=True)
class Job:
    """Statements that belong together; ``build`` runs on the writer's thread: encoding costs the loop nothing. It may
    run more than once."""

    build: Callable[[], Sequence[Statement]]
    done: Future[bool] | None = None


class Keeper(Protocol):
    """Whose memory it is; called on the writer's thread."""

    def opened(self, connection: sqlite3.Connection) -> None:
        """A file was opened, the first or another one."""

    def away(self) -> None:
        """The first opening failed, for now."""

    def restore(self) -> Sequence[Statement]:
        """What a new file must begin with, and what must be said after a loss."""


class Writer:
    """Owns the connection from its start to its end. ``started``: the first opening succeeded or failed."""

    def __init__(self, path: Path, keeper: Keeper, warn: Warn, capacity: int) -> None:
        self.started = threading.Event()
        self.refused: StoreError | None = None
        """Why there will never be a store here."""
        self._path = path
        self._keeper = keeper
        self._warn = warn
        self._capacity = capacity
        self._connection: sqlite3.Connection | None = None
        self._inode: tuple[int, int] | None = None
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._kept: list[Job] = []
        self._ended = False
        self._failing = False
        self._lost = 0
        self._lost_before = 0
        self._told = 0
        self._counting = threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="store", daemon=True)
        self._thread.start()

    @property
    def lost(self) -> int:
        """Entries that were not and will not be recorded."""
        return self._lost

    @property
    def waiting(self) -> int:
        """Jobs in the queue."""
        return self._jobs.qsize()

    def put(self, job: Job, *, important: bool) -> bool:
        """Queue a job, or lose it: what is important has twice the room. Never blocks."""
        room = self._capacity * (2 if important else 1)
        if self._closing.is_set() or self._jobs.qsize() >= room:
            self._lose(job)
            return False
        self._jobs.put(job)
        if self._failing:
            _answer(job, recorded=False)
        return True

    def close(self, timeout: float) -> bool:
        """Write what is queued and end; false when the disk did not let us within ``timeout`` seconds."""
        if not self._closing.is_set():
            self._closing.set()
            self._jobs.put(None)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._flush()
            self.started.set()
            while not self._ended or self._kept:
                if not self._kept:
                    self._gather()
                if not self._flush() and self._closing.wait(RETRY_S) and not self._flush():
                    break
        finally:
            self.started.set()
            self._let_go()
            self._lose_the_rest()

    def _gather(self) -> None:
        """The next batch; waits for one. This thread alone takes from the queue: what is not empty stays so."""
        batch = [self._jobs.get()]
        while len(batch) < BATCH and batch[-1] is not None and not self._jobs.empty():
            batch.append(self._jobs.get())
        self._ended = batch[-1] is None
        self._kept = [job for job in batch if job is not None]

    def _flush(self) -> bool:
        """Write what is kept; false when that must be tried again."""
        try:
            self._write_kept()
        except Exception as error:  # noqa: BLE001 - this thread outlives whatever a disk, SQLite or a value does
            self._failed(error)
            return False
        if self._failing:
            lost = self._lost - self._lost_before
            told = f"{lost} entries were lost" if lost else "nothing was lost"
            self._warn(f"store {self._path} is written again; {told}")
            self._failing = False
        return True

    def _failed(self, error: Exception) -> None:
        if isinstance(error, StoreError) and not isinstance(error, StoreAwayError) and not self.started.is_set():
            self.refused = error
        if not self._failing:
            self._lost_before = self._lost
            self._warn(
                f"store {self._path} cannot be written ({error}); going on without: entries are kept for later, those"
                f" beyond {self._capacity} are lost and counted"
            )
        self._failing = True
        for job in self._kept:
            _answer(job, recorded=False)
        if "locked" not in str(error) and "full" not in str(error):
            self._let_go()  # the file system may be another one when it answers again
        if not self.started.is_set():
            self._keeper.away()

    def _write_kept(self) -> None:
        if self._connection is not None and self._moved():
            self._warn(f"store {self._path} was moved or deleted; a new one is begun")
            self._let_go()
        begun: list[Job] = []
        if self._connection is None:
            self._open()
            begun = [Job(self._keeper.restore)]
        try:
            self._commit_each_or_all(begun)
        except sqlite3.Error as error:
            if not is_torn(error):
                raise
            self._let_go()
            set_aside(self._path, "unreadable", str(error), self._warn)
            self._open()
            self._commit_each_or_all([Job(self._keeper.restore)])

    def _open(self) -> None:
        connection = open_for_writing(self._path, self._warn)
        try:
            self._keeper.opened(connection)
        except sqlite3.Error as error:  # torn where the check at the opening did not look
            connection.close()
            if not is_torn(error):
                raise
            set_aside(self._path, "unreadable", str(error), self._warn)
            connection = open_for_writing(self._path, self._warn)
            self._keeper.opened(connection)
        self._connection = connection
        self._inode = self._inode_now()

    def _commit_each_or_all(self, begun: list[Job]) -> None:
        """All that is kept in one transaction; where an entry cannot be stored, each in its own: it costs itself."""
        try:
            self._commit([*begun, *self._kept])
        except Exception as error:  # an entry that SQLite or the codec does not take, of whatever sort
            if isinstance(error, sqlite3.Error) and (is_torn(error) or is_passing(error)):
                raise
            self._commit(begun)
            for job in self._kept[:]:
                self._commit_one(job)
                self._kept.remove(job)
        for job in self._kept:
            _answer(job, recorded=True)
        self._kept = []
        if self._lost != self._told and self._jobs.empty():  # a value that was lost may be the one that counts
            lost = self._lost
            self._commit([Job(self._keeper.restore)])
            self._told = lost

    def _commit_one(self, job: Job) -> None:
        try:
            self._commit([job])
        except Exception as error:
            if isinstance(error, sqlite3.Error) and (is_torn(error) or is_passing(error)):
                raise
            self._lose(job)
            self._warn(f"store {self._path}: {error}; this entry is not recorded")
        else:
            _answer(job, recorded=True)

    def _commit(self, jobs: Sequence[Job]) -> None:
        statements = [statement for job in jobs for statement in job.build()]
        connection = self._connection
        if not statements or connection is None:
            return
        durable = any(job.done is not None for job in jobs)
        # FULL syncs the write-ahead log at the commit; it cannot be changed inside a transaction.
        connection.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
        connection.execute("BEGIN IMMEDIATE")
        try:
            for sql, values in statements:
                connection.execute(sql, values)
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise

    def _let_go(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _lose(self, job: Job) -> None:
        with self._counting:
            self._lost += 1
        _answer(job, recorded=False)

    def _lose_the_rest(self) -> None:
        for job in self._kept:
            self._lose(job)
        while not self._jobs.empty():
            left = self._jobs.get()
            if left is not None:
                self._lose(left)

    def _moved(self) -> bool:
        """Whether the path no longer leads to our file: SQLite goes on writing to one that was deleted or replaced,
        durable for nobody."""
        if self._inode is None:
            return False
        try:
            return self._inode_now() != self._inode
        except FileNotFoundError:
            return True

    def _inode_now(self) -> tuple[int, int]:
        found = self._path.stat()
        return found.st_dev, found.st_ino


def _answer(job: Job, *, recorded: bool) -> None:
    if job.done is None:
        return
    try:
        job.done.set_result(recorded)
    except InvalidStateError:  # whoever waited has given up and cancelled it, or was told that it is not recorded yet
        return
