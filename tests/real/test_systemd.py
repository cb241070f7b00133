"""The unit and its drop-ins under a real systemd, on the stand-in engine: who ends, who restarts, what is left."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from real.conftest import unavailable
from real.machine import ROOT, Json, Machine, machine, missing, shown, sweep
from real.sandbox import PROGRAM as BUILT
from real.service import PATIENCE_S, PROGRAM, Service, service
from real.waiting import until

pytestmark = pytest.mark.real

GIVEN_UP, CONFIGURATION = "69", "78"
ERROR, WARNING, NOTICE, INFO = "3", "4", "5", "6"
PIP = ("python3 -m venv", "/opt/vllm-supervise/bin/pip")
WATCHED = "[Service]\nWatchdogSec=5\n"
FED = "WatchdogTimestampMonotonic"
EXPOSURE = 50
"""Ten times what `systemd-analyze security` may find: access to GPUs, networks and generated code is what it counts."""
STAND_IN = "[Service]\nReadWritePaths=/srv\n"
"""Where the stand-in keeps its card, if everything else is read-only."""
DEAF = "[Service]\nKillSignal=SIGWINCH\nTimeoutStopSec=2\n"
"""The daemon never hears that it is to stop. (A SIGSTOP would not do: systemd sends SIGCONT after every signal.)"""
UNITS = itertools.count(1)


@pytest.fixture(scope="module")
def bare() -> Iterator[Machine]:
    """A machine that nothing was installed on."""
    if reason := missing():
        unavailable(reason)
    with machine() as made:
        yield made


def installation(heading: str) -> list[str]:
    """The commands of a section of docs/systemd.md."""
    section = (ROOT / "docs" / "systemd.md").read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return [line for block in re.findall(r"```sh\n(.*?)```", section, re.DOTALL) for line in block.splitlines()]


def follow(machine: Machine, heading: str) -> None:
    """Do what a section of the manual says, but for pip: the program is the one under test."""
    lines = [line for line in installation(heading) if not line.startswith(PIP)]
    assert len(lines) > 1, f"the manual's commands under {heading} are found"
    machine.run("sh", "-exc", "\n".join(["cd /srv/install", *lines]))


@pytest.fixture(scope="module")
def manual(bare: Machine) -> Iterator[Service]:
    """The instance that the manual makes."""
    bare.run("mkdir", "-p", "/opt/vllm-supervise/bin", "/srv/install")
    bare.run("ln", "-s", str(BUILT), "/opt/vllm-supervise/bin/vllm-supervise")
    bare.run("ln", "-s", str(ROOT / "systemd"), "/srv/install/systemd")
    with service(bare, "qwen") as made:
        bare.run("mv", "/etc/vllm-supervise/qwen.toml", "/srv/install/qwen.toml")
        follow(bare, "Install")
        yield made


@pytest.fixture(scope="module")
def installed(manual: Service) -> Machine:
    """A machine with the unit."""
    return manual.machine


@pytest.fixture
def one(installed: Machine) -> Iterator[Service]:
    """An instance of its own for a test."""
    with service(installed, f"n{next(UNITS)}") as made:
        yield made


def messages(it: Service, priority: str, *, by: str | None = None) -> list[str]:
    """What the journal holds with a priority: the daemon's own lines, or another program's about the unit."""
    return [
        line["MESSAGE"]
        for line in it.machine.journal(it.unit)
        if line["PRIORITY"] == priority and (line.get("SYSLOG_IDENTIFIER") == (by or "vllm-supervise"))
    ]


def by_systemd(it: Service) -> str:
    """What systemd said about the unit."""
    return "\n".join(
        line["MESSAGE"] for line in it.machine.journal(it.unit) if line.get("SYSLOG_IDENTIFIER") == "systemd"
    )


def launches(it: Service) -> list[Json]:
    """All launches of an instance, from its store."""
    found: list[Json] = it.history()["launches"]
    return found


def engines(it: Service) -> set[str]:
    """The launch cgroups that the instance's processes are in."""
    return {it.group_of(pid) for pid in it.marked()}


# --- the unit as it is installed ---


def test_an_installation_by_the_manual_serves(manual: Service) -> None:
    assert manual.state() == "active"
    manual.reaches("serving", 1)
    assert manual.complete()
    assert manual.machine.run("stat", "--format=%a %U", "/run/lock/vllm-supervise").strip() == "1777 root"
    assert manual.machine.run(PROGRAM, "status").startswith("qwen"), "the only instance needs no --name"


