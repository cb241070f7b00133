"""Judging the machine before a launch."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from typer.testing import CliRunner

from family import stranger
from supervisord_vllm.cli.main import app
from supervisord_vllm.config import Settings, load
from supervisord_vllm.host.preflight import Finding, Report, inspect
from supervisord_vllm.simulation.shared_card import SharedCard

GIB = 1 << 30
Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a good policy on a simulated H200, with some words exchanged."""

    def _write(*changes: tuple[str, str], more: str = "") -> Path:
        (tmp_path / "model").mkdir(exist_ok=True)
        (tmp_path / "model" / "config.json").write_text("{}")
        text = f"""
schema = 1
name = "t"
state-dir = "{tmp_path}/state"
runtime-dir = "{tmp_path}/run"
[engine]
command = ["/bin/true", "serve"]
model = "{tmp_path}/model"
port = {_free_port()}
[levers]
gpu-memory-utilization = 0.90
[[ladder]]
lever = "gpu-memory-utilization"
min = 0.70
[memory]
source = "card:{tmp_path}/card.json"
[http]
listen = ""
{more}"""
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        path = tmp_path / "t.toml"
        path.write_text(text)
        return path

    return _write


def _free_port() -> int:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _settings(path: Path) -> Settings:
    return load(path, environ={"PATH": os.environ["PATH"]}, flags={})


def _report(path: Path) -> tuple[Report, dict[str, Finding]]:
    report = inspect(_settings(path), {"PATH": os.environ["PATH"]})
    return report, {finding.subject: finding for finding in report.findings}


def test_a_good_machine_has_no_complaint(write: Write) -> None:
    report, found = _report(write())
    assert report.severity == "ok", report.findings
    assert found["utilization"].text.startswith("0.900 asks for 125.8")
    (device,) = report.devices
    assert device.free_bytes == device.total_bytes
    assert "139.80 GiB total, 139.80 GiB free" in found[device.device].text


def test_a_neighbour_is_named_and_the_fit_is_computed(write: Write, tmp_path: Path) -> None:
    path = write()
    _report(path)  # makes the card
    SharedCard(tmp_path / "card.json").hold(30 * GIB, "hog")
    report, found = _report(path)
    assert report.severity == "warning"
    assert f"held by pid {os.getpid()} (hog): 30.00 GiB" in found[report.devices[0].device].what
    # 139.80 - 30 - 0.51 (context) - 0.15 (margin) of 139.80
    assert "the first launch would use 0.780" in found["utilization"].what
    SharedCard(tmp_path / "card.json").hold(50 * GIB, "hog")
    report, found = _report(path)
    assert report.severity == "error"
    assert "at most 0.637 fits; free memory, or permit 0.637 in the ladder" in found["utilization"].text


@pytest.mark.parametrize(
    ("old", "new", "subject", "said"),
    [
        ('"/bin/true"', '"/bin/no-such-vllm"', "command", "/bin/no-such-vllm: no such program"),
        ('/model"', '/nowhere"', "model", "/nowhere: no such folder or file; correct the path"),
        ('/model"', '/empty"', "model", "/empty: holds no config.json"),
        ('/state"', '/file/state"', "state-dir", "/file is no folder; remove it"),
        ('/state"', '/sys-state"', "state-dir", "cannot be written"),
        ('card.json"', 'bad.json"', "memory", "cannot be read: simulated card: "),
    ],
)
def test_what_would_end_a_launch_is_named_with_its_fix(
    write: Write, tmp_path: Path, old: str, new: str, subject: str, said: str
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "sys-state").symlink_to("/proc/sys/kernel")
    report, found = _report(write((old, new)))
    if said == "cannot be written" and os.access("/proc/sys/kernel", os.W_OK):
        pytest.skip("this user can write anywhere")
    assert report.severity == "error"
    assert found[subject].severity == "error"
    assert said in found[subject].text
    assert found[subject].fix


def test_weights_larger_than_the_card_are_hopeless(write: Write, tmp_path: Path) -> None:
    path = write()
    with (tmp_path / "model" / "model-1.safetensors").open("wb") as file:
        file.truncate(200 * GIB)  # sparse
    report, found = _report(path)
    assert report.severity == "error"
    assert found["weights"].text.startswith("200.00 GiB of weights for each device, which has 139.80 GiB; use more")
    path = write(("port =", 'args = ["-tp", "2"]\nport ='))
    assert "weights" not in _report(path)[1]


def test_a_taken_port_and_a_running_daemon_are_named(write: Write, tmp_path: Path) -> None:
    path = write()
    (tmp_path / "state").mkdir()
    hold = "import sys; from pathlib import Path; from supervisord_vllm.host.lock import lock_state as lock\n"
    hold += "held = lock(Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"
    with stranger(sys.executable, "-c", hold, f"{tmp_path}/state") as daemon, closing(socket.socket()) as server:
        assert daemon.stdout is not None
        assert daemon.stdout.readline() == b"held\n"
        server.bind(("127.0.0.1", _settings(path).engine.port))
        server.listen()
        report, found = _report(path)
    assert report.severity == "warning"
    assert f"is taken by pid {os.getpid()} (" in found["port"].what
    assert "stop it, or set another [engine] port" in found["port"].fix
    assert f"pid {daemon.pid} (" in found["daemon"].what


def test_looking_leaves_nothing_behind(write: Write, tmp_path: Path) -> None:
    path = write(("card:", "host"), (f"host{tmp_path}/card.json", "host"))
    _report(path)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["model", "t.toml"]


def test_the_verb_prints_a_verdict_and_json_and_ends_with_78(write: Write, tmp_path: Path) -> None:
    path = write()
    done = CliRunner().invoke(app, ["preflight", "--config", str(path)])
    assert done.exit_code == 0, done.output
    assert done.output.splitlines()[-1] == "t is ready: a launch as declared can begin."
    path = write(("/bin/true", "/bin/no-such-vllm"))
    done = CliRunner().invoke(app, ["preflight", "--config", str(path)])
    assert done.exit_code == 78
    assert "→ install vLLM" in done.output
    done = CliRunner().invoke(app, ["preflight", "--json", "--config", str(path)])
    assert done.exit_code == 78
    told = json.loads(done.output)
    assert (told["schema"], told["verdict"]) == (1, "error")
    assert {"severity", "subject", "what", "fix"} == set(told["findings"][0])
    assert told["devices"][0]["gpu"].startswith("GPU-")
    assert told["devices"][0]["total_bytes"] > 139 * GIB
