"""A store that cannot be used as it is or cannot be used now: newer, locked, full, read-only, hung. Never fatal."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from daemon_process import until
from supervisord_vllm.core.decision import Decision
from supervisord_vllm.core.diagnosis import Action, Kind
from supervisord_vllm.core.facts import Tick
from supervisord_vllm.core.levers import Levers
from supervisord_vllm.core.policy import Policy
from supervisord_vllm.store import History, Store, schema
from supervisord_vllm.store.store import CAPACITY

POLICY = Policy(name="qwen", declared=Levers({"gpu_memory_utilization": 900}), fingerprint="f1")


@pytest.fixture
def warnings() -> list[str]:
    return []


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "history.sqlite3"


def decision(number: int) -> Decision:
    return Decision(number, 7, 1, Kind.NONE, Action.WAIT, f"Decision {number}.")


def read(path: Path) -> History:
    history = History.open(path)
    assert history is not None
    return history


def numbers(path: Path) -> list[tuple[int, object]]:
    with closing(read(path)) as history:
        return [(record.run, record.json["number"]) for record in history.decisions()]


def lived(path: Path, warnings: list[str]) -> None:
    """One run with two decisions, a hold and a proven launch."""
    store = Store.open(path, warn=warnings.append)
    store.start_run(POLICY, "0.1.0", "boot")
    store.set_meta("held", True)
    store.launch_started(7, POLICY.declared, ["vllm"], 5, "log", "f1")
    store.launch_proven(7, POLICY.declared, "f1")
    store.record_decision(decision(1))
    assert store.record_decision(decision(2)).result(timeout=20)
    assert store.close()


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Another program shuts everybody out, readers too."""
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA locking_mode = EXCLUSIVE")
    connection.execute("BEGIN EXCLUSIVE")
    connection.execute("UPDATE meta SET value = value")
    try:
        yield
    finally:
        connection.execute("ROLLBACK")
        connection.close()