def test_it_is_active_at_once_says_how_it_is_and_a_stop_leaves_nothing(one: Service) -> None:
    one.systemctl("start")
    assert one.state() == "active"
    one.reaches("serving", 1)
    found = one.show("StatusText", "Delegate")
    assert found["StatusText"].startswith("serving, launch 1"), found
    assert found["Delegate"] == "yes"
    assert one.complete()
    (group,) = engines(one)
    assert group.startswith("supervise-"), "the engine has a cgroup of its own below the unit's"
    assert one.group_of(one.main_pid) == ""
    one.systemctl("stop")
    assert one.show("ActiveState", "Result") == {"ActiveState": "inactive", "Result": "success"}
    one.is_empty()


def test_ready_can_wait_for_the_engine_and_needs_no_longer_time_out(one: Service) -> None:
    one.configure('[systemd]\nready = "engine"\n', faults="slow-start factor=120")
    one.drop_in("short", "[Service]\nTimeoutStartSec=10\n")
    began = time.monotonic()
    one.systemctl("start")
    assert time.monotonic() - began > 10, "the start was longer than the time-out, or this proves nothing"
    assert one.status()["state"] in ("proving", "serving")
    assert one.show("ActiveState", "NRestarts") == {"ActiveState": "active", "NRestarts": "0"}


def test_a_killed_daemon_costs_one_restart_of_the_engine(one: Service) -> None:
    one.systemctl("start")
    one.reaches("serving", 1)
    before, (group,) = one.main_pid, engines(one)
    one.kill()
    one.reaches("serving", 2, other_than=before)
    assert one.restarts == 1
    (after,) = engines(one)
    assert after != group, "no process of the first launch lives, and there is one engine"
    assert [launch["number"] for launch in launches(one)] == [1, 2]
    assert one.history()["decisions"] == [], "the engine did not fail"


def test_an_orphan_without_an_environment_is_found_through_the_units_cgroup(one: Service) -> None:
    one.misbehave("escape-bare")
    one.systemctl("start")
    one.reaches("serving", 1)
    noted = one.machine.path(f"{one.folder}/made").read_text().split()
    (orphan,) = [int(pid) for pid in noted]
    assert one.exists(orphan)
    assert orphan not in one.marked()
    assert one.group_of(orphan).startswith("supervise-")
    one.verb("stop")
    one.reaches("stopped")
    assert not one.exists(orphan), "the daemon ended it; systemd had no part in it"
    assert one.state() == "active"


def test_giving_up_fails_the_unit_for_good_and_tells_somebody(one: Service) -> None:
    one.configure(args='["--no-such-flag"]')
    one.machine.write(
        "/etc/systemd/system/call@.service",
        "[Service]\nType=oneshot\nExecStart=/bin/sh -c 'echo $$MONITOR_EXIT_STATUS >/srv/%i.called'\n",
    )
    one.drop_in("call", f"[Unit]\nOnFailure=call@{one.name}.service\n")
    one.systemctl("start")
    one.becomes("failed")
    assert one.show("ExecMainStatus", "NRestarts") == {"ExecMainStatus": GIVEN_UP, "NRestarts": "0"}
    called = one.machine.path(f"/srv/{one.name}.called")
    until(lambda: called.exists() and called.read_text().strip() == GIVEN_UP, PATIENCE_S, one.told)
    assert "no-such-flag" in one.verb("explain")
    assert len(launches(one)) == 1


def test_a_wrong_policy_fails_the_unit_for_good_and_says_where(one: Service) -> None:
    one.configure('[stop]\ngraze = "1s"\n')
    one.systemctl("start", status=1)
    one.becomes("failed")
    assert one.show("ExecMainStatus", "NRestarts") == {"ExecMainStatus": CONFIGURATION, "NRestarts": "0"}
    assert f"/etc/vllm-supervise/{one.name}.toml:" in one.told()
    assert "graze" in one.told()


def test_a_loop_that_stands_still_is_ended_and_started_anew(one: Service) -> None:
    one.drop_in("watched", WATCHED)
    one.systemctl("start")
    one.reaches("serving", 1)
    before = one.main_pid
    one.kill("STOP")
    one.reaches("serving", 2, other_than=before)
    assert one.restarts == 1
    assert "Failed with result 'watchdog'" in by_systemd(one)
    assert "Fatal Python error: Aborted" in messages(one, INFO), "the journal shows where it stood"
    assert len(engines(one)) == 1


