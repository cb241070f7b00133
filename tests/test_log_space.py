"""A launch's log: bounded where it was read, with space reserved ahead, and what stays of past ones."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

import small_disk
from supervisord_vllm import holes
from supervisord_vllm.api import Exporter
from supervisord_vllm.chronicle import Chronicle
from supervisord_vllm.core.policy import Policy
from supervisord_vllm.holes import DataReader
from supervisord_vllm.store import Store, log_space
from supervisord_vllm.store.launch_logs import (
    launch_log,
    launch_numbers,
    prepare_launch_log,
    prune_launch_logs,
    shorten_past_logs,
)
from supervisord_vllm.store.log_space import HEAD_BYTES, Disk, LogSpace, trim

MIB = 1 << 20
ROOM = Disk(free=100 << 30, total=200 << 30)
LOW = Disk(free=100 * MIB, total=200 << 30)
needs_mount = pytest.mark.skipif(small_disk.missing() is not None, reason=str(small_disk.missing()))


def on_disk(path: Path) -> int:
    return path.stat().st_blocks * 512


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> list[Disk]:
    """What the disk is said to be; the last counts."""
    said = [ROOM]
    monkeypatch.setattr(Disk, "of", classmethod(lambda _, path: said[-1]))
    return said


class Written:
    """A log that grows line by line, and its space."""

    def __init__(self, path: Path, bound: int) -> None:
        self.path = path
        self.told: list[str] = []
        self.lows = 0
        self.space = LogSpace(path, bound, self.told.append, self._low)
        self._number = 0
        path.touch()

    def _low(self) -> None:
        self.lows += 1

    def grow(self, size: int) -> int:
        """Append whole lines of about this many bytes; the size of the file after it."""
        with self.path.open("ab") as file:
            for _ in range(size // 64):
                file.write(b"%010d" % self._number + b"." * 53 + b"\n")
                self._number += 1
        return self.path.stat().st_size

    def numbers(self) -> list[int]:
        """Of the whole lines that a reader still finds."""
        with self.path.open("rb", buffering=0) as file:
            reader = DataReader(file.fileno())
            lines = b"".join(iter(lambda: reader.read(MIB), b"")).split(b"\n")
        return [int(line[:10]) for line in lines if len(line) == 63]


def test_a_log_of_any_length_takes_its_bound_and_keeps_head_end_and_positions(tmp_path: Path, disk: list[Disk]) -> None:
    disk.append(Disk(free=100 << 30, total=16 * MIB))  # a small reserve
    log = Written(tmp_path / "000001.log", bound=2 * MIB)
    size = 0
    for _ in range(40):
        size = log.grow(MIB // 4)
        if log.space.due(size):
            log.space.keep(size)
        assert on_disk(log.path) <= 2 * MIB + MIB // 4 + 2 * MIB // 16 + Disk.of(tmp_path).reserve + 8192
    assert size == 10 * MIB == log.path.stat().st_size
    numbers = log.numbers()
    head = Disk.of(tmp_path).reserve // 2 // 64
    assert numbers[:head] == list(range(head)), "the head"
    kept = (MIB - 2 * MIB // 16) // 64
    assert numbers[-kept:] == list(range(size // 64 - kept, size // 64)), "the end"
    assert log.told == []


def test_what_was_not_read_is_never_given_up(tmp_path: Path, disk: list[Disk]) -> None:
    log = Written(tmp_path / "000001.log", bound=MIB)
    size = log.grow(8 * MIB)
    disk.append(LOW)
    log.space.keep(2 * MIB)
    # A reader cannot know that the line right behind a hole is whole.
    assert log.numbers()[-(6 * MIB // 64) + 1 :] == list(range(2 * MIB // 64 + 1, size // 64))


def test_while_the_disk_is_low_all_that_was_read_goes_but_the_head_and_it_is_said_once(
    tmp_path: Path, disk: list[Disk]
) -> None:
    log = Written(tmp_path / "000001.log", bound=256 * MIB)
    size = log.grow(10 * MIB)
    log.space.keep(size)
    assert len(log.numbers()) == size // 64
    disk.append(LOW)
    for _ in range(3):
        log.space.keep(size)
    assert log.numbers() == list(range(HEAD_BYTES // 64))
    assert log.lows == 1
    disk.append(Disk(free=LOW.low_mark + 1, total=LOW.total))
    log.space.keep(size)
    disk.append(ROOM)
    for _ in range(3):
        log.space.keep(log.grow(MIB))
    low, room = log.told
    assert "has 100 MiB left" in low
    assert "has room again" in room
    assert len(log.numbers()) == (HEAD_BYTES + 3 * MIB) // 64 - 1


def test_a_file_system_without_holes_or_reserve_is_said_once_each(
    tmp_path: Path, disk: list[Disk], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_file: int, _mode: int, _start: int, _size: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(holes, "_fallocate", refuse)
    log = Written(tmp_path / "000001.log", bound=MIB)
    for _ in range(20):
        size = log.grow(MIB // 4)
        log.space.keep(size)
    assert [text.rpartition(" ")[2] for text in log.told] == ["lines", "says"]
    assert not log.space.due(size)
    assert len(log.numbers()) == size // 64


def test_a_failing_disk_or_a_missing_log_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = LogSpace(tmp_path / "none", MIB, pytest.fail, lambda: None)
    gone.keep(0)
    log = Written(tmp_path / "000001.log", bound=MIB)

    def fail(_file: int, _mode: int, _start: int, _size: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(holes, "_fallocate", fail)
    log.space.keep(log.grow(4 * MIB))
    assert log.told == []


def test_space_is_reserved_behind_the_end_and_moves_with_it(tmp_path: Path, disk: list[Disk]) -> None:
    log = Written(tmp_path / "000001.log", bound=256 * MIB)
    log.space.keep(0)
    reserve = ROOM.reserve
    assert (log.path.stat().st_size, on_disk(log.path)) == (0, reserve)
    size = log.grow(reserve // 2)
    log.space.keep(size)
    assert on_disk(log.path) == size + reserve
    when = log.path.stat().st_mtime_ns
    trim(log.path)
    assert on_disk(log.path) <= size + 8192
    assert (log.path.stat().st_size, log.path.stat().st_mtime_ns) == (size, when)


def test_the_next_log_lies_ready_and_past_ones_reserve_nothing(tmp_path: Path, disk: list[Disk]) -> None:
    first = prepare_launch_log(tmp_path, 1)
    assert first == launch_log(tmp_path, 1)
    assert on_disk(first) == on_disk(tmp_path / "next") == ROOM.reserve
    assert first.stat().st_mode & 0o777 == 0o600
    inode = (tmp_path / "next").stat().st_ino
    first.write_bytes(b"x" * 5000)
    assert prepare_launch_log(tmp_path, 2).stat().st_ino == inode
    assert on_disk(first) == 8192
    assert launch_numbers(tmp_path) == [1, 2]
    disk.append(LOW)
    first.write_bytes(b"x" * (HEAD_BYTES + 8 * MIB))
    shorten_past_logs(tmp_path, 2)
    assert on_disk(first) == HEAD_BYTES + log_space.END_BYTES


def test_a_log_that_exists_is_not_replaced(tmp_path: Path) -> None:
    prepare_launch_log(tmp_path, 1)
    launch_log(tmp_path, 2).write_bytes(b"earlier")
    assert prepare_launch_log(tmp_path, 2).read_bytes() == b"earlier"


def test_a_folder_that_cannot_be_written_is_left_to_the_spawn(tmp_path: Path) -> None:
    assert prepare_launch_log(tmp_path / "none", 1) == tmp_path / "none" / "000001.log"


def test_first_launches_of_incidents_stay_longest_but_take_no_more_than_half(tmp_path: Path) -> None:
    def logs(count: int) -> None:
        for number in range(1, count + 1):
            launch_log(tmp_path, number).write_bytes(b"x" * 8192)

    logs(20)
    prune_launch_logs(tmp_path, 6, 1 << 30, firsts={3, 9})
    assert launch_numbers(tmp_path) == [3, 9, 17, 18, 19, 20]
    logs(20)
    prune_launch_logs(tmp_path, 6, 1 << 30, firsts=range(1, 21, 2))
    assert launch_numbers(tmp_path) == [15, 16, 17, 18, 19, 20]
    logs(20)
    prune_launch_logs(tmp_path, 50, 6 * 8192, protect={2}, firsts={5, 6})
    assert launch_numbers(tmp_path) == [2, 5, 6, 17, 18, 19, 20]


class Nobody:
    """An exporter's daemon that nobody asks."""

    def snapshot(self) -> object:
        raise AssertionError


