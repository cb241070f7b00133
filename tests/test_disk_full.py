"""Engines that print for ever and disks that others filled take neither the daemon nor its engine."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import small_disk
from daemon_process import DaemonProcess, daemon, until
from supervisord_vllm.holes import DataReader, data_from
from supervisord_vllm.store.launch_logs import launch_log

pytestmark = pytest.mark.slow

MIB = 1 << 20
FLOOD = """
import time
for number in range(1024):
    print(f"{number:010d}" + "x" * 16_373)
print("end", flush=True)
time.sleep(600)
"""


class OnSmallDisk(DaemonProcess):
    """An instance whose state directory is a disk of its own."""

    def start(self, *words: str) -> None:
        """Start the daemon."""
        state = self.folder / "state"
        state.mkdir()
        command = [sys.executable, "-m", "supervisord_vllm.cli.main", "run", "--config", str(self.policy), *words]
        argv = small_disk.command("48m", str(state), *command)
        with self.errors.open("a") as errors, self.output.open("a") as output:
            self.process = subprocess.Popen(argv, stdout=output, stderr=errors, stdin=subprocess.DEVNULL, text=True)

    @property
    def state_dir(self) -> Path:
        """The state directory, as the daemon sees it."""
        assert self.process is not None
        return Path(f"/proc/{self.process.pid}/root{self.folder}/state")

    def log(self, launch: int) -> str:
        """The output of a launch; empty before there is any."""
        path = launch_log(self.state_dir / "launches", launch)
        return path.read_text() if path.exists() else ""

    def fill(self) -> None:
        """Leave no block of the disk free."""
        with (self.state_dir / "ballast").open("ab", buffering=0) as ballast:
            for size in (1 << 20, 1 << 12):
                try:
                    while ballast.write(bytes(size)) == size:
                        pass
                except OSError:
                    continue
        disk = os.statvfs(self.state_dir)
        assert disk.f_bfree == 0


@pytest.fixture
def full() -> Iterator[OnSmallDisk]:
    folder = Path(tempfile.mkdtemp(prefix="vs-", dir="/tmp"))
    instance = OnSmallDisk(folder)
    try:
        yield instance
    finally:
        instance.close()
        shutil.rmtree(folder)


def data_in(path: Path) -> int:
    """The bytes of a file that are no hole."""
    with path.open("rb") as file:
        size = position = 0
        while stretch := data_from(file.fileno(), position):
            size += stretch[1] - stretch[0]
            position = stretch[1]
    return size


@pytest.mark.skipif(small_disk.missing() is not None, reason=str(small_disk.missing()))
def test_on_a_full_disk_the_engine_serves_prints_and_is_restarted(full: OnSmallDisk) -> None:
    full.start()
    first = full.reaches("serving", 1)
    full.fill()
    before = full.log(1)
    assert [full.complete()[0] for _ in range(20)] == [200] * 20
    until(lambda: len(full.log(1)) > len(before) + 500, lambda: full.log(1)[-2000:])
    assert "\0" not in full.log(1)
    os.kill(first["launch"]["pid"], 9)
    second = full.reaches("serving", 2)
    assert second["decision"]["action"] == "restart_same"
    assert "Starting vLLM" in full.log(2) or "vLLM API server version" in full.log(2), full.log(2)
    assert full.complete()[0] == 200
    until(lambda: "MiB left: launch logs lose" in full.told(), full.told)
    (full.state_dir / "ballast").unlink()
    until(lambda: "has room again" in full.told(), full.told)
    assert full.term() == 0


def test_the_log_of_an_engine_that_prints_for_ever_is_bounded_and_its_positions_stay() -> None:
    with daemon() as flooded:
        program = flooded.folder / "flood.py"
        program.write_text(FLOOD)
        text = flooded.policy.read_text().replace('"-m", "supervisord_vllm.simulation", "serve"', f'"{program}"')
        flooded.policy.write_text(text + 'engine-output = false\nkeep-launch-bytes = "8MiB"\n')
        flooded.start()
        log = launch_log(flooded.folder / "state" / "launches", 1)
        until(lambda: log.exists() and log.stat().st_size == 16 * MIB + 4, flooded.told)
        # Head and end, and a step between two holes.
        until(lambda: data_in(log) <= 8 * MIB + MIB // 2 + (64 << 10), lambda: data_in(log))
        with log.open("rb", buffering=0) as file:
            reader = DataReader(file.fileno())
            lines = b"".join(iter(lambda: reader.read(MIB), b"")).splitlines()
        numbers = [int(line[:10]) for line in lines if len(line) == 16_383]
        head = 4 * MIB >> 14
        assert numbers[:head] == list(range(head))
        assert numbers[head:] == list(range(1024 - len(numbers) + head, 1024))
        assert lines[-1] == b"end"