def test_two_instances_live_side_by_side(one: Service, installed: Machine) -> None:
    with service(installed, "other") as other:
        one.systemctl("start")
        other.systemctl("start")
        one.reaches("serving", 1)
        other.reaches("serving", 1)
        assert {"name": one.name, "ready": True} == {key: one.status()[key] for key in ("name", "ready")}
        locks = {path.name for path in installed.path("/run/lock/vllm-supervise").iterdir()}
        assert {f"GPU-{one.name}", "GPU-other"} <= locks
        one.systemctl("stop")
        one.is_empty()
        assert other.complete()
        assert other.restarts == 0


def test_the_journal_has_one_line_for_each_decision_with_its_priority(one: Service) -> None:
    one.misbehave("kill")
    one.systemctl("start")
    one.reaches("serving", 2)
    one.systemctl("stop")
    (decision,) = one.history()["decisions"]
    decided = [json.loads(text) for text in messages(one, WARNING) if '"decision"' in text]
    assert [(line["event"], line["decision"]) for line in decided] == [(decision["sentence"], decision["number"])]
    assert any("gating → starting" in text for text in messages(one, INFO))
    assert any("Application startup complete" in text for text in messages(one, INFO)), "the engine's own lines"
    assert messages(one, ERROR) == []


# --- stops ---


def test_a_stop_waits_for_an_engine_as_long_as_the_policy_says(one: Service) -> None:
    one.configure('[stop]\ngrace = "4s"\n', faults="ignore-term")
    one.drop_in("short", "[Service]\nTimeoutStopSec=2\n")
    one.systemctl("start")
    one.reaches("serving", 1)
    began = time.monotonic()
    one.systemctl("stop")
    assert time.monotonic() - began > 2, "the stop was longer than the time-out, or this proves nothing"
    assert one.show("ActiveState", "Result") == {"ActiveState": "inactive", "Result": "success"}
    one.is_empty()


def stop_a_deaf_daemon(it: Service) -> int:
    """systemd kills it in the end; returned is what escaped from the engine, which must be gone with the rest."""
    it.misbehave("escape-bare")
    it.drop_in("deaf", DEAF)
    it.systemctl("start")
    it.reaches("serving", 1)
    orphan = int(it.machine.path(f"{it.folder}/made").read_text())
    it.systemctl("stop", status=None)
    assert it.show("Result")["Result"] == "timeout"
    it.is_empty()
    return orphan


def test_a_daemon_that_does_not_stop_is_killed_with_all_of_its_engine(one: Service) -> None:
    assert not one.exists(stop_a_deaf_daemon(one))


# --- upgrade ---


@pytest.mark.parametrize("drop_in", ["", "adopt"])
def test_a_reload_replaces_the_daemon_in_place_and_not_the_engine(one: Service, drop_in: str) -> None:
    if drop_in:
        one.take(drop_in)
    one.systemctl("start")
    found = one.reaches("serving", 1)
    daemon, engine = one.identity(one.main_pid), one.identity(found["launch"]["pid"])
    one.configure('[stop]\ngrace = "7s"\n')
    one.systemctl("reload")
    again = until(lambda: replaced(one, found), PATIENCE_S, one.told) or {}
    assert one.identity(again["launch"]["pid"]) == engine
    assert one.identity(one.main_pid) == daemon
    assert one.complete()
    fed = one.show(FED)
    until(lambda: one.show(FED) != fed, PATIENCE_S, "the watchdog hears of the daemon that follows")
    assert one.show("ActiveState", "NRestarts") == {"ActiveState": "active", "NRestarts": "0"}
    assert one.status()["launch"]["number"] == 1
    one.systemctl("stop")
    assert one.show("Result")["Result"] == "success"
    assert [launch["number"] for launch in launches(one)] == [1]


def replaced(it: Service, earlier: Json) -> Json | None:
    """The status of the daemon that follows in the same process, once it answers."""
    found = it.status()
    later = found.get("state") == "serving" and found["daemon"]["since"] != earlier["daemon"]["since"]
    return found if later else None


def test_a_reload_of_a_wrong_policy_is_refused_and_all_goes_on(one: Service) -> None:
    one.systemctl("start")
    found = one.reaches("serving", 1)
    one.configure('[stop]\ngraze = "1s"\n')
    one.systemctl("reload", status=1)
    assert "graze" in one.told()
    assert one.show("ActiveState", "NRestarts") == {"ActiveState": "active", "NRestarts": "0"}
    assert one.status()["daemon"] == found["daemon"]
    assert one.complete()


