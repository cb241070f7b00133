"""`vllm-supervise logs`: what a launch printed, without a daemon, without secrets, and without the holes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from supervisord_vllm.cli.logs import spans
from supervisord_vllm.holes import punch
from supervisord_vllm.store.launch_logs import launch_log

ROOT = Path(__file__).parent.parent
PROGRAM = [sys.executable, "-m", "supervisord_vllm.cli.main", "logs"]
PATIENT_S = 60.0


def environment() -> dict[str, str]:
    ours = {name: value for name, value in os.environ.items() if not name.startswith("SUPERVISE_")}
    return {**ours, "PYTHONPATH": str(ROOT), "NO_COLOR": "1", "COLUMNS": "120"}


def run(state_dir: Path, *words: str) -> subprocess.CompletedProcess[bytes]:
    command = [*PROGRAM, "--state-dir", str(state_dir), *words]
    return subprocess.run(command, env=environment(), capture_output=True, timeout=PATIENT_S, check=False)


@pytest.fixture
def state_dir(tmp_path: Path) -> Path:
    (tmp_path / "launches").mkdir()
    return tmp_path


def written(state_dir: Path, number: int, content: bytes) -> Path:
    path = launch_log(state_dir / "launches", number)
    with path.open("ab") as file:
        file.write(content)
    return path


class Followed:
    """`logs -f` as a child, its lines as they come."""

    def __init__(self, state_dir: Path, *words: str) -> None:
        command = [*PROGRAM, "-f", "--state-dir", str(state_dir), *words]
        self.process = subprocess.Popen(
            command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0
        )
        # A child that never says anything must not hold up the suite.
        self._limit = threading.Timer(PATIENT_S, self.process.kill)
        self._limit.start()

    def line(self) -> bytes:
        assert self.process.stdout is not None
        line = bytearray()
        while not line.endswith(b"\n"):
            byte = self.process.stdout.read(1)
            assert byte, "it ended"
            line += byte
        return bytes(line)

    def close(self) -> None:
        self._limit.cancel()
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdout, self.process.stderr):
            assert stream is not None
            stream.close()


@contextmanager
def followed(state_dir: Path, *words: str) -> Iterator[Followed]:
    follower = Followed(state_dir, *words)
    try:
        yield follower
    finally:
        follower.close()


def test_the_last_launch_is_printed_or_the_one_that_is_asked_for(state_dir: Path) -> None:
    written(state_dir, 3, b"third\n")
    written(state_dir, 12, b"one\n\ntorn")
    done = run(state_dir)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"one\n\ntorn\n", b"")
    assert run(state_dir, "--launch", "3").stdout == b"third\n"
    refused = run(state_dir, "--launch", "4")
    assert (refused.returncode, refused.stdout) == (3, b"")
    assert refused.stderr == b"vllm-supervise: launch 4 has no log; there are those of 3, 12\n"


def test_no_log_is_one_line(state_dir: Path) -> None:
    done = run(state_dir)
    assert done.returncode == 3
    assert b"no launch has a log in" in done.stderr
    assert done.stderr.count(b"\n") == 1


def test_numbers_are_told_in_spans() -> None:
    assert spans([1, 2, 3, 7, 9, 10]) == "1-3, 7, 9-10"


def test_where_space_was_given_up_one_line_says_how_much(state_dir: Path) -> None:
    lines = [b"line %06d of the engine's output" % number for number in range(20_000)]
    path = written(state_dir, 1, b"\n".join(lines) + b"\n")
    file = os.open(path, os.O_RDWR)
    first, last = punch(file, 100_000, 500_000)
    os.close(file)
    out = run(state_dir).stdout.splitlines()
    told = [line for line in out if line.startswith(b"vllm-supervise: ")]
    assert told == [b"vllm-supervise: %d bytes of this log were given up for space" % (last - first)]
    size = len(lines[0]) + 1
    at = out.index(told[0])
    assert out[: at - 1] == lines[: first // size]
    assert lines[first // size].startswith(out[at - 1])
    assert out[at + 1 :] == lines[last // size + 1 :]


def test_secrets_are_taken_out_and_with_a_policy_also_its_own(state_dir: Path, tmp_path: Path) -> None:
    written(state_dir, 1, b"\x1b[31mHF_TOKEN=abcdefgh\x1b[0m and plain-secret-7\nbell \x07 \xff\n")
    assert run(state_dir).stdout == b"HF_TOKEN=*** and plain-secret-7\nbell \\x07 \\xff\n"
    key = tmp_path / "key"
    key.write_text("plain-secret-7\n")
    key.chmod(0o600)
    policy = tmp_path / "qwen.toml"
    policy.write_text(
        f'schema = 1\nstate-dir = "{state_dir}"\n[engine]\nmodel = "small"\nport = 8000\napi-key-file = "{key}"\n'
    )
    command = [*PROGRAM, "--config", str(policy)]
    done = subprocess.run(command, env=environment(), capture_output=True, timeout=PATIENT_S, check=False)
    assert (done.stdout, done.stderr) == (b"HF_TOKEN=*** and ***\nbell \\x07 \\xff\n", b"")
    policy.write_text(f'schema = 1\nstate-dir = "{state_dir}"\n')
    done = subprocess.run(command, env=environment(), capture_output=True, timeout=PATIENT_S, check=False)
    assert b"plain-secret-7" in done.stdout
    assert done.stderr.startswith(b"vllm-supervise: the policy's own secrets are not known (")


def test_following_prints_what_comes_and_goes_on_with_the_next_launch(state_dir: Path) -> None:
    written(state_dir, 1, b"old\n")
    with followed(state_dir) as follower:
        assert follower.line() == b"old\n"
        for number in range(3):
            written(state_dir, 1, b"new %d\n" % number)
            assert follower.line() == b"new %d\n" % number
        written(state_dir, 1, b"last words")
        (state_dir / "launches" / "next").touch()
        (state_dir / "launches" / "next").rename(launch_log(state_dir / "launches", 2))
        written(state_dir, 2, b"again\n")
        assert follower.line() == b"last words\n"
        assert follower.line() == b"again\n"
        follower.process.send_signal(signal.SIGINT)
        assert follower.process.wait(PATIENT_S) == 0
        assert follower.process.stderr is not None
        assert follower.process.stderr.read() == b"vllm-supervise: launch 2\n"


def test_following_one_launch_ends_when_a_later_one_has_begun(state_dir: Path) -> None:
    written(state_dir, 1, b"old\n")
    with followed(state_dir, "--launch", "1") as follower:
        assert follower.line() == b"old\n"
        written(state_dir, 2, b"not this\n")
        assert follower.process.wait(PATIENT_S) == 0
        assert follower.process.stdout is not None
        assert follower.process.stdout.read() == b""


def test_a_reader_that_goes_away_ends_it_though_the_engine_is_silent(state_dir: Path) -> None:
    written(state_dir, 1, b"only\n")
    with followed(state_dir) as follower:
        assert follower.line() == b"only\n"
        assert follower.process.stdout is not None
        follower.process.stdout.close()
        assert follower.process.wait(PATIENT_S) == 0
        assert follower.process.stderr is not None
        assert follower.process.stderr.read() == b""


def test_memory_is_bounded_whatever_the_log(state_dir: Path) -> None:
    path = written(state_dir, 1, b"begin\n")
    with path.open("ab") as file:
        for _ in range(64):
            file.write(b"x" * (1 << 20))
        file.write(b"\nend\n")
    # The child has room for itself and not for the line.
    limit = 40 << 20
    program = (
        "import resource, sys\nfrom pathlib import Path\nfrom supervisord_vllm.cli.logs import logs\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        f"resource.setrlimit(resource.RLIMIT_AS, (used + {limit}, used + {limit}))\n"
        "logs(state_dir=Path(sys.argv[1]))\n"
        "heavy = {'aiohttp', 'pydantic', 'structlog', 'pynvml'} & set(sys.modules)\n"
        "print('heavy:', sorted(heavy))\n"
    )
    command = [sys.executable, "-c", program, str(state_dir)]
    done = subprocess.run(command, capture_output=True, env=environment(), timeout=PATIENT_S, check=False, cwd=ROOT)
    lines = done.stdout.splitlines()
    assert [line[:5] for line in lines[:1] + lines[2:]] == [b"begin", b"end", b"heavy"], done.stderr
    assert len(lines[1]) == 64 << 10
    assert lines[-1] == b"heavy: []"
