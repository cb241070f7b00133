"""What is ours, and ending all of it and nothing else."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from family import alive, as_subreaper, family, start, stranger, until
from supervisord_vllm.host import cgroup, procfs, tree
from supervisord_vllm.host.exits import Exit
from supervisord_vllm.host.process import Child, wait_exit
from supervisord_vllm.host.tree import Identity, Patience

QUICK = Patience(interrupt=0.2, terminate=0.2, alone=0.3, tracker=5.0, deadline=10.0, poll=0.05)


@pytest.fixture(autouse=True)
def _subreaper() -> Iterator[None]:
    with as_subreaper():
        yield


def _root(child: Child) -> Identity:
    return Identity(child.pid, child.start_ticks)


def test_the_marker_finds_children_and_escaped_orphans_alike(tmp_path: Path) -> None:
    async def observe() -> None:
        async with family(tmp_path, "child", "escape") as (child, pids):
            found = {ref.pid: ref for ref in tree.find_owned(child.instance)}
            assert set(found) == {pids["main"], pids["child"], pids["escaped"]}
            assert all(ref.ours and ref.command.startswith("python") and ref.user for ref in found.values())

    asyncio.run(observe())


def test_only_the_exact_instance_is_ours(tmp_path: Path) -> None:
    instance = uuid.uuid4().hex[:16]

    async def observe() -> set[int]:
        with (
            stranger(SUPERVISE_LAUNCH=f"{instance}0.1"),  # another instance that begins alike
            stranger(SUPERVISE_LAUNCH=instance),  # no launch
            stranger(X_SUPERVISE_LAUNCH=f"{instance}.1"),  # another variable
            stranger(NOTE=f"SUPERVISE_LAUNCH={instance}.1"),  # the text inside a value
            stranger("/bin/sleep", "600", f"SUPERVISE_LAUNCH={instance}.1"),  # in the arguments
        ):
            async with family(tmp_path, instance=instance) as (child, _):
                assert tree.owned_pids(instance) == {child.pid}
            return set(tree.owned_pids(instance))

    assert asyncio.run(observe()) == set()


def test_descent_and_session_prove_what_has_no_marker(tmp_path: Path) -> None:
    """A child that was executed without environment is ours by its living ancestor; in the session also without one."""

    async def observe() -> None:
        async with family(tmp_path, "child") as (child, pids):
            nobody = uuid.uuid4().hex[:16]
            assert tree.owned_pids(nobody) == frozenset()
            assert tree.owned_pids(nobody, roots=[_root(child)]) == {child.pid, pids["child"]}
            child.send(signal.SIGKILL)
            await wait_exit(child)
            await until(lambda: _parent(pids["child"]) == os.getpid(), "the child is adopted")
            assert tree.owned_pids(nobody, roots=[_root(child)]) == {pids["child"]}
            assert tree.owned_pids(nobody, roots=[Identity(child.pid, child.start_ticks + 1)]) == frozenset()

    asyncio.run(observe())


def test_we_and_our_ancestors_are_never_ours_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(procfs, "environ", lambda pid: b"A=1\0SUPERVISE_LAUNCH=self.1\0" if pid == os.getpid() else b"")
    assert tree.owned("self") == []


def test_a_pid_that_was_reused_is_not_signalled() -> None:
    with stranger() as process:
        found = procfs.stat(process.pid)
        assert found is not None
        assert not tree.send(Identity(process.pid, found.start_ticks - 1), signal.SIGKILL)
        assert alive(process.pid)
        assert tree.send(Identity(process.pid, found.start_ticks), signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL


def test_a_tree_is_ended_to_the_last_orphan_and_no_stranger_is_touched(tmp_path: Path) -> None:
    async def observe() -> None:
        with stranger() as foreign:
            async with family(tmp_path, "ignore:TERM,INT", "child", "escape") as (child, pids):
                assert await tree.end_tree(child) == ()
                assert [pid for pid in pids.values() if alive(pid)] == []
                assert child.exit == Exit(signal=9)
            assert foreign.poll() is None

    asyncio.run(observe())


def test_leftovers_of_a_dead_main_process_are_ended(tmp_path: Path) -> None:
    async def observe() -> None:
        async with family(tmp_path, "child", "escape") as (child, pids):
            child.send(signal.SIGKILL)
            assert await wait_exit(child) == Exit(signal=9)
            assert alive(pids["child"])
            assert alive(pids["escaped"])
            assert await tree.end_tree(child) == ()
            assert [pid for pid in pids.values() if procfs.stat(pid) is not None] == []  # not even zombies

    asyncio.run(observe())


def test_children_forked_while_the_tree_is_being_killed_are_caught(tmp_path: Path) -> None:

    async def observe() -> None:
        async with family(tmp_path, "relay") as (child, _):
            await until(child.exited.done, "the relay has left its first process")
            assert tree.owned(child.instance) != []
            assert await tree.end_tree(child) == ()
            assert tree.owned(child.instance) == []

    asyncio.run(observe())


def test_an_engine_that_starts_is_interrupted_first(tmp_path: Path) -> None:
    """TERM is swallowed while vLLM initialises, INT is not."""

    async def observe() -> Exit | None:
        async with family(tmp_path, "ignore:TERM") as (child, _):
            assert await tree.stop(child, phase="starting", grace_s=60) == ()
            return child.exit

    assert asyncio.run(observe()) == Exit(signal=int(signal.SIGINT))


@pytest.mark.parametrize(("ignored", "wanted"), [("INT", signal.SIGTERM), ("INT,TERM", signal.SIGKILL)])
def test_the_stop_of_a_start_escalates(tmp_path: Path, ignored: str, wanted: signal.Signals) -> None:
    async def observe() -> Exit | None:
        async with family(tmp_path, f"ignore:{ignored}", "child") as (child, _):
            assert await tree.stop(child, phase="starting", grace_s=60, patience=QUICK) == ()
            return child.exit

    assert asyncio.run(observe()) == Exit(signal=int(wanted))


def test_a_serving_engine_gets_term_alone_and_its_grace(tmp_path: Path) -> None:
    async def observe() -> tuple[Exit | None, float]:
        async with family(tmp_path, "ignore:TERM", "child") as (child, _):
            begun = time.monotonic()
            assert await tree.stop(child, phase="serving", grace_s=1.0, patience=QUICK) == ()
            return child.exit, time.monotonic() - begun

    ended, took = asyncio.run(observe())
    assert ended == Exit(signal=9)
    assert took >= 1.0


def test_a_serving_engine_that_ends_by_itself_is_not_waited_for_longer(tmp_path: Path) -> None:
    async def observe() -> tuple[Exit | None, float]:
        async with family(tmp_path, "child") as (child, _):
            begun = time.monotonic()
            assert await tree.stop(child, phase="serving", grace_s=60) == ()
            return child.exit, time.monotonic() - begun

    ended, took = asyncio.run(observe())
    assert ended == Exit(signal=int(signal.SIGTERM))
    assert took < 30


def test_an_api_server_whose_engine_is_gone_is_not_given_its_whole_grace(tmp_path: Path) -> None:
    async def observe() -> tuple[Exit | None, float]:
        async with family(tmp_path, "child", "keep-children") as (child, _):
            begun = time.monotonic()
            assert await tree.stop(child, phase="serving", grace_s=600, patience=QUICK) == ()
            return child.exit, time.monotonic() - begun

    ended, took = asyncio.run(observe())
    assert ended == Exit(signal=9)
    assert 0.3 <= took < 60


def test_an_engine_of_a_single_process_keeps_its_whole_grace(tmp_path: Path) -> None:
    """Nobody but the main process from the start says nothing about an engine that is gone: it may be draining."""

    async def observe() -> float:
        async with family(tmp_path, "ignore:TERM") as (child, _):
            begun = time.monotonic()
            assert await tree.stop(child, phase="serving", grace_s=1.5, patience=QUICK) == ()
            return time.monotonic() - begun

    assert asyncio.run(observe()) >= 1.5


def test_the_resource_tracker_may_finish_its_work(tmp_path: Path) -> None:
    async def observe() -> None:
        cleaned = tmp_path / "cleaned"
        async with family(tmp_path, "ignore:TERM,INT", "child", f"tracker:{cleaned}") as (child, pids):
            assert await tree.end_tree(child, patience=QUICK) == ()
            assert cleaned.exists()
            assert not alive(pids["tracker"])

    asyncio.run(observe())


def test_a_resource_tracker_that_stays_is_ended_too(tmp_path: Path) -> None:
    async def observe() -> None:
        async with family(tmp_path, "tracker:/dev/null/never") as (child, pids):
            os.kill(pids["tracker"], signal.SIGSTOP)
            assert await tree.end_tree(child, patience=Patience(tracker=0.1)) == ()
            assert not alive(pids["tracker"])

    asyncio.run(observe())


def test_what_survives_the_deadline_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process inside a driver call can't be killed; here the kill is taken away instead."""

    async def observe() -> None:
        async with family(tmp_path, "child") as (child, pids):
            with monkeypatch.context() as patched:
                patched.setattr(tree, "send", lambda identity, number: False)
                patched.setattr(cgroup.LaunchGroup, "kill", lambda group: False)
                survivors = await tree.end_tree(child, patience=Patience(deadline=0.2))
            assert {ref.pid for ref in survivors} == {pids["main"], pids["child"]}
            assert all(ref.ours and ref.command.startswith("python") for ref in survivors)
            assert child.exit is None
            child.send(signal.SIGKILL)  # the status is still ours when it ends after all
            await until(lambda: procfs.stat(child.pid) is None, "the main process is collected")

    asyncio.run(observe())


def test_a_new_daemon_ends_what_an_earlier_one_left(tmp_path: Path) -> None:
    async def observe() -> None:
        instance = uuid.uuid4().hex[:16]
        with stranger() as foreign:
            first, pids = await start(tmp_path, "ignore:TERM", "child", "escape", instance=instance)
            ended, survivors = await tree.reap_leftovers(instance)
            assert survivors == ()
            assert {ref.pid for ref in ended} == set(pids.values())
            assert {ref.command for ref in ended} == {f"{Path(sys.executable).name} -c"}
            assert await tree.reap_leftovers(instance) == ((), ())
            assert await tree.end_tree(first) == ()
            assert foreign.poll() is None

    asyncio.run(observe())


def _parent(pid: int) -> int:
    found = procfs.stat(pid)
    return found.ppid if found is not None else 0
