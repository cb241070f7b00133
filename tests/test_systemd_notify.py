"""sd_notify, the watchdog's interval, priorities in the journal, the unit file and its drop-in."""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from supervisord_vllm.exitcodes import ExitCode
from supervisord_vllm.host.systemd import (
    Notifier,
    Pulse,
    is_main_process,
    to_journal,
    watchdog_interval,
    with_priority,
)

UNIT = Path(__file__).parent.parent / "systemd" / "vllm-supervise@.service"
ADOPT = UNIT.with_name("adopt.conf")


@contextmanager
def _listener(address: str) -> Iterator[socket.socket]:
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)) as receiver:
        receiver.bind("\0" + address[1:] if address.startswith("@") else address)
        receiver.settimeout(10)
        yield receiver


@pytest.mark.parametrize("abstract", [False, True])
def test_what_systemd_hears(tmp_path: Path, abstract: bool) -> None:
    address = f"@supervise-test-{os.getpid()}" if abstract else str(tmp_path / "notify")
    with _listener(address) as receiver:
        notifier = Notifier({"NOTIFY_SOCKET": address})
        assert notifier
        assert notifier.ready("starting\nlaunch 1")
        assert receiver.recv(1 << 16) == b"READY=1\nSTATUS=starting\\nlaunch 1"  # a status can't smuggle an assignment
        assert notifier.status("x" * 10_000)
        assert receiver.recv(1 << 16) == b"STATUS=" + b"x" * 500
        assert notifier.watchdog()
        assert receiver.recv(1 << 16) == b"WATCHDOG=1"
        assert notifier.stopping("SIGTERM")
        assert receiver.recv(1 << 16) == b"STOPPING=1\nEXTEND_TIMEOUT_USEC=30000000\nSTATUS=SIGTERM"


def test_without_systemd_nothing_happens() -> None:
    assert not Notifier({})
    assert not Notifier({}).ready("x")
    assert not Notifier({"NOTIFY_SOCKET": "vsock:2:1234"}).ready("x")


def test_a_listener_that_is_gone_or_full_neither_blocks_nor_raises(tmp_path: Path) -> None:
    assert not Notifier({"NOTIFY_SOCKET": str(tmp_path / "none")}).watchdog()
    address = str(tmp_path / "full")
    with _listener(address):
        notifier = Notifier({"NOTIFY_SOCKET": address})
        assert not all(notifier.watchdog() for _ in range(5000))


@pytest.mark.parametrize(
    ("environ", "wanted"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "60000000"}, 30.0),
        ({"WATCHDOG_USEC": "60000000", "WATCHDOG_PID": "7"}, 30.0),
        ({"WATCHDOG_USEC": "60000000", "WATCHDOG_PID": "8"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
    ],
)
def test_the_watchdog_is_fed_twice_per_interval(environ: dict[str, str], wanted: float | None) -> None:
    assert watchdog_interval(environ, pid=7) == wanted


def test_the_unit_says_what_the_daemon_relies_on() -> None:
    settings = dict(line.split("=", 1) for line in UNIT.read_text().splitlines() if "=" in line and line[0] != "#")
    assert settings["Type"] == "notify"
    assert settings["KillMode"] == "mixed"
    assert settings["OOMPolicy"] == "continue"
    assert settings["WatchdogSec"] == "60"
    assert settings["Restart"] == "on-failure"
    final = {int(code) for code in settings["RestartPreventExitStatus"].split()}
    assert final == {ExitCode.GIVEN_UP, ExitCode.CONFIGURATION}
    assert settings["StateDirectory"] == settings["RuntimeDirectory"] == "vllm-supervise/%i"
    assert settings["ExecStart"].endswith("vllm-supervise --config /etc/vllm-supervise/%i.toml")


def test_systemd_finds_no_fault_in_the_unit(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")

    def verify(text: str) -> tuple[int, str]:
        unit = tmp_path / "vllm-supervise@.service"
        unit.write_text(text)
        argv = ["systemd-analyze", "verify", "--recursive-errors=no", "--man=no", str(unit)]
        done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)
        return done.returncode, done.stdout + done.stderr

    good = UNIT.read_text().replace("/usr/local/bin/vllm-supervise", sys.executable)
    code, said = verify(good)
    assert (code, said.count(str(tmp_path))) == (0, 0), said
    code, said = verify(good.replace("KillMode=mixed", "KillMode=mixd"))
    assert "kill mode" in said  # the check bites


@pytest.mark.parametrize(
    ("environ", "wanted"),
    [
        ({}, False),
        ({"SYSTEMD_EXEC_PID": "7", "INVOCATION_ID": "x"}, True),
        ({"SYSTEMD_EXEC_PID": "8", "INVOCATION_ID": "x", "NOTIFY_SOCKET": "/n"}, False),
        ({"INVOCATION_ID": "x"}, True),
    ],
)
def test_a_shell_in_a_unit_is_not_the_unit(environ: dict[str, str], wanted: bool) -> None:
    assert is_main_process(environ, pid=7) is wanted