# --- the drop-in adopt.conf ---


@pytest.fixture
def adopting(one: Service) -> Service:
    """An instance whose engine outlives its daemon."""
    one.take("adopt")
    return one


@pytest.mark.parametrize("end", ["KILL", "STOP"])
def test_an_engine_outlives_a_crash_of_its_daemon_and_ends_with_the_next_stop(adopting: Service, end: str) -> None:
    """STOP: the daemon stands still, and the watchdog ends it."""
    it = adopting
    it.misbehave("escape-bare")
    it.drop_in("watched", WATCHED)
    it.systemctl("start")
    found = it.reaches("serving", 1)
    before, engine, groups = it.main_pid, it.identity(found["launch"]["pid"]), engines(it)
    orphan = int(it.machine.path(f"{it.folder}/made").read_text())
    it.kill(end)
    assert it.complete(), "the engine serves whatever its daemon does"
    again = it.reaches("serving", 1, other_than=before)
    assert it.restarts == 1
    assert it.identity(again["launch"]["pid"]) == engine
    assert (again["proven"], again["launch"]["started_at"]) == (found["proven"], found["launch"]["started_at"])
    assert engines(it) == groups
    assert it.complete()
    assert [launch["number"] for launch in launches(it)] == [1]
    assert it.history()["decisions"] == []
    result = "watchdog" if end == "STOP" else "signal"
    assert f"Failed with result '{result}'" in by_systemd(it)
    it.systemctl("stop")
    assert it.show("ActiveState", "Result") == {"ActiveState": "inactive", "Result": "success"}
    it.is_empty()
    assert not it.exists(orphan)


def test_an_engine_that_dies_while_no_daemon_lives_has_failed(adopting: Service) -> None:
    it = adopting
    it.systemctl("start")
    it.reaches("serving", 1)
    before = it.main_pid
    it.systemctl("kill", "--signal=KILL")
    it.reaches("serving", 2, other_than=before)
    (decision,) = it.history()["decisions"]
    assert (decision["launch"], decision["action"]) == (1, "restart_same")


def test_a_restart_by_the_operator_is_a_stop_and_a_start(adopting: Service) -> None:
    it = adopting
    it.systemctl("start")
    found = it.reaches("serving", 1)
    it.systemctl("restart")
    it.reaches("serving", 2)
    assert not it.exists(found["launch"]["pid"])
    assert it.restarts == 0
    assert len(engines(it)) == 1


def test_a_daemon_that_does_not_stop_is_killed_and_its_engine_is_reaped(adopting: Service) -> None:
    orphan = stop_a_deaf_daemon(adopting)
    assert not adopting.exists(orphan), "reap looks into the unit's cgroups, not only into its own"


def test_a_daemon_that_is_killed_in_the_middle_of_a_stop_leaves_no_engine(adopting: Service) -> None:
    it = adopting
    it.configure('[stop]\ngrace = "10m"\n', faults="ignore-term")
    it.systemctl("start")
    it.reaches("serving", 1)
    it.systemctl("stop", "--no-block")
    it.reaches("stopping", 1)
    it.kill()
    it.becomes("failed")
    assert it.show("Result")["Result"] == "signal"
    it.is_empty()


def test_an_engine_whose_next_daemon_cannot_start_is_reaped(adopting: Service) -> None:
    it = adopting
    it.systemctl("start")
    found = it.reaches("serving", 1)
    it.machine.write(f"/etc/vllm-supervise/{it.name}.toml", "schema = 1\n[engine\n")
    it.kill()
    it.becomes("failed")
    assert it.show("ExecMainStatus")["ExecMainStatus"] == CONFIGURATION
    assert not it.exists(found["launch"]["pid"]), "nobody is left to look after it"
    it.is_empty()


# --- other users ---


@pytest.fixture(scope="module")
def account(installed: Machine) -> None:
    """The account that the manual makes, and gives to its instance."""
    installed.run("chmod", "--recursive", "a+rwX", "/srv/qwen")
    installed.write("/etc/systemd/system/vllm-supervise@qwen.service.d/stand-in.conf", STAND_IN)
    follow(installed, "An account of its own")


def test_an_instance_of_root_is_given_to_an_account_by_the_manual(manual: Service, account: None) -> None:
    manual.reaches("serving")
    assert manual.show("User", "ActiveState") == {"User": "vllm", "ActiveState": "active"}
    assert manual.complete()
    assert len(launches(manual)) > 1, "its history is still there"


