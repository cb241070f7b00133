"""A disk that others filled takes neither the daemon nor its engine: the real daemon on the stand-in engine."""

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
from daemon_process import DaemonProcess, until
from supervisord_vllm.store.launch_logs import launch_log

pytestmark = pytest.mark.skipif(small_disk.missing() is not None, reason=str(small_disk.missing()))


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