def heard(receiver: socket.socket) -> list[bytes]:
    """All that has come so far."""
    receiver.setblocking(False)
    found = []
    while True:
        try:
            found.append(receiver.recv(1 << 16))
        except BlockingIOError:
            return found


def test_a_loop_that_turns_is_heard_of_and_lengthens_what_systemd_waits_for(tmp_path: Path) -> None:
    address = str(tmp_path / "notify")
    with _listener(address) as receiver:
        notifier = Notifier({"NOTIFY_SOCKET": address})
        unwatched, watched = Pulse(notifier, {}), Pulse(notifier, {"WATCHDOG_USEC": "4000000"})
        unwatched.beat(100.0, awaited=False)
        assert heard(receiver) == []
        for second in (100.0, 100.5, 101.9, 102.0, 103.0):
            watched.beat(second, awaited=False)
        assert heard(receiver) == [b"WATCHDOG=1"] * 2, "every two seconds: half of what is allowed"
        for second in (105.0, 106.0, 109.9, 110.0):
            unwatched.beat(second, awaited=True)
        assert heard(receiver) == [b"EXTEND_TIMEOUT_USEC=30000000"] * 2, "every five seconds"


def test_only_the_journals_own_stream_gets_priorities() -> None:
    read, write = os.pipe()
    try:
        found = os.fstat(write)
        journal = {"JOURNAL_STREAM": f"{found.st_dev}:{found.st_ino}"}
        assert to_journal(write, journal)
        assert not to_journal(write, {})
        assert not to_journal(write, {"JOURNAL_STREAM": "8:1"}), "a stream that was redirected since"
    finally:
        os.close(read)
        os.close(write)
    assert not to_journal(write, journal)
    assert with_priority("one\ntwo", "error") == "<3>one\n<3>two"
    assert with_priority("one", "warning") == "<4>one"
    assert with_priority("one", "no such level") == "<6>one"


def test_the_log_gives_each_line_the_priority_of_its_event(tmp_path: Path) -> None:
    """In an interpreter of its own: the set-up is the process's."""
    script = """
import os, sys
found = os.fstat(2)
os.environ["JOURNAL_STREAM"] = f"{found.st_dev}:{found.st_ino}"
from supervisord_vllm.log import configure
import structlog
log = configure(form=sys.argv[1])
structlog.get_logger().info("a")
structlog.get_logger().warning("b")
try:
    1 / 0
except ZeroDivisionError:
    structlog.get_logger().exception("c")
assert log.close()
"""
    for form in ("json", "console"):
        done = subprocess.run(
            [sys.executable, "-c", script, form], capture_output=True, text=True, check=False, timeout=60
        )
        assert done.returncode == 0, done.stderr
        lines = done.stderr.splitlines()
        assert [line[:3] for line in lines[:2]] == ["<6>", "<4>"]
        assert {line[:3] for line in lines[2:]} == {"<3>"}, "every line of a traceback"


def test_the_adoption_drop_in_keeps_the_engine_after_a_crash_only(tmp_path: Path) -> None:
    """The command of ExecStopPost=, run by a shell as systemd runs it, with a systemctl that tells of jobs."""
    (line,) = [line for line in ADOPT.read_text().splitlines() if line.startswith("ExecStopPost=")]
    named = line.partition("=")[2].replace("%i", "t").replace("%n", "vllm-supervise@t.service").replace("$$", "$")
    program, option, command = shlex.split(named)
    assert (program, option) == ("/bin/sh", "-c")
    command = command.replace("/usr/local/bin/vllm-supervise", str(tmp_path / "vllm-supervise"))
    for name, script in (("vllm-supervise", 'echo "$@"'), ("systemctl", 'test "$1" = list-jobs && echo "$JOBS"')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)

    def reaps(result: str, jobs: str = "") -> bool:
        environ = {"SERVICE_RESULT": result, "JOBS": jobs, "PATH": f"{tmp_path}:/usr/bin:/bin"}
        done = subprocess.run([program, option, command], env=environ, capture_output=True, text=True, check=True)
        assert done.stdout in ("", "reap --config /etc/vllm-supervise/t.toml\n")
        return done.stdout != ""

    for result in ("success", "exit-code", "timeout", "protocol", "oom-kill", "start-limit-hit"):
        assert reaps(result), result
    for result in ("signal", "core-dump", "watchdog"):
        assert not reaps(result), result
        assert reaps(result, "  7 vllm-supervise@t.service stop    running"), result
        assert reaps(result, "  7 vllm-supervise@t.service restart waiting"), result
        assert not reaps(result, "  7 vllm-supervise@t.service start   running"), result
        assert not reaps(result, "  7 vllm-supervise@other.service stop running"), result
