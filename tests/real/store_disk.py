"""Stories of a store on a real disk of its own, in a private mount namespace: ``unshare -m python store_disk.py …``.

A tmpfs of 1 MiB is filled up or remounted; an ext4 in a file is frozen (fsfreeze: every write hangs in the kernel until
it thaws) or thrown into read-only by an error, as a failing disk is. Each story ends with status 0 or an assertion.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from io import FileIO
from pathlib import Path

import pytest

from daemon_process import daemon, until
from supervisord_vllm.core.decision import Decision
from supervisord_vllm.core.diagnosis import Action, Kind
from supervisord_vllm.core.facts import Tick
from supervisord_vllm.core.policy import Policy
from supervisord_vllm.store import History, Store, durable
from supervisord_vllm.store import store as store_module

POLICY = Policy(name="qwen", fingerprint="f1")


def run(*argv: str) -> None:
    """A program of the system."""
    subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)


def decision(number: int) -> Decision:
    """A decision to record."""
    return Decision(number, 7, 1, Kind.NONE, Action.WAIT, "Waiting.")


class Disk:
    """A mounted disk with a store that an earlier run wrote."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.folder = folder
        self.path = folder / "history.sqlite3"
        self.filler = folder / "filler"
        self.warnings: list[str] = []
        folder.mkdir()
        if kind == "tmpfs":
            run("mount", "-t", "tmpfs", "-o", "size=1M", "tmpfs", str(folder))
        else:
            image = folder.with_suffix(".img")
            with image.open("wb") as file:
                file.truncate(16 << 20)
            run("mkfs.ext4", "-q", "-O", "^has_journal", str(image))
            run("mount", "-o", "loop,errors=remount-ro", str(image), str(folder))

    def live(self) -> None:
        """A first run: a hold and a decision."""
        store = self.open()
        store.set_meta("held", True)
        self.begin(store)
        assert store.record_decision(decision(1)).result(timeout=20)
        assert store.close()
        assert self.warnings == []

    def open(self) -> Store:
        """The store, for a daemon."""
        return Store.open(self.path, warn=self.warnings.append)

    def begin(self, store: Store) -> int:
        """Begin a run."""
        return store.start_run(POLICY, "0.1.0", "boot")

    def fill(self) -> None:
        """Not a byte is left."""
        with self.filler.open("ab", buffering=0) as file:
            for size in (4096, 1):
                with pytest.raises(OSError, match="No space left"):
                    _write_for_ever(file, bytes(size))

    def comes_back(self, store: Store, number: int) -> None:
        """It is written again, without a word from anybody."""
        until(lambda: any("written again" in line for line in self.warnings), lambda: self.warnings)
        assert store.record_decision(decision(number)).result(timeout=20)

    def decisions(self) -> list[tuple[int, object]]:
        """(run, number) of everything recorded."""
        history = History.open(self.path)
        assert history is not None
        with closing(history):
            return [(record.run, record.json["number"]) for record in history.decisions()]

    def degraded(self, reason: str) -> None:
        """One warning, with the reason; nothing was set aside."""
        assert len(self.warnings) == 1, self.warnings
        assert reason in self.warnings[0]
        assert not list(self.folder.glob("*.unreadable-*"))


def _write_for_ever(file: FileIO, block: bytes) -> None:
    while True:
        file.write(block)


def full_at_open(disk: Disk) -> None:
    """A good store is not set aside because the disk is full; what it remembers counts."""
    disk.live()
    disk.fill()
    store = disk.open()
    assert store.get_meta("held") is True
    assert store.next_decision() == 2
    disk.begin(store)
    assert store.record_decision(decision(2)).result(timeout=20) is False
    assert len(disk.warnings) == 1, disk.warnings
    assert not list(disk.folder.glob("*.unreadable-*"))
    disk.filler.unlink()
    disk.comes_back(store, 3)
    assert store.close()
    assert store.lost == 0
    assert disk.decisions() == [(1, 1), (2, 2), (2, 3)]


def full_and_new(disk: Disk) -> None:
    """A first start on a full disk: the history begins when there is room."""
    disk.fill()
    store = disk.open()
    disk.begin(store)
    assert store.record_decision(decision(1)).result(timeout=20) is False
    disk.filler.unlink()
    disk.comes_back(store, 2)
    assert store.close()
    assert disk.decisions() == [(1, 1), (1, 2)]


def full_while_running(disk: Disk) -> None:
    """Entries wait for room; those beyond the queue are lost, counted and said once."""
    disk.live()
    store = disk.open()
    number = disk.begin(store)
    assert store.record_decision(decision(2)).result(timeout=20)
    disk.fill()
    long = Decision(3, 7, 1, Kind.NONE, Action.WAIT, "Waiting. " * 5000)
    until(lambda: store.record_decision(long).result(timeout=20) is False, lambda: disk.warnings)
    begun = time.monotonic()
    for tick in range(store_module.CAPACITY + 50):
        store.record_fact(number, Tick(at_ns=tick))
    assert store.record_decision(decision(4)).result(timeout=1) is False
    assert time.monotonic() - begun < 5, "nobody waits for the disk"
    lost = store.lost
    assert lost > 0
    disk.degraded("full")
    assert disk.decisions() == [(1, 1), (2, 2)], "what was recorded can still be read"
    disk.filler.unlink()
    disk.folder.joinpath("unrelated").touch()
    run("mount", "-o", "remount,size=16M", str(disk.folder))
    disk.comes_back(store, 5)
    assert store.close(timeout=60)
    assert disk.decisions() == [(1, 1), (2, 2), (2, 3), (2, 4), (2, 5)]
    assert f"{lost} entries were lost" in disk.warnings[1]
    assert len(disk.warnings) == 2


