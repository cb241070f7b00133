"""The store: what is confirmed survives a kill, nothing that a disk or a file does is fatal, readers change nothing."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from supervisord_vllm.core.decision import Decision, Move
from supervisord_vllm.core.diagnosis import Action, Diagnosis, Kind
from supervisord_vllm.core.facts import Diagnosed, Exited, Fact, GateSampled, Spawned, Tick
from supervisord_vllm.core.levers import Levers
from supervisord_vllm.core.policy import Policy
from supervisord_vllm.store import History, Store, StoreError, durable, launch_log, prune_launch_logs
from supervisord_vllm.store.store import CAPACITY
from supervisord_vllm.store.writer import Job

POLICY = Policy(name="qwen", declared=Levers({"gpu_memory_utilization": 900}), fingerprint="f1")
DECISION = Decision(
    number=1,
    at_ns=7,
    launch=1,
    kind=Kind.OOM_RUNTIME,
    action=Action.NEXT_CONFIG,
    sentence="Utilization 0.900 → 0.850.",
    moves=(Move("gpu_memory_utilization", 900, 850, "down", "stepped"),),
)


@pytest.fixture
def warnings() -> list[str]:
    return []


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "history.sqlite3"


@pytest.fixture
def store(path: Path, warnings: list[str]) -> Iterator[Store]:
    opened = Store.open(path, warn=warnings.append)
    yield opened
    assert opened.close()


def read(path: Path) -> History:
    history = History.open(path)
    assert history is not None
    return history


def files(path: Path) -> dict[str, int]:
    return {entry.name: entry.stat().st_mtime_ns for entry in path.parent.iterdir()}


def settle(store: Store) -> None:
    """Wait until everything recorded so far is on the disk."""
    assert store.record_decision(DECISION).result(timeout=20)


def test_a_story_is_read_back_while_the_daemon_runs(store: Store, path: Path, warnings: list[str]) -> None:
    run = store.start_run(POLICY, "0.1.0", "boot")
    facts: list[Fact] = [
        Spawned(at_ns=1, launch=1, pid=5, start_ticks=3, argv=("vllm", "serve"), log="launches/000001.log"),
        Diagnosed(at_ns=2, launch=1, diagnosis=Diagnosis(Kind.OOM_RUNTIME)),
        Tick(at_ns=3),
    ]
    for fact in facts:
        store.record_fact(run, fact)
    store.launch_started(1, POLICY.declared, ["vllm", "serve"], 5, "launches/000001.log", "f1")
    store.launch_ready(1)
    store.launch_proven(1, POLICY.declared, "f1")
    store.launch_ended(1, "oom_runtime", code=0)
    settle(store)
    store.complete_decision(1, "done")
    store.record_decision(Decision(2, 9, 1, Kind.NONE, Action.WAIT, "Waiting.")).result(timeout=20)

    history = read(path)
    assert list(history.facts(run)) == facts
    assert history.policy(run) == POLICY
    (launch,) = history.launches()
    assert (launch.levers, launch.argv, launch.pid) == ({"gpu_memory_utilization": 0.9}, ["vllm", "serve"], 5)
    assert (launch.outcome, launch.exit_code) == ("oom_runtime", 0)
    assert launch.started_at <= str(launch.ready_at) <= str(launch.proven_at) <= str(launch.ended_at)
    first, second = history.decisions()
    assert (first.decision(), first.outcome, first.unrecorded) == (DECISION, "done", False)
    assert second.outcome is None
    last = history.last_decision()
    assert last is not None
    assert last.json["number"] == 2
    assert [record.json["number"] for record in history.decisions(limit=1)] == [2]
    assert [(launch, found.kind) for launch, _, found in history.diagnoses()] == [(1, Kind.OOM_RUNTIME)]
    history.close()
    assert warnings == []


def test_a_restarted_daemon_remembers(path: Path, warnings: list[str]) -> None:
    store = Store.open(path, warn=warnings.append)
    assert (store.next_launch(), store.next_decision()) == (1, 1)
    first_run = store.start_run(POLICY, "0.1.0", "boot")
    store.launch_started(4, POLICY.declared, ["vllm"], 5, "log", "f1")
    store.launch_proven(4, POLICY.declared, "f1")
    store.set_meta("held", {"reason": "night"})
    store.set_meta("gone", 1)
    store.set_meta("gone", None)
    settle(store)
    assert store.next_launch() == 5
    assert store.close()
    again = Store.open(path, warn=warnings.append)
    assert (again.next_launch(), again.next_decision()) == (5, 2)
    assert again.last_known_good("f1") == POLICY.declared
    assert again.last_known_good("f2") is None
    assert again.get_meta("held") == {"reason": "night"}
    assert again.get_meta("gone") is None
    assert again.start_run(POLICY, "0.1.0", "boot") == first_run + 1
    assert again.close()
    assert warnings == []


def test_old_facts_are_forgotten_when_a_run_begins(store: Store, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("supervisord_vllm.store.store.FACTS_KEPT", 10)
    first = store.start_run(POLICY, "0.1.0", "boot")
    for tick in range(30):
        store.record_fact(first, Tick(at_ns=tick))
    second = store.start_run(POLICY, "0.1.0", "boot")
    for tick in range(30):
        store.record_fact(second, Tick(at_ns=tick))
    settle(store)
    history = read(path)
    assert [fact.at_ns for fact in history.facts(first)] == list(range(20, 30))
    assert len(list(history.facts(second))) == 30
    history.close()


def test_an_exhausted_window_counts_within_its_boot_fingerprint_and_time(store: Store) -> None:
    store.start_run(POLICY, "0.1.0", "boot")
    store.set_exhausted("f1", "six restarts in an hour", until_ns=100)
    assert store.exhausted("f1", "boot", 99) == "six restarts in an hour"
    assert store.exhausted("f1", "boot", 100) is None
    assert store.exhausted("f1", "another boot", 99) is None
    assert store.exhausted("f2", "boot", 99) is None
    store.clear_exhausted()
    assert store.exhausted("f1", "boot", 99) is None


def test_a_lost_store_overwrites_no_log(path: Path, warnings: list[str]) -> None:
    launches = path.parent / "launches"
    launches.mkdir(parents=True)
    launch_log(launches, 41).write_text("it said this\n")
    launch_log(launches, 42).touch()  # space that was kept for a launch to come
    (launches / "000099.log.bak").touch()
    store = Store.open(path, warn=warnings.append)
    assert store.next_launch() == 42
    assert store.close()


def test_a_confirmed_decision_survives_kill_9(path: Path, warnings: list[str]) -> None:
    program = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from supervisord_vllm.store import Store\n"
        "from supervisord_vllm.core.decision import Decision\n"
        "from supervisord_vllm.core.diagnosis import Action, Kind\n"
        "store = Store.open(Path(sys.argv[1]), warn=print)\n"
        "assert store.record_decision(Decision(1, 7, 1, Kind.NONE, Action.WAIT, 'Waiting.')).result(20)\n"
        "print('durable', flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE, text=True) as daemon:
        assert daemon.stdout is not None
        assert daemon.stdout.readline() == "durable\n"
        daemon.send_signal(signal.SIGKILL)
    before = set(files(path))
    history = read(path)
    assert [record.json["sentence"] for record in history.decisions()] == ["Waiting."]
    history.close()
    assert set(files(path)) == before
    store = Store.open(path, warn=warnings.append)
    assert store.next_decision() == 2
    assert store.close()
    assert warnings == []


@pytest.mark.parametrize("damage", ["text", "zeros", "truncated", "foreign", "directory", "no-tables-of-ours"])
def test_an_unreadable_store_is_set_aside_and_a_new_one_begun(path: Path, warnings: list[str], damage: str) -> None:
    first = Store.open(path, warn=warnings.append)
    for number in range(1, 200):
        first.record_decision(Decision(number, 7, 1, Kind.NONE, Action.WAIT, "Waiting. " * 50))
    settle(first)
    assert first.close()
    whole = path.read_bytes()
    path.unlink()
    if damage == "text":
        path.write_text("this is no database, and it is long enough to have a header " * 20)
    elif damage == "zeros":
        path.write_bytes(whole[:4096] + bytes(len(whole) - 4096))
    elif damage == "truncated":
        path.write_bytes(whole[: len(whole) // 2])
    elif damage == "foreign":
        with sqlite3.connect(path) as other:
            other.execute("CREATE TABLE facts(x)")
        other.close()
    elif damage == "directory":
        path.mkdir()
    else:
        with sqlite3.connect(path) as other:
            other.executescript("CREATE TABLE runs(x); PRAGMA application_id = 0x764C5376; PRAGMA user_version = 1;")
        other.close()
    store = Store.open(path, warn=warnings.append)
    assert store.next_decision() == 1
    settle(store)
    assert store.close()
    assert len(warnings) == 1
    assert "set aside as history.sqlite3.unreadable-" in warnings[0]
    assert len(list(path.parent.glob("history.sqlite3.unreadable-*"))) == 1


def test_an_empty_file_is_simply_a_new_store(path: Path, warnings: list[str]) -> None:
    path.parent.mkdir()
    path.touch()
    store = Store.open(path, warn=warnings.append)
    settle(store)
    assert store.close()
    assert warnings == []


def test_a_directory_that_cannot_be_made_is_one_clear_line(tmp_path: Path, warnings: list[str]) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match=r"state directory .*file/state: .*; give another state-dir"):
        Store.open(tmp_path / "file" / "state" / "history.sqlite3", warn=warnings.append)


def test_a_hung_disk_loses_and_counts_but_never_blocks(path: Path, warnings: list[str]) -> None:
    store = Store.open(path, warn=warnings.append)
    run = store.start_run(POLICY, "0.1.0", "boot")
    disk = threading.Event()
    hung = threading.Event()

    def hang() -> list[tuple[str, tuple[object, ...]]]:
        hung.set()
        assert disk.wait(60)
        return []

    store._writer.put(Job(hang), important=True)
    assert hung.wait(20)
    for tick in range(CAPACITY + 25):
        store.record_fact(run, Tick(at_ns=tick))
    intent = store.record_decision(DECISION)  # facts cannot crowd a decision out
    assert asyncio.run(durable(intent, seconds=0.01)) is False
    assert not store.close(timeout=0.01)
    disk.set()
    assert asyncio.run(durable(intent, seconds=20)) is True
    assert store.close(timeout=60)
    assert store.lost == 25
    history = read(path)
    assert history.runs()[0].lost == 25
    assert len(list(history.facts(run))) == CAPACITY
    history.close()
    assert asyncio.run(durable(store.record_decision(DECISION))) is False  # closed: lost, not hung


def test_a_store_deleted_under_the_daemon_is_begun_anew_with_what_it_remembers(
    store: Store, path: Path, warnings: list[str]
) -> None:
    run = store.start_run(POLICY, "0.1.0", "boot")
    store.launch_proven(1, POLICY.declared, "f1")
    settle(store)
    for name in files(path):
        (path.parent / name).unlink()
    settle(store)
    assert warnings == [f"store {path} was moved or deleted; a new one is begun"]
    history = read(path)
    assert history.meta("last_known_good:f1") == {"gpu_memory_utilization": 0.9}
    assert history.policy(run) == POLICY
    history.close()


def test_a_store_torn_under_the_daemon_is_set_aside_and_nothing_is_lost(
    store: Store, path: Path, warnings: list[str]
) -> None:
    run = store.start_run(POLICY, "0.1.0", "boot")
    store.set_meta("held", True)
    settle(store)
    connection = store._writer._connection
    assert connection is not None
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(b"\xff" * (path.stat().st_size - 4096))
        os.fsync(file.fileno())
    connection.execute("PRAGMA cache_size = 0")
    connection.execute("PRAGMA shrink_memory")
    store.record_fact(run, Tick(at_ns=1))
    settle(store)
    assert store.lost == 0
    assert len(warnings) == 1
    assert "set aside" in warnings[0]
    history = read(path)
    assert history.meta("held") is True
    assert history.runs()[0].run == run
    history.close()


def test_a_reader_makes_locks_and_changes_nothing(path: Path, warnings: list[str], tmp_path: Path) -> None:
    assert History.open(path) is None
    assert not path.parent.exists()
    store = Store.open(path, warn=warnings.append)
    settle(store)
    assert store.close()
    before = files(path)
    history = read(path)
    history.decisions()
    assert files(path) == before
    store = Store.open(path, warn=warnings.append)  # a daemon starts while the reader looks
    settle(store)
    assert store.close()
    history.close()
    assert warnings == []


def test_an_unreadable_history_is_one_clear_line(path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(b"nonsense" * 1000)
    with pytest.raises(StoreError, match=r"history.sqlite3 cannot be read: file is not a database"):
        History.open(path)


def test_secrets_are_redacted_in_everything_stored(path: Path, warnings: list[str]) -> None:
    store = Store.open(path, warn=warnings.append, clean=lambda text: text.replace("hf_secret", "***"))
    run = store.start_run(POLICY, "0.1.0", "boot")
    argv = ("vllm", "--api-key=hf_secret")
    store.record_fact(run, Spawned(at_ns=1, pid=1, start_ticks=1, argv=argv, log=""))
    store.launch_started(1, Levers(), argv, 1, "log")
    store.launch_ended(1, "died of hf_secret")
    store.set_meta("held", {"reason": "hf_secret"})
    settle(store)
    store.complete_decision(1, "hf_secret")
    assert store.close()
    for file in path.parent.iterdir():
        assert b"hf_secret" not in file.read_bytes()
    history = read(path)
    assert history.launches()[0].argv == ["vllm", "--api-key=***"]
    history.close()


def test_an_entry_that_cannot_be_encoded_costs_only_itself(store: Store, warnings: list[str]) -> None:
    store._writer.put(Job(lambda: [("", ())] if int("x") else []), important=True)
    settle(store)
    assert store.lost == 1
    assert len(warnings) == 1


def test_retention_is_by_count_and_bytes_and_keeps_what_matters(tmp_path: Path) -> None:
    for number in range(1, 11):
        launch_log(tmp_path, number).write_bytes(b"x" * 8192)
    removed = prune_launch_logs(tmp_path, keep=5, max_bytes=1 << 30, protect={2})
    assert sorted(path.name for path in removed) == [f"{number:06d}.log" for number in (1, 3, 4, 5)]
    removed = prune_launch_logs(tmp_path, keep=5, max_bytes=3 * 8192, protect={2})
    assert sorted(path.name for path in removed) == ["000006.log", "000007.log"]
    removed = prune_launch_logs(tmp_path, keep=0, max_bytes=0)
    assert [path.name for path in tmp_path.iterdir()] == ["000010.log"]
    assert prune_launch_logs(tmp_path / "none", 1, 1) == []


def test_a_launch_that_never_left_the_gate_gives_its_number_to_the_next(path: Path, warnings: list[str]) -> None:
    store = Store.open(path, warn=warnings.append)
    run = store.start_run(POLICY, "0.1", "boot")
    store.record_fact(run, Exited(at_ns=4, launch=6, code=0))
    store.record_fact(run, GateSampled(at_ns=5, launch=7))
    assert store.close()
    again = Store.open(path, warn=warnings.append)
    assert again.next_launch() == 7
    assert again.close()
