"""A launch's own cgroup: nothing that forks leaves it, and it is only used where it is ours to make."""

from __future__ import annotations

import asyncio
import os
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from family import alive, as_subreaper, family, until
from supervisord_vllm.host import cgroup, procfs, tree
from supervisord_vllm.host.process import new_marker, spawn
from supervisord_vllm.host.tree import Patience


def _delegated() -> bool:
    made = cgroup.make(new_marker("probe"))
    return made is not None and made.remove()


needs_group = pytest.mark.skipif(not _delegated(), reason="no cgroup v2 is delegated to this user here")


@pytest.fixture(autouse=True)
def _subreaper() -> Iterator[None]:
    with as_subreaper():
        yield


ESCAPE = r"""
import os, sys, time
BARE = [sys.executable, "-c", "import time; time.sleep(600)"]
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execve(sys.executable, BARE, {})
    os._exit(0)
os.wait()
print("ready", flush=True)
time.sleep(600)
"""
"""Double fork, a session of its own, and no environment: neither marker nor session nor ancestor proves it."""

STORM = r"""
import os, sys, time
for _ in range(4):
    if os.fork() == 0:
        end = time.monotonic() + 20
        while time.monotonic() < end:
            time.sleep(0.001)
            if os.fork():
                os._exit(0)
        os._exit(0)  # else every child would go on with the loop and fork eight more
print("ready", flush=True)
time.sleep(600)
"""


@needs_group
def test_a_double_fork_without_environment_is_ours_by_its_cgroup_and_is_ended(tmp_path: Path) -> None:
    async def observe() -> None:
        instance = uuid.uuid4().hex[:16]
        log = tmp_path / "log"
        child = await spawn(
            [sys.executable, "-c", ESCAPE], dict(os.environ), cwd=None, log_path=log, marker=new_marker(instance)
        )
        assert child.group is not None
        await until(lambda: "ready" in log.read_text(), "the escape")
        escaped = tree.owned_pids(instance) - {child.pid}
        assert len(escaped) == 1
        (pid,) = escaped
        assert procfs.environ(pid) == b""
        assert await tree.end_tree(child) == ()
        assert not alive(pid)
        assert not child.group.path.exists()

    asyncio.run(observe())


@needs_group
def test_what_forks_faster_than_it_is_found_ends_with_its_group(tmp_path: Path) -> None:
    async def observe() -> None:
        log = tmp_path / "log"
        marker = new_marker(uuid.uuid4().hex[:16])
        child = await spawn([sys.executable, "-c", STORM], dict(os.environ), cwd=None, log_path=log, marker=marker)
        await until(lambda: "ready" in log.read_text(), "the storm")
        assert await tree.end_tree(child, patience=Patience(deadline=25.0)) == ()
        assert tree.owned(child.instance) == []
        assert child.group is not None
        assert not child.group.path.exists(), "the kernel removes no cgroup that has a member"

    asyncio.run(observe())


@needs_group
def test_a_group_is_removed_with_its_tree_and_an_abandoned_one_by_the_next_daemon(tmp_path: Path) -> None:
    async def observe() -> None:
        async with family(tmp_path, "child") as (child, _):
            group = child.group
            assert group is not None
            assert group.path.is_dir()
            assert cgroup.of_marker(child.marker) == group
            child.group = None  # as for an engine that was adopted
        assert not group.path.exists()
        left = cgroup.make(new_marker(child.instance))
        assert left is not None
        assert await tree.reap_leftovers(child.instance) == ((), ())
        assert not left.path.exists()

    asyncio.run(observe())


def _tree(root: Path, inside: str = "/", *, hybrid: bool = False) -> Path:
    mount = root / "sys/fs/cgroup" / ("unified" if hybrid else "")
    group = mount / inside.lstrip("/")
    for folder in {mount, group}:
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("cgroup.controllers", "cgroup.procs"):
            (folder / name).write_text("")
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(f"4:memory:/x\n0::{inside}\n")
    return group


@pytest.mark.parametrize("hybrid", [False, True])
def test_the_v2_tree_is_found_alone_and_beside_v1(tmp_path: Path, hybrid: bool) -> None:
    group = _tree(tmp_path, "/unit.service", hybrid=hybrid)
    assert cgroup.own_group(tmp_path) == group


def test_a_cgroup_that_systemd_did_not_delegate_is_left_alone(tmp_path: Path) -> None:
    """Root may write everywhere; systemd's tree is systemd's."""
    _tree(tmp_path, "/system.slice/unit.service")
    (tmp_path / "run/systemd/system").mkdir(parents=True)
    if os.geteuid() == 0:
        assert cgroup.make("i.u", tmp_path) is None


def test_without_a_v2_tree_or_outside_of_what_is_mounted_there_is_no_group(tmp_path: Path) -> None:
    assert cgroup.own_group(tmp_path) is None
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/../outside\n")
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/cgroup.controllers").write_text("")
    assert cgroup.own_group(tmp_path) is None
    (tmp_path / "proc/self/cgroup").write_text("4:memory:/x\n")
    assert cgroup.own_group(tmp_path) is None


def test_a_units_other_commands_see_the_groups_of_its_daemon(tmp_path: Path) -> None:
    """systemd runs ExecStopPost= of a unit with a delegated cgroup in a group of its own below it."""
    unit = tmp_path / "sys/fs/cgroup/system.slice/x.service"
    (unit / ".control").mkdir(parents=True)
    (unit / "supervise-abc.1").mkdir()
    (tmp_path / "sys/fs/cgroup/cgroup.controllers").touch()
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/system.slice/x.service/.control\n")
    assert cgroup.own_group(tmp_path) == unit
    assert [group.path.name for group in cgroup.of_instance("abc", tmp_path)] == ["supervise-abc.1"]
