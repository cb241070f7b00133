"""The kernel's words about GPUs and killed processes, and the counter of kills in our cgroup."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from supervisord_vllm.host.kernel import KernelLine, KernelLog, bus_id, oom_kills, parse

XID = "NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, name=python, GPU has fallen off the bus."
SXID = "nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): 20034, Fatal, Link 30 LTSSM Fault Up"
KILLED = "Memory cgroup out of memory: Killed process 4711 (VLLM::EngineCor) total-vm:9kB, anon-rss:8kB"


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (XID, KernelLine("xid", XID, "0000:3b:00", 79)),
        (SXID, KernelLine("sxid", SXID, "0000:c1:00", 20034)),
        (KILLED, KernelLine("oom_killer", KILLED, pid=4711)),
        (
            "Out of memory: Killed process 9 (python3), UID 0",
            KernelLine("oom_killer", "Out of memory: Killed process 9 (python3), UID 0", pid=9),
        ),
        ("Out of memory: Kill process 9 (python3) score 5", None),
        ("oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),task=python,pid=9,uid=0", None),
        ("NVRM: Xid (PCI:zz): many", None),
        ("usb 1-1: new device", None),
    ],
)
def test_lines_that_matter_are_read(message: str, expected: KernelLine | None) -> None:
    if message.startswith("Out of memory: Kill process"):  # Linux before 4.20
        assert parse(message) == KernelLine("oom_killer", message, pid=9)
    else:
        assert parse(message) == expected


@pytest.mark.parametrize("text", ["00000000:3B:00.0", "0000:3b:00", "3B:00.0", "0000:3b:00.0"])
def test_bus_ids_of_nvml_and_of_the_kernel_are_one_form(text: str) -> None:
    assert bus_id(text) == "0000:3b:00"


def test_a_hostile_line_is_bounded_and_printable() -> None:
    line = parse(f"NVRM: Xid (PCI:0000:3b:00): 13, \x1b[31m{'x' * 10_000}")
    assert line is not None
    assert len(line.text) <= 400
    assert "\x1b" not in line.text


def test_no_access_to_the_log_is_said_and_is_no_failure(tmp_path: Path) -> None:
    assert KernelLog.open(tmp_path / "none") == f"{tmp_path}/none: No such file or directory"


def test_records_are_read_from_now_on(tmp_path: Path) -> None:
    """A file stands in for /dev/kmsg here: only its records' form is the kernel's."""
    path = tmp_path / "kmsg"
    path.write_text(f"4,1,100,-;{XID}\n")
    log = KernelLog.open(path)
    assert isinstance(log, KernelLog)
    assert log.read() == []
    with path.open("a") as file:
        file.write(f"4,2,200,-;{KILLED}\n SUBSYSTEM=memory\n")
    assert [line.pid for line in log.read()] == [4711]
    log.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="writing to /dev/kmsg needs root")
def test_the_real_log_is_read_as_it_is_written() -> None:
    log = KernelLog.open()
    if isinstance(log, str):
        pytest.skip(log)
    marker = f"vllm-supervise test {os.getpid()}: Out of memory: Killed process {os.getpid()} (test)\n"
    try:
        Path("/dev/kmsg").write_text(marker)
    except OSError as error:
        pytest.skip(f"/dev/kmsg cannot be written: {error}")
    found = log.read()
    log.close()
    assert os.getpid() in [line.pid for line in found]


def test_kills_are_counted_in_our_cgroup_of_either_version(tmp_path: Path) -> None:
    assert oom_kills(tmp_path) is None
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("4:memory:/box\n0::/unit\n")
    v1 = tmp_path / "sys/fs/cgroup/memory"
    v1.mkdir(parents=True)
    assert oom_kills(tmp_path) is None
    (v1 / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 2\n")
    assert oom_kills(tmp_path) == 2, "the mount's own root, where ours is not below it"
    (v1 / "box").mkdir()
    (v1 / "box/memory.oom_control").write_text("oom_kill 3\n")
    assert oom_kills(tmp_path) == 3
    unified = tmp_path / "sys/fs/cgroup/unified"
    (unified / "unit").mkdir(parents=True)
    (unified / "cgroup.controllers").write_text("")
    assert oom_kills(tmp_path) == 3, "in the hybrid layout the controller is v1's"
    (unified / "unit/memory.events").write_text("low 0\noom 5\noom_kill 7\noom_group_kill 0\n")
    assert oom_kills(tmp_path) == 7