def chronicle(store: Store) -> Chronicle:
    return Chronicle(store, Exporter(Nobody(), "1"), Policy("p"))  # type: ignore[arg-type]  # only what it counts with


def test_with_which_launches_incidents_began_is_known_to_the_daemons_after(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "history.sqlite3", warn=lambda text: None)
    told = chronicle(store)
    assert told.first_launches(1, 1) == set(), "no launch has failed"
    assert told.first_launches(2, 2) == {1}, "the first start failed"
    assert told.first_launches(3, 3) == {1}
    # Launch 3 is proven, fails later, and so do 4 and 5.
    assert told.first_launches(4, 1) == {1}
    assert told.first_launches(5, 2) == told.first_launches(6, 3) == {1, 3, 4}
    store.close()
    store = Store.open(tmp_path / "history.sqlite3", warn=lambda text: None)
    assert chronicle(store).first_launches(7, 1) == {1, 3, 4}
    for number in range(10, 1000, 10):
        chronicle(store).first_launches(number, 2)
    assert len(chronicle(store).first_launches(1000, 1)) == 100
    store.set_meta("first_launches", ["nonsense", 8, {}])
    assert chronicle(store).first_launches(1000, 1) == {8}
    store.close()


FULL = """
import os, sys
from pathlib import Path
from supervisord_vllm.store.launch_logs import prepare_launch_log
from supervisord_vllm.store.log_space import Disk, LogSpace

folder, told = Path(sys.argv[1]), []

def fill():
    with open(folder / "ballast", "ab", buffering=0) as ballast:
        size = 1 << 20
        while size >= 4096:
            try:
                ballast.write(bytes(size))
            except OSError:
                size //= 2

log = prepare_launch_log(folder, 1)
space = LogSpace(log, 4 << 20, told.append, lambda: None)
space.keep(0)
fill()
assert Disk.of(folder).free == 0
engine = os.open(log, os.O_WRONLY | os.O_APPEND)  # as the engine's standard output
line = b"x" * 4095 + b"\\n"
size = 0
# Eight times the disk's reserve goes through the log: what is read makes room for what comes.
for _ in range(8 * Disk.of(folder).reserve * 4 // len(line)):
    assert os.write(engine, line) == len(line)
    size += len(line)
    if size % (1 << 16) == 0:
        space.keep(size)
        fill()
assert log.stat().st_size == size, "lines were lost"
# The next launch can begin and print on the full disk.
os.close(engine)
log = prepare_launch_log(folder, 2)
fill()
engine = os.open(log, os.O_WRONLY | os.O_APPEND)
for _ in range(Disk.of(folder).reserve // len(line)):
    assert os.write(engine, line) == len(line)
print(*told, sep="\\n")
"""


@needs_mount
def test_on_a_full_disk_the_engine_goes_on_printing_and_a_next_one_can_start(tmp_path: Path) -> None:
    (told,) = small_disk.python("64m", str(tmp_path), FULL).splitlines()
    assert "launch logs lose what was read" in told
