"""sd_notify, the watchdog's interval and the unit file."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from supervisord_vllm.exitcodes import ExitCode
from supervisord_vllm.host.systemd import Notifier, watchdog_interval

UNIT = Path(__file__).parent.parent / "systemd" / "vllm-supervise@.service"


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
        assert receiver.recv(1 << 16) == b"STOPPING=1\nSTATUS=SIGTERM"


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
