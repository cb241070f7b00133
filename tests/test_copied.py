"""The copy of the engine's output: where it was left, whatever killed the daemon."""

from __future__ import annotations

import fcntl
import os
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

import small_disk
from supervisord_vllm.log import EngineOutput
from supervisord_vllm.store.copied import CopiedCursor, Place, copied_position

ROOT = Path(__file__).parent.parent
PATIENT_S = 60.0
LINE = 96
PIPE = 4096


def test_the_place_is_that_of_the_last_launch_that_was_copied(tmp_path: Path) -> None:
    assert copied_position(tmp_path, 1) is None
    cursor = CopiedCursor(tmp_path)
    assert copied_position(tmp_path, 1) == 0
    cursor.keep(Place(7, 123_456_789_012))
    assert copied_position(tmp_path, 7) == 123_456_789_012
    assert copied_position(tmp_path, 8) == 0, "nothing of a later launch was copied"
    assert copied_position(tmp_path, 6) is None, "the numbers began anew: nothing is known"
    cursor.close()
    CopiedCursor(tmp_path).close()
    assert copied_position(tmp_path, 7) == 123_456_789_012, "a new daemon changes nothing"
    (tmp_path / "copied").write_bytes(b"000000000007 0000")
    assert copied_position(tmp_path, 7) is None
    CopiedCursor(tmp_path).close()
    assert copied_position(tmp_path, 7) == 0


def test_a_place_passes_once_its_line_was_written_or_dropped(tmp_path: Path) -> None:
    read_end, write_end = os.pipe()
    fcntl.fcntl(write_end, fcntl.F_SETPIPE_SZ, 4096)
    output = EngineOutput(descriptor=write_end)
    output.keep_place(tmp_path)
    output.line("x" * 2000, Place(1, 2001))
    output.line("y" * 2000, Place(1, 4002))
    output.line("z" * 2000, Place(1, 6003))
    awaited(tmp_path, 1, 4002)  # the third finds no room in the pipe
    os.close(read_end)
    awaited(tmp_path, 1, 6003)
    assert output.close(30)
    assert output.dropped >= 1
    os.close(write_end)


def awaited(directory: Path, launch: int, position: int) -> None:
    deadline = time.monotonic() + PATIENT_S
    while copied_position(directory, launch) != position:
        assert time.monotonic() < deadline, copied_position(directory, launch)
        time.sleep(0.01)


DAEMON = """
import asyncio, sys
from pathlib import Path
from supervisord_vllm.engine.tail import tail
from supervisord_vllm.log import EngineOutput
from supervisord_vllm.store.copied import Place, copied_position

directory = Path(sys.argv[1])
output = EngineOutput()
output.keep_place(directory)

async def copy():
    ended = asyncio.Event()
    ended.set()
    copied = copied_position(directory, 5)
    async for lines in tail(directory / "000005.log", stopped=ended):
        for line, end in zip(lines, lines.ends):
            if end > copied:
                output.line(line, Place(5, end))

asyncio.run(copy())
sys.exit(not output.close(60))
"""


def _until_it_hangs(directory: Path, pipe: int, read: int, everything: int) -> None:
    """Until the pipe takes no further line and the place of the last is noted, or there is no further line."""
    deadline = time.monotonic() + PATIENT_S
    while True:
        (waiting,) = struct.unpack("i", fcntl.ioctl(pipe, termios.FIONREAD, b"\0" * 4))
        noted = copied_position(directory, 5) == read + waiting  # these lines are copied byte by byte
        if noted and (waiting + LINE > PIPE or read + waiting == everything):
            return
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("read", [1, 400, 1999])
def test_after_a_kill_the_copy_goes_on_with_no_line_lost_or_doubled(tmp_path: Path, read: int) -> None:
    """The daemon hangs in a write to a reader that stopped reading: a kill there falls between no two writes."""
    lines = [b"line %06d %s" % (number, b"." * (LINE - 13)) for number in range(2000)]
    (tmp_path / "000005.log").write_bytes(b"\n".join(lines) + b"\n")
    received = b""
    for wanted in (read, len(lines)):
        command = [sys.executable, "-c", DAEMON, str(tmp_path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT, bufsize=0) as daemon:
            assert daemon.stdout is not None
            fcntl.fcntl(daemon.stdout.fileno(), fcntl.F_SETPIPE_SZ, PIPE)
            while received.count(b"\n") < wanted:
                data = daemon.stdout.read(1 << 16)  # all there is: a page is only used again when it is empty
                assert data, received[-200:]
                received += data
            _until_it_hangs(tmp_path, daemon.stdout.fileno(), len(received), len(lines) * LINE)
            daemon.send_signal(signal.SIGKILL)
            daemon.wait()
            received += daemon.stdout.read()
    assert received.splitlines() == lines


FULL = """
import os, sys
from pathlib import Path
from supervisord_vllm.log import EngineOutput
from supervisord_vllm.store.copied import Place, copied_position

folder = Path(sys.argv[1])
out = os.open(folder / "out", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
output = EngineOutput(descriptor=out)
output.keep_place(folder)
with open(folder / "ballast", "ab", buffering=0) as ballast:
    for size in (1 << 16, 1 << 12):
        try:
            while ballast.write(bytes(size)) == size:
                pass
        except OSError:
            pass

def copied(number):
    output.line(b"%06d" % number + b"." * 500, Place(1, number))
    while copied_position(folder, 1) != number:
        pass

for number in range(1, 101):
    copied(number)
assert output.dropped > 0
(folder / "ballast").unlink()
for number in range(101, 104):
    copied(number)
lines = (folder / "out").read_bytes().splitlines()
told = [line for line in lines if line.startswith(b"vllm-supervise: ")]
whole = [int(line[:6]) for line in lines if len(line) == 506]
assert whole[-3:] == [101, 102, 103], whole
assert len(told) == 1 and int(told[0].split()[1]) == output.dropped, told
assert len(whole) + output.dropped == 103
"""


@pytest.mark.skipif(small_disk.missing() is not None, reason=str(small_disk.missing()))
def test_a_full_disk_behind_the_copy_costs_lines_that_are_counted_and_no_place(tmp_path: Path) -> None:
    small_disk.python("256k", str(tmp_path), FULL)
