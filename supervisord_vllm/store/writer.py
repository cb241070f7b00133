"""The one thread that writes to SQLite, behind a bounded queue.

The caller never waits for the disk. What does not fit into the queue, or cannot be written, is lost and counted. Jobs
are committed in the order they were given; a batch that holds a durable job is synced to the disk before its futures
are answered.
"""

from __future__ import annotations

import queue
import sqlite3
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from supervisord_vllm.store.schema import StoreError, Warn, is_torn, open_for_writing, set_aside

Statement = tuple[str, tuple[Any, ...]]
BATCH = 500


@dataclass(frozen=True, slots=True)
class Job:
    """Statements that belong together; ``build`` runs on the writer's thread: encoding costs the loop nothing."""

    build: Callable[[], Sequence[Statement]]
    done: Future[bool] | None = None


class Writer:
    """Owns the connection from its start to its end.

    ``restore`` gives the statements that a new file must begin with when a torn one was set aside while running.
    """

    def __init__(
        self,
        path: Path,
        connection: sqlite3.Connection,
        restore: Callable[[], Sequence[Statement]],
        warn: Warn,
        capacity: int,
    ) -> None:
        self.lost = 0
        self._path = path
        self._connection = connection
        self._restore = restore
        self._warn = warn
        self._capacity = capacity
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._failing = False
        self._inode = self._inode_now()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="store", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Jobs in the queue."""
        return self._jobs.qsize()

    def put(self, job: Job, *, important: bool) -> bool:
        """Queue a job, or lose it: what is important has twice the room. Never blocks."""
        room = self._capacity * (2 if important else 1)
        if self._closed or self._jobs.qsize() >= room:
            self._lose(job)
            return False
        self._jobs.put(job)
        return True

    def close(self, timeout: float) -> bool:
        """Write what is queued and end; false when the disk did not let us within ``timeout`` seconds."""
        if not self._closed:
            self._closed = True
            self._jobs.put(None)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            ended = False
            while not ended:
                batch = [self._jobs.get()]
                # This thread alone takes from the queue: what is not empty stays so.
                while len(batch) < BATCH and batch[-1] is not None and not self._jobs.empty():
                    batch.append(self._jobs.get())
                ended = batch[-1] is None
                self._write([job for job in batch if job is not None])
        finally:
            self._connection.close()

    def _write(self, batch: list[Job]) -> None:
        built = [(job, statements) for job in batch if (statements := self._statements(job)) is not None]
        if not built:
            return
        try:
            self._commit_or_begin_anew(built)
        except (sqlite3.Error, StoreError, OverflowError) as error:
            for job, _ in built:
                self._lose(job)
            if not self._failing:
                self._warn(
                    f"store {self._path} cannot be written ({error}); going on without, lost entries are counted"
                )
            self._failing = True
            return
        if self._failing:
            self._warn(f"store {self._path} is written again; {self.lost} entries were lost")
        self._failing = False
        for job, _ in built:
            _answer(job, recorded=True)

    def _statements(self, job: Job) -> Sequence[Statement] | None:
        try:
            return job.build()
        except (TypeError, ValueError, KeyError) as error:
            self._lose(job)
            self._warn(f"store {self._path}: {error}; this entry is not recorded")
            return None

    def _commit_or_begin_anew(self, built: list[tuple[Job, Sequence[Statement]]]) -> None:
        # SQLite goes on writing to a file that was deleted or replaced: durable for nobody.
        if self._inode is not None and self._inode_now() != self._inode:
            if not self._failing:
                self._warn(f"store {self._path} was moved or deleted; a new one is begun")
            self._begin_anew(built)
            return
        try:
            self._commit(built)
        except sqlite3.Error as error:
            if not is_torn(error):
                raise
            self._connection.close()
            set_aside(self._path, str(error), self._warn)
            self._begin_anew(built)

    def _begin_anew(self, built: list[tuple[Job, Sequence[Statement]]]) -> None:
        self._connection.close()
        self._connection = open_for_writing(self._path, self._warn)
        self._inode = self._inode_now()
        self._commit([(Job(self._restore), self._restore()), *built])

    def _commit(self, built: list[tuple[Job, Sequence[Statement]]]) -> None:
        durable = any(job.done is not None for job, _ in built)
        # FULL syncs the write-ahead log at the commit; it cannot be changed inside a transaction.
        self._connection.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            for _, statements in built:
                for sql, values in statements:
                    self._connection.execute(sql, values)
            self._connection.execute("COMMIT")
        except BaseException:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise

    def _lose(self, job: Job) -> None:
        self.lost += 1
        _answer(job, recorded=False)

    def _inode_now(self) -> tuple[int, int] | None:
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_dev, found.st_ino


def _answer(job: Job, *, recorded: bool) -> None:
    if job.done is None:
        return
    try:
        job.done.set_result(recorded)
    except InvalidStateError:  # whoever waited has given up and cancelled it
        return