@contextmanager
def slow_to_open(path: Path) -> Iterator[None]:
    """Opening the file hangs in the kernel (for at most its lease-break-time, 45 s), as on a disk that hangs."""
    program = (
        "import fcntl, os, signal, sys\n"
        "signal.signal(signal.SIGIO, signal.SIG_IGN)\n"
        "file = os.open(sys.argv[1], os.O_RDWR)\n"
        "fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)\n"
        "print('held', flush=True)\n"
        "sys.stdin.read()\n"
    )
    argv = [sys.executable, "-c", program, str(path)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        try:
            yield
        finally:
            holder.kill()


def test_a_newer_store_is_set_aside_its_memory_goes_on_and_its_version_takes_it_back(
    path: Path, warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schema, "VERSION", 2)
    lived(path, warnings)
    with closing(sqlite3.connect(path)) as newer:
        newer.execute("ALTER TABLE decisions ADD COLUMN mood TEXT NOT NULL DEFAULT 'calm'")
    assert warnings == []

    monkeypatch.setattr(schema, "VERSION", 1)
    older = Store.open(path, warn=warnings.append)
    assert older.get_meta("held") is True
    assert older.last_known_good("f1") == POLICY.declared
    older.start_run(POLICY, "0.0.9", "boot")
    older.set_meta("held", {"reason": "downgraded"})
    assert older.record_decision(decision(older.next_decision())).result(timeout=20)
    assert older.close()
    assert len(warnings) == 2
    assert "newer vllm-supervise, form 2" in warnings[0]
    assert "set aside as history.sqlite3.form-2" in warnings[0]
    assert "a hold, the last known good and the like are taken over from history.sqlite3.form-2" in warnings[1]
    assert numbers(path.with_name("history.sqlite3.form-2")) == [(1, 1), (1, 2)], "readers can still be pointed at it"

    monkeypatch.setattr(schema, "VERSION", 2)
    again = Store.open(path, warn=warnings.append)
    assert again.next_decision() == 3
    assert again.get_meta("held") == {"reason": "downgraded"}
    assert again.close()
    assert numbers(path) == [(1, 1), (1, 2)]
    with closing(sqlite3.connect(path)) as back:
        assert back.execute("SELECT DISTINCT mood FROM decisions").fetchall() == [("calm",)]
    assert numbers(path.with_name("history.sqlite3.form-1")) == [(1, 1)]

    monkeypatch.setattr(schema, "VERSION", 1)
    once_more = Store.open(path, warn=warnings.append)
    assert once_more.next_decision() == 2, "its own history is taken back too"
    assert once_more.close()
    assert sorted(entry.name for entry in path.parent.iterdir()) == ["history.sqlite3", "history.sqlite3.form-2"]


class BrokenOffError(BaseException):
    """A kill at a rename."""


def broken_off(path: Path, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """An opening that is killed before its n-th rename."""
    real, calls = Path.rename, 0

    def rename(self: Path, target: Path) -> Path:
        nonlocal calls
        calls += 1
        if calls == at:
            raise BrokenOffError
        return real(self, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", rename)
        with pytest.raises(BrokenOffError):
            schema.open_for_writing(path, lambda text: None).close()


def killed(path: Path, value: str) -> None:
    """Something is remembered by a daemon that is killed: it is in the log beside the store, and only there."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("UPDATE meta SET value = ? WHERE key = 'held'", (f'"{value}"',))
        content = {suffix: Path(f"{path}{suffix}").read_bytes() for suffix in ("", "-wal")}
    for suffix, data in content.items():
        Path(f"{path}{suffix}").write_bytes(data)


@pytest.mark.parametrize("at", [1, 2])
def test_setting_a_newer_store_aside_may_break_off_at_every_rename(
    path: Path, warnings: list[str], monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    monkeypatch.setattr(schema, "VERSION", 2)
    lived(path, warnings)
    killed(path, "log")
    monkeypatch.setattr(schema, "VERSION", 1)
    broken_off(path, 1, monkeypatch)
    store = Store.open(path, warn=warnings.append)
    assert store.get_meta("held") == "log"
    assert store.close()
    killed(path, "log of the older")
    monkeypatch.setattr(schema, "VERSION", 2)
    broken_off(path, at, monkeypatch)
    again = Store.open(path, warn=warnings.append)
    assert (again.next_decision(), again.get_meta("held")) == (3, "log of the older")
    assert again.close()


def test_a_store_locked_at_the_start_is_gone_without_and_comes_back(path: Path, warnings: list[str]) -> None:
    lived(path, warnings)
    with locked(path):
        store = Store.open(path, warn=warnings.append)
        assert store.get_meta("held") is True, "what the file says is read past the lock"
        assert (store.next_launch(), store.next_decision()) == (8, 3)
        run = store.start_run(POLICY, "0.1.0", "boot")
        store.set_meta("held", None)
        begun = time.monotonic()
        assert store.record_decision(decision(3)).result(timeout=1) is False, "known at once, not after a time-out"
        assert time.monotonic() - begun < 1
        store.complete_decision(3, "acted on", unrecorded=True)
    store.record_fact(run, Tick(at_ns=1))
    until(lambda: store.record_decision(decision(4)).result(timeout=20), lambda: warnings)
    store.complete_decision(3, "done")
    assert store.close()
    assert store.lost == 0
    assert [line.split(" (")[0] for line in warnings] == [
        f"store {path} cannot be written",
        f"store {path} is written again; nothing was lost",
    ]
    assert numbers(path) == [(1, 1), (1, 2), (2, 3), (2, 4)]
    with closing(read(path)) as history:
        assert history.meta("held") is None
        first = history.decisions(run=2)[0]
        assert (first.outcome, first.unrecorded) == ("done", True)
        assert len(list(history.facts(2))) == 1


def test_a_lock_while_running_outlasts_the_patience_and_loses_nothing(path: Path, warnings: list[str]) -> None:
    store = Store.open(path, warn=warnings.append)
    run = store.start_run(POLICY, "0.1.0", "boot")
    assert store.record_decision(decision(1)).result(timeout=20)
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        for tick in range(2000):
            store.record_fact(run, Tick(at_ns=tick))
        until(lambda: warnings, lambda: "it should have said that it is locked")
        assert store.record_decision(decision(2)).result(timeout=1) is False
        other.execute("ROLLBACK")
    until(lambda: len(warnings) == 2, lambda: warnings)
    assert store.close()
    assert "database is locked" in warnings[0]
    assert "nothing was lost" in warnings[1]
    assert numbers(path) == [(1, 1), (1, 2)]
    with closing(read(path)) as history:
        assert len(list(history.facts(run))) == 2000


def test_a_full_disk_loses_what_finds_no_room_says_it_once_and_is_written_again(
    path: Path, warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite's own page limit is the disk here (SQLITE_FULL); a real full disk: tests/real/test_store_disks.py."""
    store = Store.open(path, warn=warnings.append)
    run = store.start_run(POLICY, "0.1.0", "boot")
    assert store.record_decision(decision(1)).result(timeout=20)
    connection = store._writer._connection
    assert connection is not None
    (pages,) = connection.execute("PRAGMA page_count").fetchone()
    connection.execute(f"PRAGMA max_page_count = {pages}")
    store.record_decision(Decision(2, 7, 1, Kind.NONE, Action.WAIT, "Long. " * 2000))
    until(lambda: warnings, lambda: "it should have said that the disk is full")
    for tick in range(CAPACITY + 100):
        store.record_fact(run, Tick(at_ns=tick))
    for number in range(CAPACITY):
        store.set_meta("held", number)
    store.set_meta("held", "the last word")
    lost = store.lost
    assert lost > 100
    connection.execute("PRAGMA max_page_count = 1000000000")
    until(lambda: len(warnings) == 2, lambda: warnings)
    assert store.record_decision(decision(3)).result(timeout=20)
    assert store.close(timeout=60)
    assert "database or disk is full" in warnings[0]
    assert f"written again; {lost} entries were lost" in warnings[1]
    assert len(warnings) == 2
    with closing(read(path)) as history:
        assert history.meta("held") == "the last word", "though the queue had no room for it"
        assert history.runs()[0].lost == lost
    assert numbers(path) == [(1, 1), (1, 2), (1, 3)]


def test_a_file_that_hangs_at_the_start_is_gone_without_and_written_later(
    path: Path, warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lived(path, warnings)
    monkeypatch.setattr("supervisord_vllm.store.store.OPEN_S", 0.3)
    with slow_to_open(path):
        store = Store.open(path, warn=warnings.append)
        assert warnings == [f"store {path} does not open within 0.3 s; going on without what it remembers"]
        store.start_run(POLICY, "0.1.0", "boot")
        store.record_decision(decision(store.next_decision()))
        assert not store.close(timeout=0.1)
    assert store.close(timeout=60)
    # The run began as number 1, which the file gave before: nothing of the earlier run was touched.
    assert numbers(path) == [(1, 1), (1, 2), (2, 1)]
    with closing(read(path)) as history:
        assert history.meta("held") is True
        assert [record.run for record in history.runs()] == [1, 2]
        assert history.last_decision() == history.decisions()[-1]


@pytest.mark.parametrize("what", ["fifo", "loop", "socket"])
def test_what_is_no_file_is_set_aside(path: Path, warnings: list[str], what: str) -> None:
    path.parent.mkdir()
    if what == "fifo":
        os.mkfifo(path)
    elif what == "loop":
        path.symlink_to(path.name)
    else:
        os.mknod(path, 0o140600)
    store = Store.open(path, warn=warnings.append)
    store.start_run(POLICY, "0.1.0", "boot")
    assert store.record_decision(decision(1)).result(timeout=20)
    assert store.close()
    assert len(warnings) == 1
    assert "set aside as history.sqlite3.unreadable-" in warnings[0]


def test_tables_changed_by_another_hand_while_running_are_set_aside(path: Path, warnings: list[str]) -> None:
    store = Store.open(path, warn=warnings.append)
    store.start_run(POLICY, "0.1.0", "boot")
    assert store.record_decision(decision(1)).result(timeout=20)
    with closing(sqlite3.connect(path)) as other:
        other.execute("DROP TABLE decisions")
    assert store.record_decision(decision(2)).result(timeout=20)
    assert store.close()
    assert len(warnings) == 1
    assert "no such table: decisions" in warnings[0]
    assert numbers(path) == [(1, 2)]


def test_an_entry_that_sqlite_does_not_take_costs_only_itself(path: Path, warnings: list[str]) -> None:
    store = Store.open(path, warn=warnings.append)
    store.start_run(POLICY, "0.1.0", "boot")
    store.launch_started(1, POLICY.declared, ["vllm"], 1 << 70, "log", "f1")
    store.launch_started(2, POLICY.declared, ["vllm"], 5, "a\udcffb", "f1")
    store.launch_started(3, POLICY.declared, ["vllm"], 5, "log", "f1")
    assert store.record_decision(decision(1)).result(timeout=20)
    assert store.close()
    assert store.lost == 2
    with closing(read(path)) as history:
        assert [launch.number for launch in history.launches()] == [3]
        assert history.runs()[0].lost == 2


def test_decisions_and_launches_that_an_ended_daemon_left_open_are_closed(path: Path, warnings: list[str]) -> None:
    lived(path, warnings)
    store = Store.open(path, warn=warnings.append)
    store.start_run(POLICY, "0.1.0", "boot")
    store.leftovers_ended()
    assert store.close()
    with closing(read(path)) as history:
        assert [record.outcome for record in history.decisions()] == ["the daemon ended before that was known"] * 2
        (launch,) = history.launches()
        assert launch.outcome == "outlived its daemon, then ended as a leftover"
        assert launch.ended_at is not None


def test_the_lease_trick_hangs_an_open(tmp_path: Path) -> None:
    """What `slow_to_open` rests on."""
    file = tmp_path / "file"
    file.touch()
    with slow_to_open(file), pytest.raises(BlockingIOError):
        os.open(file, os.O_RDONLY | os.O_NONBLOCK)