def read_only_at_open(disk: Disk) -> None:
    """On a read-only disk a daemon begins with what it remembers, and writes when it may."""
    disk.live()
    run("mount", "-o", "remount,ro", str(disk.folder))
    store = disk.open()
    assert store.get_meta("held") is True
    disk.begin(store)
    assert store.record_decision(decision(2)).result(timeout=20) is False
    disk.degraded("Read-only file system")
    run("mount", "-o", "remount,rw", str(disk.folder))
    disk.comes_back(store, 3)
    assert store.close()
    assert disk.decisions() == [(1, 1), (2, 2), (2, 3)]


def read_only_while_running(disk: Disk) -> None:
    """An error of the disk makes the kernel throw it into read-only: nothing is fatal."""
    disk.live()
    store = disk.open()
    disk.begin(store)
    assert store.record_decision(decision(2)).result(timeout=20)
    device = next(line.split()[0] for line in Path("/proc/mounts").read_text().splitlines() if str(disk.folder) in line)
    Path(f"/sys/fs/ext4/{Path(device).name}/trigger_fs_error").write_text("a test")
    with pytest.raises(OSError, match="Read-only"):
        disk.filler.touch()
    assert store.record_decision(decision(3)).result(timeout=20) is False
    assert len(disk.warnings) == 1, disk.warnings
    assert store.close()
    assert store.lost >= 1


def frozen_while_running(disk: Disk) -> None:
    """A disk that hangs: nobody waits longer than 2 s for it, and what waited is written when it thaws."""
    disk.live()
    store = disk.open()
    number = disk.begin(store)
    assert store.record_decision(decision(2)).result(timeout=20)
    run("fsfreeze", "-f", str(disk.folder))
    try:
        begun = time.monotonic()
        assert asyncio.run(durable(store.record_decision(decision(3)))) is False
        for tick in range(store_module.CAPACITY + 50):
            store.record_fact(number, Tick(at_ns=tick))
        assert time.monotonic() - begun < 10
        assert not store.close(timeout=0.5), "it hangs, truly"
    finally:
        run("fsfreeze", "-u", str(disk.folder))
    assert store.close(timeout=60)
    assert store.lost >= 50
    assert disk.decisions() == [(1, 1), (2, 2), (2, 3)]


def frozen_at_open(disk: Disk) -> None:
    """A disk that hangs at the start: the daemon begins without it."""
    disk.live()
    store_module.OPEN_S = 0.5
    run("fsfreeze", "-f", str(disk.folder))
    try:
        store = disk.open()
        disk.begin(store)
        store.record_decision(decision(store.next_decision()))
        assert "does not open within 0.5 s" in disk.warnings[0]
        assert not store.close(timeout=0.5), "it hangs, truly"
    finally:
        run("fsfreeze", "-u", str(disk.folder))
    assert store.close(timeout=60)
    assert disk.decisions() == [(1, 1), (2, 1)]


def daemon_while_frozen(disk: Disk) -> None:
    """The whole daemon: while its disk hangs it answers, sees the engine die and decides; then it recovers."""
    with daemon(ladder="") as it:
        (it.folder / "state").symlink_to(disk.folder)
        text = it.policy.read_text()
        rogue = Path(__file__).parents[1] / "chaos" / "rogue.py"
        text = text.replace('"-m", "supervisord_vllm.simulation", "serve"', f'"-S", "{rogue}", "serve"')
        text = text.replace("[engine.env]", f'[engine.env]\nROGUE_FOLDER = "{it.folder}"\nROGUE_PLAN = "[]"')
        it.policy.write_text(text)
        it.start()
        pid = it.reaches("serving")["launch"]["pid"]
        run("fsfreeze", "-f", str(disk.folder))
        try:
            os.kill(pid, signal.SIGKILL)
            slowest = 0.0
            until(lambda: (it.status().get("decision") or {}).get("launch") == 1, it.told)
            begun = time.monotonic()
            while time.monotonic() - begun < 5:  # the next launch wants its log, on the disk that hangs
                asked = time.monotonic()
                assert it.status(), it.told()
                slowest = max(slowest, time.monotonic() - asked)
                time.sleep(0.1)
            assert it.status()["state"] != "serving", "it hangs, truly"
            assert slowest < 5, f"the daemon did not answer for {slowest:.1f} s"
        finally:
            run("fsfreeze", "-u", str(disk.folder))
        it.reaches("serving", 2)
        assert it.term() == 0
        (record,) = it.history()["decisions"]
        assert record["launch"] == 1
        assert record["outcome"], "what was decided while it hung is in the history"


STORIES: dict[str, tuple[str, Callable[[Disk], None]]] = {
    "full-at-open": ("tmpfs", full_at_open),
    "full-and-new": ("tmpfs", full_and_new),
    "full-while-running": ("tmpfs", full_while_running),
    "read-only-at-open": ("tmpfs", read_only_at_open),
    "read-only-while-running": ("ext4", read_only_while_running),
    "frozen-while-running": ("ext4", frozen_while_running),
    "frozen-at-open": ("ext4", frozen_at_open),
    "daemon-while-frozen": ("ext4", daemon_while_frozen),
}


def main() -> None:
    """One story in the folder that is named."""
    kind, story = STORIES[sys.argv[1]]
    disk = Disk(Path(sys.argv[2]) / "disk", kind)
    try:
        story(disk)
    finally:
        os.chdir("/")
        run("umount", str(disk.folder))


if __name__ == "__main__":
    main()