def test_an_account_of_its_own_owns_everything_and_nothing_escapes_it(one: Service, account: None) -> None:
    one.misbehave("escape-bare")
    one.take("user")
    one.drop_in("stand-in", STAND_IN)
    one.systemctl("start")
    one.reaches("serving", 1)
    users = {one.machine.path(f"/proc/{pid}").stat().st_uid for pid in (one.main_pid, *one.marked())}
    assert users == {int(one.machine.run("id", "--user", "vllm"))}
    engine = one.status()["launch"]["pid"]
    environ = one.machine.path(f"/proc/{engine}/environ").read_bytes().split(b"\0")
    assert b"HOME=/var/cache/vllm" in environ
    one.machine.run("nsenter", f"--target={engine}", "--mount", "touch", "/tmp/meet", "/var/tmp/meet")
    denied = one.machine.run("nsenter", f"--target={engine}", "--mount", "touch", "/opt/x", status=1)
    assert "Read-only file system" in denied
    orphan = int(one.machine.path(f"{one.folder}/made").read_text())
    assert one.group_of(orphan).startswith("supervise-")
    before = one.main_pid
    one.kill()
    one.reaches("serving", 2, other_than=before)
    assert not one.exists(orphan)
    assert one.verb("status").startswith(one.name), "root sees it without naming folders"
    one.systemctl("stop")
    assert one.show("Result")["Result"] == "success"


def test_a_user_that_lives_only_while_the_unit_runs(one: Service) -> None:
    seen = " ".join(map(str, shown()))  # /tmp is private, and a clone may lie there
    dynamic = "DynamicUser=yes\nReadWritePaths=/run/lock/vllm-supervise /srv\n"
    one.drop_in("dynamic", f"[Service]\n{dynamic}BindReadOnlyPaths={seen}\n")
    one.systemctl("start")
    one.reaches("serving", 1)
    assert one.machine.path(f"/proc/{one.main_pid}").stat().st_uid > 60_000
    assert one.complete()
    (group,) = engines(one)
    assert group.startswith("supervise-")
    assert f"GPU-{one.name}" in {path.name for path in one.machine.path("/run/lock/vllm-supervise").iterdir()}
    one.systemctl("restart")
    one.reaches("serving", 2)
    one.systemctl("stop")
    assert one.show("Result")["Result"] == "success"


# --- the files themselves ---


def test_systemd_finds_no_fault_in_the_unit_and_its_drop_ins(installed: Machine, one: Service, account: None) -> None:
    follow(installed, "The engine outlives the daemon")
    try:
        assert one.show("KillMode")["KillMode"] == "process", "the drop-in is for all instances"
        one.take("user")
        told = installed.run("systemd-analyze", "verify", "--recursive-errors=no", "--man=no", one.unit)
        assert told == ""
        installed.run("systemd-analyze", "security", f"--threshold={EXPOSURE}", one.unit)
    finally:
        installed.run("rm", "-r", "/etc/systemd/system/vllm-supervise@.service.d")
        installed.run("systemctl", "daemon-reload")
    assert one.show("KillMode")["KillMode"] == "mixed"


# --- the machine ---


def test_a_machine_whose_test_is_killed_leaves_nothing_on_the_host(bare: Machine) -> None:
    script = """
import os, signal
from real.machine import machine
with machine() as made:
    made.run("systemd-run", "sleep", "1000")
    print(made.pid, made.group, made.folder, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT / "tests"), str(ROOT)))}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    pid, group, folder = done.stdout.split()
    until(lambda: not Path(f"/proc/{pid}").exists(), 20, "its systemd ends with the test")
    until(lambda: "populated 0" in Path(group, "cgroup.events").read_text(), 20, "and everything inside")
    assert folder not in Path("/proc/self/mountinfo").read_text()
    sweep()
    assert not Path(group).exists()
    assert not Path(folder).exists()


def test_an_enabled_instance_serves_again_after_a_reboot(one: Service) -> None:
    one.systemctl("enable", "--now")
    one.reaches("serving", 1)
    before = one.identity(one.main_pid)
    one.machine.reboot()
    one.reaches("serving", 2)
    assert one.identity(one.main_pid) != before
    assert one.complete()
    assert [launch["number"] for launch in launches(one)] == [1, 2]
    assert one.history()["decisions"] == []
